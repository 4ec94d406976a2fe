"""Recurrent layers in plain PyTorch, one row after another: the reference.

A row's sums have one order: S at the page's start first, then the log's entries from the page's
start. Tensors have the same shapes for each row, so that torch's own order is the same, too.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

import torch
from torch import Tensor

from ..batch import RaggedBatch
from ..mixers.recurrent import RecurrentWeights, Rule
from ..state_pool import StatePool

_NORM_EPS = 1e-6  # added to the squared length of queries and keys


class SegmentStates:
    """Slot and log of one segment in one layer, and the position of its state."""

    def __init__(self, layer: int, batch: RaggedBatch, pool: StatePool, index: int) -> None:
        assert batch.states is not None
        states = batch.states
        slot, log = int(states.slots[index]), int(states.logs[index])
        self._layer, self._pool = layer, pool
        self._slot = slot
        self._kept, self._log = pool.slot(slot, layer), pool.log(log, layer)
        self._at = int(pool.at[slot, layer])
        self._start = int(batch.starts[index])
        self._final_stop = int(states.final_stops[index])
        first = int(states.keep_counts[:index].sum())
        keeps = states.keeps[first : first + int(states.keep_counts[index])].tolist()
        self._keeps: dict[int, int] = dict(keeps)

    def _write(self, slot: int, state: Tensor, tail: Tensor, at: int) -> None:
        target = self._pool.slot(slot, self._layer)
        target.state.copy_(state)
        target.tail.copy_(tail)
        self._pool.at[slot, self._layer] = at

    def _inputs_before(self, stop: int) -> Tensor:
        """Return the inputs of the ``conv_len - 1`` positions before ``stop``.

        They are read from the slot's tail and the log.
        """
        tail, log, at = self._kept.tail, self._log.inputs, self._at
        count = len(tail)
        if not count:
            return tail
        rows = [
            log[position % self._pool.ring] if position >= at else tail[position - at + count]
            for position in range(stop - count, stop)
        ]
        return torch.stack(rows)

    def _log_inputs(self, inputs: Tensor) -> None:
        """Write the inputs of the last rows to the log, at most its capacity."""
        log = self._log.inputs
        for row in range(max(0, len(inputs) - len(log)), len(inputs)):
            log[(self._start + row) % len(log)] = inputs[row]


def join_segments(outs: list[Tensor], num_rows: int) -> Tensor:
    """Join the outputs of segments, and repeat the last row up to ``num_rows``."""
    missing = num_rows - sum(map(len, outs))
    if missing:
        outs = [*outs, outs[-1][-1:].expand(missing, -1)]
    return torch.cat(outs)


def row_spans(batch: RaggedBatch) -> Iterator[tuple[int, int]]:
    """Yield the first row of each segment and the row after its last."""
    firsts, lens = batch.first_rows.tolist(), batch.lens.tolist()
    return ((first, first + count) for first, count in zip(firsts, lens, strict=True))


def run_recurrent(
    mixed: Tensor, gates: Tensor, weights: RecurrentWeights, batch: RaggedBatch, pool: StatePool
) -> Tensor:
    """Return the outputs of a recurrent layer, as `Ops.recur` defines them."""
    outs = [
        _RULES[weights.rule](weights, batch, pool, index).run(mixed[first:stop], gates[first:stop])
        for index, (first, stop) in enumerate(row_spans(batch))
    ]
    return join_segments(outs, len(mixed)).to(mixed.dtype)


class _Sequence(SegmentStates, ABC):
    """Rows of one segment in one layer."""

    def __init__(
        self, weights: RecurrentWeights, batch: RaggedBatch, pool: StatePool, index: int
    ) -> None:
        super().__init__(weights.layer, batch, pool, index)
        self._weights = weights

    def run(self, mixed: Tensor, gates: Tensor) -> Tensor:
        """Return the rows' outputs, float32 [n, num_heads * value_dim].

        ``mixed``: [n, q | k | v | z]. Writes the states at the kept page ends, and advances the
        segment's state and log.
        """
        self._catch_up()
        shape = self._weights.shape
        inputs, z = torch.split(
            mixed, [shape.conv_channels, mixed.shape[1] - shape.conv_channels], dim=1
        )
        around = torch.cat((self._inputs_before(self._start), inputs))
        state, base, final = self._kept.state, self._at, None
        outs = []
        for row, position in enumerate(range(self._start, self._start + len(mixed))):
            read = self._row(around[row : row + shape.conv_len], gates[row], state, base, position)
            outs.append(self._gated(read, z[row]))
            if position + 1 - base == self._pool.page_size:
                state, base = self._folded(state, base), position + 1
                tail = around[row + 1 : row + shape.conv_len]
                if base in self._keeps:
                    self._write(self._keeps[base], state, tail, base)
                if base < self._final_stop:
                    final = (state, tail, base)
        if final is not None:
            self._write(self._slot, *final)
        self._log_inputs(inputs)
        return torch.stack(outs)

    def _catch_up(self) -> None:
        """Advance the state S over full pages of the log, to the start of the first row's page."""
        state, at = self._kept.state, self._at
        while at + self._pool.page_size <= self._start:
            state, at = self._folded(state, at), at + self._pool.page_size
        if at > self._at:
            self._write(self._slot, state, self._inputs_before(at), at)
            self._at = at
        if self._start in self._keeps:
            self._write(self._keeps[self._start], *self._kept, at)

    def _row(
        self, inputs: Tensor, gates: Tensor, state: Tensor, base: int, position: int
    ) -> Tensor:
        """Return a row's output [num_heads, value_dim], and write its entry to the log.

        ``inputs`` [conv_len, conv_channels]: the row's own input is the last.
        """
        log, ring = self._log, self._pool.ring
        q, k, v = self._heads(inputs)
        factor, decay = self._gates(gates)
        places = [page_position % ring for page_position in range(base, position)]
        c = decay + log.c[:, places[-1]] if places else decay
        u = factor * self._added(k, v, c, state, places)
        own = (k * q).sum(-1, keepdim=True) * u
        place = position % ring
        out = self._read(q, c, state, places) + own
        log.k[:, place], log.u[:, place], log.c[:, place] = k, u, c
        skip = self._weights.skip
        return out if skip is None else out + skip.unsqueeze(-1) * v

    def _read(self, x: Tensor, c: Tensor, state: Tensor, places: list[int]) -> Tensor:
        """Return the state before a row, with the row's decay, times ``x``: [num_heads, value_dim].

        ``x`` [num_heads, key_dim] is a query or key, and ``c`` the sum of log decays since the
        page's start.
        """
        log = self._log
        out = torch.exp(c).unsqueeze(-1) * (state * x.unsqueeze(-1)).sum(1)
        for place in places:
            weight = torch.exp(c - log.c[:, place]) * (log.k[:, place] * x).sum(-1)
            out = out + weight.unsqueeze(-1) * log.u[:, place]
        return out

    def _folded(self, state: Tensor, base: int) -> Tensor:
        """Return the state S at the start of the next page, from S at position ``base``."""
        log, ring = self._log, self._pool.ring
        places = [position % ring for position in range(base, base + self._pool.page_size)]
        last = log.c[:, places[-1]]
        state = torch.exp(last).view(-1, 1, 1) * state
        for place in places:
            weighed = torch.exp(last - log.c[:, place]).unsqueeze(-1) * log.k[:, place]
            state = state + weighed.unsqueeze(-1) * log.u[:, place].unsqueeze(1)
        return state

    def _heads(self, inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Convolve and return float32 q, k [num_heads, key_dim] and v [num_heads, value_dim]."""
        shape, taps = self._weights.shape, self._weights.conv
        total = inputs[0].float() * taps[:, 0]
        for tap in range(1, shape.conv_len):
            total = total + inputs[tap].float() * taps[:, tap]
        bias = self._weights.conv_bias
        total = total if bias is None else total + bias
        activated = _silu(total)
        keys_width = shape.num_key_heads * shape.key_dim
        parts = torch.split(activated, [keys_width, keys_width, len(activated) - 2 * keys_width])
        q, k = self._scaled(*(part.view(-1, shape.key_dim) for part in parts[:2]))
        if shape.is_tiled:
            of = torch.arange(shape.num_value_heads, device=q.device) % shape.num_key_heads
        else:
            share = shape.num_value_heads // shape.num_key_heads
            of = torch.arange(shape.num_value_heads, device=q.device) // share
        return q[of], k[of], parts[2].view(-1, shape.value_dim)

    @abstractmethod
    def _scaled(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Return queries and keys [num_key_heads, key_dim], scaled for the state."""

    @abstractmethod
    def _gates(self, gates: Tensor) -> tuple[Tensor, Tensor]:
        """Return the factor of a row's update u, [num_heads, 1], and its log decay, [num_heads]."""

    @abstractmethod
    def _added(self, k: Tensor, v: Tensor, c: Tensor, state: Tensor, places: list[int]) -> Tensor:
        """Return a row's update u without its factor, [num_heads, value_dim]."""

    @abstractmethod
    def _gated(self, read: Tensor, z: Tensor) -> Tensor:
        """Return the layer's output [num_heads * value_dim], gated by z."""


class _DeltaSequence(_Sequence):
    def _scaled(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return _normed(q) * self._weights.shape.key_dim**-0.5, _normed(k)

    def _gates(self, gates: Tensor) -> tuple[Tensor, Tensor]:
        b, a = gates.float().chunk(2)
        beta = torch.exp(-b).add_(1.0).reciprocal_()
        decay = self._weights.decay * _softplus(a + self._weights.dt_bias)
        return beta.unsqueeze(-1) * self._weights.most_beta, decay

    def _added(self, k: Tensor, v: Tensor, c: Tensor, state: Tensor, places: list[int]) -> Tensor:
        return v - self._read(k, c, state, places)

    def _gated(self, read: Tensor, z: Tensor) -> Tensor:
        """Return the RMS norm of each head times silu(z), [num_heads * value_dim]."""
        weights = self._weights
        assert weights.norm is not None, "the delta rule has a norm"
        gate = z.float().view_as(read)
        root = ((read * read).mean(-1, keepdim=True) + weights.norm_eps).sqrt()
        normed = read / root * weights.norm
        return (normed * _silu(gate)).flatten()


class _Mamba2Sequence(_Sequence):
    def _scaled(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return q, k

    def _gates(self, gates: Tensor) -> tuple[Tensor, Tensor]:
        dt = _softplus(gates.float() + self._weights.dt_bias)
        return dt.unsqueeze(-1), self._weights.decay * dt

    def _added(self, k: Tensor, v: Tensor, c: Tensor, state: Tensor, places: list[int]) -> Tensor:  # noqa: ARG002 - as the delta rule
        return v

    def _gated(self, read: Tensor, z: Tensor) -> Tensor:
        """Return the state's output times silu(z), with the RMS norm of each part if there is one.

        The result is [num_heads * value_dim].
        """
        return self._normed_parts(read.flatten() * _silu(z.float()))

    def _normed_parts(self, x: Tensor) -> Tensor:
        weights = self._weights
        if weights.norm is None:
            return x
        parts = x.view(weights.num_norms, -1)
        root = ((parts * parts).mean(-1, keepdim=True) + weights.norm_eps).sqrt()
        return (parts / root).flatten() * weights.norm


class _LightningSequence(_Mamba2Sequence):
    def _gates(self, gates: Tensor) -> tuple[Tensor, Tensor]:
        return gates.new_ones(1), self._weights.decay

    def _gated(self, read: Tensor, z: Tensor) -> Tensor:
        """Return the RMS norm of each part times sigmoid(z), [num_heads * value_dim]."""
        return self._normed_parts(read.flatten()) / torch.exp(-z.float()).add_(1.0)


_RULES: dict[Rule, type[_Sequence]] = {
    "delta": _DeltaSequence,
    "mamba2": _Mamba2Sequence,
    "lightning": _LightningSequence,
}


def _silu(x: Tensor) -> Tensor:
    # F.silu rounds the tail of a tensor unlike its body.
    return x / torch.exp(-x).add_(1.0)


def _softplus(x: Tensor) -> Tensor:
    return torch.log1p(torch.exp(-x.abs())) + x.clamp(min=0.0)


def _normed(x: Tensor) -> Tensor:
    """Return heads [num_heads, key_dim] divided by their length."""
    return x / ((x * x).sum(-1, keepdim=True) + _NORM_EPS).sqrt()
