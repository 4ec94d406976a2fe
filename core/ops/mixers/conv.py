"""A gated short convolution over a row and the rows before it, as in LFM2 (arXiv 2511.23404)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor
from typing_extensions import override

from ..state_pool import StateShape
from ..weights import PackedLinear
from .mixer import MixerWeights

if TYPE_CHECKING:
    from ..base import ForwardPlan, Ops


class ConvShape(NamedTuple):
    """Number of channels of a layer's short convolution, and of taps, the row itself included."""

    channels: int
    conv_len: int

    @property
    def state(self) -> StateShape:
        """Shape of a sequence's state in this layer: only the last inputs of the convolution."""
        return StateShape(0, 0, 0, self.channels, self.conv_len)


@dataclass(frozen=True, slots=True, eq=False)
class ConvWeights(MixerWeights):
    """A gated short convolution, as in LFM2 (arXiv 2511.23404).

    A row of ``in_proj`` is b, c and x. The convolution reads ``b * x`` of the row and earlier rows,
    each rounded to the activations' dtype; its output times c is the input of ``out``.
    """

    in_proj: PackedLinear  # rows: b, c, x
    conv: Tensor  # [channels, conv_len] float32, the last tap is the row's own
    bias: Tensor | None  # [channels] float32, added by the convolution
    out: PackedLinear
    layer: int  # index in the pass's `StatePool`

    @property
    def shape(self) -> ConvShape:
        """Channels and taps."""
        return ConvShape(*self.conv.shape)

    @property
    @override
    def linears(self) -> tuple[PackedLinear, ...]:
        return (self.in_proj, self.out)

    @override
    def compute(self, ops: Ops, x: Tensor, plan: ForwardPlan) -> Tensor:
        return ops.linear(ops.short_conv(ops.linear(x, self.in_proj), self, plan), self.out)
