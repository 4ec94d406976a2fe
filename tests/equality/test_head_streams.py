"""A trained head that drafts changes no token, on every backend of this machine."""

from __future__ import annotations

import pytest

from support.draft_trees import TreeDepth
from support.equality_harness import HEADS, House, shuffled, tiny_house
from support.native_variants import slow
from support.tiny_heads import TINY

SHARE = -(-2 * len(HEADS) // 3)


@pytest.fixture(
    scope="module",
    params=[*slow("float32-torch-auto"), "bfloat16-native-auto", "bfloat16-native-int8"],
)
def house(request) -> House:
    return tiny_house(*request.param.split("-"))


@pytest.mark.parametrize("place", range(SHARE))
def test_no_head_changes_a_token(house: House, place: int, take) -> None:
    """Each head on two of the three kernels."""
    drafter = take([*HEADS], SHARE, place)
    house.check(house.run(shuffled(3)[::2], drafter, max_running=5))
    proposed = sum(request.usage.proposed_tokens for request in house.requests)
    assert proposed > 100


@pytest.mark.parametrize("drafter", ["block", "auto+eagle3"])
def test_preemption_with_a_head_changes_no_token(house: House, drafter) -> None:
    served = house.run(shuffled(4)[:24], drafter, num_pages=59, max_batch_tokens=40)
    assert house.scheduler.num_preemptions > 0
    house.check(served)


@pytest.mark.parametrize(("drafter", "page_size"), [("block", 1), ("eagle3", 1), ("eagle3", 16)])
def test_a_hit_with_a_head_changes_no_token(house: House, drafter, page_size) -> None:
    order = shuffled(6)[:10]
    served = house.run(order, drafter, page_size=page_size, repeats=2)
    assert house.scheduler.cache.num_hits > 0
    for index in order:
        assert served[str(index)] == house.solo[str(index)]


@pytest.mark.parametrize(
    ("drafter", "page_size"),
    [("lm", 1), ("lm", 16), ("block", 1), *((kind, 16) for kind in TINY), ("reduced", 4)],
)
def test_trees_of_a_model_or_a_head_change_no_token(house: House, drafter, page_size) -> None:
    """Every parameter; void slots of the target's pool hold NaN, and branches win."""
    served = house.run(
        shuffled(8)[::2], drafter, speculator=TreeDepth(8), page_size=page_size,
        max_batch_tokens=160, num_pages=600 if page_size > 1 else 2000, poison=True,
    )  # fmt: skip
    house.check(served)
    assert sum(request.usage.tree_steps for request in house.requests) > 20
