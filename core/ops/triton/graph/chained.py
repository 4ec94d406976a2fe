"""TritonChainedPasses: passes whose input tokens are in the results of the pass before, on the GPU.

The rows of all passes are known before the first pass. So a pass takes one call of C, which writes
the inputs of its graph, one copy to the device and one replay. The results of all passes are copied
to one block of host memory, which the host reads after the last launch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from ....sampling.sampler import PendingBest
from ....sampling.verifier import Best
from ...chained_rows import NUM_FIELDS, OUTPUT_POSITION, POSITION, REQUEST, ChainedRows
from ...native.declarations import STRUCTS, address_of
from ..graph_inputs import JoinedCopy
from ..sampling.sampler import bests_of_words
from ..sampling.sampling_inputs import NUM_COLUMNS, chained_controls
from .plan import take_tokens

TakeWords: TypeAlias = Callable[[int, Mapping[str, Tensor]], None]
"""Writes tokens to a number of rows of a pass's inputs, on the device."""
_INT64 = 8  # bytes


class ChainedGraph(Protocol):
    """A graph that can compute chained passes; ``num_positions``: positions of its RoPE tables."""

    @property
    def num_positions(self) -> int: ...

    def run_chained(
        self, arguments: Sequence[object], num_rows: int, take: TakeWords | None
    ) -> Tensor | None:
        """Compute a pass and return the words of its tokens, valid until the next replay.

        ``arguments``: the arguments of `ft_fill_chained` before the work lists. ``take``: writes
        the tokens that are results of the pass before. Returns None if the pass does not fit.
        """


class TritonChainedPasses:
    """`ChainedPasses` of one decoder over one pool.

    ``find`` returns the graph for a number of rows and a number of tokens to choose after each row,
    or None.
    """

    def __init__(
        self, find: Callable[[int, int], ChainedGraph | None], page_size: int, vocab_size: int
    ) -> None:
        self._find, self._page_size, self._vocab_size = find, page_size, vocab_size

    @torch.inference_mode()
    def launch(self, rows: ChainedRows, words: Tensor | None) -> list[PendingBest]:
        """Launch passes as `ChainedPasses` describes it."""
        table, first_pages = rows.table, rows.first_pages
        requests, positions = table[:, REQUEST], table[:, OUTPUT_POSITION]
        controls = chained_controls(rows.samplings, requests, positions, self._vocab_size)
        if controls is None:
            return []
        last = int(table[:, POSITION].max())
        at, tails_at = address_of(table), rows.tails.buffer_info()[0]
        controls_at = address_of(controls)
        pages = (address_of(first_pages), rows.page_ids.buffer_info()[0], self._page_size)
        launched, replies = list[PendingBest](), _Replies(0, 0)
        passes = zip(rows.counts, rows.num_best, rows.tail_counts, strict=True)
        for count, num_best, num_tails in passes:
            graph = self._find(count, num_best)
            if graph is None or last >= graph.num_positions:
                break
            first = STRUCTS.ft_chained_row.from_address(at)
            take = None if words is None else partial(take_tokens, words, self._vocab_size)
            words = graph.run_chained((first, count, *pages, tails_at, controls_at), count, take)
            if words is None:
                break
            if num_best != replies.num_best:
                replies.end()
                replies = _Replies(num_best, len(table))
            launched.append(_ChainedBest(words, replies, *replies.add(words, count)))
            at += count * NUM_FIELDS * _INT64
            tails_at += num_tails * _INT64
            controls_at += count * NUM_COLUMNS * _INT64
        replies.end()
        return launched


class _Replies:
    """The words of passes that choose equally many tokens after a row, on their way to the host.

    ``num_rows``: maximum number of rows in all passes together.
    """

    def __init__(self, num_best: int, num_rows: int) -> None:
        self.num_best, self._num_words, self._stop = num_best, num_best * num_rows, 0
        self._copy: JoinedCopy | None = None

    def add(self, words: Tensor, num_rows: int) -> tuple[int, int]:
        """Begin the copy of a pass's words; return the range of its rows among all rows."""
        if self._copy is None:
            self._copy = JoinedCopy(self._num_words, words)
        self._copy.add(words)
        start, self._stop = self._stop, self._stop + num_rows
        return start, self._stop

    def end(self) -> None:
        """Declare that no pass follows."""
        if self._copy is not None:
            self._copy.end()

    @cached_property
    def bests(self) -> list[Best]:
        """The best tokens of all rows; the first access waits for the device."""
        assert self._copy is not None
        return bests_of_words(self._copy.read().reshape(-1, self.num_best), {}, None)


class _ChainedBest(PendingBest):
    """Results of one of the passes of a launch."""

    def __init__(self, words: Tensor, replies: _Replies, start: int, stop: int) -> None:
        self._words, self._replies, self._start, self._stop = words, replies, start, stop

    @property
    def words(self) -> Tensor:
        return self._words

    def bests(self) -> list[Best]:
        """Wait for all passes of the launch."""
        return self._replies.bests[self._start : self._stop]
