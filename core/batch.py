"""The ragged batch: what one forward pass computes, as index tensors shared by all layers."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

IntArray: TypeAlias = NDArray[np.int64]


class Segment(msgspec.Struct, frozen=True, gc=False):
    """One request's rows of a batch: compute KV of ``token_ids`` at positions ``start``, ...

    Each row attends to every position up to its own; the KV of positions before ``start`` is in
    the pages already. ``page_ids[i]`` holds positions ``[i * page_size, (i + 1) * page_size)``.
    Logits are wanted for the last ``num_logits`` rows.
    """

    token_ids: Sequence[int]  # lent, read only; slices of array('q') are the fastest
    start: int
    page_ids: array[int]  # lent, read only
    num_logits: int

    @property
    def stop(self) -> int:
        """First position after the segment."""
        return self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True, eq=False)
class RaggedBatch:
    """Segments laid out row after row, then copies of the last row up to ``min_rows``.

    Host arrays describe the segments, device tensors the rows.
    """

    token_ids: Tensor  # [num_rows] int64
    positions: Tensor  # [num_rows] int64
    slots: Tensor  # [num_rows] int64: page_id * page_size + offset in the page
    logit_rows: Tensor  # [num_logits], or none; fewer than min_rows are filled up likewise
    num_logits: int
    page_size: int
    starts: IntArray  # [num_segments] position of the first row
    lens: IntArray  # [num_segments] rows
    first_rows: IntArray  # [num_segments] index of the first row
    page_table: IntArray  # [num_segments, max_pages]; unused entries repeat the first page

    @property
    def num_rows(self) -> int:
        """Rows to compute, the copies included."""
        return len(self.token_ids)

    @property
    def stops(self) -> IntArray:
        """First position after each segment, [num_segments]."""
        return self.starts + self.lens


def build_batch(
    segments: Sequence[Segment], *, page_size: int, device: torch.device | str, min_rows: int
) -> RaggedBatch:
    """Lay out segments as one batch of at least ``min_rows`` rows, the backend's `Ops.min_rows`.

    Raises ValueError for rows without a page or a token.
    """
    starts, lens, wanted = _shape(segments)
    page_table = _page_table(segments, page_size)
    ends = np.cumsum(lens)
    first_rows = ends - lens
    num_rows = int(ends[-1])
    if num_rows == len(segments):  # plain decoding: a row each
        rows, positions = np.arange(num_rows), starts
        logit_rows = rows if wanted.all() else np.flatnonzero(wanted)
    else:
        rows = np.repeat(np.arange(len(segments)), lens)
        indices = np.arange(num_rows)
        positions = indices + (starts - first_rows)[rows]
        logit_rows = np.flatnonzero(indices >= (ends - wanted)[rows])
    slots = page_table[rows, positions // page_size] * page_size + positions % page_size
    return RaggedBatch(
        token_ids=_rows(_token_ids(segments), min_rows, device),
        positions=_rows(positions, min_rows, device),
        slots=_rows(slots, min_rows, device),
        logit_rows=_rows(logit_rows, min_rows, device),
        num_logits=len(logit_rows),
        page_size=page_size,
        starts=starts,
        lens=lens,
        first_rows=first_rows,
        page_table=page_table,
    )


def _shape(segments: Sequence[Segment]) -> tuple[IntArray, IntArray, IntArray]:
    """Start, rows and logit rows of each segment."""
    shape = np.array([(s.start, len(s.token_ids), s.num_logits) for s in segments], dtype=np.int64)
    if not len(shape):
        raise ValueError("a batch has segments")
    starts, lens, wanted = np.ascontiguousarray(shape.T)
    if lens.min() < 1:
        raise ValueError("every segment has tokens")
    if shape.min() < 0 or (wanted > lens).any():
        raise ValueError("a segment starts at 0 or later and wants logits of its own rows")
    return starts, lens, wanted


def _token_ids(segments: Sequence[Segment]) -> IntArray:
    joined = array("q")
    for segment in segments:
        joined.extend(segment.token_ids)
    return np.frombuffer(joined, dtype=np.int64)  # keeps ``joined`` alive


def _page_table(segments: Sequence[Segment], page_size: int) -> IntArray:
    """Page ids of every position that a segment reads or writes."""
    joined, counts = array("q"), []
    for segment in segments:
        count = (segment.stop + page_size - 1) // page_size
        if len(segment.page_ids) < count:
            raise ValueError(f"{len(segment.page_ids)} pages for {segment.stop} positions")
        joined.extend(segment.page_ids[:count])
        counts.append(count)
    pages, width = np.frombuffer(joined, dtype=np.int64), max(counts)
    if len(pages) == width * len(counts):
        return pages.reshape(-1, width)
    needed = np.array(counts)
    table = np.repeat(pages[np.cumsum(needed) - needed], width).reshape(-1, width)
    table[np.arange(width) < needed[:, None]] = pages
    return table


def _rows(values: NDArray[Any], min_rows: int, device: torch.device | str) -> Tensor:
    if 0 < len(values) < min_rows:
        values = np.pad(values, (0, min_rows - len(values)), mode="edge")
    return torch.from_numpy(values).to(device)
