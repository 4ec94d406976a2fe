"""Draft trees in one ragged step: the path that the target takes wins, and no token changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from foretoken.core.execution import step_layout
from foretoken.core.interface.draft import Draft
from foretoken.core.interface.plan import ScheduledRequest
from foretoken.core.model.decoder import OwnDecoder
from foretoken.core.ops.batch import ForwardOutput, RaggedBatch, Wanted
from foretoken.core.ops.kv_pool import KVPool
from foretoken.core.ops.rows.row_table import RowTable
from support.draft_trees import RandomTrees, TreeDepth
from support.equality_harness import REQUESTS, House, shuffled, tiny_house

pytestmark = pytest.mark.slow

KINDS = {
    "torch": ("float32", "torch", "auto"),
    "torch bfloat16": ("bfloat16", "torch", "auto"),
    "native": ("float32", "native", "auto"),
    "native bfloat16": ("bfloat16", "native", "auto"),
    "torch int8": ("float32", "torch", "int8"),
    "native int8": ("bfloat16", "native", "int8"),
}
Take = Callable[[Sequence[int], int, int], int]  # the fixture `take`


@pytest.fixture(scope="module", params=KINDS)
def house(request: pytest.FixtureRequest) -> House:
    return tiny_house(*KINDS[request.param])  # type: ignore[arg-type]


@pytest.mark.parametrize("place", range(2))
def test_known_trees_change_no_token(house: House, place: int, take: Take) -> None:
    page_size = take((1, 4, 16), 2, place)
    trees = RandomTrees(house.solo)
    order = shuffled(page_size)[:24]
    served = house.run(
        order, None, speculator=trees, page_size=page_size, max_batch_tokens=160, poison=True
    )
    house.check(served)
    accepted = sum(request.usage.accepted_tokens for request in house.requests)
    beside = [
        r.usage.accepted_by_source.get(f"path {n}", 0) for r in house.requests for n in (1, 2)
    ]
    assert accepted > 100
    assert sum(beside) > 40, "some paths beside the trunk win"


def test_proposed_trees_change_no_token(house: House) -> None:
    served = house.run(
        shuffled(7)[:24], "trees", speculator=TreeDepth(10), max_batch_tokens=160, poison=True
    )
    house.check(served)
    assert sum(request.usage.accepted_tokens for request in house.requests) > 60


def test_trees_are_cut_where_pages_are_short_and_requests_are_preempted(house: House) -> None:
    served = house.run(
        shuffled(5)[:12], None, speculator=RandomTrees(house.solo), num_pages=60,
        max_batch_tokens=160,
    )  # fmt: skip
    house.check(served)
    assert house.scheduler.num_preemptions > 0


def test_the_usage_counts_every_node(house: House) -> None:
    house.run([0, 2, 4], None, speculator=RandomTrees(house.solo), max_batch_tokens=160)
    for request in house.requests:
        usage = request.usage
        assert usage.proposed_tokens == sum(usage.proposed_by_source.values())
        assert usage.accepted_tokens == sum(usage.accepted_by_source.values())
        assert usage.accepted_tokens < usage.proposed_tokens
        assert usage.accepted_tokens + usage.verify_steps == usage.completion_tokens
        assert 1 < usage.tree_steps <= usage.verify_steps


def test_the_slots_of_a_step_are_copied_in_one_call_behind_the_pass(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU a call is a few kernels, and calls are what a step waits for."""
    events: list[str | int] = []

    def copy_slots(pool: KVPool, sources: Sequence[int], targets: Sequence[int]) -> None:
        events.append(len(targets))
        copied(pool, sources, targets)

    def forward(
        decoder: OwnDecoder, batch: RaggedBatch, pool: KVPool, wanted: Wanted
    ) -> ForwardOutput:
        events.append("forward")
        return computed(decoder, batch, pool, wanted)

    copied, computed = KVPool.copy_slots, OwnDecoder.forward
    monkeypatch.setattr(KVPool, "copy_slots", copy_slots)
    monkeypatch.setattr(OwnDecoder, "forward", forward)
    house.run(shuffled(5)[:8], None, speculator=RandomTrees(house.solo), max_batch_tokens=160)
    before = ["forward" if event != "forward" else "" for event in events]
    assert all(a == "forward" for a, b in zip(events, before[1:], strict=False) if b)
    assert max(event for event in events if isinstance(event, int)) >= 3


# -- what the tests above must notice -------------------------------------------------------------


def swapped_siblings(draft: Draft) -> Draft:
    """The tokens of the first two children of a node, exchanged, as a mistake in layout would."""
    known: dict[int, int] = {}
    for node, parent in enumerate(draft.parents):
        if parent in known:
            token_ids = list(draft.token_ids)
            other = known[parent]
            token_ids[node], token_ids[other] = token_ids[other], token_ids[node]
            return Draft(token_ids, draft.sources, parents=draft.parents)
        known[parent] = node
    return draft


def test_siblings_swapped_behind_verification_are_noticed(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_rows = step_layout.add_rows

    def swapped(rows: RowTable, row: ScheduledRequest, tokens, draft: Draft, num_logits: int):  # type: ignore[no-untyped-def]
        draft = swapped_siblings(draft) if draft.parents else draft
        add_rows(rows, row, tokens, draft, num_logits)

    monkeypatch.setattr(step_layout, "add_rows", swapped)
    served = house.run(shuffled(1), None, speculator=RandomTrees(house.solo), max_batch_tokens=160)
    assert any(served[i] != house.solo[i] for i in served)


def test_a_wrong_slot_in_a_tail_is_noticed(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_layout, "all_plain", lambda _: False)  # segments, not records
    spare = step_layout.spare_slots

    def rotated(row: ScheduledRequest, page_size: int) -> list[int]:
        slots = spare(row, page_size)
        return slots[1:] + slots[:1]

    copies = step_layout.request_copies
    monkeypatch.setattr(step_layout, "request_copies", lambda *args: _with(spare, copies, *args))
    monkeypatch.setattr(step_layout, "spare_slots", rotated)
    served = house.run(shuffled(1), None, speculator=RandomTrees(house.solo), max_batch_tokens=160)
    assert any(served[i] != house.solo[i] for i in served)


def _with(spare, copies, *args):  # type: ignore[no-untyped-def]
    """The copies as if no slot had changed."""
    rotated, step_layout.spare_slots = step_layout.spare_slots, spare
    try:
        return copies(*args)
    finally:
        step_layout.spare_slots = rotated


def test_accepted_nodes_that_stay_where_they_are_are_noticed(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_layout, "request_copies", lambda *_: [])
    served = house.run(shuffled(1), None, speculator=RandomTrees(house.solo), max_batch_tokens=160)
    assert any(served[i] != house.solo[i] for i in served), REQUESTS[0]
