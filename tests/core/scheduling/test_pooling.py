"""Requests that end when their prompt is computed, and get numbers of its last row."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from foretoken.core.errors import DeadlineExceeded, InvalidRequest, PromptTooLong
from foretoken.core.interface.output import StepOutput
from foretoken.core.interface.plan import StepPlan
from foretoken.core.interface.request import Request
from foretoken.core.interface.sampling import BranchPooling, Pooling
from foretoken.core.scheduling.async_scheduling import plan_next
from support.fake_model import (
    VOCAB_SIZE,
    Driver,
    FakeRunner,
    answer,
    make_request,
    make_scheduler,
    perfect,
    sometimes,
)

PROMPT = [1, 2, 3, 4, 5, 6, 1, 3, 5, 2, 4, 6, 1, 4, 2, 5, 3, 6]
STEP_S, TOKEN_S = 0.5, 0.01  # of a machine: each step, and each token of a prompt


def pooled(request_id: str, prompt: Sequence[int], **options: object) -> Request:
    return make_request(request_id, prompt, pooling=Pooling(), depth=0, **options)  # type: ignore[arg-type]


def drive(**options: object) -> Driver:
    scheduler = make_scheduler(**options)  # type: ignore[arg-type]
    return Driver(scheduler, FakeRunner(scheduler.cache.page_size, perfect))


def chunks_of(driver: Driver, request_id: str) -> list[tuple[int, int]]:
    return [
        (row.start, row.stop)
        for plan in driver.runner.plans
        for row in plan.requests
        if row.request_id == request_id
    ]


def test_it_ends_with_its_prompt_and_serves_no_token() -> None:
    driver = drive(max_batch_tokens=7)
    driver.add(request := pooled("a", PROMPT))
    driver.run()
    assert driver.pooled == {"a": [float(sum(PROMPT))]}
    assert (driver.served["a"], driver.ended["a"]) == ([], "stop")
    assert chunks_of(driver, "a") == [(0, 7), (7, 14), (14, 18)]
    assert list(request.tokens) == PROMPT
    usage = request.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_time) == (18, 0, 3.0)


def test_what_is_cached_is_not_computed_again_but_for_the_last_token() -> None:
    driver = drive()
    prompt = PROMPT[:16]  # whole pages
    driver.add(pooled("cold", prompt))
    driver.run()
    driver.add(again := pooled("again", prompt), longer := pooled("longer", PROMPT))
    driver.run()
    assert chunks_of(driver, "again") == [(12, 16)]
    assert chunks_of(driver, "longer") == [(16, 18)]
    assert (again.usage.cached_tokens, longer.usage.cached_tokens) == (12, 16)
    assert driver.pooled["again"] == driver.pooled["cold"]


def test_answers_read_the_pages_of_vectors_and_vectors_those_of_answers() -> None:
    driver = drive()
    driver.add(pooled("vector", PROMPT))
    driver.run()
    driver.add(answer := make_request("answer", PROMPT))
    driver.run()
    driver.add(vector := pooled("again", PROMPT))
    driver.run()
    assert (answer.usage.cached_tokens, vector.usage.cached_tokens) == (16, 16)
    driver.add(other := pooled("other", PROMPT, namespace="other"))
    driver.run()
    assert other.usage.cached_tokens == 0


def test_prompts_that_come_together_compute_what_they_share_once() -> None:
    driver = drive(max_batch_tokens=64)
    driver.add(*(pooled(str(index), [*PROMPT[:12], 1 + index]) for index in range(4)))
    driver.run()
    assert driver.runner.num_computed == 12 + 4


def test_a_prompt_of_one_token_and_one_that_fills_the_context_are_served() -> None:
    driver = drive(max_model_len=18, num_pages=5)
    driver.add(pooled("one", [3]), pooled("all", PROMPT))
    driver.run()
    assert driver.pooled == {"one": [3.0], "all": [float(sum(PROMPT))]}
    with pytest.raises(PromptTooLong) as caught:
        driver.add(pooled("more", [*PROMPT, 1]))
    assert (caught.value.num_tokens, caught.value.limit) == (19, 18)
    with pytest.raises(PromptTooLong) as caught:
        driver.add(make_request("answer", PROMPT))
    assert caught.value.limit == 17, "an answer needs room for a token"


def test_a_prompt_that_fills_the_whole_pool_is_admitted() -> None:
    driver = drive(num_pages=4)
    driver.add(pooled("a", PROMPT[:16]))
    driver.run()
    assert driver.ended == {"a": "stop"}


def test_it_drafts_nothing_where_others_do() -> None:
    driver = drive(depth=3)
    driver.add(make_request("answer", [1, 2], max_tokens=20, stop_ids=()), pooled("a", PROMPT))
    driver.run()
    drafted = {
        row.request_id
        for plan in driver.runner.plans
        for row in plan.requests
        if row.draft_plan.max_draft
    }
    assert drafted == {"answer"}


def test_no_step_is_planned_ahead_of_one_that_ends_it() -> None:
    driver = drive()
    driver.add(make_request("answer", [1, 2], max_tokens=20), pooled("a", [3]))
    plan = driver.scheduler.schedule(0.0)
    assert not plan.is_decode_only
    assert plan_next(driver.scheduler, plan, 0.0) is None


def test_aborted_and_late_ones_end_without_numbers() -> None:
    driver = drive(max_batch_tokens=4, max_running=1)
    driver.add(pooled("aborted", PROMPT), pooled("late", PROMPT[::-1], deadline=3.0))
    driver.step()
    driver.abort("aborted")
    driver.step()
    driver.step()
    driver.add(waiting := pooled("waiting", PROMPT, deadline=0.5))
    (event,) = driver.scheduler.expire(driver.now + 0.75)
    assert event[0] is waiting
    assert isinstance(event[1].error, DeadlineExceeded)
    driver.step()
    assert driver.ended == {"aborted": "abort", "late": "abort"}
    assert driver.pooled == {}
    driver.run()


def test_preempted_ones_go_on_and_get_the_same() -> None:
    driver = drive(num_pages=8, max_batch_tokens=4)
    driver.add(make_request("answer", [2, 1], max_tokens=20, stop_ids=()))
    driver.step()
    driver.add(request := pooled("a", [*PROMPT, *PROMPT[:4]]))
    driver.run()
    assert driver.pooled["a"] == [float(sum(PROMPT) + sum(PROMPT[:4]))]
    assert driver.ended == {"answer": "length", "a": "stop"}
    assert request.num_preemptions > 0


class TimedRunner(FakeRunner):
    """A machine on which every step costs, and every token of a prompt."""

    def step(self, plan: StepPlan) -> StepOutput:
        chunks = sum(row.stop - row.start for row in plan.requests if row.stop - row.start > 1)
        rows = super().step(plan).requests
        return StepOutput(requests=rows, times={"forward": STEP_S + TOKEN_S * chunks})


def test_a_long_one_makes_a_stream_slower_by_no_more_than_the_bound() -> None:
    """In virtual time: a step beside the stream takes at most 1.5 times as long as without."""
    scheduler = make_scheduler(num_pages=400, max_batch_tokens=200, max_slowdown=1.5)
    driver = Driver(scheduler, TimedRunner(page_size=4))
    driver.add(make_request("stream", [1, 2, 3], max_tokens=60, stop_ids=()))
    for _ in range(6):
        driver.step()
    driver.add(pooled("long", [2, 3, 4, 5, 6] * 140))
    driver.run()
    beside = [
        row.stop - row.start
        for plan in driver.runner.plans
        for row in plan.requests
        if row.request_id == "long" and len(plan.requests) == 2
    ]
    served = [plan for plan in driver.runner.plans if plan.requests[0].request_id == "stream"]
    assert len(served) == 60, "every step serves the stream until it ends"
    assert max(beside[1:]) <= (1.5 - 1) * STEP_S / TOKEN_S
    assert sum(stop - start for start, stop in chunks_of(driver, "long")) == 700
    assert driver.ended == {"stream": "length", "long": "stop"}


@pytest.mark.parametrize(
    "pooling",
    [Pooling((1, VOCAB_SIZE)), Pooling((1,), branches=(BranchPooling(-1, (VOCAB_SIZE,)),))],
)
def test_tokens_that_the_model_lacks_cannot_be_read(pooling: Pooling) -> None:
    """Their logits do not exist: a step that reads them would fail, with its other requests."""
    scheduler = make_scheduler()
    with pytest.raises(InvalidRequest, match="token_ids must have token ids from 0 to 6"):
        scheduler.check(make_request("a", PROMPT, pooling=pooling))


@pytest.mark.parametrize("seed", range(8))
def test_any_mixture_of_vectors_and_answers_in_a_small_pool_gets_what_each_gets_alone(
    seed: int,
) -> None:
    """Every step is audited, and the runner checks the KV of every path that it reads."""
    rng = random.Random(seed)
    scheduler = make_scheduler(num_pages=10, max_batch_tokens=9, max_running=4, depth=2)
    driver = Driver(scheduler, FakeRunner(4, sometimes, seed))
    stems = [[rng.randrange(1, VOCAB_SIZE) for _ in range(rng.randint(1, 16))] for _ in range(3)]
    asked: dict[str, tuple[list[int], bool]] = {}
    aborted: set[str] = set()
    for index in range(60):
        name, pools = str(index), rng.random() < 0.6
        prompt = rng.choice(stems) + [
            rng.randrange(1, VOCAB_SIZE) for _ in range(rng.randint(0, 5))
        ]
        asked[name] = prompt, pools
        options = {"namespace": rng.choice([None, None, "a"]), "priority": rng.randint(0, 1)}
        if pools:
            driver.add(pooled(name, prompt, **options))
        else:
            driver.add(make_request(name, prompt, max_tokens=12, **options))  # type: ignore[arg-type]
        if rng.random() < 0.15:
            aborted.add(gone := rng.choice(list(asked)))
            driver.abort(gone)
        for _ in range(rng.randint(0, 3)):
            driver.step()
    driver.run()
    for name, (prompt, pools) in asked.items():
        if driver.ended[name] == "abort":
            assert name in aborted
        elif pools:
            assert (driver.pooled[name], driver.served[name]) == ([float(sum(prompt))], [])
        else:
            assert driver.served[name] == answer(prompt, 12)
    assert len(driver.pooled) > 20
    assert scheduler.num_preemptions > 0
