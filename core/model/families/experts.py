"""Families with mixtures of experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ...ops.weights import Activation, Routing
from ..description.config import (
    MTP_AFTER_LAST,
    DecoderConfig,
    ExpertNames,
    ExpertsSpec,
    LayerSpec,
    MlpNames,
)
from ..description.fields import Fields
from ..description.rope import RopeSpec
from .dense import hunyuan
from .shared import (
    activation_of,
    base_config,
    kinds_of,
    qwen_layers,
    sliding,
    window_of,
    windowed,
)

MIXTRAL_NAMES = ExpertNames(
    "block_sparse_moe.gate", "block_sparse_moe.experts.{}.", MlpNames("w1", "w3", "w2")
)


def mixtral(fields: Fields, **differences: Any) -> DecoderConfig:  # noqa: ANN401 - declared fields
    """Describe Mixtral: experts in every layer, with renormalised weights (arXiv 2401.04088)."""
    layers = windowed(fields, window_of(fields))
    routing = Routing(top_k_of(fields), renorm=0.0)
    shape: dict[str, Any] = {
        "theta": 1e6,
        "eps": 1e-5,
        "layers": with_experts(
            fields, layers, routing, names=MIXTRAL_NAMES, width="intermediate_size"
        ),
    }
    return base_config(fields, **(shape | differences))


def minimax_m2(fields: Fields) -> DecoderConfig:
    """Describe MiniMax M2: sigmoid router with a bias for the choice only, norms over all heads."""
    names = MIXTRAL_NAMES._replace(choice_bias="block_sparse_moe.e_score_correction_bias")
    head_dim = fields.positive("head_dim", 128)
    layers = windowed(fields, None)
    routing = Routing(top_k_of(fields), score="sigmoid", renorm=0.0)
    return base_config(
        fields,
        theta=5e6,
        partial=fields.positive("rotary_dim", head_dim) / head_dim,
        head_dim=head_dim,
        head_norm="whole",
        mtp=MTP_AFTER_LAST,
        layers=with_experts(fields, layers, routing, names=names, width="intermediate_size"),
    )


def qwen2_moe(fields: Fields) -> DecoderConfig:
    """Describe Qwen 1.5 and 2 with experts: a shared expert behind a gate (arXiv 2407.10671)."""
    if fields.flag("use_sliding_window", False) and not fields.has("layer_types"):
        raise fields.unsupported("use_sliding_window", "is not supported without layer_types")
    names = ExpertNames(shared="mlp.shared_expert.", shared_gate="mlp.shared_expert_gate")
    routing = Routing(top_k_of(fields), renorm=renorm_of(fields, False))
    layers = with_experts(
        fields,
        qwen_layers(fields),
        routing,
        names=names,
        shared_width=fields.positive("shared_expert_intermediate_size"),
    )
    return base_config(fields, qkv_bias=fields.flag("qkv_bias", True), layers=layers)


def qwen3_moe(fields: Fields, names: ExpertNames = ExpertNames()) -> DecoderConfig:  # noqa: B008 - immutable
    """Describe Qwen 3 with experts (arXiv 2505.09388)."""
    window = window_of(fields) if fields.flag("use_sliding_window", False) else None
    routing = Routing(top_k_of(fields), renorm=renorm_of(fields, False))
    return base_config(
        fields,
        head_norm="each",
        attention_bias=False,
        layers=with_experts(fields, windowed(fields, window), routing, names=names),
    )


def qwen3_vl_moe(fields: Fields) -> DecoderConfig:
    """Describe Qwen3-VL's text model with experts: `qwen3_moe`, with experts in stacked tensors."""
    fields = Fields({**fields.values, "norm_topk_prob": True}, fields.where)
    return qwen3_moe(fields, ExpertNames(expert="mlp.experts.", stacked="rows"))


def olmoe(fields: Fields) -> DecoderConfig:
    """Describe OLMoE: norms of queries and keys over all heads (arXiv 2409.02060)."""
    if fields.has("clip_qkv"):
        raise fields.unsupported("clip_qkv", "is not supported")
    routing = Routing(top_k_of(fields), renorm=renorm_of(fields, False))
    layers = windowed(fields, None)
    return base_config(
        fields,
        eps=1e-5,
        head_norm="whole",
        attention_bias=False,
        layers=with_experts(fields, layers, routing, width="intermediate_size"),
    )


def glm4_moe(fields: Fields) -> DecoderConfig:
    """Describe GLM-4.5: DeepSeek V3's router; RoPE rotates half of each head (arXiv 2508.06471)."""
    return base_config(
        fields,
        eps=1e-5,
        partial=0.5,
        head_norm="each" if fields.flag("use_qk_norm", False) else "none",
        qkv_bias=fields.flag("attention_bias", False),
        mtp=MTP_AFTER_LAST,
        layers=like_deepseek(fields, windowed(fields, None), renorms=True, num_default=1),
    )


def hunyuan_moe(fields: Fields) -> DecoderConfig:
    """Describe Hunyuan with experts, one of which is shared (arXiv 2411.02265)."""
    chosen = set(fields.integers("moe_topk"))  # one number for all layers, or one per layer
    if len(chosen) != 1:
        raise fields.unsupported("moe_topk", "must be the same for all layers")
    layers = with_experts(
        fields,
        windowed(fields, None),
        Routing(chosen.pop(), renorm=0.0),
        names=ExpertNames("mlp.gate.wg", shared="mlp.shared_mlp."),
        width="intermediate_size",
        shared_width=fields.positive("intermediate_size"),
    )
    return hunyuan(fields, layers=layers)


def dots1(fields: Fields) -> DecoderConfig:
    """Describe dots.llm1: DeepSeek V3's router, head norms, late windows (arXiv 2506.05767)."""
    window = window_of(fields)
    first = fields.integer("max_window_layers", 62)
    num_layers = fields.positive("num_hidden_layers")
    kinds = kinds_of(fields, (window is not None and i >= first for i in range(num_layers)))
    layers = tuple(LayerSpec(window=window if is_sliding else None) for is_sliding in kinds)
    return base_config(
        fields,
        head_norm="each",
        attention_bias=False,
        layers=like_deepseek(fields, layers, renorms=False, num_default=0),
    )


def gpt_oss(fields: Fields) -> DecoderConfig:
    """Describe gpt-oss: sinks, a clamped SwiGLU, windows in every 2nd layer (arXiv 2508.10925)."""
    if fields.number("swiglu_alpha", 1.702) != 1.702:
        raise fields.unsupported("swiglu_alpha", "other than 1.702 is not supported")
    limit = fields.above_zero("swiglu_limit", 7.0)
    differences: dict[str, Any] = {}
    if not fields.has("rope_parameters") and not fields.has("rope_scaling"):
        differences["rope"] = RopeSpec(
            kind="yarn", theta=15e4, factor=32.0, original_max_len=4096, truncate=False
        )
    layers = with_experts(
        fields,
        sliding(fields, 2, window=128),
        Routing(top_k_of(fields), of_chosen=True),
        names=ExpertNames("mlp.router", "mlp.experts.", stacked="gpt-oss"),
        width="intermediate_size",
        activation=Activation("clamped_swiglu", True, limit),
        router_bias=True,
    )
    return base_config(
        fields,
        theta=15e4,
        eps=1e-5,
        head_dim=fields.positive("head_dim", 64),
        attention_bias=True,
        has_sinks=True,
        layers=layers,
        **differences,
    )


def top_k_of(fields: Fields) -> int:
    """Return the number of experts per token. Raises `ModelLoadError` below 1."""
    return fields.positive("num_experts_per_tok")


def renorm_of(fields: Fields, default: bool) -> float | None:
    """Return `Routing.renorm`: 0 if the chosen scores are divided by their sum, otherwise None."""
    return 0.0 if fields.flag("norm_topk_prob", default) else None


def like_deepseek(
    fields: Fields, layers: tuple[LayerSpec, ...], *, renorms: bool, num_default: int
) -> tuple[LayerSpec, ...]:
    """Add experts with DeepSeek V3's router (arXiv 2412.19437) to all but the first layers.

    ``num_default``: number of dense layers, and of shared experts, if the config names no number.
    """
    routing = Routing(
        top_k_of(fields),
        score="sigmoid",
        num_groups=fields.positive("n_group", 1),
        kept_groups=fields.positive("topk_group", 1),
        renorm=1e-20 if fields.flag("norm_topk_prob", renorms) else None,
        factor=fields.number("routed_scaling_factor", 1.0),
    )
    width = fields.positive("moe_intermediate_size") * fields.integer(
        "n_shared_experts", num_default
    )
    return with_experts(
        fields,
        layers,
        routing,
        names=ExpertNames(choice_bias="mlp.gate.e_score_correction_bias"),
        num_dense=num_default,
        shared_width=width,
    )


def with_experts(
    fields: Fields,
    layers: tuple[LayerSpec, ...],
    routing: Routing,
    *,
    names: ExpertNames = ExpertNames(),  # noqa: B008 - immutable
    width: str = "moe_intermediate_size",
    num_dense: int = 0,
    **differences: Any,  # noqa: ANN401 - fields of `ExpertsSpec`
) -> tuple[LayerSpec, ...]:
    """Add experts to all layers except those that the config declares dense."""
    counts = ("num_local_experts", "num_experts", "n_routed_experts")
    count = fields.positive(next((name for name in counts if fields.has(name)), counts[0]))
    groups, kept = routing.num_groups, routing.kept_groups
    if count % groups or kept > groups or routing.top_k > count // groups * kept:
        problem = f"{routing.top_k} of {count} experts in {kept} of {groups} groups is impossible"
        raise fields.error("num_experts_per_tok", problem)
    activation = activation_of(fields, "hidden_act", "silu", is_gated=True)
    values = {"activation": activation, **differences}
    spec = ExpertsSpec(
        count=count, width=fields.positive(width), routing=routing, names=names, **values
    )
    step = fields.positive("decoder_sparse_step", 1)
    first = fields.integer("first_k_dense_replace", num_dense)
    dense = fields.integers("mlp_only_layers")
    return tuple(
        replace(layer, experts=spec)
        if index >= first and (index + 1) % step == 0 and index not in dense
        else layer
        for index, layer in enumerate(layers)
    )
