"""ChunkBudget: a long prompt makes running answers slower by a bounded factor, and no more."""

from __future__ import annotations

import math
from array import array

import pytest

from foretoken.core.config import EngineConfig
from foretoken.core.errors import InvalidRequest
from foretoken.core.interface.output import StepOutput
from foretoken.core.interface.plan import ScheduledRequest, StepPlan
from foretoken.core.interface.sampling import SamplingMetadata, TokenSamplingParams
from foretoken.core.scheduling.chunk_budget import (
    LEAST_CHUNK,
    MEASURE,
    REMEASURE,
    WIDE_CHUNK,
    ChunkBudget,
)
from support.fake_model import Driver, FakeRunner, make_request, make_scheduler

SAMPLING = SamplingMetadata(params=TokenSamplingParams(), seed=0, prompt_len=1)
STEP_S, TOKEN_S = 0.5, 0.01  # of a machine: each step, and each token of a prompt


def step_of(num_decodes: int, *chunks: int) -> StepPlan:
    """A plan with this number of decoding requests, and prompts' chunks of these lengths."""
    return StepPlan(
        requests=[
            ScheduledRequest(
                request_id=str(index),
                tokens=array("q", [1] * length),
                start=0,
                stop=length,
                page_ids=array("q"),
                sampling=SAMPLING,
            )
            for index, length in enumerate([1] * num_decodes + list(chunks))
        ],
        newly_allocated_pages=array("q"),
    )


def after(seconds: float) -> StepOutput:
    return StepOutput(requests=(), times={"forward": 0.75 * seconds, "verify": 0.25 * seconds})


def learnt(slowdown: float, *, num_decodes: int = 4) -> ChunkBudget:
    chunk_budget = ChunkBudget(slowdown)
    chunk_budget.observe(step_of(0, 60, 40), after(100 * TOKEN_S))
    chunk_budget.observe(step_of(num_decodes), after(STEP_S))
    return chunk_budget


@pytest.mark.parametrize(("slowdown", "tokens"), [(2.0, 50), (3.0, 100), (1.5, 25)])
def test_chunks_take_no_more_than_their_share_of_time(slowdown: float, tokens: int) -> None:
    assert learnt(slowdown).limit(4, 1000) == tokens


def test_what_chunks_take_is_learnt_beside_decodes_as_well() -> None:
    chunk_budget = ChunkBudget(2.0)
    chunk_budget.observe(step_of(4), after(STEP_S))
    chunk_budget.observe(step_of(4, 30), after(STEP_S + 30 * TOKEN_S))
    assert chunk_budget.limit(4, 1000) == pytest.approx(50, abs=1)


def test_the_budget_holds_all_the_same() -> None:
    assert learnt(2.0).limit(4, 20) == 20


def test_a_prompt_gets_on_however_dear_its_tokens_are() -> None:
    assert learnt(1.0).limit(4, 1000) == LEAST_CHUNK


@pytest.mark.parametrize(
    ("token_s", "tokens"), [(0.002, 125), (0.001, 250), (1e-6, 1000), (0.5, WIDE_CHUNK)]
)
def test_where_no_request_decodes_a_step_ends_soon_for_those_that_arrive(token_s, tokens) -> None:
    chunk_budget = ChunkBudget(2.0)
    chunk_budget.observe(step_of(0, 60, 40), after(100 * token_s))
    assert chunk_budget.limit(0, 1000) == pytest.approx(tokens, abs=1)
    assert chunk_budget.limit(0, 20) == 20


@pytest.mark.parametrize("num_decodes", [0, 4])
def test_without_a_bound_the_budget_alone_counts(num_decodes: int) -> None:
    assert learnt(math.inf).limit(num_decodes, 1000) == 1000


@pytest.mark.parametrize("seen", [[step_of(4)], [step_of(0, 90)], [step_of(4, 90)], []])
def test_what_is_not_known_yet_bounds_nothing(seen: list[StepPlan]) -> None:
    chunk_budget = ChunkBudget(2.0)
    for plan in seen:
        chunk_budget.observe(plan, after(1.0))
    assert chunk_budget.limit(4, 1000) == 1000


def test_a_runner_that_tells_no_times_teaches_nothing() -> None:
    chunk_budget = learnt(2.0)
    for _ in range(9):
        chunk_budget.observe(step_of(4), StepOutput(requests=()))
    assert chunk_budget.limit(4, 1000) == 50


def test_requests_of_another_number_are_judged_by_the_nearest_that_was_seen() -> None:
    chunk_budget = learnt(2.0, num_decodes=4)
    chunk_budget.observe(step_of(16), after(4 * STEP_S))
    assert [chunk_budget.limit(n, 1000) for n in (1, 5, 16, 60)] == [50, 50, 200, 200]


@pytest.mark.parametrize(("seen", "due"), [(4, REMEASURE), (0, MEASURE)])
def test_while_prompts_keep_coming_a_step_without_them_comes_in_a_while(seen, due) -> None:
    chunk_budget = learnt(2.0)
    num_decodes = seen or 100
    limits = []
    for _ in range(2 * due):
        limits.append(limit := chunk_budget.limit(num_decodes, 1000))
        chunk_budget.observe(
            step_of(num_decodes, limit) if limit else step_of(num_decodes), after(3.0)
        )
    assert limits.count(0) == 1
    assert limits.index(0) == due


def test_a_machine_that_became_slower_is_believed() -> None:
    chunk_budget = learnt(2.0)
    for _ in range(6 * REMEASURE):
        tokens = chunk_budget.limit(4, 1000)
        plan = step_of(4, tokens) if tokens else step_of(4)
        chunk_budget.observe(plan, after(3 * (STEP_S + TOKEN_S * tokens)))
    assert chunk_budget.limit(4, 1000) == pytest.approx(50, rel=0.4)


def test_a_short_prompt_alone_does_not_tell_what_a_long_one_takes() -> None:
    chunk_budget = ChunkBudget(2.0)
    chunk_budget.observe(step_of(1), after(STEP_S))
    for _ in range(5):
        chunk_budget.observe(step_of(0, 2), after(STEP_S + 2 * TOKEN_S))
    assert chunk_budget.limit(1, 1000) == pytest.approx(50, abs=2)


class TimedRunner(FakeRunner):
    """A machine on which every step costs, and every token of a prompt."""

    def step(self, plan: StepPlan) -> StepOutput:
        chunks = sum(row.stop - row.start for row in plan.requests if row.stop - row.start > 1)
        rows = super().step(plan).requests
        return StepOutput(requests=rows, times={"forward": STEP_S + TOKEN_S * chunks})


def test_a_long_prompt_that_joins_is_cut_where_somebody_decodes() -> None:
    scheduler = make_scheduler(num_pages=400, max_batch_tokens=200, max_slowdown=1.5)
    driver = Driver(scheduler, TimedRunner(page_size=4))
    driver.add(make_request("stream", [1, 2, 3], max_tokens=60, stop_ids=()))
    for _ in range(6):
        driver.step()
    driver.add(make_request("long", [2, 3, 4, 5, 6] * 140, max_tokens=1, stop_ids=()))
    driver.run()
    chunks = [
        (len(plan.requests), row.stop - row.start)
        for plan in driver.runner.plans
        for row in plan.requests
        if row.request_id == "long"
    ]
    beside = [tokens for num_rows, tokens in chunks if num_rows > 1]
    assert sum(tokens for _, tokens in chunks) == 700
    assert max(beside[1:]) <= 30, "a quarter of a second of prompt beside half a second"
    assert driver.ended == {"stream": "length", "long": "length"}


@pytest.mark.parametrize("bad", [0.5, -1, "fast", math.nan, True])
def test_a_slowdown_below_one_is_refused(bad: object) -> None:
    with pytest.raises(InvalidRequest) as caught:
        EngineConfig(max_slowdown=bad)  # type: ignore[arg-type]
    assert caught.value.param == "max_slowdown"
