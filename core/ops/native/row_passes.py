"""NativeRowPasses: drafting passes, from one-row segments to their best tokens in one call.

Python's work for a pass is slow because the previous pass has read all weights and evicted the
interpreter's memory from the CPU caches. So a pass makes no tensors.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from ctypes import Structure, c_void_p

from torch import Tensor

from ...sampling.drafted_row import DraftedRow
from ...sampling.gumbel import vocabulary_hashes
from ...sampling.verifier import Best
from ..base import Rope
from ..batch import Segment, first_pages
from ..kv_pool import KVPool
from ..weights import HeadLayout
from .declarations import STRUCTS
from .library import NativeLibrary
from .sampler import HOST, Walks
from .structs.plan import heads_struct, kv_struct


class NativeRowPasses:
    """Passes of one decoder over one pool; `RowPasses` of the native backend."""

    def __init__(
        self,
        library: NativeLibrary,
        decoder: Structure,
        vocab_size: int,
        pool: KVPool,
        parts: Sequence[tuple[HeadLayout, Sequence[Rope]]],
        *,
        cap: float,
    ) -> None:
        """Make the structs of ``parts``, the heads and RoPE tables of each part of the pool.

        ``cap``: cap of the logits; 0.0: no cap.
        """
        self._library, self._page_size = library, pool.page_size
        self._vocab_size = vocab_size
        hashes = vocabulary_hashes(self._vocab_size, HOST)
        self._kept_alive = (decoder, pool, hashes)  # C may read them
        self._first = (decoder, cap)
        self._hashes_at = hashes.data_ptr()
        self._structs = [
            (kv_struct(part), heads_struct(heads, part.dtype))
            for part, (heads, _) in zip(pool.parts, parts, strict=True)
        ]
        self._ropes = [ropes for _, ropes in parts]
        self._tables: list[list[Tensor]] = []  # cos tables, then sin tables of each part
        self._num_positions = 0  # number of positions in the tables
        self._parts: object = None

    def best(
        self, segments: Sequence[Segment], rows: Sequence[DraftedRow], num_best: int
    ) -> list[Best]:
        """Compute one row per segment, and return the best next tokens of each row.

        ``rows``: the requests, with their sampling parameters. ``num_best`` is at most
        `sampler.MOST_BEST`. Raises ValueError for a position without a page, MemoryError.
        """
        layout, max_pages = self._layout(segments)
        parts = self._parts_up_to(max(segment.stop for segment in segments))
        batch = (parts, len(self._structs), layout.buffer_info()[0], max_pages, self._hashes_at)
        return Walks.of(rows, self._vocab_size).best(
            num_best,
            lambda *arguments: int(self._library.c.ft_row_pass(*self._first, *batch, *arguments)),
        )

    def _layout(self, segments: Sequence[Segment]) -> tuple[array[int], int]:
        """Return the rows as step.c's ``layout``, and the greatest number of pages of a row."""
        layout, max_pages = array("q"), 0
        for segment in segments:
            num_tails = len(segment.tail)
            num_pages = -(-(segment.stop - num_tails) // self._page_size)
            layout.extend((segment.token_ids[0], segment.start, num_pages, num_tails))
            layout.extend(first_pages(segment, num_pages))
            layout.extend(segment.tail)
            max_pages = max(max_pages, num_pages)
        return layout, max_pages

    def _parts_up_to(self, stop: int) -> object:
        """Return the parts as structs whose tables have all positions below ``stop``."""
        if stop > self._num_positions:
            pairs = [[rope.table(stop) for rope in ropes] for ropes in self._ropes]
            self._tables = [[cos for cos, _ in each] + [sin for _, sin in each] for each in pairs]
            self._num_positions = min(len(table) for tables in self._tables for table in tables)
            parts = map(_part, self._structs, self._tables)
            self._parts = (STRUCTS.ft_row_part * len(pairs))(*parts)
        return self._parts


def _part(structs: tuple[Structure, Structure], tables: Sequence[Tensor]) -> Structure:
    kv, heads = structs
    return STRUCTS.ft_row_part(
        kv=ctypes.pointer(kv),
        heads=ctypes.pointer(heads),
        num_tables=len(tables) // 2,
        tables=(c_void_p * len(tables))(*(table.data_ptr() for table in tables)),
    )
