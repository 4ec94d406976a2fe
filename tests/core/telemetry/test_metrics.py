"""The tally of speculation, what Prometheus is told of it, and the line a minute in the log."""

from __future__ import annotations

import logging
import re
from array import array
from collections.abc import Mapping

import pytest
from prometheus_client.parser import text_string_to_metric_families

from foretoken.core.errors import DeadlineExceeded, ForetokenError
from foretoken.core.interface.draft import Draft
from foretoken.core.interface.output import RequestOutput, StepOutput
from foretoken.core.interface.plan import ScheduledRequest, StepPlan
from foretoken.core.interface.protocols import NO_SPECULATION, Speculator
from foretoken.core.interface.request import Delta, FinishReason, Request
from foretoken.core.interface.sampling import SamplingMetadata, TokenSamplingParams
from foretoken.core.scheduling.guarded_speculator import MAX_FAILURES
from foretoken.core.scheduling.request_table import SchedulerLimits
from foretoken.core.scheduling.scheduler import Scheduler
from foretoken.core.telemetry.metrics import EngineMetrics
from foretoken.core.telemetry.observers import EngineObserver
from foretoken.core.telemetry.spec_decode_stats import EngineLog, Load, SpecDecodeStats
from foretoken.core.telemetry.vllm_names import VLLM_NAMES, render_vllm
from foretoken.radix_cache import PrefixCache

LIMITS = SchedulerLimits(
    max_batch_tokens=64, max_running=4, max_queued=9, max_model_len=64, vocab_size=100
)


class Troubled:
    """An engine's counts of its misfortunes."""

    alive = True
    num_failed_steps, num_bisections, num_audit_failures, num_crash_dumps = 5, 4, 3, 2


class Engine:
    """Metrics over a scheduler of ten pages of two tokens, fed as the engine feeds them."""

    def __init__(self, speculator: Speculator = NO_SPECULATION) -> None:
        self.cache = PrefixCache(10, 2)
        self.scheduler = Scheduler(self.cache, LIMITS, speculator)
        self.metrics = EngineMetrics(self.scheduler, Troubled())
        sampling = SamplingMetadata(params=TokenSamplingParams(), seed=1, prompt_len=1)
        self.request = Request(request_id="a", tokens=array("q", [1]), sampling=sampling)

    def step(
        self, sources: str, accepted: int, *, path: int | None = None, now: float = 0.0
    ) -> None:
        """One draft: a letter per draft token names its source; ``path`` of them lead."""
        names = [{"n": "ngram", "m": "model", "p": "prediction"}[letter] for letter in sources]
        length = len(names) if path is None else path  # the other nodes follow the last token
        parents = [*range(-1, length - 1), *[-1] * (len(names) - length)]
        draft = Draft(range(len(names)), names, parents=parents)
        row = RequestOutput(request_id="a", draft=draft, path=range(accepted))
        delta = Delta(
            token_ids=[5] * (accepted + 1),
            num_proposed=len(names),
            proposed_sources=names,
            accepted_sources=names[:accepted],
            token_sources=[*names[:accepted], ""],
        )
        plan = StepPlan(requests=[self.row(1)], newly_allocated_pages=array("q"))
        output = StepOutput(requests=[row])
        self.metrics.observe_step(plan, output, began=0.0, computed=0.01, ended=0.02)
        self.metrics.observe_delta(self.request, delta, now)

    def row(self, num_tokens: int) -> ScheduledRequest:
        """A share of a step: a chunk of so many tokens, or one to decode."""
        return ScheduledRequest(
            request_id="a",
            tokens=array("q", range(100)),
            start=10,
            stop=10 + num_tokens,
            page_ids=array("q"),
            sampling=self.request.sampling,
        )

    def samples(self) -> dict[str, float]:
        """Every sample by name and label values, read as Prometheus reads it."""
        families = text_string_to_metric_families(self.metrics.render()[0].decode())
        return {
            " ".join([sample.name.removeprefix("foretoken:"), *sample.labels.values()]): value
            for family in families
            for sample in family.samples
            for value in [sample.value]
        }


@pytest.fixture
def engine() -> Engine:
    return Engine()


def test_drafts_are_counted_whole_by_source_and_by_position(engine: Engine) -> None:
    engine.step("", 0)
    engine.step("nnn", 2)
    engine.step("nmmp", 1, path=2)  # the last two are of a branch that got less far
    engine.step("pp", 0)
    found = engine.samples()
    expected = {
        "drafts_total": 3,
        "draft_tokens_total": 9,
        "accepted_tokens_total": 3,
        "draft_tokens_per_source_total ngram": 4,
        "draft_tokens_per_source_total model": 2,
        "draft_tokens_per_source_total prediction": 3,
        "accepted_tokens_per_source_total ngram": 3,
        "draft_tokens_per_pos_total 0": 3,
        "draft_tokens_per_pos_total 1": 3,
        "draft_tokens_per_pos_total 2": 1,
        "accepted_tokens_per_pos_total 0": 2,
        "accepted_tokens_per_pos_total 1": 1,
        "accepted_tokens_per_pos_total 2": 0,
    }
    spec = {
        name.removeprefix("spec_decode_num_"): value
        for name, value in found.items()
        if name.startswith("spec_decode_num_")
    }
    assert spec == expected


def test_acceptance_length_is_a_histogram_over_steps_with_a_draft(engine: Engine) -> None:
    for sources, accepted in [("", 0), ("nnn", 2), ("nn", 2), ("n", 0)]:
        engine.step(sources, accepted)
    found = engine.samples()
    assert found["spec_decode_acceptance_length_count"] == 3
    assert found["spec_decode_acceptance_length_sum"] == 7
    buckets = [found[f"spec_decode_acceptance_length_bucket {n}.0"] for n in (1, 2, 3, 65)]
    assert buckets == [1, 1, 3, 3]
    assert found["spec_decode_acceptance_length_bucket +Inf"] == 3


def test_the_tokens_of_a_step_share_the_time_since_the_last(engine: Engine) -> None:
    engine.step("", 0, now=1.0)
    assert engine.samples()["inter_token_latency_seconds_count"] == 0
    engine.step("nnn", 3, now=1.4)
    engine.step("", 0, now=1.44)
    found = engine.samples()
    assert found["inter_token_latency_seconds_count"] == 5
    assert found["inter_token_latency_seconds_sum"] == pytest.approx(0.44)
    assert found["inter_token_latency_seconds_bucket 0.05"] == 1
    assert found["inter_token_latency_seconds_bucket 0.1"] == 5
    assert found["inter_token_latency_seconds_bucket +Inf"] == 5


def test_a_draft_is_counted_though_nothing_of_it_was_accepted_or_the_answer_ended(
    engine: Engine,
) -> None:
    engine.step("nn", 0)
    end = Delta(
        token_ids=[7], num_proposed=3, proposed_sources=["ngram"] * 3,
        accepted_sources=["ngram"], token_sources=["ngram"], finish_reason=FinishReason.STOP,
    )  # fmt: skip
    engine.metrics.observe_delta(engine.request, end, 1.0)
    found = engine.samples()
    assert found["spec_decode_num_draft_tokens_total"] == 5
    assert found["spec_decode_num_accepted_tokens_total"] == 1
    assert found["spec_decode_acceptance_length_sum"] == 2
    assert found["request_success_total stop"] == 1


# -- pools, steps and faults ----------------------------------------------------------------------


def test_a_page_is_free_evictable_or_held_and_the_held_share_is_the_occupancy(
    engine: Engine,
) -> None:
    tokens = array("q", range(9))
    lease = engine.cache.acquire(tokens)
    assert engine.cache.extend(lease, 9)
    assert pages(engine) == {"total": 10, "free": 5, "evictable": 0, "held": 5, "pinned": 0}
    assert engine.samples()["kv_cache_occupancy"] == 0.5
    engine.cache.release(lease, tokens, 8)
    assert pages(engine) == {"total": 10, "free": 6, "evictable": 4, "held": 0, "pinned": 0}
    assert engine.samples()["kv_cache_occupancy"] == 0.0
    engine.cache.pin(tokens, 4, ttl=60.0)
    assert pages(engine) == {"total": 10, "free": 6, "evictable": 2, "held": 2, "pinned": 2}
    assert engine.samples()["kv_cache_occupancy"] == 0.2
    assert engine.samples()["kv_cache_usage_perc"] == 0.0  # pins yield: nobody live holds them


def pages(engine: Engine) -> dict[str, float]:
    found = engine.samples()
    names = ("total", "free", "evictable", "held", "pinned")
    return {name: found[f"kv_cache_{name}_pages"] for name in names}


def test_evicted_pages_are_counted_by_whether_a_quota_made_them_go(engine: Engine) -> None:
    cache = PrefixCache(10, 2, cache_quota=0.5)
    metrics = EngineMetrics(Scheduler(cache, LIMITS))
    for salt, num_pages in (("rich", 7), ("poor", 3)):
        tokens = array("q", range(2 * num_pages + 1))
        lease = cache.acquire(tokens, namespace=salt)
        cache.extend(lease, 2 * num_pages)
        cache.release(lease, tokens, 2 * num_pages)
    cache.extend(cache.acquire(array("q", [1]), namespace="third"), 6)
    text = metrics.render()[0].decode()
    evicted = dict(re.findall(r'evicted_pages_total\{cause="(\w+)"\} (\S+)', text))
    assert evicted == {"quota": "2.0", "pressure": "1.0"}


def test_a_step_counts_its_requests_and_its_tokens_by_kind(engine: Engine) -> None:
    plan = StepPlan(
        requests=[engine.row(1), engine.row(7), engine.row(1)], newly_allocated_pages=array("q")
    )
    output = StepOutput(requests=[], times={"draft": 0.25, "forward": 2.0, "verify": 0.5})
    engine.metrics.observe_step(plan, output, began=1.0, computed=4.0, ended=4.5)
    engine.metrics.observe_round(output, 5.0)
    engine.step("nnn", 2)  # its tokens are served, and its row decodes
    found = engine.samples()
    assert found["step_tokens_total prefill"] == 7
    assert found["step_tokens_total decode"] == 3
    assert found["step_tokens_total draft"] == 3
    assert found["step_num_requests_sum"] == 4
    assert found["step_num_tokens_sum"] == 10
    assert found["step_seconds_sum"] == pytest.approx(3.01)
    parts = [found[f"step_part_seconds_sum {p}"] for p in ("draft", "forward", "verify", "host")]
    assert parts == [0.25, 2.0, 0.5, 2.25]


def test_what_goes_wrong_is_told_from_the_start(engine: Engine) -> None:
    found = engine.samples()
    faults = ("failed_steps", "bisections", "audit_failures", "crash_dumps")
    assert [found[f"{name}_total"] for name in faults] == [5, 4, 3, 2]
    assert found["engine_alive"] == 1
    assert found["request_aborts_total caller"] == found["request_aborts_total deadline"] == 0
    assert found["max_requests_running"] == 4
    assert found["max_requests_waiting"] == 9


def test_drafters_that_were_given_up_are_told_by_name() -> None:
    class Drafting(Speculator):
        lost = False

        def drafters(self) -> Mapping[str, bool]:
            return {"suffix": True, "proposer": not self.lost}

    engine = Engine(drafting := Drafting())
    found = [engine.samples()]
    drafting.lost = True
    found.append(engine.samples())
    for _ in range(MAX_FAILURES):
        engine.scheduler.speculator.broke_step()
    found.append(engine.samples())
    disabled = [
        {name.split()[1]: value for name, value in each.items() if name.startswith("drafter_")}
        for each in found
    ]
    assert disabled == [
        {"suffix": 0, "proposer": 0, "all": 0},
        {"suffix": 0, "proposer": 1, "all": 0},
        {"all": 1},
    ]


def test_without_drafts_there_is_no_drafter_to_give_up(engine: Engine) -> None:
    assert not any(name.startswith("drafter_disabled") for name in engine.samples())


class Failing(EngineObserver):
    """Raises whatever it is told."""

    def begin(self, *event: object) -> None:  # type: ignore[override]
        raise RuntimeError("begin")

    def observe_step(self, *event: object, **times: float) -> None:  # type: ignore[override]
        raise RuntimeError("observe_step")

    def observe_delta(self, *event: object) -> None:  # type: ignore[override]
        raise RuntimeError("observe_delta")


class Counting(EngineObserver):
    num_steps = 0

    def observe_step(self, *event: object, **times: float) -> None:  # type: ignore[override]
        self.num_steps += 1


def test_an_observer_that_raises_costs_nothing_but_itself(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    sound = Counting()
    engine.metrics.observers += [Failing(), sound]
    for _ in range(3):
        engine.metrics.observe_arrival(engine.request, 0.0)
        engine.step("n", 1)
    found = engine.samples()
    assert found["observer_failures_total"] == 9
    assert found["generation_tokens_total"] == 6
    assert sound.num_steps == 3, "those behind it are called"
    names = [text.split()[1] for text in caplog.messages]
    assert names == [f"Failing.{call}" for call in ("begin", "observe_step", "observe_delta")]


def test_an_abort_is_the_callers_or_the_deadlines(engine: Engine) -> None:
    ended = Delta(finish_reason=FinishReason.ABORT)
    late = Delta(finish_reason=FinishReason.ABORT, stop_reason="deadline")
    never_ran = Delta(error=DeadlineExceeded("too late"))
    failed = Delta(error=ForetokenError("the model failed"))
    for delta in (ended, late, late, never_ran, failed):
        engine.metrics.observe_delta(engine.request, delta, 1.0)
    found = engine.samples()
    assert found["request_aborts_total caller"] == 1
    assert found["request_aborts_total deadline"] == 3
    assert found["request_success_total abort"] == 3
    assert found["request_failure_total"] == 1


def test_a_finished_request_tells_its_tokens_and_where_its_time_went(engine: Engine) -> None:
    usage = engine.request.usage
    usage.queue_time, usage.time_to_first_token, usage.total_time = 0.25, 1.0, 4.0
    usage.completion_tokens = 7
    engine.metrics.observe_delta(engine.request, Delta(finish_reason=FinishReason.STOP), 4.0)
    names = ("prompt_tokens", "generation_tokens", "prefill_time_seconds", "decode_time_seconds")
    found = engine.samples()
    assert [found[f"request_{name}_sum"] for name in names] == [1, 7, 0.75, 3.0]
    assert found["time_per_output_token_seconds_sum"] == 0.5
    assert found["request_generation_tokens_bucket 5.0"] == 0
    assert found["request_generation_tokens_bucket 10.0"] == 1
    usage.completion_tokens = 0  # ended in the queue: no first token, so no times between
    engine.metrics.observe_delta(engine.request, Delta(finish_reason=FinishReason.ABORT), 4.0)
    found = engine.samples()
    assert [found[f"request_{name}_count"] for name in names] == [2, 2, 1, 1]
    assert found["time_per_output_token_seconds_count"] == 1


# -- under vLLM's names ---------------------------------------------------------------------------


def test_every_name_of_the_table_is_a_metric_of_ours_and_told_with_vllms_labels(
    engine: Engine,
) -> None:
    engine.step("nnn", 2)
    engine.metrics.observe_delta(engine.request, Delta(finish_reason=FinishReason.STOP), 1.0)
    ours = {family.name: family for family in engine.metrics.registry.collect()}
    assert {f"foretoken:{name}" for name in VLLM_NAMES} - set(ours) == set()
    text = render_vllm(engine.metrics.registry, 'a "name"').decode()
    theirs = {family.name: family for family in text_string_to_metric_families(text)}
    labels = {"model_name": 'a "name"', "engine": "0"}
    for own, name in VLLM_NAMES.items():
        mine, other = ours[f"foretoken:{own}"], theirs[f"vllm:{name}"]
        assert mine.type == other.type
        expected = {
            (each.name.replace(mine.name, other.name), *sorted((labels | each.labels).items())):
            each.value for each in mine.samples if not each.name.endswith("_created")
        }  # fmt: skip
        assert expected == {
            (each.name, *sorted(each.labels.items())): each.value for each in other.samples
        }
    strange = set(theirs) - {f"vllm:{name}" for name in VLLM_NAMES.values()}
    assert all(name.endswith("_created") for name in strange)


def test_the_size_of_the_pool_is_told_where_routers_look_for_it(engine: Engine) -> None:
    text = render_vllm(engine.metrics.registry, "m").decode()
    line = next(line for line in text.splitlines() if line.startswith("vllm:cache_config_info"))
    assert 'block_size="2"' in line
    assert 'num_gpu_blocks="10"' in line
    assert line.endswith("} 1.0")


# -- the log --------------------------------------------------------------------------------------


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Logged:
    """A log over a tally, with a clock that is moved by hand."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.DEBUG, "foretoken.core.telemetry.spec_decode_stats")
        self._caplog = caplog
        self.load = Load()
        self.spec_stats, self.clock = SpecDecodeStats(), Clock()
        self.decision: dict[str, object] = {}
        self.asked = 0
        self.log = EngineLog(
            self.spec_stats, lambda: self.load, self.describe, interval_s=60.0, clock=self.clock
        )

    def describe(self) -> dict[str, object]:
        self.asked += 1
        return self.decision

    def serve(self, sources: list[str], accepted: int) -> None:
        """Report one step in the engine's order: the tick comes before the tokens."""
        self.log.tick()
        self.spec_stats.observe_delta(
            Delta(
                token_ids=[5] * (accepted + 1),
                num_proposed=len(sources),
                proposed_sources=sources,
                accepted_sources=sources[:accepted],
            )
        )

    def tick_at(self, now: float, level: str = "DEBUG") -> list[str]:
        """The lines of a level that a step at this time brings."""
        self.clock.now = now
        self._caplog.clear()
        self.log.tick()
        assert {record.levelname for record in self._caplog.records} <= {"INFO", "DEBUG"}
        return [each.getMessage() for each in self._caplog.records if each.levelname == level]


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> Logged:
    return Logged(caplog)


def test_a_line_a_minute_tells_load_speed_and_cache(logged: Logged) -> None:
    logged.load = Load(3, 1, 0.123, 1000, 610)
    for _ in range(60):
        logged.serve(["ngram", "ngram"], 1)
    line = "running 3, waiting 1, 2 tok/s, KV 12%, prefix hits 61%, 2.0 tokens per step"
    assert logged.tick_at(60.0, "INFO") == [line]
    logged.load = Load(0, 0, 0.5, 1200, 610)
    logged.serve([], 0)
    line = "running 0, waiting 0, 0 tok/s, KV 50%, prefix hits 0%, 1.0 tokens per step"
    assert logged.tick_at(120.0, "INFO") == [line]
    logged.serve([], 0)
    assert "prefix hits" not in logged.tick_at(180.0, "INFO")[0], "no prompt came"


def test_idle_time_does_not_count(logged: Logged) -> None:
    for second in range(31):
        logged.clock.now = float(second)
        logged.serve(["ngram"] * 9, 9)
    assert logged.tick_at(3600.0, "INFO") == [
        "running 0, waiting 0, 10 tok/s, KV 0%, 10.0 tokens per step"
    ]


def test_a_line_a_minute_tells_acceptance_sources_and_what_decides(logged: Logged) -> None:
    logged.decision = {"depth": 3, "because": "a third token costs more than it brings"}
    logged.serve([], 0)
    logged.serve(["ngram", "ngram", "radix"], 3)
    logged.serve(["ngram"], 0)
    assert logged.tick_at(59.9) == []
    assert logged.asked == 0
    assert logged.tick_at(60.0) == [
        "speculation in the last 60 s: 6 tokens in 3 steps (2.00 per step); "
        "acceptance length 2.50 over 2 drafts; "
        "acceptance rate 75%: ngram 2 of 3, radix 1 of 1; "
        "tokens from ngram 33%, radix 17%, the target itself 50%; "
        "controller: depth=3, because=a third token costs more than it brings"
    ]


def test_each_line_tells_its_own_minute_only(logged: Logged) -> None:
    logged.serve(["ngram"], 1)
    assert len(logged.tick_at(60.0)) == 1
    logged.serve(["model", "model"], 1)
    [line] = logged.tick_at(125.0)
    assert line.startswith("speculation in the last 65 s: 2 tokens in 1 steps (2.00 per step); ")
    assert "model 1 of 2" in line
    assert "ngram" not in line


def test_an_idle_minute_is_silent_and_the_next_window_begins_with_the_work(logged: Logged) -> None:
    assert logged.tick_at(60.0) == []
    assert logged.tick_at(1000.0) == []
    logged.serve(["ngram"], 1)
    assert logged.tick_at(1059.0) == []
    [line] = logged.tick_at(1060.0)
    assert line.startswith("speculation in the last 60 s: 2 tokens")
    assert logged.asked == 1


def test_plain_decoding_is_said_to_have_no_drafts(logged: Logged) -> None:
    logged.serve([], 0)
    expected = "speculation in the last 60 s: 1 tokens in 1 steps (1.00 per step); no drafts"
    assert logged.tick_at(60.0) == [expected]


def test_a_controller_that_cannot_be_described_does_not_end_the_engine(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail() -> dict[str, object]:
        raise RuntimeError("broken")

    caplog.set_level(logging.DEBUG, "foretoken.core.telemetry.spec_decode_stats")
    spec_stats, clock = SpecDecodeStats(), Clock()
    log = EngineLog(spec_stats, Load, fail, clock=clock)
    spec_stats.observe_delta(Delta(token_ids=[1]))
    clock.now = 60.0
    log.tick()
    assert [record.levelname for record in caplog.records] == ["INFO", "ERROR", "DEBUG"]
    assert caplog.messages[2].endswith("no drafts")
