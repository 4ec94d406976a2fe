"""Families of dense decoders."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..description.config import DecoderConfig, LayerSpec, MlpNames, NormNames
from ..description.fields import Fields
from ..description.fold import Fold
from ..description.rope import NO_ROPE, parse_rope, parse_ropes
from .shared import (
    base_config,
    cap_of,
    kinds_of,
    qwen_layers,
    rope_flags,
    sliding,
    window_of,
    windowed,
    with_alpha,
    without_rope_unless_windowed,
)

BEFORE_AND_AFTER = NormNames(
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)
_AFTER = NormNames(None, "post_attention_layernorm", None, "post_feedforward_layernorm")


def llama(fields: Fields) -> DecoderConfig:
    """Describe Llama and compatible models: RMS norms, RoPE, SwiGLU (arXiv 2302.13971)."""
    mlp_bias = fields.flag("mlp_bias", False)
    return base_config(fields, attention_bias=False, mlp_bias=mlp_bias)


def mistral(fields: Fields) -> DecoderConfig:
    """Describe Mistral: Llama with a window in every layer (arXiv 2310.06825)."""
    # The class default applies where the key is absent; null means full attention.
    absent = "sliding_window" not in fields.values
    return base_config(fields, layers=windowed(fields, 4096 if absent else window_of(fields)))


def ministral3(fields: Fields) -> DecoderConfig:
    """Describe Ministral 3: Mistral with YaRN, and queries scaled by their position."""
    if not fields.has("rope_parameters"):
        raise fields.unsupported("rope_parameters", "is missing")
    rope = parse_rope(fields, max_len=fields.positive("max_position_embeddings", 262144))
    beta = fields.object("rope_parameters").number("llama_4_scaling_beta", 0.0)
    if beta and not rope.original_max_len:
        raise fields.error("rope_parameters", "lacks original_max_position_embeddings")
    return base_config(
        fields,
        eps=1e-5,
        head_dim=fields.positive("head_dim", 128),
        rope=replace(rope, query_beta=beta),
        layers=windowed(fields, window_of(fields)),
    )


def qwen2(fields: Fields) -> DecoderConfig:
    """Describe Qwen 2 and 2.5: biases on queries, keys and values (arXiv 2407.10671)."""
    return base_config(fields, qkv_bias=True, layers=qwen_layers(fields))


def qwen3(fields: Fields) -> DecoderConfig:
    """Describe Qwen 3: norms on each head's queries and keys (arXiv 2505.09388)."""
    head_dim = fields.positive("head_dim", 128)
    return base_config(
        fields,
        head_norm="each",
        attention_bias=False,
        layers=qwen_layers(fields),
        head_dim=head_dim,
    )


def phi3(fields: Fields) -> DecoderConfig:
    """Describe Phi-3 and Phi-4: fused matrices (arXiv 2404.14219)."""
    fold = Fold(fused_qkv=True, fused_gate_up=True)
    layers = windowed(fields, window_of(fields))
    return base_config(fields, eps=1e-5, partial=1.0, layers=layers, fold=fold)


def granite(fields: Fields) -> DecoderConfig:
    """Describe Granite 3: factors on the embedding, the residual stream, scores and logits."""
    fold = Fold(
        embed_scale=fields.number("embedding_multiplier", 1.0),
        residual_scale=fields.number("residual_multiplier", 1.0),
        logit_scale=1 / fields.above_zero("logits_scaling", 1.0),
    )
    return base_config(
        fields,
        attention_bias=False,
        mlp_bias=fields.flag("mlp_bias", False),
        attention_scale=fields.number("attention_multiplier", 1.0),
        fold=fold,
    )


def glm(fields: Fields, **differences: Any) -> DecoderConfig:  # noqa: ANN401 - declared fields
    """Describe GLM-4: RoPE rotates half of each head, in neighbouring pairs (arXiv 2406.12793)."""
    return base_config(
        fields,
        partial=0.5,
        eps=1.5625e-07,
        qkv_bias=fields.flag("attention_bias", True),
        head_dim=fields.positive("head_dim", 128),
        fold=Fold(fused_gate_up=True, interleaved=True),
        **differences,
    )


def glm4(fields: Fields) -> DecoderConfig:
    """Describe GLM-4 of 2025: `glm` with norms before and after attention and MLP."""
    norms = NormNames(
        "input_layernorm",
        "post_self_attn_layernorm",
        "post_attention_layernorm",
        "post_mlp_layernorm",
    )
    return glm(fields, norms=norms)


def helium(fields: Fields) -> DecoderConfig:
    """Describe Helium 1: RoPE rotates neighbouring pairs."""
    return base_config(
        fields,
        theta=1e5,
        eps=1e-8,
        qkv_bias=fields.flag("attention_bias", False),
        mlp_bias=fields.flag("mlp_bias", False),
        head_dim=fields.positive("head_dim", 128),
        fold=Fold(interleaved=True),
    )


def ernie(fields: Fields) -> DecoderConfig:
    """Describe ERNIE 4.5 without experts: RoPE rotates neighbouring pairs."""
    bias = fields.flag("use_bias", False)
    return base_config(
        fields,
        theta=5e5,
        eps=1e-5,
        tied=True,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
        head_dim=fields.positive("head_dim", 128),
        fold=Fold(interleaved=True),
    )


def gemma(fields: Fields, **differences: Any) -> DecoderConfig:  # noqa: ANN401 - declared fields
    """Describe Gemma: norms of 1 + weight, a scaled embedding (arXiv 2403.08295)."""
    # The first release says "gelu" and means its tanh approximation.
    if fields.values.get("hidden_act") == "gelu":
        fields = Fields({**fields.values, "hidden_act": "gelu_pytorch_tanh"}, fields.where)
    shape: dict[str, Any] = {
        "tied": True,
        "activation": ("hidden_act", "gelu_pytorch_tanh"),
        "attention_bias": False,
        "head_dim": fields.positive("head_dim", 256),
        "fold": Fold(
            embed_scale=fields.positive("hidden_size") ** 0.5,
            rounds_embed_scale=True,
            norm_offset=1.0,
        ),
    }
    return base_config(fields, **(shape | differences))


def gemma2(fields: Fields, **differences: Any) -> DecoderConfig:  # noqa: ANN401 - declared fields
    """Describe Gemma 2: norms around each part, windows, soft caps (arXiv 2408.00118)."""
    if fields.flag("use_bidirectional_attention", False):
        raise fields.unsupported("use_bidirectional_attention", "is not supported")
    shape: dict[str, Any] = {
        "activation": ("hidden_activation", "gelu_pytorch_tanh"),
        "norms": BEFORE_AND_AFTER,
        "layers": sliding(fields, 2, window=4096),
        "attention_scale": fields.above_zero("query_pre_attn_scalar", 256) ** -0.5,
        "attention_cap": cap_of(fields, "attn_logit_softcapping", 50.0),
        "logit_cap": cap_of(fields, "final_logit_softcapping", 30.0),
    }
    return gemma(fields, **(shape | differences))


def gemma3(fields: Fields) -> DecoderConfig:
    """Describe Gemma 3: head norms; layers with a window have their own RoPE (arXiv 2503.19786)."""
    max_len = fields.positive("max_position_embeddings", 131072)
    full, local = parse_ropes(fields, max_len=max_len, theta=1e6, local_theta=1e4)
    pattern = fields.positive("sliding_window_pattern", 6)
    layers = sliding(fields, pattern, window=4096, local=local)
    return gemma2(
        fields,
        head_norm="each",
        rope=full,
        # Rows of an image attend to each other.
        layers=tuple(replace(each, is_mutual=True) for each in layers),
        attention_cap=None,
        logit_cap=fields.optional_number("final_logit_softcapping"),
    )


def olmo2(fields: Fields, **differences: Any) -> DecoderConfig:  # noqa: ANN401 - declared fields
    """Describe OLMo 2: norms after each part, head norms over all heads (arXiv 2501.00656)."""
    return base_config(
        fields,
        eps=1e-5,
        norms=_AFTER,
        head_norm="whole",
        attention_bias=False,
        **differences,
    )


def olmo3(fields: Fields) -> DecoderConfig:
    """Describe OLMo 3: `olmo2` with windows in three of four layers."""
    max_len = fields.positive("max_position_embeddings", 2048)
    full, local = parse_ropes(fields, max_len=max_len, theta=5e5)
    return olmo2(fields, rope=full, layers=sliding(fields, 4, window=4096, local=local))


def hunyuan(fields: Fields, **differences: Any) -> DecoderConfig:  # noqa: ANN401 - declared fields
    """Describe Hunyuan: head norms after RoPE, and a RoPE base that ``alpha`` increases."""
    head_dim = fields.positive("head_dim")
    return base_config(
        with_alpha(fields, head_dim),
        eps=1e-5,
        head_dim=head_dim,
        head_norm="each",
        head_norm_names=("query_layernorm", "key_layernorm"),
        norms_behind_rope=True,
        attention_bias=False,
        **differences,
    )


def smollm3(fields: Fields) -> DecoderConfig:
    """Describe SmolLM3: by default every fourth layer has no RoPE."""
    turns = rope_flags(fields)
    window = window_of(fields) if fields.flag("use_sliding_window", False) else None
    kinds = kinds_of(fields, (window is not None and not turn for turn in turns))
    layers = tuple(
        LayerSpec(window=window if is_sliding else None, rope=None if turn else NO_ROPE)
        for is_sliding, turn in zip(kinds, turns, strict=True)
    )
    return base_config(
        fields,
        theta=2e6,
        tied=True,
        attention_bias=False,
        mlp_bias=fields.flag("mlp_bias", False),
        layers=layers,
    )


def cohere(fields: Fields, **differences: Any) -> DecoderConfig:  # noqa: ANN401 - declared fields
    """Describe Command R: attention and MLP in parallel after one layer norm."""
    if fields.flag("use_qk_norm", False):
        raise fields.unsupported("use_qk_norm", "is not supported")
    hidden_size, num_heads = fields.positive("hidden_size"), fields.positive("num_attention_heads")
    shape: dict[str, Any] = {"theta": 5e5} | differences
    return base_config(
        fields,
        tied=True,
        norms=NormNames(mlp=None),
        layer_norm="plain",
        is_parallel=True,
        norm_eps=fields.number("layer_norm_eps", 1e-5),
        attention_bias=False,
        head_dim=hidden_size // num_heads,
        fold=Fold(interleaved=True, logit_scale=fields.number("logit_scale", 0.0625)),
        **shape,
    )


def cohere2(fields: Fields) -> DecoderConfig:
    """Describe Command R7B and A: `cohere` with windows; layers without one have no RoPE."""
    pattern = fields.positive("sliding_window_pattern", 4)
    layers = sliding(fields, pattern, window=4096)
    return cohere(fields, theta=1e4, layers=without_rope_unless_windowed(layers))


def exaone4(fields: Fields) -> DecoderConfig:
    """Describe EXAONE 4: norms after attention and MLP, head norms (arXiv 2507.11407)."""
    absent = "sliding_window" not in fields.values
    window = 4096 if absent else window_of(fields)
    layers = (LayerSpec(),) * fields.positive("num_hidden_layers")
    if window is not None:
        pattern = 4 if fields.has("layer_types") else fields.positive("sliding_window_pattern", 4)
        layers = without_rope_unless_windowed(sliding(fields, pattern, window=window))
    return base_config(fields, eps=1e-5, norms=_AFTER, head_norm="each", layers=layers)


def starcoder2(fields: Fields) -> DecoderConfig:
    """Describe StarCoder 2: layer norms and an MLP without a gate (arXiv 2402.19173)."""
    bias = fields.flag("use_bias", True)
    return base_config(
        fields,
        tied=True,
        activation=("hidden_act", "gelu_pytorch_tanh"),
        is_gated=False,
        norm_eps=fields.number("norm_epsilon", 1e-5),
        layer_norm="bias",
        mlp_names=MlpNames(None, "c_fc", "c_proj"),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
        layers=windowed(fields, window_of(fields)),
    )


def arcee(fields: Fields, **differences: Any) -> DecoderConfig:  # noqa: ANN401 - declared fields
    """Describe AFM of Arcee: an MLP without a gate, with squared ReLU."""
    shape: dict[str, Any] = {"eps": 1e-5} | differences
    return base_config(
        fields,
        activation=("hidden_act", "relu2"),
        is_gated=False,
        mlp_names=MlpNames(None),
        attention_bias=False,
        mlp_bias=fields.flag("mlp_bias", False),
        **shape,
    )


def nemotron(fields: Fields) -> DecoderConfig:
    """Describe Nemotron and Minitron: `arcee` with layer norms of 1 + weight (arXiv 2402.16819)."""
    return arcee(
        fields,
        partial=0.5,
        norm_eps=fields.number("norm_eps", 1e-5),
        layer_norm="bias",
        fold=Fold(norm_offset=1.0),
    )
