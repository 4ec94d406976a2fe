"""Ops: the operations of a decoder step, behind which the backends stand.

The torch backend is the oracle: another backend is right when it agrees with it. Every operation
keeps a row's bits independent of the rows beside it unless the backend was made with
``exact="off"``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import (
    TYPE_CHECKING,
    Literal,
    NamedTuple,
    Protocol,
    TypeAlias,
    runtime_checkable,
)

import torch
from torch import Tensor

from ..sampling.sampler import PendingBest, PendingTokens, Sampler
from .batch import NOTHING_MORE, RaggedBatch, Segment, Wanted
from .kv_pool import KVPool
from .lora import AdaptedRows, LoraUpdate, PackedLora
from .quantize import QuantizedWeight, WeightKind
from .weights import (
    FIRST_TABLE,
    SILU,
    Activation,
    ConvWeights,
    DecoderWeights,
    ExpertWeights,
    HeadLayout,
    HeadNorm,
    Norm,
    PackedLinear,
    PackedTable,
    RecurrentWeights,
    Table,
    Tables,
)

if TYPE_CHECKING:
    from ..sampling.drafted_row import DraftedRow
    from ..sampling.verifier import Best

Exactness: TypeAlias = Literal["spec", "batch", "off"]


class ForwardPlan(Protocol):
    """A backend's preparations for one forward pass, which its layers share.

    It has no methods: only the backend that made it reads it. Each operation that takes a plan
    asserts that it is of its own backend's class.
    """


class Rope(Protocol):
    """cos and sin by position, float32. Backends gather rows of it, or read the table itself."""

    def rows(self, positions: Tensor, stop: int) -> tuple[Tensor, Tensor]:
        """cos and sin ``[T, head_dim / 2]`` of positions ``[T]``, all of them below ``stop``.

        Positions ``[3, T]`` are in time, height and width: each frequency follows one of them.
        """

    def table(self, stop: int) -> tuple[Tensor, Tensor]:
        """cos and sin ``[stop or more, head_dim / 2]`` of all positions from 0 up."""


class LayersOutput(NamedTuple):
    """Outputs of a decoder's layers, valid until its next pass.

    A backend that copies the rows to its device itself says where ``logit_rows`` are there. One
    that also computes the output layer fills in ``logits``; if it sampled every row, ``tokens``.
    """

    hidden: Tensor  # [T, hidden]: the final norm's output
    logit_rows: Tensor | None = None  # [num_logits] or more; None: the batch's own
    logits: Tensor | None = None  # [num_logits, vocab] float32
    tokens: PendingTokens | None = None
    taps: Tensor | None = None  # [T, num_taps * hidden]
    best: PendingBest | None = None  # for ``tokens``, where several or of a part are wanted


class RowPasses(Protocol):
    """Passes of one decoder over one pool, choice of tokens included, each in one call."""

    def best(
        self, segments: Sequence[Segment], rows: Sequence[DraftedRow], num_best: int
    ) -> list[Best]:
        """Compute segments of one row each; the best tokens behind each, as `Sampler.best`.

        Raises ValueError for a position without a page.
        """


class CompiledForward(Protocol):
    """All layers of one decoder in one call, to the same bits as one operation after another."""

    def __call__(
        self,
        token_ids: Tensor,
        plans: Sequence[ForwardPlan],
        wanted: Wanted,
        adapted: Sequence[AdaptedRows] = (),
    ) -> LayersOutput:
        """Compute token ids ``[T]``; writes KV to the pool. A plan for each of its parts.

        ``adapted``: rows that adapters change. Calls `Wanted.tell_started`.
        """

    def row_passes(
        self, pool: KVPool, parts: Sequence[tuple[HeadLayout, Sequence[Rope]]]
    ) -> RowPasses | None:
        """Passes over a pool, with heads and tables of each part; None: the backend has none."""

    def warm_up(
        self,
        pool: KVPool,
        heads: HeadLayout,
        ropes: tuple[Rope, ...],
        wanted: Wanted = NOTHING_MORE,
    ) -> None:
        """Do what the first passes over a pool would else wait for; writes none of it.

        ``wanted``: what those passes will want; of vectors and tokens to choose only that they are.
        """


class Ops(Protocol):
    """The operations of a decoder step. Rows are tokens; ``T`` counts them.

    ``min_rows``: the fewest rows that a batch for these operations may have. ``tile_rows``: rows
    that share each load of a weight; one more than a multiple begins another tile.
    ``batch_device``: where a batch's tensors are made; None: on the device of the weights.
    ``sampler``: chooses tokens from this backend's logits. ``stored_kinds``: of quantised weights
    that `pack_linear` takes as they are. ``has_own_threads``: whether the operations run on threads
    of the backend's own, which sleep while they wait; torch's threads would spin beside them.
    """

    min_rows: int
    tile_rows: int
    batch_device: str | None
    sampler: Sampler
    stored_kinds: frozenset[WeightKind]
    has_own_threads: bool

    def unsuited(self, heads: HeadLayout) -> str:
        """Name what these operations cannot compute of such heads; empty if there is nothing."""

    @property
    def identity(self) -> Mapping[str, str]:
        """Versions and variants of its kernels: results of other ones may have other bits.

        Torch and the machine are not among them: see `machine_identity`.
        """

    def set_threads(self, count: int) -> None:
        """Set the threads for operations called by this thread, itself included."""

    def compile_forward(self, weights: DecoderWeights) -> CompiledForward | None:
        """The decoder of these weights in one call, where the backend has that."""

    def pack_linear(
        self, weight: Tensor | QuantizedWeight, bias: Tensor | None = None, *, plain: bool = False
    ) -> PackedLinear:
        """Lay out a weight ``[out_features, in_features]`` for `linear`.

        ``plain``: not quantised, even where these operations quantise.
        """

    def linear(self, x: Tensor, weight: PackedLinear) -> Tensor:
        """``[T, in_features] -> [T, out_features]``; T is at least `min_rows`."""

    def pack_lora(self, update: LoraUpdate, dtype: torch.dtype) -> PackedLora:
        """Lay out an adapter's update of a linear for `add_lora`; ``dtype``: of activations."""

    def add_lora(self, out: Tensor, x: Tensor, rows: Tensor, lora: PackedLora) -> None:
        """Add an update of some rows of ``x`` [T, in_features] to ``out`` [T, out_features].

        ``rows`` [n] int64, rising. A row's bits depend on that row alone.
        """

    def packed_table(self, weight: PackedLinear, dtype: torch.dtype, factor: float) -> PackedTable:
        """Make an embedding of a weight of `stored_kinds` that `pack_linear` has packed.

        Its rows are rounded to ``dtype``, and once more behind the product with ``factor``.
        """

    def embedding(self, token_ids: Tensor, table: Table) -> Tensor:
        """``[T] -> [T, hidden]`` from a table ``[vocab, hidden]``."""

    def norm(self, x: Tensor, norm: Norm) -> Tensor:
        """The norm of rows ``[T, hidden]``."""

    def add_norm(
        self, x: Tensor, residual: Tensor, norm: Norm | None, factor: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """The norm of ``(x + residual) * factor``, and that itself; without a norm, it twice.

        The sum is rounded before it is multiplied.
        """

    def plan(
        self, batch: RaggedBatch, pool: KVPool, heads: HeadLayout, *ropes: Rope
    ) -> ForwardPlan:
        """Prepare a forward pass; ``ropes`` are the tables that `Tables` name."""

    def rope_write(
        self,
        qkv: Tensor,
        layer: int,
        plan: ForwardPlan,
        norm: HeadNorm | None,
        tables: Tables = FIRST_TABLE,
    ) -> Tensor:
        """Norm and rotate queries and keys, write keys and values to the pool.

        ``[T, (num_heads + 2 * num_kv_heads) * head_dim]`` to queries ``[T, num_heads * head_dim]``
        as the backend's own `attention` takes them, scaled. May overwrite ``qkv``. Of queries
        alone, ``[T, num_heads * head_dim]``, nothing is written. Of heads with a `HeadLayout.rank`
        rows have no values, and there is no ``norm``.
        """

    def attention(
        self,
        q: Tensor,
        layer: int,
        plan: ForwardPlan,
        window: int | None,
        *,
        cap: float | None = None,
        sinks: Tensor | None = None,
        is_mutual: bool = False,
    ) -> Tensor:
        """Causal attention over the pages, ``[T, num_heads * head_dim]`` to the same shape.

        Of heads with a `HeadLayout.rank` to ``[T, num_heads * rank]``.

        With a ``window`` a row sees itself and the ``window - 1`` positions before it. With a
        ``cap`` scores become ``cap * tanh(scores / cap)`` (Gemma 2, arXiv 2408.00118). ``sinks``
        [num_heads] float32: the score of a key without a value that each row sees besides
        (gpt-oss, arXiv 2508.10925). ``is_mutual``: rows see up to `RaggedBatch.reaches` where the
        batch has them, with a window, too.
        """

    def gate(self, x: Tensor, gate: Tensor) -> Tensor:
        """``x * sigmoid(gate)``, all ``[T, width]``, computed in float32 and rounded once."""

    def recur(
        self, mixed: Tensor, gates: Tensor, weights: RecurrentWeights, plan: ForwardPlan
    ) -> Tensor:
        """A recurrent layer over the states and logs of the plan's pass, which it moves on.

        ``mixed`` [T, q | k | v | z] in the activations' dtype and ``gates`` [T, rows of
        ``weights.gates``] float32, to ``[T, num_value_heads * value_dim]`` as ``weights.out`` takes
        it. A row's bits depend on its position and on the rows before it alone.
        """

    def short_conv(self, mixed: Tensor, weights: ConvWeights, plan: ForwardPlan) -> Tensor:
        """A gated short convolution over the states and logs of the plan's pass, which it moves on.

        ``mixed`` [T, b | c | x] to ``[T, channels]`` as ``weights.out`` takes it, computed in
        float32 and rounded once. A row's bits depend on the rows before it alone.
        """

    def activate(self, x: Tensor, activation: Activation = SILU) -> Tensor:
        """``[T, 2 * width] -> [T, width]`` where it is gated, else ``[T, width]`` to the same."""

    def experts(
        self,
        x: Tensor,
        weights: ExpertWeights,
        plan: ForwardPlan | None = None,
        routed_by: Tensor | None = None,
    ) -> Tensor:
        """``[T, hidden]`` to the outputs of each row's experts, added up, of the same shape.

        ``plan``: of the pass whose rows these are; those that it lacks may choose no expert.
        ``routed_by``: what the router reads where that is not ``x``, [T, hidden].
        """

    def logits(self, hidden: Tensor, weight: PackedLinear, cap: float | None = None) -> Tensor:
        """``[R, hidden] -> [R, vocab]`` float32, capped as scores are; R is at least `min_rows`."""


@runtime_checkable
class RoughOps(Protocol):
    """Operations with weights of 4 bits for drafts, whose sums need no fixed order."""

    def rough_copy(self, weight: PackedLinear, dtype: torch.dtype) -> PackedLinear:
        """The same weight in 4 bits, for activations of ``dtype``; the bias is shared.

        Raises ValueError for weights of fewer than 8 bits.
        """


def gated(x: Tensor, gate: Tensor) -> Tensor:
    """``x * sigmoid(gate)`` in float32, rounded once, by torch."""
    # F.sigmoid rounds the tail of a vector otherwise than its body; exp and divide do not.
    return (x.float() / torch.exp(-gate.float()).add_(1.0)).to(x.dtype)


def capped(scores: Tensor, cap: float | None) -> Tensor:
    """``cap * tanh(scores / cap)``, in place."""
    return scores if cap is None else scores.div_(cap).tanh_().mul_(cap)
