"""Ops: the operations of a decoder step, behind which the backends stand.

The torch backend is the oracle: another backend is right when it agrees with it. Every operation
keeps a row's bits independent of the rows beside it unless the
backend was made with ``exact="off"``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, TypeAlias

from torch import Tensor

from ..sampling.sampler import PendingTokens, Sampler
from .batch import RaggedBatch, Taps, Wanted
from .kv_pool import KVPool
from .quantize import QuantizedWeight, WeightKind

Exactness: TypeAlias = Literal["spec", "batch", "off"]


@dataclass(frozen=True, slots=True, eq=False)
class PackedLinear:
    """A weight ``[out_features, in_features]`` in the backend's own layout, and its bias."""

    weight: Tensor
    bias: Tensor | None
    packed: bool  # whether the layout is the backend's rather than plain


@dataclass(frozen=True, slots=True, eq=False)
class HeadNorm:
    """RMS norm of every query and key head before RoPE; ``weight`` is one row per head."""

    weight: Tensor  # [num_heads + num_kv_heads, head_dim]
    eps: float


@dataclass(frozen=True, slots=True)
class HeadLayout:
    """How a row of packed QKV is cut into heads: queries, then keys, then values."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float  # of the scores, usually head_dim ** -0.5

    @property
    def group_size(self) -> int:
        """Query heads that share one KV head."""
        return self.num_heads // self.num_kv_heads


class ForwardPlan(Protocol):
    """What a backend prepares once per forward pass and shares between the layers."""


class Rope(Protocol):
    """cos and sin by position, float32. Backends gather rows of it, or read the table itself."""

    def rows(self, positions: Tensor, stop: int) -> tuple[Tensor, Tensor]:
        """cos and sin ``[T, head_dim / 2]`` of positions ``[T]``, all of them below ``stop``."""

    def table(self, stop: int) -> tuple[Tensor, Tensor]:
        """cos and sin ``[stop or more, head_dim / 2]`` of all positions from 0 up."""


class LayersOutput(NamedTuple):
    """What the layers of a decoder leave, until its next pass.

    A backend that copies the rows to its device itself says where ``logit_rows`` are there. One
    that also computes the output layer fills in ``logits``; if it sampled every row, ``tokens``.
    """

    hidden: Tensor  # [T, hidden]: the final norm's output
    logit_rows: Tensor | None = None  # [num_logits] or more; None: the batch's own
    logits: Tensor | None = None  # [num_logits, vocab] float32
    tokens: PendingTokens | None = None
    taps: Tensor | None = None  # [T, num_taps * hidden]


class CompiledForward(Protocol):
    """All layers of one decoder in one call, to the same bits as one operation after another."""

    def __call__(self, token_ids: Tensor, plan: ForwardPlan, wanted: Wanted) -> LayersOutput:
        """Compute token ids ``[T]``; writes KV to the pool."""

    def warm_up(self, pool: KVPool, heads: HeadLayout, rope: Rope, taps: Taps) -> None:
        """Do what the first passes over a pool would else wait for; writes none of it.

        ``taps``: the boundaries that those passes will want.
        """


@dataclass(frozen=True, slots=True, eq=False)
class LayerWeights:
    """One layer, with Q, K and V packed into one matrix and gate and up into another."""

    input_norm: Tensor  # [hidden]
    qkv: PackedLinear
    head_norm: HeadNorm | None
    o: PackedLinear
    post_norm: Tensor  # [hidden]
    gate_up: PackedLinear
    down: PackedLinear
    window: int | None  # positions that a row sees, itself included; None: all before it


@dataclass(frozen=True, slots=True, eq=False)
class DecoderWeights:
    """All weights, in the layout of the ops that will use them."""

    embedding: Tensor  # [vocab, hidden]
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor  # [hidden]
    lm_head: PackedLinear
    norm_eps: float


class Ops(Protocol):
    """The operations of a decoder step. Rows are tokens; ``T`` counts them."""

    @property
    def min_rows(self) -> int:
        """The fewest rows that a batch for these operations may have."""

    @property
    def batch_device(self) -> str | None:
        """Where a batch's tensors are made; None: beside the weights."""

    @property
    def sampler(self) -> Sampler:
        """Chooses tokens from this backend's logits."""

    def set_threads(self, count: int) -> None:
        """Threads for the operations that the calling thread will ask for, itself included."""

    def compile_forward(self, weights: DecoderWeights) -> CompiledForward | None:
        """The decoder of these weights in one call, where the backend has that."""

    @property
    def stored_kinds(self) -> frozenset[WeightKind]:
        """Kinds of quantised weights that `pack_linear` takes as they are."""

    def pack_linear(
        self, weight: Tensor | QuantizedWeight, bias: Tensor | None = None
    ) -> PackedLinear:
        """Lay out a weight ``[out_features, in_features]`` for `linear`."""

    def linear(self, x: Tensor, weight: PackedLinear) -> Tensor:
        """``[T, in_features] -> [T, out_features]``; T is at least `min_rows`."""

    def embedding(self, token_ids: Tensor, table: Tensor) -> Tensor:
        """``[T] -> [T, hidden]`` from a table ``[vocab, hidden]``."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Root mean square norm over the last dimension (arXiv 1910.07467)."""

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """The norm of ``x + residual``, and that sum."""

    def plan(self, batch: RaggedBatch, pool: KVPool, heads: HeadLayout, rope: Rope) -> ForwardPlan:
        """Prepare a forward pass."""

    def rope_write(
        self, qkv: Tensor, layer: int, plan: ForwardPlan, norm: HeadNorm | None
    ) -> Tensor:
        """Norm and rotate queries and keys, write keys and values to the pool.

        ``[T, (num_heads + 2 * num_kv_heads) * head_dim]`` to queries ``[T, num_heads * head_dim]``
        as the backend's own `attention` takes them, scaled. May overwrite ``qkv``.
        """

    def attention(self, q: Tensor, layer: int, plan: ForwardPlan, window: int | None) -> Tensor:
        """Causal attention over the pages, ``[T, num_heads * head_dim]`` to the same shape.

        With a ``window`` a row sees itself and the ``window - 1`` positions before it.
        """

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """``[T, 2 * width] -> [T, width]``: silu of the first half times the second."""

    def logits(self, hidden: Tensor, weight: PackedLinear) -> Tensor:
        """``[R, hidden] -> [R, vocab]`` float32; R is at least `min_rows`."""
