"""DecoderConfig: what makes one decoder differ from another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from ...ops.state_pool import StateShape
from ...ops.weights import (
    SILU,
    Activation,
    ConvShape,
    HeadLayout,
    LatentShape,
    RecurrentShape,
    Routing,
)
from .fold import NO_FOLD, Fold
from .rope import RopeSpec

DtypeName: TypeAlias = Literal["float32", "bfloat16", "float16"]
HeadNormKind: TypeAlias = Literal["none", "each", "whole"]


class MlpNames(NamedTuple):
    """The matrices of an MLP, as the tensors name them; an MLP without a gate has none."""

    gate: str | None = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


LLAMA_MLP = MlpNames()


class ExpertNames(NamedTuple):
    """Tensors of a mixture of experts, as they are named behind a layer's prefix.

    ``expert`` is the prefix of one, by its number. ``stacked``: all experts are in one tensor of
    each kind: "gpt-oss" transposed, with biases, a row of the gate before each of the factor;
    "rows" the rows of the gate, then those of the factor; "columns" these transposed. ``factors``:
    of the output of each.
    """

    router: str = "mlp.gate"
    expert: str = "mlp.experts.{}."
    mlp: MlpNames = LLAMA_MLP
    choice_bias: str | None = None
    shared: str = "mlp.shared_experts."
    shared_mlp: MlpNames = LLAMA_MLP
    shared_gate: str | None = None
    stacked: Literal["none", "gpt-oss", "rows", "columns"] = "none"
    factors: str | None = None


class BesideNames(NamedTuple):
    """Norms of experts that are beside an MLP, as the tensors name them; ``router_norm`` has no
    ending, and is multiplied by hidden_size ** -0.5.
    """

    norm: str = "pre_feedforward_layernorm_2"
    router_norm: str = "router.scale"
    out_norm: str = "post_feedforward_layernorm_2"
    mlp_out_norm: str = "post_feedforward_layernorm_1"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsSpec:
    """A mixture of experts in the place of an MLP, or beside it; widths are the experts'."""

    count: int
    width: int
    routing: Routing
    names: ExpertNames = ExpertNames()  # noqa: RUF009 - immutable
    activation: Activation = SILU
    router_bias: bool = False
    shared_width: int = 0  # of the MLP that all rows have besides; 0: there is none
    beside: BesideNames | None = None  # None: in the place of the MLP
    held: tuple[int, int] | None = None  # numbers that a rank has, from and to; None: all

    @property
    def numbers(self) -> range:
        """The numbers of the experts that are here."""
        return range(*(self.held or (0, self.count)))


class DeltaSpec(NamedTuple):
    """A gated delta rule in the place of attention (arXiv 2412.06464).

    ``matrices``: of the files for queries, keys, values and z: "qkvz" has all of them, key head by
    key head; "qkv" has queries, then keys, then values. ``fused_ba``: one matrix has b and a, key
    head by key head. ``conv_rows``: of the three tensors that hold the channels of queries, keys
    and values one behind the other; () is one tensor. ``most_beta``: what the sigmoid of b is
    multiplied by. ``norm_eps``: None: the model's.
    """

    shape: RecurrentShape
    matrices: tuple[str, ...] = ("qkv", "z")
    fused_ba: bool = False
    conv_rows: tuple[int, ...] = ()
    most_beta: float = 1.0
    norm_eps: float | None = None


class Mamba2Spec(NamedTuple):
    """Mamba-2 in the place of attention (arXiv 2405.21060).

    ``num_norms``: equal parts of a row of its output, each of which has an RMS norm of its own; 0:
    there is no norm. ``factors``: of the matrix's rows for z, x, B, C and dt.
    """

    shape: RecurrentShape
    num_norms: int = 1
    has_conv_bias: bool = True
    has_bias: bool = False  # of its matrices
    factors: tuple[float, float, float, float, float] | None = None


class ConvSpec(NamedTuple):
    """A gated short convolution in the place of attention (arXiv 2511.23404).

    ``has_bias``: of both matrices and of the convolution.
    """

    shape: ConvShape
    has_bias: bool = False


MixerSpec: TypeAlias = DeltaSpec | Mamba2Spec | ConvSpec


class NormNames(NamedTuple):
    """Tensor names of a layer's norms of the residual stream; None: there is no such norm."""

    attention: str | None = "input_layernorm"
    attention_out: str | None = None  # of what attention adds to the stream
    mlp: str | None = "post_attention_layernorm"
    mlp_out: str | None = None


LLAMA_NORMS = NormNames()


class HeadSpec(NamedTuple):
    """The heads of a layer."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """Parts of one layer that may differ from other layers'.

    ``keys_as_values``: there is no matrix of values, which are keys before norm and RoPE.
    ``kv_of``: the earlier layer whose keys and values this one reads in place of its own.
    ``mixer``: a layer with a recurrent state keeps no keys and values; None: attention. With
    ``beside_attention`` it has both, which read the same, and whose outputs are added up.
    ``parts``: a layer may be a mixer alone or an MLP alone, with one norm, `NormNames.attention`.
    """

    window: int | None = None  # positions that a row sees, itself included; None: all before it
    rope: RopeSpec | None = None  # None: that of the model
    experts: ExpertsSpec | None = None
    width: int | None = None  # of the MLP; None: that of the model
    kv_of: int | None = None
    heads: HeadSpec | None = None  # None: those of the model
    keys_as_values: bool = False
    mixer: MixerSpec | None = None
    beside_attention: bool = False
    is_mutual: bool = False  # rows of an image see each other
    norms: NormNames | None = None  # None: those of the model
    parts: Literal["both", "mixer", "mlp"] = "both"

    @property
    def has_attention(self) -> bool:
        """Whether it reads keys and values."""
        return (self.mixer is None or self.beside_attention) and self.parts != "mlp"


class MtpNames(NamedTuple):
    """Tensors of a layer that predicts one token more than the model does, as they are named.

    ``layer`` is the prefix of its own parts, which are those of the model's last layer;
    ``projection`` has no ending. ``{}``: the number of the layer behind the model's last.
    """

    layer: str = "model.layers.{}."
    embedding_norm: str = "model.layers.{}.enorm.weight"
    hidden_norm: str = "model.layers.{}.hnorm.weight"
    projection: str = "model.layers.{}.eh_proj"
    final_norm: str = "model.layers.{}.shared_head.norm.weight"


BEHIND_THE_LAST = MtpNames()  # GLM-4.5, DeepSeek V3
BESIDE_THE_MODEL = MtpNames(  # Qwen3-Next and Qwen3.5
    layer="mtp.layers.0.",
    embedding_norm="mtp.pre_fc_norm_embedding.weight",
    hidden_norm="mtp.pre_fc_norm_hidden.weight",
    projection="mtp.fc",
    final_norm="mtp.norm.weight",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """Shape and declared differences of a decoder. Lengths and windows are in tokens."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    rope: RopeSpec
    max_model_len: int
    layers: tuple[LayerSpec, ...]  # [num_layers]
    dtype: DtypeName = "float32"  # what config.json names; the tensors' own dtype wins
    eos_token_ids: tuple[int, ...] = ()
    tie_embeddings: bool = False
    norms: NormNames = LLAMA_NORMS
    layer_norm: Literal["none", "plain", "bias"] = "none"  # in place of RMS norms
    is_parallel: bool = False  # the MLP reads what attention reads
    head_norm: HeadNormKind = "none"  # of queries and keys: each head, or all of a kind together
    head_norm_names: tuple[str, str] = ("q_norm", "k_norm")
    norms_behind_rope: bool = False  # the heads
    norms_values: bool = False  # each head's, without a weight
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    mlp_names: MlpNames = LLAMA_MLP
    activation: Activation = SILU
    attention_scale: float | None = None  # of the scores; None: head_dim ** -0.5
    attention_cap: float | None = None  # of the scores
    logit_cap: float | None = None
    has_sinks: bool = False  # in attention, a score of each head without a value
    # The matrix of queries has for each head a gate of what it attends to behind its query.
    has_gate: bool = False
    token_input_size: int = 0  # of what each layer is given of a token besides the stream; 0: none
    layer_factor: str | None = None  # the tensor of what the stream behind a layer is multiplied by
    is_nested: bool = False  # the text model of a checkpoint that holds other models, too
    # One key a position for all heads, whose first items are its value: `num_kv_heads` is 1, and
    # `head_dim` the key's.
    latent: LatentShape | None = None
    # The files hold what makes keys and values of latents apart, by head, that of keys transposed.
    has_split_latents: bool = False
    mtp: MtpNames | None = None  # of a layer that checkpoints may have besides; None: unknown
    fold: Fold = NO_FOLD
    # Pairs: a part of a tensor's name as checkpoints have it, and as `tensor_shapes` does.
    stored_names: tuple[tuple[str, str], ...] = ()

    def heads_of(self, layer: int) -> HeadSpec:
        """The heads of a layer."""
        return self.layers[layer].heads or HeadSpec(
            self.num_heads, self.num_kv_heads, self.head_dim
        )

    @property
    def states(self) -> tuple[StateShape, ...]:
        """The shapes of the recurrent states, in the order of the layers that have one."""
        return tuple(layer.mixer.shape.state for layer in self.layers if layer.mixer is not None)

    def state_of(self, layer: int) -> int:
        """The place of a layer's state in `states`."""
        return sum(each.mixer is not None for each in self.layers[:layer])

    @property
    def head_layouts(self) -> tuple[HeadLayout, ...]:
        """Heads in a row of each layer's packed QKV, [num_layers].

        What it is for layers without attention means nothing.
        """
        found = (self.heads_of(layer) for layer in range(self.num_layers))
        eps = self.norm_eps if self.norms_values else None
        rank = 0 if self.latent is None else self.latent.rank
        return tuple(
            HeadLayout(*heads, self.attention_scale or heads.head_dim**-0.5, eps, rank)
            for heads in found
        )

    @property
    def ropes(self) -> tuple[RopeSpec, ...]:
        """RoPE of each layer."""
        return tuple(layer.rope or self.rope for layer in self.layers)
