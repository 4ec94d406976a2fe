"""Layers with states without a decoder: their inputs are drawn, their states kept.

A `Sequences` runs any rows of a few sequences over one pool, cut as a test likes.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from foretoken.core.ops.base import ForwardPlan, Ops
from foretoken.core.ops.batch import Segment, build_batch
from foretoken.core.ops.kv_pool import KVPool
from foretoken.core.ops.mixers.conv import ConvShape, ConvWeights
from foretoken.core.ops.mixers.recurrent import (
    DeltaWeights,
    LightningWeights,
    Mamba2Weights,
    RecurrentShape,
    RecurrentWeights,
)
from foretoken.core.ops.row_extras import RowExtras, SegmentState
from foretoken.core.ops.state_pool import StatePool
from foretoken.core.ops.weights import HeadLayout, PackedLinear
from support.rope_fixture import Turns

SHAPE = RecurrentShape(2, 4, key_dim=24, value_dim=40, conv_len=4)
MAMBA_SHAPE = RecurrentShape(2, 4, key_dim=20, value_dim=24, conv_len=4)
CONV_SHAPE = ConvShape(56, 3)
HEADS = HeadLayout(1, 1, 8, 1.0)
NO_MATRIX = PackedLinear(torch.empty(0), None, packed=False)

Weights: TypeAlias = RecurrentWeights | ConvWeights


class Rows(NamedTuple):
    """Rows of a sequence in a pass: final ones of its inputs, then drafts of random ones."""

    sequence: int
    start: int
    count: int
    num_drafts: int = 0
    keeps: tuple[tuple[int, int], ...] = ()


def make_weights(shape: RecurrentShape = SHAPE, layer: int = 0) -> DeltaWeights:
    """Log decays of a token are from -0.001 to -8, by head."""
    heads = shape.num_value_heads
    return DeltaWeights(
        in_proj=NO_MATRIX,
        gates=NO_MATRIX,
        conv=torch.randn(shape.conv_channels, shape.conv_len) * 0.6,
        decay=-(10.0 ** torch.linspace(-3.0, 0.9, heads)),
        dt_bias=torch.randn(heads) * 0.3,
        norm=torch.rand(shape.value_dim) + 0.5,
        norm_eps=1e-6,
        out=NO_MATRIX,
        shape=shape,
        layer=layer,
    )


def make_mamba_weights(
    shape: RecurrentShape = MAMBA_SHAPE, layer: int = 0, *, has_bias: bool = True
) -> Mamba2Weights:
    """Log decays as those of `make_weights`; a norm of each group."""
    heads = shape.num_value_heads
    return Mamba2Weights(
        in_proj=NO_MATRIX,
        gates=NO_MATRIX,
        conv=torch.randn(shape.conv_channels, shape.conv_len) * 0.6,
        conv_bias=torch.randn(shape.conv_channels) * 0.3 if has_bias else None,
        decay=-(10.0 ** torch.linspace(-3.0, 0.9, heads)),
        dt_bias=torch.randn(heads) * 0.3,
        skip=torch.randn(heads),
        norm=torch.rand(shape.value_width) + 0.5,
        norm_eps=1e-6,
        num_norms=shape.num_key_heads,
        out=NO_MATRIX,
        shape=shape,
        layer=layer,
    )


def make_lightning_weights(shape: RecurrentShape = SHAPE, layer: int = 0) -> LightningWeights:
    """Log decays as those of `make_weights`; a norm of the whole row."""
    shape = shape._replace(conv_len=1)
    return LightningWeights(
        in_proj=NO_MATRIX,
        conv=torch.ones(shape.conv_channels, 1),
        decay=-(10.0 ** torch.linspace(-3.0, 0.9, shape.num_value_heads)),
        dt_bias=torch.empty(0),
        norm=torch.rand(shape.value_width) + 0.5,
        norm_eps=1e-6,
        num_norms=1,
        out=NO_MATRIX,
        shape=shape,
        layer=layer,
    )


def make_conv_weights(
    shape: ConvShape = CONV_SHAPE, layer: int = 0, *, has_bias: bool = True
) -> ConvWeights:
    return ConvWeights(
        in_proj=NO_MATRIX,
        conv=torch.randn(shape) * 0.6,
        bias=torch.randn(shape.channels) * 0.3 if has_bias else None,
        out=NO_MATRIX,
        layer=layer,
    )


def row_widths(weights: Weights) -> tuple[int, int]:
    """Items of a row before the layer, and of one behind it."""
    if isinstance(weights, ConvWeights):
        return 3 * weights.shape.channels, weights.shape.channels
    shape = weights.shape
    return shape.conv_channels + shape.value_width, shape.value_width


def gates_width(weights: Weights) -> int:
    """Rows of the gates' matrix."""
    if isinstance(weights, ConvWeights | LightningWeights):
        return 0
    rows = 2 if isinstance(weights, DeltaWeights) else 1
    return rows * weights.shape.num_value_heads


class Sequences:
    """Sequences of drawn inputs, each with the slot and the log of its number."""

    def __init__(
        self,
        ops: Ops,
        weights: Sequence[Weights],
        *,
        length: int,
        count: int = 1,
        page_size: int = 16,
        dtype: torch.dtype = torch.float32,
        num_slots: int = 8,
        seed: int = 0,
    ) -> None:
        self.ops, self.weights, self.dtype, self.length = ops, weights, dtype, length
        self.width, _ = row_widths(weights[0])
        self._draw = torch.Generator("cpu").manual_seed(seed)
        self.mixed = self._randn(count, length, self.width).to(dtype)
        self.gates = self._randn(count, length, gates_width(weights[0]))
        self.page_size = page_size
        self.states = StatePool(
            num_slots,
            count,
            [each.shape.state for each in weights],
            page_size=page_size,
            dtype=dtype,
            device=torch.get_default_device(),
        )
        self.pool = KVPool(
            1, num_layers=1, num_kv_heads=1, head_dim=8, page_size=page_size,
            dtype=dtype, device=torch.get_default_device(), states=self.states,
        )  # fmt: skip

    def run(self, *passes: Rows, layers: Sequence[int] = (0,)) -> list[Tensor]:
        """One pass: what each of its sequences' final rows give in the last of ``layers``."""
        segments, mixed, gates = [], [], []
        for sequence, start, count, num_drafts, keeps in passes:
            stop = start + count
            extras = RowExtras(state=SegmentState(sequence, sequence, stop, keeps))
            pages = array("q", [0] * (1 + (stop + num_drafts) // self.page_size))
            tokens = [0] * (count + num_drafts)
            segments.append(Segment(tokens, start, pages, 0, extras=extras))
            mixed.append(self.mixed[sequence, start:stop])
            gates.append(self.gates[sequence, start:stop])
            if num_drafts:
                for into, drafts in zip(
                    (mixed, gates), self.draft_rows(sequence, stop, num_drafts), strict=True
                ):
                    into.append(drafts)
        batch = build_batch(
            segments, page_size=self.page_size, device="cpu", min_rows=self.ops.min_rows
        )
        plan = self.ops.plan(batch, self.pool, HEADS, Turns(torch.ones(4)))
        padding = batch.num_rows - int(batch.lens.sum())
        rows = [torch.cat([*each, *[each[-1][-1:]] * padding]) for each in (mixed, gates)]
        for layer in layers:
            out = self._mix(*rows, self.weights[layer], plan)
        firsts = batch.first_rows.tolist()
        return [out[first : first + rows.count] for first, rows in zip(firsts, passes, strict=True)]

    def _mix(self, mixed: Tensor, gates: Tensor, weights: Weights, plan: ForwardPlan) -> Tensor:
        if isinstance(weights, ConvWeights):
            return self.ops.short_conv(mixed, weights, plan)
        return self.ops.recur(mixed, gates, weights, plan)

    def draft_rows(self, sequence: int, start: int, count: int) -> tuple[Tensor, Tensor]:
        """Inputs of drafts: random ones."""
        mixed = self._randn(count, self.width).to(self.dtype)
        return mixed, self._randn(count, self.gates.shape[2])

    def _randn(self, *shape: int) -> Tensor:
        drawn = torch.randn(*shape, generator=self._draw, device="cpu")
        return drawn.to(torch.get_default_device())

    def one_by_one(self, sequence: int = 0) -> Tensor:
        """All rows of a sequence, a pass for each."""
        return torch.cat([self.run(Rows(sequence, at, 1))[0] for at in range(self.length)])

    def reset(self) -> None:
        """Begin all sequences anew, over logs and slots that hold what no row may read."""
        for memory in (self.states.slots, self.states.logs):
            memory.view(self.dtype).fill_(torch.nan)
        for slot in range(len(self.mixed)):
            self.states.reset(slot)
