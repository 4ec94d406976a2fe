"""DecoderConfig: what makes one decoder differ from another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from ..ops.base import SILU, Activation, Routing
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

    ``expert`` is the prefix of one, by its number. ``is_stacked``: all experts are in one tensor of
    each kind, transposed, with biases, a row of the gate before each of the factor (gpt-oss).
    """

    router: str = "mlp.gate"
    expert: str = "mlp.experts.{}."
    mlp: MlpNames = LLAMA_MLP
    choice_bias: str | None = None
    shared: str = "mlp.shared_experts."
    shared_gate: str | None = None
    is_stacked: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsSpec:
    """A mixture of experts in the place of an MLP; widths are those of the experts' MLPs."""

    count: int
    width: int
    routing: Routing
    names: ExpertNames = ExpertNames()  # noqa: RUF009 - immutable
    activation: Activation = SILU
    router_bias: bool = False
    shared_width: int = 0  # of the MLP that all rows have besides; 0: there is none


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """What one layer does otherwise than others."""

    window: int | None = None  # positions that a row sees, itself included; None: all before it
    rope: RopeSpec | None = None  # None: that of the model
    experts: ExpertsSpec | None = None  # in place of the MLP


class NormNames(NamedTuple):
    """Where a layer has norms of the stream, as its tensors name them; None: there is none."""

    attention: str | None = "input_layernorm"
    attention_out: str | None = None  # of what attention adds to the stream
    mlp: str | None = "post_attention_layernorm"
    mlp_out: str | None = None


LLAMA_NORMS = NormNames()


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
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    mlp_names: MlpNames = LLAMA_MLP
    activation: Activation = SILU
    attention_scale: float | None = None  # of the scores; None: head_dim ** -0.5
    attention_cap: float | None = None  # of the scores
    logit_cap: float | None = None
    has_sinks: bool = False  # in attention, a score of each head without a value
    is_nested: bool = False  # the text model of a checkpoint that holds other models, too
    has_further_layers: bool = False  # checkpoints may hold layers that predict further tokens
    fold: Fold = NO_FOLD

    @property
    def group_size(self) -> int:
        """Query heads that share one KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def ropes(self) -> tuple[RopeSpec, ...]:
        """RoPE of each layer."""
        return tuple(layer.rope or self.rope for layer in self.layers)
