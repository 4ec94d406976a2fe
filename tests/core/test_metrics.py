"""The tally of speculation, what Prometheus is told of it, and the line a minute in the log."""

from __future__ import annotations

import logging
from array import array
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from foretoken.core.metrics import EngineMetrics
from foretoken.core.params import SamplingParams
from foretoken.core.report import SpeculationLog, Tally
from foretoken.core.request import Delta, FinishReason, Request
from foretoken.core.step import RowOutput, RowSampling, StepOutput


class Engine:
    """Metrics over a scheduler that has nothing to tell, fed as the engine feeds them."""

    def __init__(self) -> None:
        cache = SimpleNamespace(usage=0.0, num_queries=0, num_hits=0, num_pinned_pages=0)
        scheduler: Any = SimpleNamespace(running={}, waiting=[], num_preemptions=0, cache=cache)
        self.metrics = EngineMetrics(scheduler)
        sampling = RowSampling(params=SamplingParams(), seed=1, prompt_len=1)
        self.request = Request(request_id="a", tokens=array("q", [1]), sampling=sampling)

    def step(
        self, sources: str, accepted: int, *, path: int | None = None, now: float = 0.0
    ) -> None:
        """One draft: a letter per draft token names its source; ``path`` of them lead."""
        names = [{"n": "ngram", "m": "model", "p": "prediction"}[letter] for letter in sources]
        row = RowOutput(
            request_id="a",
            num_proposed=len(names),
            num_accepted=accepted,
            sources=names,
            draft_len=len(names) if path is None else path,
        )
        delta = Delta(
            token_ids=[5] * (accepted + 1),
            num_proposed=len(names),
            proposed_sources=names,
            accepted_sources=names[:accepted],
            token_sources=[*names[:accepted], ""],
        )
        self.metrics.observe_step(StepOutput(rows=[row]), 0.01)
        self.metrics.observe_delta(self.request, delta, now)

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


# -- the log --------------------------------------------------------------------------------------


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Logged:
    """A log over a tally, with a clock that is moved by hand."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO, "foretoken.core.report")
        self._caplog = caplog
        self.tally, self.clock = Tally(), Clock()
        self.decision: dict[str, object] = {}
        self.asked = 0
        self.log = SpeculationLog(self.tally, self.describe, interval_s=60.0, clock=self.clock)

    def describe(self) -> dict[str, object]:
        self.asked += 1
        return self.decision

    def serve(self, sources: list[str], accepted: int) -> None:
        """As the engine does: the tick comes before the tokens."""
        self.log.tick()
        self.tally.observe_delta(
            Delta(
                token_ids=[5] * (accepted + 1),
                num_proposed=len(sources),
                proposed_sources=sources,
                accepted_sources=sources[:accepted],
            )
        )

    def tick_at(self, now: float) -> list[str]:
        """The lines that a step at this time brings."""
        self.clock.now = now
        self._caplog.clear()
        self.log.tick()
        assert {record.levelname for record in self._caplog.records} <= {"INFO"}
        return self._caplog.messages


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> Logged:
    return Logged(caplog)


def test_a_line_a_minute_tells_acceptance_sources_and_what_decides(logged: Logged) -> None:
    logged.decision = {"depth": 3, "because": "a third token costs more than it brings"}
    logged.serve([], 0)
    logged.serve(["ngram", "ngram", "oracle:0.8"], 3)
    logged.serve(["ngram"], 0)
    assert logged.tick_at(59.9) == []
    assert logged.asked == 0
    assert logged.tick_at(60.0) == [
        "speculation in the last 60 s: 6 tokens in 3 steps (2.00 a step); "
        "acceptance length 2.50 over 2 drafts; "
        "acceptance rate 75%: ngram 2 of 3, oracle:0.8 1 of 1 (simulated); "
        "tokens from ngram 33%, oracle:0.8 17%, the target itself 50%; "
        "controller: depth=3, because=a third token costs more than it brings"
    ]


def test_each_line_tells_its_own_minute_only(logged: Logged) -> None:
    logged.serve(["ngram"], 1)
    assert len(logged.tick_at(60.0)) == 1
    logged.serve(["model", "model"], 1)
    [line] = logged.tick_at(125.0)
    assert line.startswith("speculation in the last 65 s: 2 tokens in 1 steps (2.00 a step); ")
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
    expected = "speculation in the last 60 s: 1 tokens in 1 steps (1.00 a step); no drafts"
    assert logged.tick_at(60.0) == [expected]


def test_a_controller_that_cannot_be_described_does_not_end_the_engine(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail() -> dict[str, object]:
        raise RuntimeError("broken")

    caplog.set_level(logging.INFO, "foretoken.core.report")
    tally, clock = Tally(), Clock()
    log = SpeculationLog(tally, fail, clock=clock)
    tally.observe_delta(Delta(token_ids=[1]))
    clock.now = 60.0
    log.tick()
    assert [record.levelname for record in caplog.records] == ["ERROR", "INFO"]
    assert caplog.messages[1].endswith("no drafts")
