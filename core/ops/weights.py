"""Weights of a decoder as backends lay them out, and the shapes of its layers.

They say what is computed; `Ops` (base.py) computes it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from .kv_pool import KvPlace
from .state_pool import StateShape

if TYPE_CHECKING:
    from .parallel import Comm


@dataclass(frozen=True, slots=True, eq=False)
class PackedLinear:
    """A weight ``[out_features, in_features]`` in the backend's own layout, and its bias."""

    weight: Tensor
    bias: Tensor | None
    packed: bool  # whether the layout is the backend's rather than plain

    @property
    def num_weights(self) -> int:
        """Weights, those included that fill up the layout."""
        return self.weight.numel()

    @property
    def num_bytes(self) -> int:
        """Bytes of the weight, with its scales."""
        return self.weight.nbytes


@dataclass(frozen=True, slots=True, eq=False)
class PackedTable:
    """An embedding ``[vocab, hidden]`` that is a packed weight; ``rows`` unpacks some of it.

    A row is rounded to ``dtype``, multiplied by ``factor`` and rounded again.
    """

    weight: PackedLinear
    shape: tuple[int, int]
    dtype: torch.dtype
    factor: float
    rows: Callable[[Tensor], Tensor]  # token ids [..] to [.., hidden]

    @property
    def device(self) -> torch.device:
        """The device that has the weight."""
        return self.weight.weight.device

    def __len__(self) -> int:
        return self.shape[0]


Table: TypeAlias = Tensor | PackedTable
"""An embedding ``[vocab, hidden]``."""


def table_rows(table: Table, token_ids: Tensor) -> Tensor:
    """Look token ids ``[..]`` up in an embedding, ``[.., hidden]``."""
    return F.embedding(token_ids, table) if isinstance(table, Tensor) else table.rows(token_ids)


def whole_table(table: Table) -> Tensor:
    """Return an embedding as one tensor ``[vocab, hidden]``."""
    return table if isinstance(table, Tensor) else table.rows(torch.arange(len(table)))


@dataclass(frozen=True, slots=True, eq=False)
class Norm:
    """RMS norm (arXiv 1910.07467), or layer norm (arXiv 1607.06450), of the residual stream.

    A weight in float32 is multiplied before the result is rounded to the dtype of the activations.
    """

    weight: Tensor  # [hidden], of the activations' dtype or float32; of a layer norm float32
    eps: float
    bias: Tensor | None = None  # [hidden] float32, of a layer norm
    is_layer: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class HeadNorm:
    """RMS norm of queries and keys before RoPE, or behind it; ``weight`` is one row per head.

    ``whole``: the mean is taken over all query heads of a row together, and over all key heads;
    before RoPE alone.
    """

    weight: Tensor  # [num_heads + num_kv_heads, head_dim] float32
    eps: float
    whole: bool = False
    is_behind: bool = False


class Activation(NamedTuple):
    """Function between the two matrices of an MLP.

    ``gated``: the input is a gate and a factor side by side, the output ``act(gate) * factor``;
    else the output is ``act(input)``. The clamped kind is gpt-oss's (arXiv 2508.10925):
    ``(factor + 1) * gate * sigmoid(1.702 * gate)`` of a gate of at most ``limit`` and a factor from
    ``-limit`` to ``limit``.
    """

    kind: Literal["silu", "gelu_tanh", "relu2", "clamped_swiglu"] = "silu"
    gated: bool = True
    limit: float = 0.0  # of the clamped kind


SILU = Activation()


class Tables(NamedTuple):
    """Indices of the plan's RoPE tables that turn a layer's queries and keys."""

    queries: int = 0
    keys: int = 0


FIRST_TABLE = Tables()


@dataclass(frozen=True, slots=True)
class HeadLayout:
    """Heads in a row of packed QKV: queries, then keys, then values.

    With a ``rank`` (latent attention) there are no values of their own: a key's first items are its
    value, too, and RoPE turns the others alone, of queries likewise.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float  # of the scores, usually head_dim ** -0.5
    value_eps: float | None = None  # of an RMS norm of each value, without a weight; None: no norm
    rank: int = 0  # items of a key that are its value; 0: values have rows of their own

    @property
    def group_size(self) -> int:
        """Query heads that share one KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def num_blocks(self) -> int:
        """Blocks of a page, layer and KV head."""
        return 1 if self.rank else 2

    @property
    def value_dim(self) -> int:
        """Items of a value."""
        return self.rank or self.head_dim

    @property
    def turned_dim(self) -> int:
        """Items of a query or key that RoPE's tables are of, the last ones."""
        return self.head_dim - self.rank


@dataclass(frozen=True, slots=True, eq=False)
class MlpWeights:
    """An MLP, with gate and up packed into one matrix; without a gate, that is up alone.

    ``comm``: of an MLP of which each rank has a part; ``down`` then gives a summand.
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

    A score is a softmax over all experts or a sigmoid; with ``of_chosen`` the ``top_k`` best logits
    are chosen, and scored among themselves. With ``num_groups`` above 1 experts are in so many
    groups of neighbours, and only the ``kept_groups`` best ones are chosen from: those whose best
    score, or whose two best ones together, are the highest (arXiv 2412.19437, section 2.1.2).
    Weights are the scores of the chosen, divided by their sum and ``renorm`` unless that is None,
    times ``factor``.
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
    """A mixture of experts: each row's are chosen by a router, their outputs added up.

    ``choice_bias`` is added to the scores in choosing alone. ``shared`` is an MLP of all rows,
    whose output a sigmoid of ``shared_gate`` weighs, if there is one. Sums are float32, in the
    order in which a row's experts were chosen, best first, then what is shared. ``comm``: of
    experts of which each rank has a part, or some of them: those from number ``first`` on. The sum
    over the ranks comes last.
    """

    router: PackedLinear  # [num_experts, hidden], not quantised
    routing: Routing
    experts: tuple[MlpWeights, ...]  # all of one shape
    choice_bias: Tensor | None = None  # [num_experts] float32
    factors: Tensor | None = None  # [num_experts] float32, of the output of each
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
class ExpertsBeside:
    """A mixture of experts beside an MLP; both read the stream, each by a norm of its own.

    The outputs of MLP and experts are added up, each behind its norm (Gemma 4).
    """

    experts: ExpertWeights
    norm: Norm  # of what the experts read
    router_norm: Norm  # of what the router reads
    out_norm: Norm
    mlp_out_norm: Norm


@dataclass(frozen=True, slots=True, eq=False)
class TokenInputWeights:
    """Weights that add a layer's input of each token to the stream, behind its MLP (Gemma 4).

    A gate that reads the stream is activated, times the input, and goes through ``out``.
    """

    gate: PackedLinear  # [width, hidden]
    activation: Activation
    out: PackedLinear  # [hidden, width]
    out_norm: Norm


@dataclass(frozen=True, slots=True, eq=False)
class TokenInputs:
    """Makes the inputs of all layers of a token: ``[T, num_layers * width]``.

    The norm of each layer's part of a projection of the embedding, plus a row of a second table,
    times ``factor``.
    """

    table: Tensor  # [vocab, num_layers * width]
    projection: PackedLinear  # [num_layers * width, hidden]
    norm: Norm  # [width]
    factor: float


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Gemma4Extras:
    """Parts of a Gemma 4 layer besides Llama's; gemma4.py computes them.

    ``out_norm``: of the sum of MLP and experts, in place of `LayerWeights.mlp_out_norm`.
    """

    out_norm: Norm
    factor: float  # of the residual stream behind the layer
    beside: ExpertsBeside | None = None
    token_input: TokenInputWeights | None = None

    @property
    def linears(self) -> tuple[PackedLinear, ...]:
        """Every packed matrix that may be quantised."""
        beside = () if self.beside is None else self.beside.experts.linears
        added = () if self.token_input is None else (self.token_input.gate, self.token_input.out)
        return (*beside, *added)


@dataclass(frozen=True, slots=True, eq=False)
class AttentionWeights:
    """Attention over the pages, with Q, K and V packed into one matrix.

    A layer without keys of its own (``has_keys``) reads the keys and values of an earlier one: it
    has queries alone in ``qkv``, and that layer's ``place``. With a ``gate`` rows of ``qkv`` are
    queries, keys, values and the gate, whose sigmoid weighs what was attended to before ``o``
    (Qwen3-Next). ``comm``: of heads that are shared out among ranks; ``o`` then gives a summand.
    """

    qkv: PackedLinear
    head_norm: HeadNorm | None
    o: PackedLinear
    window: int | None  # positions that a row sees, itself included; None: all before it
    place: KvPlace  # of its keys and values
    tables: Tables = FIRST_TABLE
    cap: float | None = None  # of the scores
    sinks: Tensor | None = None  # [num_heads] float32: scores of a key without a value
    gate: int = 0  # width of the gate: that of the queries; 0: there is none
    has_keys: bool = True
    comm: Comm | None = None
    is_mutual: bool = False  # rows of an image see each other

    @property
    def linears(self) -> tuple[PackedLinear, ...]:
        """Both matrices."""
        return (self.qkv, self.o)


class LatentShape(NamedTuple):
    """Sizes of latent attention. Of a head's query ``nope_dim`` items meet the latent."""

    q_rank: int  # of what queries are made of; 0: they are made of the stream
    rank: int  # of the latent: what is kept of a position besides ``rope_dim`` items
    nope_dim: int
    rope_dim: int  # items of a query and of the key that RoPE turns
    value_dim: int

    @property
    def query_dim(self) -> int:
        """Items of a head's query before it meets the latent."""
        return self.nope_dim + self.rope_dim

    @property
    def key_dim(self) -> int:
        """Items that are kept of a position."""
        return self.rank + self.rope_dim


@dataclass(frozen=True, slots=True, eq=False)
class LatentWeights:
    """Multi-head latent attention (arXiv 2405.04434, section 2.1), absorbed.

    A position keeps one row for all heads: its latent, and a key that RoPE has turned. A head's
    matrix of keys takes its query to the latent's dimensions, and its matrix of values takes what
    it read of the latents to its output; so no key or value of a head is ever made.
    """

    down: PackedLinear  # rows: what queries are made of, the latent, the key that RoPE turns
    q_norm: Norm | None  # None: ``down`` makes the queries themselves
    q_up: PackedLinear | None  # [num_heads * query_dim, q_rank]
    kv_norm: Norm  # of the latent
    keys: tuple[PackedLinear, ...]  # of each head, [rank, nope_dim]
    values: tuple[PackedLinear, ...]  # of each head, [value_dim, rank]
    o: PackedLinear
    place: KvPlace  # of its latents
    shape: LatentShape
    tables: Tables = FIRST_TABLE

    @property
    def linears(self) -> tuple[PackedLinear, ...]:
        """Every packed matrix that may be quantised."""
        up = () if self.q_up is None else (self.q_up,)
        return (self.down, *up, *self.keys, *self.values, self.o)


class RecurrentShape(NamedTuple):
    """Heads of a layer with a recurrent state, and the taps of its convolution.

    Value head j reads key head ``j // (num_value_heads // num_key_heads)``; where heads are tiled
    (as GGUF files have them), key head ``j % num_key_heads``. Of Mamba-2 a key head is a group,
    its queries and keys are C and B, and values are x.
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int  # of a head
    value_dim: int
    conv_len: int  # taps, the row itself included
    is_tiled: bool = False

    @property
    def conv_channels(self) -> int:
        """Queries, keys and values of a row, which the convolution reads."""
        return 2 * self.num_key_heads * self.key_dim + self.value_width

    @property
    def value_width(self) -> int:
        """Values of a row."""
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


@dataclass(frozen=True, slots=True, eq=False)
class DeltaWeights:
    """The gated delta rule (arXiv 2412.06464) behind a short convolution, as Qwen3-Next has it.

    Of a row: q, k and v of ``in_proj`` go through the convolution and silu; q and k are divided by
    their length, q by the root of ``key_dim`` besides. ``log decay = decay * softplus(a +
    dt_bias)`` and ``beta = most_beta * sigmoid(b)`` of each value head. What is read of the state
    goes through an RMS norm of each head, is multiplied by ``silu(z)``, and goes through ``out``.
    """

    in_proj: PackedLinear  # rows: q, k, v, z
    gates: PackedLinear  # rows: b, a; not quantised
    conv: Tensor  # [conv_channels, conv_len] float32, the last tap is the row's own
    decay: Tensor  # [num_value_heads] float32, below 0: -exp(A_log)
    dt_bias: Tensor  # [num_value_heads] float32
    norm: Tensor  # [value_dim] float32
    norm_eps: float
    out: PackedLinear
    shape: RecurrentShape
    layer: int  # of the pass's `StatePool`
    most_beta: float = 1.0

    @property
    def linears(self) -> tuple[PackedLinear, ...]:
        """Every packed matrix that may be quantised."""
        return (self.in_proj, self.out)


@dataclass(frozen=True, slots=True, eq=False)
class Mamba2Weights:
    """Mamba-2 (arXiv 2405.21060) behind a short convolution.

    Of a row: C, B and x of ``in_proj`` go through the convolution and silu. ``dt = softplus(gate +
    dt_bias)`` and ``log decay = decay * dt`` of each head, whose state gets ``B (dt x)^T``. What C
    reads of it, plus ``skip * x``, is multiplied by ``silu(z)``, goes through an RMS norm of each
    of ``num_norms`` equal parts of the row, if there is a norm, and through ``out``.
    """

    in_proj: PackedLinear  # rows: C, B, x, z
    gates: PackedLinear  # rows: one of each head; not quantised
    conv: Tensor  # [conv_channels, conv_len] float32, the last tap is the row's own
    conv_bias: Tensor | None  # [conv_channels] float32
    decay: Tensor  # [num_value_heads] float32, below 0: -exp(A_log)
    dt_bias: Tensor  # [num_value_heads] float32
    skip: Tensor  # [num_value_heads] float32
    norm: Tensor | None  # [num_value_heads * value_dim] float32
    norm_eps: float
    num_norms: int
    out: PackedLinear
    shape: RecurrentShape
    layer: int  # of the pass's `StatePool`

    @property
    def linears(self) -> tuple[PackedLinear, ...]:
        """Every packed matrix that may be quantised."""
        return (self.in_proj, self.out)


class ConvShape(NamedTuple):
    """A layer of a short convolution: its channels, and its taps, the row itself included."""

    channels: int
    conv_len: int

    @property
    def state(self) -> StateShape:
        """Shape of a sequence's state in this layer: the last inputs of the convolution alone."""
        return StateShape(0, 0, 0, self.channels, self.conv_len)


@dataclass(frozen=True, slots=True, eq=False)
class ConvWeights:
    """A gated short convolution, as LFM2 has it (arXiv 2511.23404).

    A row of ``in_proj`` is b, c and x. The convolution reads ``b * x`` of a row and of those before
    it, each rounded to the activations' dtype; its sums times c go through ``out``.
    """

    in_proj: PackedLinear  # rows: b, c, x
    conv: Tensor  # [channels, conv_len] float32, the last tap is the row's own
    bias: Tensor | None  # [channels] float32, of the convolution
    out: PackedLinear
    layer: int  # of the pass's `StatePool`

    @property
    def shape(self) -> ConvShape:
        """Channels and taps."""
        return ConvShape(*self.conv.shape)

    @property
    def linears(self) -> tuple[PackedLinear, ...]:
        """Both matrices."""
        return (self.in_proj, self.out)


RecurrentWeights: TypeAlias = DeltaWeights | Mamba2Weights


MixerWeights: TypeAlias = AttentionWeights | LatentWeights | RecurrentWeights | ConvWeights


@dataclass(frozen=True, slots=True, eq=False)
class LayerWeights:
    """One layer: what mixes rows of a sequence, then an MLP, and its declared differences.

    Without a norm before the mixer or the MLP, these read the residual stream itself. The norms of
    what the mixer and the MLP add to the stream stand before the sum. ``is_parallel``: the MLP
    reads what the mixer reads. A layer may have a mixer or an MLP alone; the MLP then reads what
    the mixer would. ``beside``: reads what attention reads; both outputs are added up.
    """

    mixer_norm: Norm | None
    mixer: MixerWeights | None
    mlp_norm: Norm | None
    mlp: MlpWeights | ExpertWeights | None
    mixer_out_norm: Norm | None = None
    mlp_out_norm: Norm | None = None
    is_parallel: bool = False
    extras: Gemma4Extras | None = None
    beside: RecurrentWeights | None = None

    @property
    def mixers(self) -> tuple[MixerWeights, ...]:
        """The parts that mix rows of a sequence, attention first."""
        return tuple(each for each in (self.mixer, self.beside) if each is not None)

    @property
    def part(self) -> int:
        """Part of the pool, and so the plan, that the layer's operations read."""
        mixer = self.mixer
        return mixer.place.part if isinstance(mixer, AttentionWeights | LatentWeights) else 0

    @property
    def linears(self) -> tuple[PackedLinear, ...]:
        """Every packed matrix of the layer that may be quantised."""
        parts = (*self.mixers, self.mlp, self.extras)
        return tuple(each for part in parts if part is not None for each in part.linears)


@dataclass(frozen=True, slots=True, eq=False)
class JoinedInputs:
    """Makes rows of the embedding of their token and the vector that they are given, each normed.

    The first layer's mixer reads both side by side; the residual stream begins with the given one,
    or with its norm (EAGLE-3, arXiv 2503.01840).
    """

    embedding_norm: Norm
    given_norm: Norm
    norms_residual: bool


@dataclass(frozen=True, slots=True, eq=False)
class DecoderWeights:
    """All weights, in the layout of the ops that will use them.

    ``joined``: of layers whose rows all have both a token and a vector (`Wanted.inputs`).
    """

    embedding: Table  # [vocab, hidden]
    layers: tuple[LayerWeights, ...]
    final_norm: Norm
    lm_head: PackedLinear
    token_inputs: TokenInputs | None = None
    logit_cap: float | None = None
    joined: JoinedInputs | None = None
