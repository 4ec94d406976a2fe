"""Prompts that end with branches: computed in one step, beside others, and never cached."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence

import pytest

from foretoken.core.errors import InvalidRequest, PromptTooLong
from foretoken.core.interface.extras.branches import Branches, chunk_stop
from foretoken.core.interface.request import Request
from foretoken.core.interface.sampling import BranchPooling, Pooling
from support.fake_model import (
    VOCAB_SIZE,
    Driver,
    FakeRunner,
    make_request,
    make_scheduler,
    sometimes,
)

PROMPT = [1, 2, 3, 4, 5, 6, 1, 3, 5, 2, 4, 6, 1, 4, 2, 5, 3, 6]


def pooling_of(parents: Sequence[int]) -> Pooling:
    branches = tuple(BranchPooling(parent, (1,)) for parent in parents)
    return Pooling((1, 2), branches=branches)


def branching(
    request_id: str, prompt: Sequence[int], parents: Sequence[int], **options: object
) -> Request:
    """A request whose branches all have the token 2, after ``prompt``."""
    tokens = [*prompt, *[2] * len(parents)]
    pooling = pooling_of(parents)
    return make_request(request_id, tokens, pooling=pooling, depth=0, **options)  # type: ignore[arg-type]


def drive(**options: object) -> Driver:
    scheduler = make_scheduler(**options)  # type: ignore[arg-type]
    return Driver(scheduler, FakeRunner(scheduler.cache.page_size))


def chunks_of(driver: Driver, request_id: str) -> list[tuple[int, int]]:
    return [
        (row.start, row.stop)
        for plan in driver.runner.plans
        for row in plan.requests
        if row.request_id == request_id
    ]


def test_branches_are_computed_with_the_row_before_them() -> None:
    driver = drive(max_batch_tokens=7)
    driver.add(branching("a", PROMPT, [-1, 0, -1]))
    driver.run()
    assert chunks_of(driver, "a") == [(0, 7), (7, 14), (14, 21)]
    driver = drive(max_batch_tokens=10)
    driver.add(branching("a", PROMPT, [-1, 0, -1]))
    driver.run()
    assert chunks_of(driver, "a") == [(0, 10), (10, 17), (17, 21)], "the second would cut them"


def test_more_branches_than_a_step_has_tokens_are_computed_at_once() -> None:
    driver = drive(max_batch_tokens=4)
    for name in ("a", "b"):
        driver.add(branching(name, PROMPT[:8], [-1] * 9))
    driver.run()
    assert chunks_of(driver, "a")[-1] == (7, 17)
    assert driver.ended == {"a": "stop", "b": "stop"}
    steps = [sum(row.stop - row.start for row in plan.requests) for plan in driver.runner.plans]
    assert max(steps) <= 10 + 4, "at most one chunk of a step exceeds its share"


def test_pages_with_branches_are_not_cached() -> None:
    driver = drive()
    driver.add(branching("a", PROMPT[:6], [-1, -1]))
    driver.run()
    tokens = array("q", [*PROMPT[:6], 2, 2, 3])
    assert driver.scheduler.cache.match_len(tokens) == 4
    driver.add(again := branching("b", PROMPT[:6], [-1, -1]))
    driver.run()
    assert again.usage.cached_tokens == 4


def test_the_last_row_before_branches_is_computed_though_its_page_is_cached() -> None:
    driver = drive()
    driver.add(make_request("text", [*PROMPT[:6], 2, 2, 3, 3]))
    driver.run()
    for name, cut in (("a", 6), ("b", 8)):
        driver.add(request := branching(name, [*PROMPT[:6], 2, 2][:cut], [-1, -1]))
        driver.run()
        assert request.usage.cached_tokens == 4


def test_prompts_with_branches_wait_for_pages_that_they_share() -> None:
    driver = drive(max_batch_tokens=64)
    driver.add(*(branching(str(at), [*PROMPT[:12], 1 + at], [-1, 0]) for at in range(4)))
    driver.run()
    assert driver.runner.num_computed == 12 + 4 * 3


def test_branches_count_towards_the_context() -> None:
    driver = drive(max_model_len=20, num_pages=5)
    driver.add(branching("a", PROMPT, [-1, -1]))
    driver.run()
    assert driver.ended == {"a": "stop"}
    with pytest.raises(PromptTooLong):
        driver.add(branching("b", PROMPT, [-1, -1, -1]))


def test_branches_that_nothing_precedes_and_models_with_states_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="before its branches"):
        branching("a", [], [-1])
    with pytest.raises(ValueError, match="precede"):
        pooling_of([0])
    with pytest.raises(ValueError, match="token_ids"):
        Pooling((), branches=(BranchPooling(-1, (1,)),))
    scheduler = make_scheduler(num_slots=4)
    with pytest.raises(InvalidRequest, match="recurrent"):
        scheduler.check(branching("a", PROMPT, [-1]))


def test_a_chunk_ends_before_the_row_of_the_root_or_after_all_branches() -> None:
    branches = Branches(5, (-1, 0))  # rows 4, 5 and 6
    stops = [chunk_stop((), branches, 2, stop) for stop in range(3, 8)]
    assert stops == [3, 4, 4, 4, 7]
    assert [chunk_stop((), branches, 4, stop) for stop in (5, 6, 7)] == [7, 7, 7]


@pytest.mark.parametrize("seed", range(8))
def test_any_mixture_in_a_small_pool_is_served(seed: int) -> None:
    """Every step is audited, and the runner fails where a page holds the KV of another path."""
    rng = random.Random(seed)
    scheduler = make_scheduler(num_pages=10, max_batch_tokens=9, max_running=4, depth=2)
    driver = Driver(scheduler, FakeRunner(4, sometimes, seed))
    stems = [[rng.randrange(1, VOCAB_SIZE) for _ in range(rng.randint(1, 16))] for _ in range(3)]
    for index in range(60):
        prompt = rng.choice(stems) + [2] * rng.randint(0, 4)
        if rng.random() < 0.6:
            parents = [rng.randrange(-1, at) for at in range(rng.randint(1, 6))]
            driver.add(branching(str(index), prompt, parents))
        else:
            driver.add(make_request(str(index), prompt, max_tokens=12))
        for _ in range(rng.randint(0, 3)):
            driver.step()
    driver.run()
    assert scheduler.num_preemptions > 0
    assert len(driver.pooled) > 20
