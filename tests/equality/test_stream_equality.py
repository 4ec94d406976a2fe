"""Drafts, other requests of the batch and cached prefixes change no token of a stream.

Every request runs alone first, without any draft. Then all of them run through the whole engine
(scheduler, cache, ragged forward, verifier) in many ways, and every stream must be that first one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from support.equality_harness import (
    DEPTHS,
    NUM_TOKENS,
    REQUESTS,
    SYNTHETIC,
    House,
    shuffled,
    tiny_house,
)
from support.native_variants import slow

KERNELS = ["float32-torch", "bfloat16-torch", "float32-native", "bfloat16-native"]


@pytest.fixture(scope="module", params=[*slow(*KERNELS[:2]), *KERNELS[2:]])
def house(request) -> House:
    dtype, backend = request.param.split("-")
    return tiny_house(dtype, backend)


@pytest.fixture
def turn(request) -> Callable[[list[str | None], str | None, Sequence[int]], int]:
    """Return a function that picks one of some values for a drafter on these kernels.

    Kernels, drafters and sizes know nothing of each other: every two of them meet, not all three.
    """

    def take(drafters: list[str | None], drafter: str | None, values: Sequence[int]) -> int:
        kernels = KERNELS.index(request.node.callspec.params["house"])
        return values[(drafters.index(drafter) + kernels) % len(values)]

    return take


DRAFTERS: list[str | None] = [None, "lm", *SYNTHETIC]
CACHED: list[str | None] = [None, "lm", "auto+lm"]
SHARE = -(-len(DEPTHS) // 2)  # so each of `DEPTHS` meets both backends, in one dtype or the other


def test_the_requests_are_worth_comparing(house: House) -> None:
    streams = {tuple(tokens) for tokens in house.solo.values()}
    assert len(streams) > len(REQUESTS) * 0.8
    assert any(len(tokens) < NUM_TOKENS for tokens in house.solo.values()), "none ever stops"


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_no_drafter_and_no_batch_changes_a_token(house: House, drafter, turn) -> None:
    max_running = turn(DRAFTERS, drafter, [3, 8])
    house.check(house.run(shuffled(max_running), drafter, max_running=max_running))


@pytest.mark.parametrize("drafter", ["lm", "auto+lm"])
def test_a_request_that_runs_alone_says_what_it_says_without_drafts(house: House, drafter) -> None:
    house.check(house.run(shuffled(1)[::2], drafter, max_running=1))


@pytest.mark.parametrize("place", range(SHARE))
def test_no_source_and_no_controller_changes_a_token(house: House, place, take, turn) -> None:
    sources = take([*DEPTHS], SHARE, place)
    max_running = turn([*DEPTHS], sources, [3, 8])
    order = shuffled(max_running)[::2]
    served = house.run(order, sources, max_running=max_running, max_batch_tokens=96, repeats=2)
    for index in order:
        assert served[str(index)] == house.solo[str(index)], REQUESTS[index][1].params
    names = {name for r in house.requests for name in r.usage.accepted_by_source}
    assert names, "nothing was ever guessed right, so nothing was shown"


@pytest.mark.parametrize("drafter", [None, "lm", "perfect", "all", "auto+lm"])
def test_preemption_changes_no_token(house: House, drafter) -> None:
    served = house.run(shuffled(4), drafter, num_pages=59, max_batch_tokens=40)
    assert house.scheduler.num_preemptions > 0
    house.check(served)


@pytest.mark.parametrize("drafter", CACHED)
def test_a_cached_prompt_gives_the_same_tokens_as_a_cold_one(house: House, drafter, turn) -> None:
    order = shuffled(6)[:12]
    page_size = turn(CACHED, drafter, [1, 4, 16])
    served = house.run(order, drafter, page_size=page_size, repeats=2)
    assert house.scheduler.cache.num_hits > 0
    for index in order:
        assert served[str(index)] == house.solo[str(index)]


@pytest.mark.parametrize("depth", [1, 2, 7])
def test_the_depth_changes_no_token(house: House, depth) -> None:
    house.check(house.run(shuffled(depth), "lm", depth=depth))


def test_rejected_and_unused_slots_may_hold_anything(house: House) -> None:
    house.check(house.run(shuffled(8), "wrong", poison=True))


def test_drafts_of_a_language_model_are_accepted(house: House) -> None:
    house.run(shuffled(1), "lm")
    usages = [request.usage for request in house.requests]
    accepted = sum(usage.accepted_tokens for usage in usages)
    assert accepted == sum(usage.accepted_by_source.get("lm", 0) for usage in usages)
    assert accepted > 0.3 * sum(usage.proposed_tokens for usage in usages)


@pytest.fixture(scope="module", params=[*slow("float32-torch"), "bfloat16-native"])
def transformers_house(request) -> House:
    """Target and draft model are transformers' modules on our pages and kernels."""
    dtype, backend = request.param.split("-")
    return tiny_house(dtype, backend, impl="transformers")


@pytest.mark.parametrize("drafter", [None, "lm", "all", "auto+lm"])
def test_modules_of_transformers_keep_the_promise(transformers_house: House, drafter) -> None:
    """No drafter, batch, chunk, cached prefix or preemption changes a token."""
    house = transformers_house
    house.check(house.run(shuffled(4)[::2], drafter, num_pages=59, max_batch_tokens=40))
    assert house.scheduler.num_preemptions > 0
    order = shuffled(4)[:12:2]
    served = house.run(order, drafter, repeats=2)
    assert house.scheduler.cache.num_hits > 0
    for index in order:
        assert served[str(index)] == house.solo[str(index)]
