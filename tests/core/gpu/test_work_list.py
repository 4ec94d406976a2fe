"""WorkList: every row meets every split that it sees exactly once, and sharers meet together."""

from __future__ import annotations

import random
from array import array
from collections import Counter

import pytest

from foretoken.core.batch import RaggedBatch, Segment, build_batch
from foretoken.core.ops.triton.work_list import SPLIT, Items, WorkList, build_work_list

PAGE_SIZE = 16


def batch_of(segments: list[Segment]) -> RaggedBatch:
    return build_batch(segments, page_size=PAGE_SIZE, device="cpu", min_rows=1)


def work_of(segments: list[Segment], window: int | None = None) -> WorkList:
    return build_work_list(batch_of(segments), narrow_rows=8, wide_rows=32, window=window)


def meetings(items: Items) -> Counter[tuple[int, int]]:
    """How often each row meets each split."""
    met: Counter[tuple[int, int]] = Counter()
    for first, count, lo, hi in zip(
        items.first_rows, items.num_rows, items.first_splits, items.last_splits, strict=True
    ):
        for row in items.rows[first : first + count].tolist():
            met.update((row, split) for split in range(lo, hi + 1))
    return met


def random_segments(rng: random.Random) -> list[Segment]:
    trunk = list(range(100, 160))
    segments = []
    for index in range(rng.randrange(1, 9)):
        num_shared = rng.choice([0, 3, 16, 33, 48])
        start = num_shared * PAGE_SIZE + rng.randrange(40)
        length = rng.choice([1, 1, 5, 32, 33, 90])
        own = list(range(1000 * (index + 1), 1000 * (index + 1) + 12))
        pages = array("q", trunk[:num_shared] + own)
        segments.append(Segment(range(length), start, pages, 1))
    return segments


@pytest.mark.parametrize("seed", range(40))
def test_narrow_rows_meet_each_split_that_they_see_once_and_wide_rows_at_least_those(seed) -> None:
    rng = random.Random(seed)
    segments = random_segments(rng)
    window = rng.choice([None, 20, 300])
    batch, work = batch_of(segments), work_of(segments, window)
    seen = {
        (row, split)
        for row, (lo, hi) in enumerate(zip(work.first_splits, work.last_splits, strict=True))
        for split in range(lo, hi + 1)
    }
    narrow, wide = meetings(work.narrow), meetings(work.wide)
    merged = set(work.merged_rows.tolist())
    assert narrow == {place: 1 for place in seen if place[0] in merged}
    assert set(wide) >= {place for place in seen if place[0] not in merged}
    assert not merged & {row for row, _ in wide}
    assert len(merged) + len({row for row, _ in wide}) == int(batch.lens.sum())
    places = {int(work.bases[row]) + split for row, split in narrow}
    assert places == set(range(work.num_places)), "places are dense and nobody's twice"


@pytest.mark.parametrize("seed", range(40))
def test_whoever_shares_an_item_has_its_pages(seed: int) -> None:
    segments = random_segments(random.Random(seed))
    batch, items = batch_of(segments), work_of(segments).narrow
    owners = [index for index, segment in enumerate(segments) for _ in segment.token_ids]
    for index in range(len(items)):
        first, table = items.first_rows[index], int(items.tables[index])
        rows = items.rows[first : first + items.num_rows[index]].tolist()
        lo = int(items.first_splits[index]) * SPLIT // PAGE_SIZE
        for owner in {owners[row] for row in rows} - {table}:
            pages = segments[owner].page_ids[lo : lo + SPLIT // PAGE_SIZE]
            assert pages == segments[table].page_ids[lo : lo + SPLIT // PAGE_SIZE]
    assert items.num_rows.max(initial=0) <= 8
    assert batch.num_rows == len(owners)


def test_sharers_of_one_split_and_no_more_read_it_together() -> None:
    trunk = list(range(16))
    segments = [Segment([1], 256, array("q", [*trunk, 50 + i]), 1) for i in range(3)]
    assert work_of(segments).narrow.num_rows.tolist() == [3, 1, 1, 1]


def test_the_tiles_of_long_chunks_that_read_most_come_first() -> None:
    work = work_of([Segment(range(90), start, array("q", range(100)), 1) for start in (0, 1000)])
    depths = (work.wide.last_splits - work.wide.first_splits).tolist()
    assert depths == sorted(depths, reverse=True)
    assert depths[0] == 4
    assert depths[-1] == 0


def test_eight_sharers_read_a_split_once_together() -> None:
    trunk = list(range(32))
    segments = [Segment([1], 512, array("q", [*trunk, 50 + i]), 1) for i in range(8)]
    items = work_of(segments).narrow
    assert items.num_rows.tolist() == [8, 8] + [1] * 8
    assert items.first_splits.tolist() == [0, 1] + [2] * 8
