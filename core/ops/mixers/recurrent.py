"""Mixers with a recurrent state, which `Ops.recur` computes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor
from typing_extensions import override

from ..state_pool import StateShape
from ..weights import PackedLinear
from .mixer import MixerWeights

if TYPE_CHECKING:
    from ..base import ForwardPlan, Ops

Rule: TypeAlias = Literal["delta", "mamba2", "lightning"]


class RecurrentShape(NamedTuple):
    """Heads of a layer with a recurrent state, and the taps of its convolution.

    Value head j reads key head ``j // (num_value_heads // num_key_heads)``, or if heads are tiled
    (in GGUF files) key head ``j % num_key_heads``. In Mamba-2 a key head is a group, queries and
    keys are C and B, and values are x.
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int  # items of a head
    value_dim: int
    conv_len: int  # taps, the row itself included
    is_tiled: bool = False

    @property
    def conv_channels(self) -> int:
        """Width of a row's queries, keys and values together, which the convolution reads."""
        return 2 * self.num_key_heads * self.key_dim + self.value_width

    @property
    def value_width(self) -> int:
        """Width of a row's values over all heads."""
        return self.num_value_heads * self.value_dim

    @property
    def state(self) -> StateShape:
        """Shape of a sequence's state in this layer."""
        return StateShape(
            self.num_value_heads,
            self.key_dim,
            self.value_dim,
            self.conv_channels,
            self.conv_len,
        )


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class RecurrentWeights(MixerWeights):
    """Weights of a mixer whose rows read and advance a state; each subclass is an update rule.

    A row's q, k and v from ``in_proj`` go through a short convolution and silu. The rest of the
    row, z, gates the state's output, which is the input of ``out``.
    """

    rule: ClassVar[Rule]

    in_proj: PackedLinear  # rows: q, k, v, z
    gates: PackedLinear | None = None  # not quantised
    conv: Tensor  # [conv_channels, conv_len] float32, the last tap is the row's own
    conv_bias: Tensor | None = None  # [conv_channels] float32
    decay: Tensor  # [num_value_heads] float32, below 0: -exp(A_log)
    dt_bias: Tensor  # [num_value_heads] float32; [0] without gates
    most_beta: float = 1.0
    skip: Tensor | None = None  # [num_value_heads] float32
    norm: Tensor | None  # float32
    norm_eps: float
    num_norms: int = 0  # equal parts of an output row with a norm each; 0: none, or per head
    out: PackedLinear
    shape: RecurrentShape
    layer: int  # index in the pass's `StatePool`

    @property
    @override
    def linears(self) -> tuple[PackedLinear, ...]:
        return (self.in_proj, self.out)

    @override
    def compute(self, ops: Ops, x: Tensor, plan: ForwardPlan) -> Tensor:
        mixed, gates = ops.linear(x, self.in_proj), x.new_empty((len(x), 0), dtype=torch.float32)
        if self.gates is not None:
            gates = ops.logits(x, self.gates)
        return ops.linear(ops.recur(mixed, gates, self, plan), self.out)


class DeltaWeights(RecurrentWeights):
    """The gated delta rule (arXiv 2412.06464) after a short convolution, as in Qwen3-Next.

    q and k are divided by their length, and q also by the root of ``key_dim``. The rows of
    ``gates`` are b and a: each value head has ``log decay = decay * softplus(a + dt_bias)`` and
    ``beta = most_beta * sigmoid(b)``. The state's output goes through an RMS norm per head, whose
    weight is [value_dim], and is multiplied by ``silu(z)``.
    """

    __slots__ = ()
    rule = "delta"


class Mamba2Weights(RecurrentWeights):
    """Mamba-2 (arXiv 2405.21060) after a short convolution.

    q, k and v are C, B and x. Each head has one row of ``gates``, ``dt = softplus(gate + dt_bias)``
    and ``log decay = decay * dt``, and adds ``B (dt x)^T`` to its state. The state's output for C,
    plus ``skip * x``, is multiplied by ``silu(z)`` and goes through an RMS norm of each of
    ``num_norms`` parts, if there is a norm; its weight is [num_value_heads * value_dim].
    """

    __slots__ = ()
    rule = "mamba2"


class LightningWeights(RecurrentWeights):
    """Lightning attention (arXiv 2501.08313), as in MiniMax.

    There is no convolution and no row of ``gates``: each head has one ``log decay = decay`` and
    adds ``k v^T`` to its state. The state's output goes through an RMS norm of each of
    ``num_norms`` parts, whose weight is [num_value_heads * value_dim], and is multiplied by
    ``sigmoid(z)``.
    """

    __slots__ = ()
    rule = "lightning"
