"""TileSchedule: every row meets each of its splits exactly once, sharers together."""

from __future__ import annotations

import random
from array import array
from collections import Counter
from itertools import pairwise

import pytest

from foretoken.core.ops.batch import RaggedBatch, Segment, build_batch
from foretoken.core.ops.triton.attention.tile_schedule import (
    NARROW_LEN,
    SPLIT,
    TileSchedule,
    WorkItems,
    build_tile_schedule,
)

PAGE_SIZE = 16
WIDE_ROWS, WIDE_PARTIALS = 32, 33  # as where a group of heads does not divide a tile


def batch_of(segments: list[Segment]) -> RaggedBatch:
    return build_batch(segments, page_size=PAGE_SIZE, device="cpu", min_rows=1)


def work_of(
    segments: list[Segment],
    window: int | None = None,
    *,
    kv_split_group: int = 2,
    part: range | None = None,
) -> TileSchedule:
    return build_tile_schedule(
        batch_of(segments),
        narrow_rows=8,
        wide_rows=WIDE_ROWS,
        wide_partials=WIDE_PARTIALS,
        kv_split_group=kv_split_group,
        window=window,
        part=part,
    )


def meetings(items: WorkItems) -> Counter[tuple[int, int]]:
    """Number of times that each row meets each split."""
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


def splits_seen(segments: list[Segment], window: int | None) -> list[range]:
    """By each row."""
    positions = [position for each in segments for position in range(each.start, each.stop)]
    return [
        range(0 if window is None else max(0, at - window + 1) // SPLIT, at // SPLIT + 1)
        for at in positions
    ]


def rows_of_chunks(segments: list[Segment]) -> list[bool]:
    return [len(each.token_ids) > NARROW_LEN for each in segments for _ in each.token_ids]


@pytest.mark.parametrize("seed", range(40))
def test_narrow_rows_meet_each_split_that_they_see_once_and_wide_rows_at_least_those(seed) -> None:
    rng = random.Random(seed)
    segments = random_segments(rng)
    window = rng.choice([None, 20, 300])
    work, seen = work_of(segments, window), splits_seen(segments, window)
    narrow, wide = meetings(work.narrow), meetings(work.wide)
    in_chunk = rows_of_chunks(segments)
    expected = {(row, split) for row, splits in enumerate(seen) for split in splits}
    assert narrow == {place: 1 for place in expected if not in_chunk[place[0]]}
    assert set(wide) >= {place for place in expected if in_chunk[place[0]]}
    assert set(wide.values()) <= {1}, "no stretch is computed twice"
    assert all(in_chunk[row] for row, _ in wide)


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("kv_split_group", [1, 2, 16])
def test_every_split_of_a_row_and_every_stretch_of_a_tile_of_several_has_places_of_its_own(
    seed: int, kv_split_group: int
) -> None:
    rng = random.Random(seed)
    segments = random_segments(rng)
    window = rng.choice([None, 20, 300])
    work, seen = (
        work_of(segments, window, kv_split_group=kv_split_group),
        splits_seen(segments, window),
    )
    taken: Counter[int] = Counter()
    for row, in_chunk in enumerate(rows_of_chunks(segments)):
        assert (work.rows_in_tile[row] >= 0) == in_chunk
        if not in_chunk:
            taken.update(work.partials[row] + index for index in range(len(seen[row])))
    num_stretches = Counter(work.wide.first_rows.tolist())
    for index, start in enumerate(work.wide.first_rows.tolist()):
        rows = work.wide.rows[start : start + work.wide.num_rows[index]].tolist()
        assert work.rows_in_tile[rows].tolist() == list(range(len(rows)))
        if num_stretches[start] == 1:
            assert (work.partials[rows] == -1).all()
            continue
        number = int(work.wide.first_splits[index]) // kv_split_group
        begins = {
            int(work.partials[row]) + WIDE_PARTIALS * (number - seen[row].start // kv_split_group)
            for row in rows
            if number in {split // kv_split_group for split in seen[row]}
        }
        (begin,) = begins
        taken.update(range(begin, begin + WIDE_PARTIALS))
    assert taken == Counter(range(work.num_partials)), "partials are dense and nobody's twice"


@pytest.mark.parametrize("seed", range(40))
def test_an_item_of_a_chunk_stays_within_a_stretch_and_the_cuts_are_at_fixed_positions(
    seed: int,
) -> None:
    rng = random.Random(seed)
    items = work_of(random_segments(rng), rng.choice([None, 20, 300]), kv_split_group=2).wide
    assert (items.first_splits // 2 == items.last_splits // 2).all()
    tiles: dict[tuple[int, int], list[tuple[int, int]]] = {}
    spans = zip(items.first_splits.tolist(), items.last_splits.tolist(), strict=True)
    for index, span in enumerate(spans):
        tile = int(items.tables[index]), int(items.rows[items.first_rows[index]])
        tiles.setdefault(tile, []).append(span)
    for found in map(sorted, tiles.values()):
        for (_, last), (first, _) in pairwise(found):
            assert first == last + 1
            assert first % 2 == 0


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("max_partials", [1, 6, 150, 1000])
def test_parts_hold_every_row_once_and_no_more_sums_than_there_is_room_for(
    seed: int, max_partials: int
) -> None:
    rng = random.Random(seed)
    segments = random_segments(rng)
    window = rng.choice([None, 20, 300])
    whole = work_of(segments, window, kv_split_group=1)
    parts = whole.parts(max_partials)
    assert [row for part in parts for row in part] == list(range(len(whole.ends)))
    works = [work_of(segments, window, kv_split_group=1, part=part) for part in parts]
    for part, work in zip(parts, works, strict=True):
        least = whole.ends[part.start] - (whole.ends[part.start - 1] if part.start else 0)
        assert work.num_partials <= max(max_partials, least), "one row or tile may need more"
        met = {row for items in (work.narrow, work.wide) for row, _ in meetings(items)}
        assert met == set(part)
        assert {row for row, place in enumerate(work.partials) if place >= 0} <= set(part)
    assert sum(work.num_partials for work in works) == whole.num_partials
    narrow = sum((meetings(work.narrow) for work in works), Counter())
    assert narrow == meetings(whole.narrow)
    wide = sum((meetings(work.wide) for work in works), Counter())
    assert set(wide.values()) <= {1}
    for row, splits in enumerate(splits_seen(segments, window)):
        assert all(narrow[row, split] + wide[row, split] == 1 for split in splits)


def test_a_chunk_behind_a_long_prefix_makes_many_items_and_one_in_front_as_many_as_its_tiles() -> (
    None
):
    pages = array("q", range(3000))
    assert len(work_of([Segment(range(64), 32768, pages, 1)], kv_split_group=16).wide) == 2 * 9
    work = work_of([Segment(range(64), 16 * SPLIT - 64, pages, 1)], kv_split_group=16)
    assert len(work.wide) == 2
    assert work.num_partials == 0


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
    segments = [Segment(range(90), start, array("q", range(100)), 1) for start in (0, 1000)]
    work = work_of(segments, kv_split_group=16)
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
