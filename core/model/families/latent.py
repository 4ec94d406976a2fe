"""Families with latent attention (MLA): DeepSeek V2, V3 and related models."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ...ops.mixers.latent import LatentShape
from ...ops.weights import Routing
from ..description.config import MTP_AFTER_LAST, DecoderConfig, LayerSpec
from ..description.fields import Fields
from ..description.fold import Fold
from ..description.rope import RopeSpec, mscale_all, parse_rope
from ..description.tensors import layer_prefix
from .experts import like_deepseek, top_k_of, with_experts
from .shared import base_config

_HEADS: dict[str, Any] = {"kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64}
_HEADS |= {"v_head_dim": 128, "qk_nope_head_dim": 128}
_V3: dict[str, Any] = _HEADS | {"n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5}
_V3 |= {"num_experts_per_tok": 8, "first_k_dense_replace": 3, "n_shared_experts": 1}
_GLM: dict[str, Any] = _HEADS | {"q_lora_rank": 768, "v_head_dim": 256, "qk_nope_head_dim": 192}
_GLM |= {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.8}
_GLM |= {"num_experts_per_tok": 4, "n_shared_experts": 1}
_MINICPM: dict[str, Any] = {"kv_lora_rank": 256, "q_lora_rank": 768, "qk_rope_head_dim": 32}
_MINICPM |= {"qk_nope_head_dim": 64, "scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256}


def deepseek_v2(fields: Fields) -> DecoderConfig:
    """Describe DeepSeek V2: latent attention, and softmax over experts (arXiv 2405.04434).

    Experts are chosen from all groups or from the best groups.
    """
    fields = _given(fields, _HEADS | {"n_shared_experts": 2, "topk_method": "greedy"})
    _refuse_others(fields, norm_topk_prob=False, mlp_bias=False, moe_layer_freq=1)
    method = fields.text("topk_method")
    if method not in ("greedy", "group_limited_greedy"):
        raise fields.unsupported("topk_method", f"{method!r} is not supported")
    factor = fields.number("routed_scaling_factor", 1.0)
    routing = Routing(top_k_of(fields), factor=factor)
    if method == "group_limited_greedy":
        routing = routing._replace(
            num_groups=fields.positive("n_group"),
            kept_groups=fields.positive("topk_group"),
            groups_by="best",
        )
    shared = fields.positive("moe_intermediate_size", 1407) * fields.positive("n_shared_experts")
    layers = with_experts(fields, _layers(fields), routing, shared_width=shared)
    return _config(fields, interleaved=True, layers=layers)


def deepseek_v3(fields: Fields) -> DecoderConfig:
    """Describe DeepSeek V3 and R1: a sigmoid router with a bias (arXiv 2412.19437).

    The bias affects only the choice of experts, not their weights.
    """
    fields = _given(fields, _V3)
    _refuse_others(fields, moe_layer_freq=1)
    layers = like_deepseek(fields, _layers(fields), renorms=True, num_default=1)
    return _config(fields, interleaved=_is_interleaved(fields), layers=layers, mtp=MTP_AFTER_LAST)


def glm4_moe_lite(fields: Fields) -> DecoderConfig:
    """Describe GLM-4.7-Flash: `deepseek_v3` with one group of experts."""
    fields = _given(fields, _GLM)
    kinds = fields.values.get("mlp_layer_types")
    if kinds is not None:
        num_layers = fields.positive("num_hidden_layers")
        is_known = isinstance(kinds, list) and set(kinds) <= {"dense", "sparse"}
        if not is_known or len(kinds) != num_layers:
            raise fields.error(
                "mlp_layer_types", f"must be a list of {num_layers} names from dense, sparse"
            )
        dense = [index for index, kind in enumerate(kinds) if kind == "dense"]
        of_layers = {"mlp_only_layers": dense, "first_k_dense_replace": 0}
        fields = Fields({**fields.values, **of_layers}, fields.where)
    layers = like_deepseek(fields, _layers(fields), renorms=True, num_default=1)
    return _config(
        fields, eps=1e-5, interleaved=_is_interleaved(fields), layers=layers, mtp=MTP_AFTER_LAST
    )


def youtu(fields: Fields) -> DecoderConfig:
    """Describe Youtu-LLM: latent attention and an MLP in every layer."""
    fields = _given(fields, _HEADS)
    return _config(fields, tied=True, interleaved=_is_interleaved(fields))


def minicpm3(fields: Fields) -> DecoderConfig:
    """Describe MiniCPM3: factors on embedding, residual stream and logits (arXiv 2404.06395)."""
    num_layers, hidden_size = fields.positive("num_hidden_layers"), fields.positive("hidden_size")
    fields = _given(fields, _MINICPM)
    depth = fields.number("scale_depth", num_layers**0.5)
    fold = Fold(
        embed_scale=fields.number("scale_emb"),
        rounds_embed_scale=True,
        residual_scale=depth / num_layers**0.5,
        logit_scale=fields.above_zero("dim_model_base", hidden_size) / hidden_size,
    )
    value_dim = {"v_head_dim": hidden_size // fields.positive("num_attention_heads")}
    mlp_bias = fields.flag("mlp_bias", False)
    given = {name: value for name, value in fields.values.items() if value is not None}
    fields = Fields(value_dim | given, fields.where)
    return _config(fields, eps=1e-5, tied=True, interleaved=False, fold=fold, mlp_bias=mlp_bias)


def as_split(config: DecoderConfig, names: set[str]) -> DecoderConfig:
    """Return ``config`` with `has_split_latents` set, according to the ``names`` of the tensors."""
    is_split = f"{layer_prefix(0)}self_attn.k_b_proj.weight" in names
    return replace(config, has_split_latents=is_split)


def _config(fields: Fields, *, interleaved: bool, **differences: Any) -> DecoderConfig:  # noqa: ANN401 - declared fields
    """Return the config of a model with latent attention, whose KV is one vector per position.

    The vector consists of a latent and a part with RoPE.
    """
    shape = _shape(fields)
    if shape.rope_dim % 2:
        raise fields.error("qk_rope_head_dim", f"must be even, not {shape.rope_dim}")
    if fields.flag("attention_bias", False) and not shape.q_rank:
        raise fields.unsupported("attention_bias", "without q_lora_rank is not supported")
    rope = parse_rope(fields, max_len=fields.positive("max_position_embeddings", 2048))
    defaults: dict[str, Any] = {"fold": Fold(interleaved=interleaved), "attention_bias": False}
    return base_config(
        fields,
        rope=rope,
        num_kv_heads=1,
        head_dim=shape.key_dim,
        latent=shape,
        attention_scale=shape.query_dim**-0.5 * _yarn_score_factor(rope),
        **(defaults | differences),
    )


def _shape(fields: Fields) -> LatentShape:
    return LatentShape(
        q_rank=fields.positive("q_lora_rank") if fields.has("q_lora_rank") else 0,
        rank=fields.positive("kv_lora_rank"),
        nope_dim=fields.positive("qk_nope_head_dim"),
        rope_dim=fields.positive("qk_rope_head_dim"),
        value_dim=fields.positive("v_head_dim"),
    )


def _yarn_score_factor(rope: RopeSpec) -> float:
    """Return YaRN's factor of attention scores: its mscale, squared (DeepSeek-V2, 2405.04434)."""
    return mscale_all(rope) ** 2


def _layers(fields: Fields) -> tuple[LayerSpec, ...]:
    return (LayerSpec(),) * fields.positive("num_hidden_layers")


def _is_interleaved(fields: Fields) -> bool:
    return fields.flag("rope_interleave", True)


def _given(fields: Fields, defaults: dict[str, Any]) -> Fields:
    """Return ``fields`` with ``defaults`` for absent fields; a null field stays null."""
    return Fields({**defaults, **fields.values}, fields.where)


def _refuse_others(fields: Fields, **known: object) -> None:
    """Raise `UnsupportedConfig` if a field's value differs from its value in ``known``."""
    for name, value in known.items():
        if fields.has(name) and fields.values[name] != value:
            raise fields.unsupported(name, f"other than {value} is not supported")
