"""The ragged batch: rows of one forward pass, as index tensors shared by all layers.

`Wanted` lists the outputs that a caller requests besides KV and logits; `ForwardOutput` has them.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..interface.extras.adapter import Adapter
from .row_extras import BatchStates, RowExtras, batch_extras
from .state_pool import StatePool

if TYPE_CHECKING:
    from ..sampling.drafted_row import DraftedRow
    from ..sampling.sampler import DraftVocab, PendingBest, PendingTokens

IntArray: TypeAlias = NDArray[np.int64]
_NO_TAILS: IntArray = np.zeros(0, dtype=np.int64)
Taps: TypeAlias = tuple[int, ...]
# Greatest number of rows of a pass that chooses tokens itself (`SamplingPlan`).
MOST_DRAWN_ROWS = 64


class Segment(msgspec.Struct, frozen=True, gc=False):
    """One request's rows of a batch: ``token_ids`` at positions ``start``, ``start + 1``, ...

    Each row attends to every position up to its own; the KV of positions before ``start`` is
    already in the pages. ``page_ids[i]`` holds positions ``[i * page_size, (i + 1) * page_size)``.
    Logits are computed for the last ``num_logits`` rows.

    ``tail``: slots of the last ``len(tail)`` positions before `stop`, if these are not in the
    pages. A tail includes all rows of the segment, but not the first position, which is always in a
    page.
    """

    token_ids: Sequence[int]  # the caller's, only read; slices of array('q') are the fastest
    start: int
    page_ids: array[int]  # the caller's, only read
    num_logits: int
    tail: Sequence[int] = ()  # the caller's, only read
    extras: RowExtras | None = None  # None: no recurrent state, adapter or positions for RoPE

    @property
    def stop(self) -> int:
        """First position after the segment."""
        return self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True, eq=False)
class DeviceTokens:
    """Tokens of a batch that only the device knows, because an earlier pass is still choosing them.

    In the batch's ``token_ids`` such a token is 0. ``words`` is the output of a `DeviceSampler` for
    the earlier pass, which only the sampler's backend reads. A word that holds an error instead of
    a token yields some id of the vocabulary; the results of that row are meaningless. ``names``:
    token ids of the columns of the logits from which the words were made (`DraftVocab`).
    """

    words: Tensor  # [num_words], on the device
    sources: NDArray[np.int32]  # [num_rows] index of each row's word; -1: the host has the token
    vocab_size: int
    names: Tensor | None = None  # [draft_vocab] int64, on the device; None: columns are token ids


@dataclass(frozen=True, slots=True, eq=False)
class SamplingPlan:
    """Tokens to choose from a batch's logits, for a backend that can choose them within the pass.

    Each request of ``rows`` has consecutive rows of logits: the last is for the token after its
    draft, and each earlier one is for the token after one draft token fewer. The draft's ids are
    not needed: the choice depends on the logits alone unless a logits processor edits them, and
    tokens of edited rows are not chosen within the pass. ``draft_vocab``: the tokens that have
    logits, if not the whole vocabulary; it is the same in all passes of a decoder.
    """

    rows: Sequence[DraftedRow]
    counts: Sequence[int]  # [len(rows)] number of rows of logits per request
    num_best: int = 1  # tokens to choose from each row of logits; if above 1, with scores
    draft_vocab: DraftVocab | None = None


class Wanted(NamedTuple):
    """Outputs that a caller requests of a pass besides KV, hidden states and logits.

    ``draws``: tokens to choose from the logits. A `DeviceSampler`'s backend may choose them within
    the pass; other backends ignore them. ``taps``: layer boundaries at which the residual stream is
    copied, each at most once: 0 is the embedding, ``b`` is after ``b`` layers, and the last
    boundary is before the final norm. ``on_kernels_started`` is called just before the kernels
    begin, or as soon as all of them are queued on the device. ``inputs`` [rows of the batch,
    hidden]: a row whose token id is below 0 begins with its vector of ``inputs`` instead of an
    embedding; other vectors are not read. ``layer_vectors`` [n, rows of the batch, hidden], only on
    a CPU: vectors added to the rows whose token id is below 0, after each of the first n layers.
    ``hidden_alone``: compute no logits.
    """

    draws: SamplingPlan | None = None
    taps: Taps = ()
    on_kernels_started: Callable[[], None] | None = None
    inputs: Tensor | None = None
    layer_vectors: Tensor | None = None
    hidden_alone: bool = False

    def notify_started(self) -> None:
        """Call ``on_kernels_started``, if there is one."""
        if self.on_kernels_started is not None:
            self.on_kernels_started()


NOTHING_MORE = Wanted()


class ForwardOutput(NamedTuple):
    """Outputs of a pass, valid until the decoder's next pass."""

    hidden: Tensor  # [num_rows, hidden]: the final norm's output
    logits: Tensor  # [num_logits, vocab] float32
    tokens: PendingTokens | None = None  # the tokens of `Wanted.draws`, if the pass chose them
    taps: Tensor | None = None  # [num_rows, num_taps * hidden] at `Wanted.taps`, in that order

    # Replaces ``tokens`` if a row has several tokens, or if they are from a `DraftVocab`.
    best: PendingBest | None = None


@dataclass(frozen=True, eq=False)
class RaggedBatch:
    """Segments laid out row after row, then copies of the last row up to ``min_rows``.

    Host arrays describe the segments, tensors the rows. A batch never changes.

    A row attends to the positions of its segment's pages and tail up to its own position, which is
    counted from ``starts``. ``positions`` are the positions for RoPE. They are equal to the rows'
    own positions unless earlier KV of a segment was dropped (`RowExtras.shift`); ``rope_until`` is
    then the highest position for RoPE plus 1, else 0. If a segment has `RowExtras.rope_positions`,
    ``positions`` is [3, num_rows]. If a segment has `RowExtras.reaches`, ``reaches`` has a number
    for each row of the batch; only some layers read them.
    """

    token_ids: Tensor  # [num_rows] int64
    positions: Tensor  # [num_rows] int64
    slots: Tensor  # [num_rows] int64: page_id * page_size + offset in the page
    logit_rows: Tensor  # [num_logits] rows whose logits are computed; padded to min_rows
    num_logits: int
    page_size: int
    starts: IntArray  # [num_segments] position of the first row
    lens: IntArray  # [num_segments] rows
    first_rows: IntArray  # [num_segments] index of the first row
    page_counts: IntArray  # [num_segments]
    pages: IntArray  # [sum of page_counts], segment after segment
    tail_lens: IntArray  # [num_segments]
    tails: IntArray  # [sum of tail_lens] slots, segment after segment

    # Only for a backend with a `DeviceSampler`; with other backends the host knows every token.
    device_tokens: DeviceTokens | None = None
    rope_until: int = 0
    states: BatchStates | None = None  # for models with recurrent layers

    # Each adapter once, with its rows [n], ascending; copies of a row are included.
    adapters: tuple[tuple[Adapter, IntArray], ...] = ()

    # [rows without the copies] first position that a row does not see
    reaches: IntArray | None = None

    @property
    def num_rows(self) -> int:
        """Rows to compute, the copies included."""
        return len(self.token_ids)

    @property
    def stops(self) -> IntArray:
        """First position after each segment, [num_segments]."""
        return self.starts + self.lens

    @cached_property
    def rope_stop(self) -> int:
        """Number of positions that the RoPE tables must have."""
        return max(self.rope_until, int(self.stops.max()))

    @cached_property
    def tail_from(self) -> IntArray:
        """First position of each segment that is not in its pages, [num_segments]."""
        return self.stops - self.tail_lens

    @cached_property
    def first_tails(self) -> IntArray:
        """Index in ``tails`` of each segment's first slot, [num_segments]."""
        return self.tail_lens.cumsum() - self.tail_lens

    @cached_property
    def first_pages(self) -> IntArray:
        """Index in ``pages`` of each segment's first page, [num_segments]."""
        return self.page_counts.cumsum() - self.page_counts

    @cached_property
    def page_table(self) -> IntArray:
        """Page ids ``[num_segments, max_pages]``; unused entries repeat the first page."""
        counts, width = self.page_counts, int(self.page_counts.max())
        if len(self.pages) == width * len(counts):
            return self.pages.reshape(-1, width)
        table = np.repeat(self.pages[self.first_pages], width).reshape(-1, width)
        table[np.arange(width) < counts[:, None]] = self.pages
        return table


def build_batch(
    segments: Sequence[Segment],
    *,
    page_size: int,
    device: torch.device | str,
    min_rows: int,
    device_tokens: DeviceTokens | None = None,
) -> RaggedBatch:
    """Lay out segments as one batch of at least ``min_rows`` rows, the backend's `Ops.min_rows`.

    ``device_tokens``: tokens that the device puts in place of the host's, on backends with a
    `DeviceSampler`. Raises ValueError for rows without a page or a token, and for states that
    segments share or lack.
    """
    starts, lens, wanted = _shape(segments)
    tail_lens, tails = _tails(segments, starts, lens)
    in_pages = starts + lens - tail_lens  # each segment's number of positions in pages
    page_counts, pages = _pages(segments, in_pages, page_size)
    ends = lens.cumsum()
    first_rows = ends - lens
    num_rows = int(ends[-1])
    row_pages = page_counts.cumsum() - page_counts  # index of each segment's first page in pages
    if num_rows == len(segments):  # plain decoding has one row per segment
        positions = starts
        logit_rows = np.arange(num_rows) if wanted.all() else np.flatnonzero(wanted)
    else:
        rows = np.arange(len(segments)).repeat(lens)
        indices = np.arange(num_rows)
        positions = indices + (starts - first_rows)[rows]
        logit_rows = np.flatnonzero(indices >= (ends - wanted)[rows])
        row_pages = row_pages[rows]
    pages_before, in_page = np.divmod(positions, page_size)
    if len(tails):  # rows in a tail have no page
        pages_before = np.minimum(pages_before, np.repeat(page_counts - 1, lens))
    slots = pages[row_pages + pages_before] * page_size + in_page
    if len(tails):
        tail_offsets = positions - np.repeat(in_pages, lens)
        first_tails = np.repeat(np.cumsum(tail_lens) - tail_lens, lens)
        slots[tail_offsets >= 0] = tails[(first_tails + tail_offsets)[tail_offsets >= 0]]
    batch = RaggedBatch(
        token_ids=padded_rows(_token_ids(segments), min_rows, device),
        positions=padded_rows(positions, min_rows, device),
        slots=padded_rows(slots, min_rows, device),
        logit_rows=padded_rows(logit_rows, min_rows, device),
        num_logits=len(logit_rows),
        page_size=page_size,
        starts=starts,
        lens=lens,
        first_rows=first_rows,
        page_counts=page_counts,
        pages=pages,
        tail_lens=tail_lens,
        tails=tails,
        device_tokens=device_tokens,
    )
    extras = [segment.extras for segment in segments]
    if not any(extras):
        return batch
    more = batch_extras(
        extras, starts, lens, positions, page_size=page_size, num_rows=batch.num_rows
    )
    return replace(
        batch,
        positions=padded_rows(more.positions, min_rows, device),
        rope_until=more.rope_until,
        states=more.states,
        adapters=more.adapters,
        reaches=more.reaches,
    )


def pass_states(batch: RaggedBatch, pool: StatePool | None) -> StatePool | None:
    """Return ``pool``, or None if neither the pool nor the batch has recurrent states.

    Raises ValueError if only one of the two has states, or if a segment's first row is before the
    position of its state, or after it by more positions than a log holds.
    """
    if batch.states is None and pool is None:
        return None
    if batch.states is None or pool is None:
        raise ValueError(
            "recurrent states are missing, either in the pool or in the batch's segments"
        )
    starts = batch.starts[:, None]
    at = pool.at.numpy()[batch.states.slots]
    wrong = (at > starts) | (at + pool.ring < starts)
    if wrong.any():
        index = int(wrong.any(axis=1).argmax())
        raise ValueError(
            f"the state in slot {batch.states.slots[index]} is at {at[index].tolist()} and cannot "
            f"be advanced to position {batch.starts[index]} with its log"
        )
    return pool


def _shape(segments: Sequence[Segment]) -> tuple[IntArray, IntArray, IntArray]:
    """Return each segment's start, number of rows and number of logit rows.

    Raises ValueError for no segments and for numbers out of range.
    """
    if not segments:
        raise ValueError("a batch needs at least one segment")
    # Three lists take a third of the time of one list of tuples.
    starts = np.array([s.start for s in segments], dtype=np.int64)
    lens = np.array([len(s.token_ids) for s in segments], dtype=np.int64)
    wanted = np.array([s.num_logits for s in segments], dtype=np.int64)
    if lens.min() < 1:
        raise ValueError("a segment has no tokens")
    if starts.min() < 0 or wanted.min() < 0 or (wanted > lens).any():
        raise ValueError("a segment starts before 0, or requests more logits than it has rows")
    return starts, lens, wanted


def _tails(
    segments: Sequence[Segment], starts: IntArray, lens: IntArray
) -> tuple[IntArray, IntArray]:
    """Return how many KV slots each segment reads after its pages, and all these slots."""
    if not any([s.tail for s in segments]):  # noqa: C419 - a list is faster
        return np.zeros(len(segments), dtype=np.int64), _NO_TAILS
    tail_lens = np.array([len(s.tail) for s in segments], dtype=np.int64)
    too_short = (tail_lens > 0) & (tail_lens < lens)
    if too_short.any() or (tail_lens >= starts + lens).any():
        raise ValueError("a tail must have a slot for every row and exclude position 0")
    joined = array("q")
    for segment in segments:
        joined.extend(segment.tail)
    return tail_lens, np.frombuffer(joined, dtype=np.int64)


def _token_ids(segments: Sequence[Segment]) -> IntArray:
    joined = array("q")
    for segment in segments:
        joined.extend(segment.token_ids)
    return np.frombuffer(joined, dtype=np.int64)  # keeps ``joined`` alive


def _pages(
    segments: Sequence[Segment], in_pages: IntArray, page_size: int
) -> tuple[IntArray, IntArray]:
    """Return each segment's number of pages, and the page ids of all segments in one array."""
    counts = (in_pages + (page_size - 1)) // page_size
    joined = array("q")
    for segment, count in zip(segments, counts.tolist(), strict=True):
        joined.extend(first_pages(segment, count))
    return counts, np.frombuffer(joined, dtype=np.int64)


def first_pages(segment: Segment, count: int) -> array[int]:
    """Return the first ``count`` page ids. Raises ValueError if the segment has fewer."""
    if len(segment.page_ids) < count:
        raise ValueError(f"{len(segment.page_ids)} pages are too few for {segment.stop} positions")
    return segment.page_ids[:count]


def padded_rows(values: NDArray[Any], min_rows: int, device: torch.device | str) -> Tensor:
    """Return ``values`` [.., n] on a device, the last column repeated up to ``min_rows``."""
    num_rows = values.shape[-1]
    if 0 < num_rows < min_rows:
        around = [(0, 0)] * (values.ndim - 1)
        values = np.pad(values, [*around, (0, min_rows - num_rows)], mode="edge")
    return torch.from_numpy(values).to(device)
