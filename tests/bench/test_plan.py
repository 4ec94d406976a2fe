"""`foretoken bench plan`: engines in virtual time take what steps cost, and nothing else."""

from __future__ import annotations

import asyncio
import json
import sys
from array import array
from dataclasses import replace

import msgspec
import pytest

from foretoken.bench import plan
from foretoken.bench.load.generator import Job, Piece, Session
from foretoken.bench.planning.cluster import Shape, planned
from foretoken.bench.planning.costs import StepCosts, _features, fit, read_costs, write_costs
from foretoken.bench.planning.drafts import Drafts
from foretoken.bench.planning.replica import Tier
from foretoken.bench.planning.virtual_time import Stuck, VirtualLoop, VirtualThread, run_on
from foretoken.core.interface.plan import ScheduledRequest, StepPlan
from foretoken.core.interface.sampling import SamplingMetadata, TokenSamplingParams
from foretoken.draft.control.cost_model import CostCurve, StepProfile

# A row costs a millisecond, a step 2, a request in it half a one, keys nothing.
COSTS = StepCosts(
    model="made up",
    machine={},
    forward={n: n * 1e-3 for n in (1, 2, 4, 256, 512)},
    row_key_s=0.0,
    scale=1.0,
    step_s=2e-3,
    request_s=5e-4,
    key_s=0.0,
    page_size=16,
    page_bytes=1000,
    max_model_len=4096,
    max_batch_tokens=512,
    max_running=8,
    max_slowdown=None,
    vocab_size=1000,
    overlaps=False,
)
ONE = Shape(num_replicas=1, kv_bytes=1000 * 1000, max_running=8)


def session(at: float, prompt: list[int], output_len: int) -> Session:
    async def run(ask) -> None:
        await ask(Job(name="x", prompt=[Piece("user", prompt)], output_len=output_len))

    return Session(run, at=at)


def ids(first: int, length: int) -> list[int]:
    return [(first * 131 + at * 7) % 1000 for at in range(length)]


def test_a_request_alone_takes_the_time_of_its_steps() -> None:
    figures = planned(COSTS, ONE, [session(0.0, ids(1, 100), 11)], {})
    assert figures["served"] == 1
    assert figures["ttft_ms"]["p50"] == pytest.approx(100 + 2 + 0.5)
    assert figures["itl_ms"]["p99"] == pytest.approx(1 + 2 + 0.5)
    assert figures["step_seconds"] == pytest.approx(0.1025 + 10 * 0.0035)


def test_the_way_to_an_engine_delays_first_tokens_alone() -> None:
    shape = replace(ONE, arrival_s=0.05)
    figures = planned(COSTS, shape, [session(0.0, ids(1, 100), 11)], {})
    assert figures["ttft_ms"]["p50"] == pytest.approx(152.5)
    assert figures["itl_ms"]["p50"] == pytest.approx(3.5)


def test_pages_of_a_prompt_are_found_again_and_only_on_their_replica() -> None:
    twice = [session(0.0, ids(1, 100), 4), session(10.0, ids(1, 100), 4)]
    for count in (1, 2):
        figures = planned(COSTS, replace(ONE, num_replicas=count), twice, {})
        assert figures["cached_tokens"] == 96, "six whole pages of 16"
        assert sorted(figures["requests_by_replica"]) == [0, 2][-count:], "kv: both go to one"


def test_a_pool_that_is_too_small_forgets_and_a_tier_does_not() -> None:
    prompts = [ids(each, 640) for each in range(3)]
    load = [session(20.0 * turn, prompts[turn % 3], 4) for turn in range(6)]
    small = replace(ONE, kv_bytes=50 * 1000)  # 800 tokens
    without = planned(COSTS, small, load, {})
    tier = Tier("host", 10**6, 1e-3)
    with_tier = planned(COSTS, replace(small, tiers=[tier]), load, {})
    assert without["cached_tokens"] == without["loaded_tokens"] == 0
    assert with_tier["loaded_tokens"] == with_tier["cached_tokens"] == 3 * 624
    assert with_tier["tiers"]["host"]["loaded_pages"] == 3 * 39
    loaded = planned(COSTS, replace(small, tiers=[replace(tier, page_seconds=3e-3)]), load, {})
    # Half of the requests load 39 pages and compute 16 tokens: slower pages, later first tokens.
    delay = loaded["ttft_ms"]["mean"] - with_tier["ttft_ms"]["mean"]
    assert delay == pytest.approx(39 * 2 / 2, rel=0.01)


def test_two_replicas_halve_the_waiting_of_a_burst() -> None:
    burst = [session(0.0, ids(each, 400), 2) for each in range(8)]
    one, two = (planned(COSTS, replace(ONE, num_replicas=n), burst, {}) for n in (1, 2))
    assert two["requests_by_replica"] == [4, 4]
    # One after the other: the mean of 1..4 turns against that of 1..8.
    assert two["ttft_ms"]["mean"] == pytest.approx(one["ttft_ms"]["mean"] * 2.5 / 4.5, rel=0.1)
    assert one["kv_most_held"] > two["kv_most_held"] > 0


APART = replace(ONE, num_replicas=2, num_prefill=1, transfer_s=1e-3)


def test_a_prompt_that_another_replica_computes_takes_its_steps_its_pages_and_the_tail() -> None:
    figures = planned(COSTS, APART, [session(0.0, ids(1, 400), 11)], {})
    assert figures["requests_by_replica"] == [1, 1]
    assert figures["prefilled"] == 1
    assert figures["loaded_tokens"] == 24 * 16, "all whole pages, but not the last token"
    assert figures["cached_tokens"] == 0, "no token of it was known before"
    # A step of 400 rows there, 24 pages, one step of the 16 tokens left here.
    assert figures["ttft_ms"]["p50"] == pytest.approx(402.5 + 24 + 18.5, abs=0.5)
    assert figures["itl_ms"]["p99"] == pytest.approx(3.5)
    again = [session(0.0, ids(1, 400), 2), session(2.0, ids(1, 400), 2)]
    assert planned(COSTS, APART, again, {})["cached_tokens"] == 24 * 16, "the second one's"


def test_a_short_prompt_stays_with_the_replica_of_its_answer() -> None:
    figures = planned(COSTS, APART, [session(0.0, ids(1, 200), 4)], {})
    assert figures["requests_by_replica"] == [0, 1]
    assert figures["prefilled"] == 0
    assert figures["ttft_ms"]["p50"] == pytest.approx(202.5)


def test_long_prompts_of_another_replica_do_not_stretch_the_gaps() -> None:
    load = [session(0.0, ids(1, 100), 100), session(0.2, ids(2, 800), 2)]
    alike = replace(APART, num_prefill=0, num_replicas=1)
    together, apart = (planned(COSTS, each, load, {})["itl_ms"]["p99"] for each in (alike, APART))
    assert apart < 0.2 * together


def test_drafts_bring_the_tokens_that_are_given_and_cost_their_rows() -> None:
    drafts = Drafts(depth=3, tokens_per_step=2.5, seconds=1e-3)
    load = [session(0.0, ids(1, 100), 101)]
    figures = planned(COSTS, replace(ONE, drafts=drafts), load, {})
    # 100 tokens behind the first one, 40 steps of 4 rows and a draft each.
    assert figures["output_tokens"] == 101
    assert figures["step_seconds"] == pytest.approx(0.1025 + 40 * (4 + 2 + 0.5 + 1) / 1e3, rel=0.01)
    with pytest.raises(ValueError, match=r"1 to 4 tokens per step, not 4\.5"):
        Drafts(depth=3, tokens_per_step=4.5)


def test_a_plan_is_the_same_twice() -> None:
    load = [session(each / 50, ids(each % 5, 200 + each), 20) for each in range(30)]
    shape = replace(ONE, num_replicas=2, kv_bytes=80 * 1000, tiers=[Tier("disk", 10**5, 1e-3)])
    for each in (shape, replace(shape, num_prefill=1)):
        assert planned(COSTS, each, load, {}) == planned(COSTS, each, load, {})


def test_a_load_that_never_fits_is_an_error_of_its_requests() -> None:
    tiny = replace(ONE, kv_bytes=2 * 1000)
    figures = planned(COSTS, tiny, [session(0.0, ids(1, 100), 4)], {})
    assert figures["errors"] == {"PromptTooLong": 1}
    with pytest.raises(ValueError, match="one KV page"):
        planned(COSTS, replace(ONE, kv_bytes=999), [], {})


# -- costs --------------------------------------------------------------------------------------


def step(*parts: tuple[int, int]) -> StepPlan:
    sampling = SamplingMetadata(params=TokenSamplingParams(), seed=0, prompt_len=1)
    rows = [
        ScheduledRequest(
            request_id=str(index),
            tokens=array("q", [0] * stop),
            start=start,
            stop=stop,
            page_ids=array("q"),
            sampling=sampling,
        )
        for index, (start, stop) in enumerate(parts)
    ]
    return StepPlan(requests=rows, newly_allocated_pages=array("q"))


def test_the_fit_finds_what_made_the_times_and_leaves_out_a_stall() -> None:
    profile = StepProfile({n: 1e-3 + n * 1e-4 for n in (1, 2, 4, 8, 64, 128)}, {}, 1e-8)
    plans = [
        step(*[(at, at + width)] * n) for at in (0, 64, 900) for width in (1, 40) for n in (1, 3)
    ]
    curve = CostCurve(profile.forward)
    truth = (1.3, 2e-4, 5e-5, 4e-8)
    costs = StepCosts(
        **{**msgspec.to_builtins(COSTS), "forward": dict(profile.forward), "row_key_s": 1e-8}
    )
    steps = [
        (each, sum(a * b for a, b in zip(_features(each, curve, 1e-8), truth, strict=True)))
        for each in plans
    ]
    found = fit(profile, [*steps, (plans[0], 1.0)])
    assert found == pytest.approx(truth, rel=1e-6)
    again = msgspec.structs.replace(
        costs, scale=found[0], step_s=found[1], request_s=found[2], key_s=found[3]
    )
    for each, seconds in steps:
        assert again.seconds(each, curve) == pytest.approx(seconds)


def test_costs_are_kept_in_a_file(tmp_path) -> None:
    write_costs(tmp_path / "costs.json", COSTS)
    assert read_costs(tmp_path / "costs.json") == COSTS
    (tmp_path / "costs.json").write_text('{"model": "x"}')
    with pytest.raises(SystemExit, match=r"costs\.json.*missing required field"):
        read_costs(tmp_path / "costs.json")


# -- the command --------------------------------------------------------------------------------


@pytest.fixture
def costs_file(tmp_path):
    write_costs(tmp_path / "costs.json", COSTS)
    return str(tmp_path / "costs.json")


def test_the_command_prints_a_line_for_each_shape(costs_file, tmp_path, capsys) -> None:
    out = tmp_path / "plan.json"
    flags = ["--costs", costs_file, "--requests", "12", "--scale", "0.05", "--kv-memory", "1MiB"]
    assert plan.main([*flags, "--replicas", "1,2", "--kv-host", "1MiB", "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    assert "computed, not measured" in shown
    assert "synthetic trace" in shown
    report = json.loads(out.read_text())
    found = [(each["replicas"], each["tiers_used"], each["served"]) for each in report["plans"]]
    assert found == [(1, "none", 12), (1, "host", 12), (2, "none", 12), (2, "host", 12)]
    assert "occupancy" not in report["plans"][0]


def test_the_command_plans_roles_beside_replicas_that_are_alike(
    costs_file, tmp_path, capsys
) -> None:
    out = tmp_path / "plan.json"
    flags = ["--costs", costs_file, "--requests", "12", "--scale", "0.25", "--kv-memory", "1MiB"]
    flags += ["--draft-depth", "3", "--tokens-per-step", "2"]
    assert plan.main([*flags, "--prefill", "1", "--decode", "2", "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    assert "| 1 prefill, 2 decode |" in shown
    assert "drafts of 3 tokens, 2 tokens per step" in shown
    found = [(each["replicas"], each["prefill"]) for each in json.loads(out.read_text())["plans"]]
    assert found == [(3, 0), (3, 1)]


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--prefill", "1"], "--prefill and --decode must be given together"),
        (["--prefill", "1", "--decode", "0"], "--decode"),
        (["--draft-depth", "2", "--tokens-per-step", "4"], "1 to 3 tokens per step, not 4"),
        (["--tokens-per-step", "2"], "1 to 1 tokens per step"),
        (["--draft-depth", "-1"], "--draft-depth"),
    ],
)
def test_flags_that_do_not_fit_end_with_2(costs_file, capsys, flags, told) -> None:
    with pytest.raises(SystemExit) as end:
        sys.exit(plan.main(["--costs", costs_file, "--requests", "2", *flags]))
    assert end.value.code == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("nonsense", "line 1: JSON is malformed"),
        ('{"timestamp": 0, "input_length": 0, "output_length": 1, "hash_ids": [1]}', "above 0"),
    ],
)
def test_a_trace_that_is_none_is_named(costs_file, tmp_path, capsys, line, told) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(line + "\n")
    assert plan.main(["--costs", costs_file, "--trace", str(trace)]) == 2
    assert told in capsys.readouterr().err


def test_a_trace_that_is_missing_and_a_pool_without_a_page_are_named(costs_file, capsys) -> None:
    assert plan.main(["--costs", costs_file, "--trace", "/nowhere"]) == 2
    assert "/nowhere" in capsys.readouterr().err
    assert plan.main(["--costs", costs_file, "--kv-memory", "10"]) == 2
    assert "one KV page" in capsys.readouterr().err


def test_plots_are_drawn(costs_file, tmp_path) -> None:
    pytest.importorskip("matplotlib", reason="the extra bench is not installed")
    flags = ["--costs", costs_file, "--requests", "6", "--scale", "0.05", "--replicas", "1,2"]
    out = str(tmp_path / "plan.json")
    assert plan.main([*flags, "--plots", str(tmp_path / "plots"), "--out", out]) == 0
    assert sorted(each.name for each in (tmp_path / "plots").iterdir()) == [
        "occupancy.png",
        "plan.png",
    ]


# -- virtual time -------------------------------------------------------------------------------


def test_calls_of_a_virtual_thread_follow_each_other() -> None:
    async def main(loop: VirtualLoop) -> list[tuple[str, float]]:
        thread, seen = VirtualThread(), list[tuple[str, float]]()

        def work(name: str, seconds: float) -> None:
            thread.spend(seconds)
            seen.append((name, thread.time()))

        jobs = [thread.start(lambda: work("a", 2.0)), thread.start(lambda: work("b", 3.0))]
        for job in jobs:
            await job.result()
            seen.append(("end", loop.time()))
        return seen

    assert run_on(VirtualLoop(), main) == [("a", 2.0), ("b", 5.0), ("end", 2.0), ("end", 5.0)]


def test_whoever_waits_for_nothing_is_found() -> None:
    async def main(loop: VirtualLoop) -> None:
        await asyncio.Event().wait()

    with pytest.raises(Stuck, match="nothing is scheduled"):
        run_on(VirtualLoop(), main)
