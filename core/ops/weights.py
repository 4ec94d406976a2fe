"""Weights of a decoder in a backend's layout, and the shapes of its layers.

The docstrings of the classes define the computations; `Ops` (base.py) performs them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from .mixers.mixer import MixerWeights
    from .parallel import Comm


@dataclass(frozen=True, slots=True, eq=False)
class PackedLinear:
    """A weight ``[out_features, in_features]`` in the backend's own layout, and its bias."""

    weight: Tensor
    bias: Tensor | None
    packed: bool  # whether the layout is the backend's own; else it is a plain matrix

    @property
    def num_weights(self) -> int:
        """Number of weights, padding of the layout included."""
        return self.weight.numel()

    @property
    def num_bytes(self) -> int:
        """Bytes of the weight and its scales."""
        return self.weight.nbytes


@dataclass(frozen=True, slots=True, eq=False)
class PackedTable:
    """An embedding ``[vocab, hidden]`` stored as a packed weight; ``rows`` unpacks rows.

    A row is rounded to ``dtype``, multiplied by ``factor`` and rounded again.
    """

    weight: PackedLinear
    shape: tuple[int, int]
    dtype: torch.dtype
    factor: float
    rows: Callable[[Tensor], Tensor]  # token ids [..] to [.., hidden]

    @property
    def device(self) -> torch.device:
        """Device of the weight."""
        return self.weight.weight.device

    def __len__(self) -> int:
        return self.shape[0]


Table: TypeAlias = Tensor | PackedTable
"""An embedding ``[vocab, hidden]``."""


def table_rows(table: Table, token_ids: Tensor) -> Tensor:
    """Return the embedding's rows ``[.., hidden]`` of token ids ``[..]``."""
    return F.embedding(token_ids, table) if isinstance(table, Tensor) else table.rows(token_ids)


def whole_table(table: Table) -> Tensor:
    """Return an embedding as one tensor ``[vocab, hidden]``."""
    return table if isinstance(table, Tensor) else table.rows(torch.arange(len(table)))


@dataclass(frozen=True, slots=True, eq=False)
class Norm:
    """RMS norm (arXiv 1910.07467), or layer norm (arXiv 1607.06450), of the residual stream.

    A float32 weight is applied before the result is rounded to the activations' dtype.
    """

    weight: Tensor  # [hidden], float32 or the activations' dtype; float32 in a layer norm
    eps: float
    bias: Tensor | None = None  # [hidden] float32, only in a layer norm
    is_layer: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class HeadNorm:
    """RMS norm of queries and keys before RoPE, or after it; ``weight`` has one row per head.

    ``whole``: whether one mean is taken over all query heads of a row and one over all key heads,
    not one per head; only for a norm before RoPE.
    """

    weight: Tensor  # [num_heads + num_kv_heads, head_dim] float32
    eps: float
    whole: bool = False
    is_after_rope: bool = False


class Activation(NamedTuple):
    """Function between the two matrices of an MLP.

    ``gated``: the input is a gate and a factor side by side, and the output ``act(gate) * factor``;
    else the output is ``act(input)``. The clamped kind is gpt-oss's (arXiv 2508.10925):
    ``(factor + 1) * gate * sigmoid(1.702 * gate)``, the gate clamped to at most ``limit`` and the
    factor to ``-limit`` ... ``limit``.
    """

    kind: Literal["silu", "gelu_tanh", "relu2", "clamped_swiglu"] = "silu"
    gated: bool = True
    limit: float = 0.0  # only for the clamped kind


SILU = Activation()


class Tables(NamedTuple):
    """Indices of the plan's RoPE tables for a layer's queries and keys."""

    queries: int = 0
    keys: int = 0


FIRST_TABLE = Tables()


@dataclass(frozen=True, slots=True)
class HeadLayout:
    """Heads in a row of packed QKV: queries, then keys, then values.

    With a ``rank`` (latent attention) there are no separate values: the first ``rank`` items of a
    key are also its value, and RoPE rotates only the other items of keys and queries.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float  # factor of the scores, usually head_dim ** -0.5
    value_eps: float | None = None  # epsilon of each value's RMS norm without weight; None: no norm
    rank: int = 0  # items of a key that are also its value; 0: values are separate

    @property
    def group_size(self) -> int:
        """Query heads that share one KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def num_blocks(self) -> int:
        """Number of blocks per page, layer and KV head."""
        return 1 if self.rank else 2

    @property
    def value_dim(self) -> int:
        """Number of items of a value."""
        return self.rank or self.head_dim

    @property
    def rope_dim(self) -> int:
        """Number of items at the end of a query or key that RoPE rotates."""
        return self.head_dim - self.rank


@dataclass(frozen=True, slots=True, eq=False)
class MlpWeights:
    """An MLP, with gate and up packed into one matrix; without a gate the matrix is up alone.

    ``comm``: present if each rank has a part of the MLP; the ranks' outputs are then summed.
    """

    gate_up: PackedLinear
    down: PackedLinear
    activation: Activation = SILU
    comm: Comm | None = None

    @property
    def linears(self) -> tuple[PackedLinear, ...]:
        """Both matrices."""
        return (self.gate_up, self.down)


class Routing(NamedTuple):
    """Choice of experts by the logits of a router, and their weights.

    A score is a softmax over all experts or a sigmoid. With ``of_chosen`` the experts with the
    ``top_k`` best logits are chosen, and the scores are computed over these experts only. With
    ``num_groups`` above 1, neighbouring experts form groups of equal size, and only the experts of
    the ``kept_groups`` best groups are eligible. A group is ranked by its best score or by the sum
    of its two best (arXiv 2412.19437, section 2.1.2). Weights are the scores of the chosen experts
    times ``factor``, divided by the sum of the chosen scores plus ``renorm`` unless that is None.
    """

    top_k: int
    score: Literal["softmax", "sigmoid"] = "softmax"
    of_chosen: bool = False
    num_groups: int = 1
    kept_groups: int = 1
    groups_by: Literal["best", "best two"] = "best two"
    renorm: float | None = None
    factor: float = 1.0


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class ExpertWeights:
    """A mixture of experts: a router chooses experts for each row, and their outputs are added up.

    ``choice_bias`` is added to the scores for the choice only. ``shared`` is an MLP for all rows;
    the sigmoid of ``shared_gate``, if there is one, multiplies its output. Sums are float32, in the
    order of a row's choices, best first, then the shared MLP. ``comm``: present if each rank has a
    part of each expert, or the experts from number ``first``. The sum over the ranks comes last.
    """

    router: PackedLinear  # [num_experts, hidden], not quantised
    routing: Routing
    experts: tuple[MlpWeights, ...]  # all of one shape
    choice_bias: Tensor | None = None  # [num_experts] float32
    factors: Tensor | None = None  # [num_experts] float32, multiply the experts' outputs
    shared: MlpWeights | None = None
    shared_gate: PackedLinear | None = None  # [1, hidden], not quantised
    comm: Comm | None = None
    first: int = 0

    @property
    def linears(self) -> tuple[PackedLinear, ...]:
        """Every packed matrix that may be quantised."""
        mlps = self.experts if self.shared is None else (*self.experts, self.shared)
        return tuple(weight for mlp in mlps for weight in mlp.linears)


@dataclass(frozen=True, slots=True, eq=False)
class ParallelExperts:
    """A mixture of experts in a layer that also has an MLP (Gemma 4).

    MLP and experts read the residual stream, each through its own norm. Their outputs are normed
    separately and added up.
    """

    experts: ExpertWeights
    norm: Norm  # norm of the experts' input
    router_norm: Norm  # norm of the router's input
    out_norm: Norm
    mlp_out_norm: Norm


@dataclass(frozen=True, slots=True, eq=False)
class TokenInputWeights:
    """Weights that add a layer's per-token input to the stream after the MLP (Gemma 4).

    ``gate`` is applied to the stream. The activation of its output is multiplied by the per-token
    input, and ``out`` is applied to the product.
    """

    gate: PackedLinear  # [width, hidden]
    activation: Activation
    out: PackedLinear  # [hidden, width]
    out_norm: Norm


@dataclass(frozen=True, slots=True, eq=False)
class TokenInputs:
    """Weights that compute the per-token inputs of all layers, ``[T, num_layers * width]``.

    Each layer's part of a projection of the embedding is normed, added to the token's row of a
    second table, and multiplied by ``factor``.
    """

    table: Tensor  # [vocab, num_layers * width]
    projection: PackedLinear  # [num_layers * width, hidden]
    norm: Norm  # [width]
    factor: float


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Gemma4Extras:
    """Parts of a Gemma 4 layer that a Llama layer lacks; gemma4.py computes them.

    ``out_norm``: norm of the sum of MLP and experts, in place of `LayerWeights.mlp_out_norm`.
    """

    out_norm: Norm
    experts: ParallelExperts | None = None
    token_input: TokenInputWeights | None = None

    @property
    def linears(self) -> tuple[PackedLinear, ...]:
        """Every packed matrix that may be quantised."""
        experts = () if self.experts is None else self.experts.experts.linears
        added = () if self.token_input is None else (self.token_input.gate, self.token_input.out)
        return (*experts, *added)


@dataclass(frozen=True, slots=True, eq=False)
class LayerWeights:
    """One layer: a mixer of a sequence's rows, then an MLP, with optional parts.

    If ``mixer_norm`` or ``mlp_norm`` is None, the mixer or the MLP reads the residual stream
    itself. ``mixer_out_norm`` and ``mlp_out_norm`` norm an output before it is added to the stream.
    ``is_parallel``: the MLP has the mixer's input. A layer may have only a mixer or only an MLP; an
    MLP alone reads the stream through ``mixer_norm``. ``second_mixer`` has the mixer's input, and
    both outputs are added up. ``factors`` multiply the stream after the mixer and after the MLP.
    ``norms_stream``: the output of each norm of the stream replaces the stream.
    """

    mixer_norm: Norm | None
    mixer: MixerWeights | None
    mlp_norm: Norm | None
    mlp: MlpWeights | ExpertWeights | None
    mixer_out_norm: Norm | None = None
    mlp_out_norm: Norm | None = None
    is_parallel: bool = False
    extras: Gemma4Extras | None = None
    second_mixer: MixerWeights | None = None
    factors: tuple[float, float] = (1.0, 1.0)
    norms_stream: bool = False

    @property
    def mixers(self) -> tuple[MixerWeights, ...]:
        """All mixers of the layer, attention first."""
        return tuple(each for each in (self.mixer, self.second_mixer) if each is not None)

    @property
    def part(self) -> int:
        """Index in `KVPool.parts`, and in a pass's plans, that the layer uses."""
        kv = None if self.mixer is None else self.mixer.kv_layer
        return 0 if kv is None else kv.part

    @property
    def linears(self) -> tuple[PackedLinear, ...]:
        """Every packed matrix of the layer that may be quantised."""
        parts = (*self.mixers, self.mlp, self.extras)
        return tuple(each for part in parts if part is not None for each in part.linears)


@dataclass(frozen=True, slots=True, eq=False)
class JoinedInputs:
    """Norms for a decoder that reads a token embedding and an input vector for each row.

    The first layer's mixer reads the normed embedding and the normed vector side by side. The
    residual stream begins with the vector or, if ``norms_residual``, with its norm (EAGLE-3,
    arXiv 2503.01840).
    """

    embedding_norm: Norm
    given_norm: Norm
    norms_residual: bool


@dataclass(frozen=True, slots=True, eq=False)
class DecoderWeights:
    """All weights of a decoder, in the layout of the `Ops` that will use them.

    ``joined``: present if every row has both a token and a vector (`Wanted.inputs`).
    """

    embedding: Table  # [vocab, hidden]
    layers: tuple[LayerWeights, ...]
    final_norm: Norm
    lm_head: PackedLinear
    token_inputs: TokenInputs | None = None
    logit_cap: float | None = None
    joined: JoinedInputs | None = None
