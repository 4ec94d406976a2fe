"""Gated short convolutions in plain PyTorch, the reference for other backends.

All rows of a segment are computed at once. Each sum adds its products in the order of the taps, so
a row's bits do not depend on other rows of the pass.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..batch import RaggedBatch
from ..mixers.conv import ConvWeights
from ..state_pool import StatePool
from .state import SegmentStates, join_segments, row_spans


def run_short_conv(
    mixed: Tensor, weights: ConvWeights, batch: RaggedBatch, pool: StatePool
) -> Tensor:
    """Return the outputs of a gated short convolution, as `Ops.short_conv` defines them."""
    b, c, x = mixed.chunk(3, dim=1)
    inputs = b * x
    outs = [
        _Sequence(weights, batch, pool, index).run(inputs[first:stop])
        for index, (first, stop) in enumerate(row_spans(batch))
    ]
    return (c.float() * join_segments(outs, len(mixed))).to(mixed.dtype)


class _Sequence(SegmentStates):
    """Rows of one segment in one layer."""

    def __init__(
        self, weights: ConvWeights, batch: RaggedBatch, pool: StatePool, index: int
    ) -> None:
        super().__init__(weights.layer, batch, pool, index)
        self._weights = weights

    def run(self, inputs: Tensor) -> Tensor:
        """Return the convolution's float32 sums [n, channels] of its inputs [n, channels]."""
        around = torch.cat((self._inputs_before(self._start), inputs))
        self._move(around)
        self._log_inputs(inputs)
        return self._convolved(around, len(inputs))

    def _convolved(self, around: Tensor, num_rows: int) -> Tensor:
        """Return the sums [num_rows, channels].

        ``around``: the inputs of the rows, after the earlier inputs that the first rows need.
        """
        taps, bias = self._weights.conv, self._weights.bias
        total = around[:num_rows].float() * taps[:, 0]
        for tap in range(1, taps.shape[1]):
            total = total + around[tap : tap + num_rows].float() * taps[:, tap]
        return total if bias is None else total + bias

    def _move(self, around: Tensor) -> None:
        """Write the states at the kept page ends, and advance the segment's own state."""
        page_size = self._pool.page_size
        moved = (self._final_stop - 1) // page_size * page_size
        tails = {stop: self._tail(around, stop) for stop in (*self._keeps, moved)}
        for stop, slot in self._keeps.items():
            self._write(slot, self._kept.state, tails[stop], stop)
        if moved > self._at:
            self._write(self._slot, self._kept.state, tails[moved], moved)

    def _tail(self, around: Tensor, stop: int) -> Tensor:
        """Return the ``conv_len - 1`` inputs before position ``stop``."""
        first = stop - self._start
        if first < 0:
            return self._inputs_before(stop)
        return around[first : first + len(self._kept.tail)]
