"""The ragged batch: its index tensors, and what it refuses."""

from __future__ import annotations

from array import array

import pytest
from torch import Tensor

from foretoken.core.ops.batch import RaggedBatch, Segment, build_batch
from foretoken.core.ops.row_extras import RowExtras, SegmentState
from foretoken.core.ops.state_pool import DRAFT_ROOM

MIN_ROWS = 4


def build(*segments: Segment, page_size: int = 4) -> RaggedBatch:
    return build_batch(segments, page_size=page_size, device="cpu", min_rows=MIN_ROWS)


def ints(tensor: Tensor) -> list[int]:
    return tensor.tolist()


def test_segments_are_laid_out_row_after_row() -> None:
    chunk = Segment(array("q", [10, 11, 12]), 3, array("q", [7, 2]), 0)
    verify = Segment([20, 21], 0, array("q", [5]), 1)
    batch = build(chunk, verify)
    assert ints(batch.token_ids) == [10, 11, 12, 20, 21]
    assert ints(batch.positions) == [3, 4, 5, 0, 1]
    assert ints(batch.slots) == [31, 8, 9, 20, 21]
    assert ints(batch.logit_rows) == [4] * MIN_ROWS
    assert (batch.num_logits, batch.num_rows) == (1, 5)
    assert batch.first_rows.tolist() == [0, 3]
    assert batch.stops.tolist() == [6, 2]


def test_pages_are_those_that_segments_read_or_write_and_a_table_pads_them() -> None:
    batch = build(
        Segment([1], 9, array("q", [3, 1, 4, 99]), 1), Segment([1, 2], 0, array("q", [5, 9]), 1)
    )
    assert batch.pages.tolist() == [3, 1, 4, 5]
    assert batch.page_counts.tolist() == [3, 1]
    assert batch.first_pages.tolist() == [0, 3]
    assert batch.page_table.tolist() == [[3, 1, 4], [5, 5, 5]]


def test_logits_are_of_the_last_rows_of_each_segment() -> None:
    segments = [Segment(range(n), 0, array("q", [n]), k) for n, k in ((3, 2), (4, 0), (2, 2))]
    assert ints(build(*segments).logit_rows) == [1, 2, 7, 8]


def test_few_rows_are_filled_up_with_copies_of_the_last() -> None:
    batch = build(Segment([8, 9], 4, array("q", [1, 3]), 1))
    assert ints(batch.token_ids) == [8, 9, 9, 9]
    assert ints(batch.positions) == [4, 5, 5, 5]
    assert ints(batch.slots) == [12, 13, 13, 13]
    assert ints(batch.logit_rows) == [1, 1, 1, 1]
    assert (batch.num_rows, batch.num_logits) == (MIN_ROWS, 1)


def test_a_batch_without_logits_has_no_logit_rows() -> None:
    batch = build(Segment([8, 9], 4, array("q", [1, 3]), 0))
    assert (ints(batch.logit_rows), batch.num_logits) == ([], 0)


def test_a_batch_does_not_keep_the_requests_arrays_alive() -> None:
    """An array that is still viewed cannot grow (BufferError), and requests grow every step."""
    tokens, pages = array("q", [1, 2, 3, 4]), array("q", [0])
    batch = build(Segment(tokens, 0, pages, 1))
    tokens.append(5)
    pages.append(1)
    assert ints(batch.token_ids) == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("segments", "message"),
    [
        ([], "at least one segment"),
        ([Segment([], 0, array("q", [1]), 0)], "a segment has no tokens"),
        ([Segment([1], -1, array("q", [1]), 0)], "starts before 0"),
        ([Segment([1], 0, array("q", [1]), 2)], "more logits than it has rows"),
        ([Segment([1, 2], 3, array("q", [1]), 0)], "1 pages are too few for 5 positions"),
    ],
)
def test_segments_that_cannot_be_computed_are_refused(
    segments: list[Segment], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        build(*segments)


def stateful(state: SegmentState | None, start: int = 16, count: int = 17) -> RaggedBatch:
    """A segment with that state beside one with slot and log 0."""
    first = Segment([1], 0, array("q", [0]), 0, extras=RowExtras(state=SegmentState(0, 0, 1)))
    second = Segment(range(count), start, array("q", range(5)), 0, extras=RowExtras(state=state))
    return build(first, second, page_size=16)


def test_states_of_segments_are_arrays_of_the_batch() -> None:
    batch = stateful(SegmentState(3, 1, 33, ((16, 4), (32, 2))))
    assert batch.states is not None
    assert batch.states.slots.tolist() == [0, 3]
    assert batch.states.logs.tolist() == [0, 1]
    assert batch.states.final_stops.tolist() == [1, 33]
    assert batch.states.keep_counts.tolist() == [0, 2]
    assert batch.states.keeps.tolist() == [[16, 4], [32, 2]]
    assert build(Segment([1], 0, array("q", [0]), 0)).states is None


@pytest.mark.parametrize(
    ("state", "said"),
    [
        (None, "some segments of the batch"),
        (SegmentState(0, 1, 33), "two segments would write"),
        (SegmentState(3, 0, 33), "two segments would write"),
        (SegmentState(3, 1, 33, ((32, 0),)), "two segments would write"),
        (SegmentState(3, 1, 33, ((32, 3),)), "two segments would write"),
        (SegmentState(3, 1, 16), "at least 1 final row"),
        (SegmentState(3, 1, 34), "at least 1 final row"),
        (SegmentState(3, 1, 31, ((32, 4),)), "the state at 32: it is not a page end from 16 to 31"),
        (SegmentState(3, 1, 33, ((24, 4),)), "the state at 24"),
        (
            SegmentState(3, 1, 33, ((32, 4), (16, 2))),
            "the state at 16: it is not a page end from 33",
        ),
        (SegmentState(3, 1, 33, ((0, 4),)), "the state at 0"),
    ],
)
def test_states_that_cannot_be_written_are_refused(state: SegmentState | None, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        stateful(state)


def test_more_drafts_than_a_log_has_room_for_are_refused() -> None:
    stateful(SegmentState(3, 1, 17), count=1 + DRAFT_ROOM)
    with pytest.raises(ValueError, match=f"at most {DRAFT_ROOM} draft rows"):
        stateful(SegmentState(3, 1, 17), count=2 + DRAFT_ROOM)
