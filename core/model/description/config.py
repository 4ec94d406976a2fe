"""DecoderConfig: the properties in which decoders differ."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from ...ops.mixers.conv import ConvShape
from ...ops.mixers.latent import LatentShape
from ...ops.mixers.recurrent import RecurrentShape
from ...ops.state_pool import StateShape
from ...ops.weights import SILU, Activation, HeadLayout, Routing
from .fold import NO_FOLD, Fold
from .rope import RopeSpec

DtypeName: TypeAlias = Literal["float32", "bfloat16", "float16"]
HeadNormKind: TypeAlias = Literal["none", "each", "whole"]


class MlpNames(NamedTuple):
    """Tensor names of an MLP's matrices; ``gate`` is None for an MLP without a gate."""

    gate: str | None = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


LLAMA_MLP = MlpNames()


class ExpertNames(NamedTuple):
    """Tensor names of a mixture of experts, relative to the layer's prefix.

    ``expert``: prefix of one expert; ``{}`` stands for its number. ``stacked``: layout of the
    tensors that hold all experts. "rows" has the rows of the gate, then the rows of up; "columns"
    is its transpose; "gpt-oss" is transposed, has biases, and alternates rows of gate and up.
    ``factors``: name of the tensor with a factor for each expert's output.
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
    """Tensor names of the norms of experts that run beside an MLP, relative to the layer's prefix.

    ``router_norm`` includes the ending, and its weight is multiplied by hidden_size ** -0.5.
    """

    norm: str = "pre_feedforward_layernorm_2"
    router_norm: str = "router.scale"
    out_norm: str = "post_feedforward_layernorm_2"
    mlp_out_norm: str = "post_feedforward_layernorm_1"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsSpec:
    """A mixture of experts that replaces an MLP or runs beside it.

    ``width`` is the inner width of one expert.
    """

    count: int
    width: int
    routing: Routing
    names: ExpertNames = ExpertNames()  # noqa: RUF009 - immutable
    activation: Activation = SILU
    router_bias: bool = False
    shared_width: int = 0  # width of the expert shared by all rows; 0: no shared expert
    beside: BesideNames | None = None  # None: the experts replace the MLP
    held: tuple[int, int] | None = None  # range [start, stop) of experts on this rank; None: all

    @property
    def numbers(self) -> range:
        """Numbers of the experts on this rank."""
        return range(*(self.held or (0, self.count)))


class DeltaSpec(NamedTuple):
    """A gated delta rule in place of attention (arXiv 2412.06464).

    ``matrices``: the stored matrices of queries, keys, values and z: "qkvz" has all four, grouped
    by key head; "qkv" has queries, then keys, then values. ``fused_ba``: one matrix has b and a,
    grouped by key head. ``conv_rows``: channels in each of three tensors that together hold the
    convolution of queries, keys and values; () for a single tensor. ``most_beta``: factor on the
    sigmoid of b. ``norm_eps``: epsilon of the norm; None: the model's.
    """

    shape: RecurrentShape
    matrices: tuple[str, ...] = ("qkv", "z")
    fused_ba: bool = False
    conv_rows: tuple[int, ...] = ()
    most_beta: float = 1.0
    norm_eps: float | None = None


class Mamba2Spec(NamedTuple):
    """Mamba-2 in place of attention (arXiv 2405.21060).

    ``num_norms``: number of equal parts of an output row, each with its own RMS norm; 0: no norm.
    ``factors``: factors on the rows of the input matrix for z, x, B, C and dt.
    """

    shape: RecurrentShape
    num_norms: int = 1
    has_conv_bias: bool = True
    has_bias: bool = False  # whether its matrices have biases
    factors: tuple[float, float, float, float, float] | None = None


class ConvSpec(NamedTuple):
    """A gated short convolution in place of attention (arXiv 2511.23404).

    ``has_bias``: whether both matrices and the convolution have biases.
    """

    shape: ConvShape
    has_bias: bool = False


class LightningSpec(NamedTuple):
    """Lightning attention in place of attention (arXiv 2501.08313)."""

    shape: RecurrentShape


MixerSpec: TypeAlias = DeltaSpec | Mamba2Spec | ConvSpec | LightningSpec


class NormNames(NamedTuple):
    """Tensor names of a layer's norms on the residual stream; None: no such norm."""

    attention: str | None = "input_layernorm"
    attention_out: str | None = None  # norm of the output of attention
    mlp: str | None = "post_attention_layernorm"
    mlp_out: str | None = None


LLAMA_NORMS = NormNames()


class HeadSpec(NamedTuple):
    """Numbers of a layer's heads, and the number of dimensions of a head."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """Properties of one layer that may differ from other layers.

    ``keys_as_values``: the layer has no value matrix, and its values are the keys before norm and
    RoPE. ``kv_of``: the earlier layer whose keys and values this layer reads instead of its own.
    ``mixer``: a recurrent mixer in place of attention, or None. With ``beside_attention`` the layer
    has both: they read the same input, and their outputs are summed. ``parts``: a layer may have
    only a mixer or only an MLP; then its only norm is `NormNames.attention`. ``factors`` multiply
    the residual stream after the mixer and after the MLP.
    """

    window: int | None = None  # positions that a row attends to, itself included; None: all
    rope: RopeSpec | None = None  # None: the RoPE of the model
    experts: ExpertsSpec | None = None
    width: int | None = None  # width of the MLP; None: the width of the model's MLPs
    kv_of: int | None = None
    heads: HeadSpec | None = None  # None: the heads of the model
    keys_as_values: bool = False
    mixer: MixerSpec | None = None
    beside_attention: bool = False
    is_mutual: bool = False  # Rows of an image attend to each other.
    norms: NormNames | None = None  # None: the norms of the model
    parts: Literal["both", "mixer", "mlp"] = "both"
    factors: tuple[float, float] = (1.0, 1.0)

    @property
    def has_attention(self) -> bool:
        """Whether the layer has attention."""
        return (self.mixer is None or self.beside_attention) and self.parts != "mlp"


class MtpNames(NamedTuple):
    """Tensor names of an MTP layer, which predicts one more token than the model.

    ``layer``: prefix of the names inside the layer, whose tensors have the shapes of the model's
    last layer. ``projection`` is a name without ".weight". ``{}`` stands for the number of layers
    of the model.
    """

    layer: str = "model.layers.{}."
    embedding_norm: str = "model.layers.{}.enorm.weight"
    hidden_norm: str = "model.layers.{}.hnorm.weight"
    projection: str = "model.layers.{}.eh_proj"
    final_norm: str = "model.layers.{}.shared_head.norm.weight"


MTP_AFTER_LAST = MtpNames()  # after the last layer, as in GLM-4.5 and DeepSeek V3
MTP_BESIDE_MODEL = MtpNames(  # under names of their own, as in Qwen3-Next and Qwen3.5
    layer="mtp.layers.0.",
    embedding_norm="mtp.pre_fc_norm_embedding.weight",
    hidden_norm="mtp.pre_fc_norm_hidden.weight",
    projection="mtp.fc",
    final_norm="mtp.norm.weight",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """Shape of a decoder, and its differences from Llama. Lengths and windows are in tokens."""

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
    dtype: DtypeName = "float32"  # dtype in config.json; the tensors' own dtype takes precedence
    eos_token_ids: tuple[int, ...] = ()
    tie_embeddings: bool = False
    norms: NormNames = LLAMA_NORMS
    norms_stream: bool = False  # Outputs are added to the normed input, not to the stream.
    layer_norm: Literal["none", "plain", "bias"] = "none"  # replaces RMS norms
    is_parallel: bool = False  # MLP and attention read the same input

    # norms of queries and keys: per head, or over all heads together
    head_norm: HeadNormKind = "none"
    head_norm_names: tuple[str, str] = ("q_norm", "k_norm")
    norms_behind_rope: bool = False  # Head norms apply after RoPE.
    norms_values: bool = False  # Each head's values are normalised without a weight.
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    mlp_names: MlpNames = LLAMA_MLP
    activation: Activation = SILU
    attention_scale: float | None = None  # factor on scores; None: head_dim ** -0.5
    attention_cap: float | None = None  # soft cap of scores
    logit_cap: float | None = None
    has_sinks: bool = False  # Attention has an extra score per head without a value.

    # The query matrix has a gate of the attention output after each head's query.
    has_gate: bool = False
    token_input_size: int = 0  # size of a token's per-layer input (Gemma 4); 0: none
    layer_factor: str | None = None  # tensor name of a factor on the stream after a layer
    is_nested: bool = False  # The checkpoint also holds other models beside this text model.

    # With latent attention all heads share one key per position, whose first items are its value.
    # Then `num_kv_heads` is 1, and `head_dim` is the size of that key.
    latent: LatentShape | None = None
    # The files store the matrices from latents to keys and from latents to values as two tensors,
    # by head; the matrices to keys are transposed.
    has_split_latents: bool = False
    mtp: MtpNames | None = None  # names of an optional MTP layer; None: unknown
    fold: Fold = NO_FOLD
    # Pairs (part of a stored tensor name, its replacement in the names of `tensor_shapes`).
    stored_names: tuple[tuple[str, str], ...] = ()

    def heads_of(self, layer: int) -> HeadSpec:
        """Return the heads of a layer."""
        return self.layers[layer].heads or HeadSpec(
            self.num_heads, self.num_kv_heads, self.head_dim
        )

    @property
    def states(self) -> tuple[StateShape, ...]:
        """Shapes of the recurrent states, in the order of the layers that have one."""
        return tuple(layer.mixer.shape.state for layer in self.layers if layer.mixer is not None)

    def state_of(self, layer: int) -> int:
        """Return the index of a layer's state in `states`."""
        return sum(each.mixer is not None for each in self.layers[:layer])

    @property
    def head_layouts(self) -> tuple[HeadLayout, ...]:
        """Head layout of each layer's packed QKV, [num_layers].

        The entries of layers without attention are meaningless.
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
