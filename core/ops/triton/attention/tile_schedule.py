"""TileSchedule: the attention kernel's work items for one pass, made on the host.

An item is some rows against keys of one page table. Rows of decoding and verifying requests are
*narrow*: they are packed into tiles of 16 query heads and have one split of the positions per item,
so that many programs share a long context, and pages that several requests share are read once for
all of them. Rows of long chunks are *wide*: they fill a tile by themselves and an item has all
splits of a *stretch*; several stretches are divided among programs.

Splits and stretches begin at fixed absolute positions. Every row adds up the splits of a stretch in
order, and then its stretches in order, in one program or in many; so a row's sums do not depend on
other rows or on its chunk.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...batch import IntArray, RaggedBatch

SPLIT = 256  # positions of a split

# Splits of a stretch. A tile of 64 queries that stores partial sums of a stretch moves 8 bytes for
# each number, after 4 * 4096 operations for it: a few percent of the time, and nothing for the
# first 4,096 positions of a prompt, which are one stretch. In return, 64 rows after 32k positions
# have 9 items for the programs instead of one.
KV_SPLIT_GROUP = 16
NARROW_LEN = 32  # greatest number of rows of a narrow segment


@dataclass(frozen=True, slots=True, eq=False)
class WorkItems:
    """Work items of one kind of tile. All arrays except ``rows`` are [num_items].

    Item i computes ``rows[first_rows[i] : first_rows[i] + num_rows[i]]`` of the batch against the
    pages of segment ``tables[i]``, from split ``first_splits[i]`` to ``last_splits[i]`` inclusive.
    """

    rows: IntArray
    first_rows: IntArray
    num_rows: IntArray
    tables: IntArray
    first_splits: IntArray
    last_splits: IntArray

    def __len__(self) -> int:
        return len(self.tables)


@dataclass(frozen=True, slots=True, eq=False)
class TileSchedule:
    """Items of a pass, or of a part of it, and the indices of their partials.

    A *partial* is the partial sums of one row over one split or stretch. A narrow row r has a
    partial for every split that it sees, the first at ``partials[r]``. A tile of wide rows has
    ``wide_partials`` for every stretch, one for each of its rows; row r has the index
    ``rows_in_tile[r]`` among them. The partials of the first stretch that row r sees
    begin at ``partials[r]``. A tile with one stretch has no partials, because its item has all
    keys.
    """

    narrow: WorkItems
    wide: WorkItems
    partials: IntArray  # [num_rows]; -1: no partials
    rows_in_tile: IntArray  # [num_rows]; -1: a narrow row
    last_seen: IntArray  # [num_rows] last position of pages and tail that a row sees

    # [num_rows] number of partials up to and including each row; all of a tile's at its first row
    ends: IntArray

    @property
    def num_partials(self) -> int:
        """Total number of partials."""
        return int(self.ends[-1])

    def parts(self, max_partials: int) -> list[range]:
        """Divide the rows into ranges of at most ``max_partials`` partials, or of one row or tile.

        A range of one row or tile may have more partials.
        """
        found, stop, taken = [], 0, 0
        while stop < len(self.ends):
            room = max(taken + max_partials, int(self.ends[stop]))
            start, stop = stop, int(np.searchsorted(self.ends, room, side="right"))
            taken = int(self.ends[stop - 1])
            found.append(range(start, stop))
        return found


def build_tile_schedule(
    batch: RaggedBatch,
    *,
    narrow_rows: int,
    wide_rows: int,
    wide_partials: int,
    kv_split_group: int,
    window: int | None = None,
    part: range | None = None,
) -> TileSchedule:
    """Return the work of one attention layer.

    ``narrow_rows``, ``wide_rows``: rows of a tile. ``wide_partials``: partials of a wide tile per
    stretch, at least its number of rows. ``kv_split_group``: number of splits of a stretch.
    ``part``: rows to compute, one of `TileSchedule.parts`; None: all rows.
    """
    spans = _Spans.of(batch, window, part)
    is_wide, here = batch.lens > NARROW_LEN, spans.lens > 0
    counts = spans.last_splits - spans.first_splits + 1
    if is_wide.any():
        tiles = _tiles(spans, np.flatnonzero(is_wide & here), wide_rows)
        rows_in_tile = _rows_in_tile(batch, is_wide, wide_rows)
        counts[rows_in_tile >= 0] = 0
        counts[tiles.firsts] = wide_partials * tiles.num_partials(kv_split_group)
    else:  # all rows are narrow, as in decoding
        tiles, rows_in_tile = _NO_TILES, np.full(len(counts), -1)
    if part is not None:
        counts[: part.start] = counts[part.stop :] = 0
    ends = counts.cumsum()
    partials = np.where(counts > 0, ends - counts, -1)
    if len(tiles.rows):
        begun = np.repeat(partials[tiles.firsts], tiles.sizes)
        seen_from = spans.first_splits[tiles.rows] // kv_split_group
        since_begun = seen_from - np.repeat(tiles.first_splits // kv_split_group, tiles.sizes)
        partials[tiles.rows] = np.where(begun < 0, -1, begun + wide_partials * since_begun)
    return TileSchedule(
        narrow=_narrow(spans, np.flatnonzero(~is_wide & here), narrow_rows),
        wide=_wide(tiles, kv_split_group),
        partials=partials,
        rows_in_tile=rows_in_tile,
        last_seen=spans.positions,
        ends=ends,
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Spans:
    """The rows to compute of each segment, and the splits that each row of the batch sees."""

    batch: RaggedBatch
    first_rows: IntArray  # [num_segments]
    lens: IntArray  # [num_segments]
    positions: IntArray  # [num_rows] last position that a row sees
    first_splits: IntArray  # [num_rows]
    last_splits: IntArray  # [num_rows]

    @classmethod
    def of(cls, batch: RaggedBatch, window: int | None, part: range | None) -> _Spans:
        """Return the spans of all rows of a batch, or of the rows of a ``part``."""
        rows = np.arange(len(batch.lens)).repeat(batch.lens)
        positions = np.arange(len(rows)) + (batch.starts - batch.first_rows)[rows]
        first_splits = np.zeros(len(rows), dtype=np.int64)
        if window is not None:
            first_splits = np.maximum(0, positions - window + 1) // SPLIT
        first_rows, lens = batch.first_rows, batch.lens
        if part is not None:
            last_rows = np.minimum(first_rows + lens, part.stop)
            first_rows = np.maximum(first_rows, part.start)
            lens = np.maximum(0, last_rows - first_rows)
        return cls(batch, first_rows, lens, positions, first_splits, positions // SPLIT)


def _rows_in_tile(batch: RaggedBatch, is_wide: NDArray[np.bool_], wide_rows: int) -> IntArray:
    """Return each row's index in its wide tile, [num_rows]; -1 for narrow rows."""
    firsts = np.repeat(batch.first_rows, batch.lens)
    indices = (np.arange(len(firsts)) - firsts) % wide_rows
    return np.where(np.repeat(is_wide, batch.lens), indices, -1)


@dataclass(frozen=True, slots=True, eq=False)
class _Tiles:
    """Tiles of neighbouring rows of long chunks. All arrays except ``rows`` are [num_tiles]."""

    rows: IntArray  # rows, tile by tile
    starts: IntArray  # first index in ``rows``
    sizes: IntArray
    tables: IntArray
    first_splits: IntArray
    last_splits: IntArray

    @property
    def firsts(self) -> IntArray:
        """First row of each tile."""
        return self.rows[self.starts]

    def num_partials(self, kv_split_group: int) -> IntArray:
        """Return each tile's number of stretches with partial sums: all, or 0 for only one."""
        counts = self.last_splits // kv_split_group - self.first_splits // kv_split_group + 1
        return np.where(counts > 1, counts, 0)


def _tiles(spans: _Spans, segments: IntArray, tile_rows: int) -> _Tiles:
    if not len(segments):
        return _NO_TILES
    firsts = spans.first_rows[segments]
    owners, rows = _spread(firsts, spans.lens[segments])
    starts = np.flatnonzero((rows - firsts[owners]) % tile_rows == 0)
    sizes = _sizes(starts, len(rows))
    return _Tiles(
        rows=rows,
        starts=starts,
        sizes=sizes,
        tables=segments[owners[starts]],
        first_splits=spans.first_splits[rows[starts]],  # positions grow with rows
        last_splits=spans.last_splits[rows[starts + sizes - 1]],
    )


def _wide(tiles: _Tiles, kv_split_group: int) -> WorkItems:
    """Return the items of wide tiles, one per tile and stretch.

    The longest items come first, so that none of them ends last; among items of one length, those
    that read the same keys are neighbours.
    """
    if not len(tiles.rows):
        return _NO_ITEMS
    lo, hi = tiles.first_splits, tiles.last_splits
    owners, numbers = _spread(lo // kv_split_group, hi // kv_split_group - lo // kv_split_group + 1)
    first_splits = np.maximum(lo[owners], numbers * kv_split_group)
    last_splits = np.minimum(hi[owners], (numbers + 1) * kv_split_group - 1)
    tables = tiles.tables[owners]
    # lexsort sorts by its last key first.
    order = np.lexsort((numbers, tables, first_splits - last_splits))
    owners = owners[order]
    return WorkItems(
        rows=tiles.rows,
        first_rows=tiles.starts[owners],
        num_rows=tiles.sizes[owners],
        tables=tables[order],
        first_splits=first_splits[order],
        last_splits=last_splits[order],
    )


def _narrow(spans: _Spans, segments: IntArray, tile_rows: int) -> WorkItems:
    """Return the items of narrow rows, split by split; rows that share pages are neighbours."""
    if not len(segments):
        return _NO_ITEMS
    batch = spans.batch
    order, shared = _by_pages(batch, segments)
    owners, rows = _spread(spans.first_rows[order], spans.lens[order])
    # Pairs of rows and splits are sorted by split; the order of rows within a split stays.
    firsts = spans.first_splits[rows]
    entries, splits = _spread(firsts, spans.last_splits[rows] - firsts + 1)
    by_split = splits.astype(np.int16).argsort(kind="stable")  # a radix sort
    entries, splits = entries[by_split], splits[by_split]
    owners, rows = owners[entries], rows[entries]
    first_rows = _tile_starts(owners, splits, shared, tile_rows)
    splits = splits[first_rows]
    return WorkItems(
        rows=rows,
        first_rows=first_rows,
        num_rows=_sizes(first_rows, len(rows)),
        tables=order[owners[first_rows]],
        first_splits=splits,
        last_splits=splits,
    )


def _tile_starts(owners: IntArray, splits: IntArray, shared: IntArray, tile_rows: int) -> IntArray:
    """Return the indices of rows that begin a tile, because pages change or the last tile is full.

    ``owners``: segments of the rows, counted in the order of ``shared``.
    """
    step, before = owners[1:] - owners[:-1], splits[1:] == splits[:-1]
    joins = (step == 0) & before
    if shared.any():
        joins |= (step == 1) & before & (shared[owners[1:]] >= (splits[1:] + 1) * SPLIT)
    if not joins.any():  # one row per item, as in decoding without shared pages
        return np.arange(len(owners))
    indices = np.arange(len(owners))
    firsts = np.concatenate((indices[:1], np.where(joins, 0, indices[1:])))
    return np.flatnonzero((indices - np.maximum.accumulate(firsts)) % tile_rows == 0)


def _sizes(starts: IntArray, stop: int) -> IntArray:
    """Return the lengths from each start to the next or ``stop``; 5 times as fast as `np.diff`."""
    sizes = np.empty_like(starts)
    np.subtract(starts[1:], starts[:-1], out=sizes[:-1])
    sizes[-1:] = stop - starts[-1:]
    return sizes


def _spread(firsts: IntArray, counts: IntArray) -> tuple[IntArray, IntArray]:
    """Return pairs (i, n): for each i, n is ``firsts[i]`` and the next ``counts[i] - 1`` numbers.

    The result is two arrays, of all i and of all n.
    """
    ends, indices = counts.cumsum(), np.arange(len(counts))
    if ends[-1] == len(counts):
        return indices, firsts
    owners = indices.repeat(counts)
    return owners, np.arange(ends[-1]) + (firsts - ends + counts)[owners]


def _by_pages(batch: RaggedBatch, segments: IntArray) -> tuple[IntArray, IntArray]:
    """Sort segments so that sharers of pages are neighbours.

    Returns the order, and the number of positions that each shares with the segment before it.
    Positions that a segment computes itself, or has in a tail, are not shared.
    """
    shared = np.zeros(len(segments), dtype=np.int64)
    if not _may_share(batch, segments):
        return segments, shared
    pages, size = batch.pages.tobytes(), batch.pages.itemsize
    ends = (batch.first_pages + batch.page_counts).tolist()
    lists = [pages[lo * size : hi * size] for lo, hi in zip([0, *ends], ends, strict=False)]
    # Any order in which equal prefixes of page ids are neighbours is right.
    order = np.array(sorted(segments.tolist(), key=lists.__getitem__))
    tables, starts = batch.page_table[order], np.minimum(batch.starts, batch.tail_from)[order]
    differs = np.ones((len(order) - 1, tables.shape[1] + 1), dtype=bool)
    differs[:, :-1] = tables[1:] != tables[:-1]
    common = differs.argmax(axis=1) * batch.page_size
    shared[1:] = np.minimum(common, np.minimum(starts[1:], starts[:-1]))
    return order, shared


def _may_share(batch: RaggedBatch, segments: IntArray) -> bool:
    """Whether two segments have the same page at the end of the first split; this is rare."""
    last = (SPLIT - 1) // batch.page_size
    long = segments[batch.page_counts[segments] > last]
    pages = np.sort(batch.pages[batch.first_pages[long] + last])
    return bool((pages[1:] == pages[:-1]).any())


_NONE = np.zeros(0, dtype=np.int64)
_NO_TILES = _Tiles(_NONE, _NONE, _NONE, _NONE, _NONE, _NONE)
_NO_ITEMS = WorkItems(_NONE, _NONE, _NONE, _NONE, _NONE, _NONE)
