"""Ops: the operations of a decoder step, which each backend implements.

The torch backend is the reference: another backend is right if it agrees with torch. In every
operation a row's bits are independent of the other rows, unless the backend was made with
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
from .mixers.conv import ConvWeights
from .mixers.recurrent import RecurrentWeights
from .quantize import QuantizedWeight, WeightKind
from .weights import (
    FIRST_TABLE,
    SILU,
    Activation,
    DecoderWeights,
    ExpertWeights,
    HeadLayout,
    HeadNorm,
    Norm,
    PackedLinear,
    PackedTable,
    Table,
    Tables,
)

if TYPE_CHECKING:
    from ..sampling.drafted_row import DraftedRow
    from ..sampling.verifier import Best
    from .chained_rows import ChainedRows

Exactness: TypeAlias = Literal["spec", "batch", "off"]


class ForwardPlan(Protocol):
    """A backend's preparations for one forward pass, shared by all layers.

    A plan has no methods: only the backend that made it reads it. Each operation that takes a plan
    asserts that the plan is of its own backend's class.
    """


class Rope(Protocol):
    """RoPE's cos and sin by position, in float32. Backends gather rows or read the whole table."""

    def rows(self, positions: Tensor, stop: int) -> tuple[Tensor, Tensor]:
        """Return cos and sin ``[T, head_dim / 2]`` of positions ``[T]``, all below ``stop``.

        Positions may be ``[3, T]`` (time, height and width); each frequency then uses one of the
        three.
        """

    def table(self, stop: int) -> tuple[Tensor, Tensor]:
        """Return cos and sin ``[stop or more, head_dim / 2]`` of all positions from 0."""


class LayersOutput(NamedTuple):
    """Outputs of a decoder's layers, valid until its next pass.

    ``logit_rows``: set if the backend has copied the batch's `logit_rows` to its device.
    ``logits``: set if the pass also computed the output layer. ``tokens``: set if it also sampled
    every row.
    """

    hidden: Tensor  # [T, hidden]: the final norm's output
    logit_rows: Tensor | None = None  # [num_logits] or more; None: use the batch's `logit_rows`
    logits: Tensor | None = None  # [num_logits, vocab] float32
    tokens: PendingTokens | None = None
    taps: Tensor | None = None  # [T, num_taps * hidden]

    # Replaces ``tokens`` if a row has several tokens, or if they are from a `DraftVocab`.
    best: PendingBest | None = None


class RowPasses(Protocol):
    """Passes of one decoder over one KV pool, with one row per segment.

    One call computes a pass and chooses its tokens.
    """

    def best(
        self, segments: Sequence[Segment], rows: Sequence[DraftedRow], num_best: int
    ) -> list[Best]:
        """Compute segments of one row each, and return the best next tokens of each row.

        `Sampler.best` defines the result.

        Raises ValueError for a position without a page.
        """


class ChainedPasses(Protocol):
    """Passes of one decoder over one KV pool, each of which takes tokens from the pass before it.

    The host launches all of them before it reads any result.
    """

    def launch(self, rows: ChainedRows, words: Tensor | None) -> list[PendingBest]:
        """Launch passes and return their results, without waiting for the device.

        ``words``: `PendingBest.words` from which the first pass takes tokens; None: it takes none.
        Fewer passes are launched if one does not suit the backend's graphs: the caller computes
        that pass and all later ones by `CompiledForward`.
        """


class CompiledForward(Protocol):
    """All layers of one decoder in one call, with the same bits as one call per operation."""

    def __call__(
        self,
        token_ids: Tensor,
        plans: Sequence[ForwardPlan],
        wanted: Wanted,
        adapted: Sequence[AdaptedRows] = (),
    ) -> LayersOutput:
        """Compute token ids ``[T]`` and write their KV to the pool.

        ``plans``: one for each part of the pool. ``adapted``: rows that adapters change. Calls
        `Wanted.notify_started`.
        """

    def row_passes(
        self, pool: KVPool, parts: Sequence[tuple[HeadLayout, Sequence[Rope]]]
    ) -> RowPasses | None:
        """Return the decoder's `RowPasses` over a pool, or None if the backend has none.

        ``parts``: head layout and RoPE tables of each part of the pool.
        """

    def chained_passes(
        self, pool: KVPool, parts: Sequence[tuple[HeadLayout, Sequence[Rope]]]
    ) -> ChainedPasses | None:
        """Return the decoder's `ChainedPasses` over a pool, or None if the backend has none."""

    def warm_up(
        self,
        pool: KVPool,
        heads: HeadLayout,
        ropes: tuple[Rope, ...],
        wanted: Wanted = NOTHING_MORE,
    ) -> None:
        """Do the work that the first passes over a pool would wait for; the pool is not written.

        ``wanted``: outputs that those passes will request. It matters whether ``inputs`` and
        ``draws`` are given, but not which numbers they contain.
        """


class Ops(Protocol):
    """The operations of a decoder step. Rows are tokens; ``T`` is their number.

    ``min_rows``: least number of rows of a batch. ``tile_rows``: rows of a tile, for which each
    weight is loaded once. ``batch_device``: device on which a batch's tensors are made; None: the
    device of the weights. ``sampler``: chooses tokens from this backend's logits.
    ``stored_kinds``: kinds of quantised weights that `pack_linear` takes without conversion.
    ``has_own_threads``: whether the backend has its own threads, which sleep while they wait.
    torch's threads would spin and take time from them.
    """

    min_rows: int
    tile_rows: int
    batch_device: str | None
    sampler: Sampler
    stored_kinds: frozenset[WeightKind]
    has_own_threads: bool

    def unsuited(self, heads: HeadLayout) -> str:
        """Return why the backend cannot compute ``heads``, or "" if it can."""

    @property
    def identity(self) -> Mapping[str, str]:
        """Versions and variants of the kernels; other versions may give results with other bits.

        Torch and the machine are not included: `machine_identity` has them.
        """

    def set_threads(self, count: int) -> None:
        """Set the number of threads, calling thread included, for operations of this thread."""

    def compile_forward(self, weights: DecoderWeights) -> CompiledForward | None:
        """Return a forward pass over these weights in one call, or None if the backend has none."""

    def pack_linear(
        self, weight: Tensor | QuantizedWeight, bias: Tensor | None = None, *, plain: bool = False
    ) -> PackedLinear:
        """Lay out a weight ``[out_features, in_features]`` for `linear`.

        ``plain``: leave it unquantised even if this backend quantises.
        """

    def linear(self, x: Tensor, weight: PackedLinear) -> Tensor:
        """Compute ``[T, in_features] -> [T, out_features]``; T is at least `min_rows`."""

    def pack_lora(self, update: LoraUpdate, dtype: torch.dtype) -> PackedLora:
        """Lay out an adapter's update for `add_lora`; ``dtype`` is the activations'."""

    def add_lora(self, out: Tensor, x: Tensor, rows: Tensor, lora: PackedLora) -> None:
        """Add the update of ``rows`` of ``x`` [T, in_features] to ``out`` [T, out_features].

        ``rows`` [n] int64, ascending. A row's bits depend on that row alone.
        """

    def packed_table(self, weight: PackedLinear, dtype: torch.dtype, factor: float) -> PackedTable:
        """Return an embedding table over a weight of `stored_kinds` that `pack_linear` packed.

        Rows are rounded to ``dtype``, multiplied by ``factor`` and rounded again.
        """

    def embedding(self, token_ids: Tensor, table: Table) -> Tensor:
        """Look up token ids ``[T] -> [T, hidden]`` in a table ``[vocab, hidden]``."""

    def norm(self, x: Tensor, norm: Norm) -> Tensor:
        """Return the norm of rows ``[T, hidden]``."""

    def add_norm(
        self, x: Tensor, residual: Tensor, norm: Norm | None, factor: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """Return the norm of ``(x + residual) * factor``, and that product.

        Without a ``norm``, returns the product twice. The sum is rounded before the multiplication.
        """

    def plan(
        self, batch: RaggedBatch, pool: KVPool, heads: HeadLayout, *ropes: Rope
    ) -> ForwardPlan:
        """Prepare a forward pass over ``pool``. `Tables` has indices of ``ropes``."""

    def rope_write(
        self,
        qkv: Tensor,
        layer: int,
        plan: ForwardPlan,
        norm: HeadNorm | None,
        tables: Tables = FIRST_TABLE,
    ) -> Tensor:
        """Norm and rotate queries and keys, and write keys and values to the pool.

        ``qkv`` is ``[T, (num_heads + 2 * num_kv_heads) * head_dim]`` and may be overwritten.
        Returns scaled queries ``[T, num_heads * head_dim]`` for the backend's own `attention`. If
        ``qkv`` has only queries, ``[T, num_heads * head_dim]``, nothing is written to the pool.
        With a `HeadLayout.rank` (latent attention) rows have no values, and ``norm`` is None.
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
        """Compute causal attention over the pages: ``q`` and result are [T, num_heads * head_dim].

        With a `HeadLayout.rank` the result is ``[T, num_heads * rank]``.

        With a ``window`` a row sees itself and the ``window - 1`` positions before it. With a
        ``cap`` scores become ``cap * tanh(scores / cap)`` (Gemma 2, arXiv 2408.00118). ``sinks``
        [num_heads] float32: score of one more key, without a value, that each row sees (gpt-oss,
        arXiv 2508.10925). ``is_mutual``: a row sees the positions up to `RaggedBatch.reaches`, if
        the batch has them; a ``window`` still limits the earlier positions.
        """

    def gate(self, x: Tensor, gate: Tensor) -> Tensor:
        """Return ``x * sigmoid(gate)``, all ``[T, width]``, computed in float32, rounded once."""

    def recur(
        self, mixed: Tensor, gates: Tensor, weights: RecurrentWeights, plan: ForwardPlan
    ) -> Tensor:
        """Compute a recurrent layer and advance the states and logs of the plan's pass.

        ``mixed``: [T, q | k | v | z] in the activations' dtype. ``gates``: [T, rows of
        ``weights.gates``] float32. Returns ``[T, num_value_heads * value_dim]``, the input of
        ``weights.out``. A row's bits depend only on its position and on earlier rows.
        """

    def short_conv(self, mixed: Tensor, weights: ConvWeights, plan: ForwardPlan) -> Tensor:
        """Compute a gated short convolution and advance the states and logs of the plan's pass.

        ``mixed``: [T, b | c | x]. Returns ``[T, channels]``, the input of ``weights.out``, computed
        in float32 and rounded once. A row's bits depend only on the row and on earlier rows.
        """

    def activate(self, x: Tensor, activation: Activation = SILU) -> Tensor:
        """Apply an activation to ``[T, width]``, or a gated one to ``[T, 2 * width]``.

        Returns ``[T, width]``.
        """

    def experts(
        self,
        x: Tensor,
        weights: ExpertWeights,
        plan: ForwardPlan | None = None,
        routed_by: Tensor | None = None,
    ) -> Tensor:
        """Return the sum of the outputs of each row's experts, ``[T, hidden]``.

        ``plan``: the pass that has the rows; padding rows outside its batch may get no experts.
        ``routed_by`` [T, hidden]: input of the router if it is not ``x``.
        """

    def logits(self, hidden: Tensor, weight: PackedLinear, cap: float | None = None) -> Tensor:
        """Compute float32 logits ``[R, hidden] -> [R, vocab]``; R is at least `min_rows`.

        With a ``cap`` they become ``cap * tanh(logits / cap)``.
        """


@runtime_checkable
class RoughOps(Protocol):
    """Operations with 4-bit weights for drafts; the order of their sums is not fixed."""

    def rough_copy(self, weight: PackedLinear, dtype: torch.dtype) -> PackedLinear:
        """Return the weight in 4 bits, for activations of ``dtype``; the bias is shared.

        Raises ValueError for weights of fewer than 8 bits.
        """


def gated(x: Tensor, gate: Tensor) -> Tensor:
    """Return ``x * sigmoid(gate)``, computed by torch in float32 and rounded once."""
    # F.sigmoid rounds the tail of a vector unlike its body; exp and divide do not.
    return (x.float() / torch.exp(-gate.float()).add_(1.0)).to(x.dtype)


def capped(scores: Tensor, cap: float | None) -> Tensor:
    """Return ``cap * tanh(scores / cap)``, computed in place, or ``scores`` if ``cap`` is None."""
    return scores if cap is None else scores.div_(cap).tanh_().mul_(cap)
