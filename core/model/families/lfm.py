"""Families of Liquid AI: short convolutions in place of attention in most layers."""

from __future__ import annotations

from typing import Any

from ...ops.mixers.conv import ConvShape
from ...ops.weights import Routing
from ..description.config import ConvSpec, DecoderConfig, ExpertNames, LayerSpec
from ..description.fields import Fields
from .experts import renorm_of, top_k_of, with_experts
from .shared import base_config, layer_kinds, with_defaults

_KINDS = ("full_attention", "conv")
_NAMES = (
    ("model.embedding_norm.", "model.norm."),
    (".operator_norm.", ".input_layernorm."),
    (".ffn_norm.", ".post_attention_layernorm."),
    (".q_layernorm.", ".q_norm."),
    (".k_layernorm.", ".k_norm."),
    (".self_attn.out_proj.", ".self_attn.o_proj."),
    (".feed_forward.", ".mlp."),
    (".w1.", ".gate_proj."),
    (".w3.", ".up_proj."),
    (".w2.", ".down_proj."),
)
_RENORM = 1e-6  # added to the sum by which the weights of a row's experts are divided

# These are the defaults of the config classes.
_DEFAULTS = {
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 128000,
    "vocab_size": 65536,
}


def lfm2(fields: Fields) -> DecoderConfig:
    """Describe LFM2: short convolutions and attention (arXiv 2511.23404)."""
    whole = with_defaults(fields, _DEFAULTS | {"hidden_size": 2560, "intermediate_size": 12288})
    width = _adjusted(fields, whole.positive("block_ff_dim", whole.positive("intermediate_size")))
    return _config(whole, _layers(whole), intermediate_size=width)


def lfm2_moe(fields: Fields) -> DecoderConfig:
    """Describe LFM2 with experts, whose choice a bias affects; the first layers are dense."""
    defaults = {"hidden_size": 2048, "intermediate_size": 7168, "moe_intermediate_size": 1792}
    defaults |= {"num_experts": 32, "num_experts_per_tok": 4, "num_dense_layers": 2}
    fields = with_defaults(fields, _DEFAULTS | defaults)
    has_bias = fields.flag("use_expert_bias", True)
    names = ExpertNames(choice_bias="mlp.expert_bias" if has_bias else None)
    routing = Routing(
        top_k_of(fields),
        score="sigmoid",
        renorm=None if renorm_of(fields, True) is None else _RENORM,
        factor=fields.number("routed_scaling_factor", 1.0),
    )
    num_dense = fields.integer("num_dense_layers")
    layers = with_experts(fields, _layers(fields), routing, names=names, num_dense=num_dense)
    return _config(fields, layers)


def _config(
    fields: Fields,
    layers: tuple[LayerSpec, ...],
    **differences: Any,  # noqa: ANN401 - fields of `DecoderConfig`
) -> DecoderConfig:
    is_tied = fields.flag("tie_embedding", fields.flag("tie_word_embeddings", True))
    return base_config(
        fields,
        theta=1e6,
        norm_eps=fields.number("norm_eps", 1e-5),
        tie_embeddings=is_tied,
        head_norm="each",
        stored_names=_NAMES,
        layers=layers,
        **differences,
    )


def _adjusted(fields: Fields, width: int) -> int:
    """Return the inner width of the MLP for the config's ``width``.

    By default it is two thirds of ``width`` times a factor, rounded up to a multiple.
    """
    if not fields.flag("block_auto_adjust_ff_dim", True):
        return width
    width = int(2 * width / 3)
    factor = "block_ffn_dim_multiplier"
    if factor in fields.values and not fields.has(factor):  # null differs from absent
        return width
    multiple = fields.positive("block_multiple_of", 256)
    width = int(fields.above_zero(factor, 1.0) * width)
    return multiple * -(-width // multiple)


def _layers(fields: Fields) -> tuple[LayerSpec, ...]:
    conv_len = fields.positive("conv_L_cache", 3)
    if conv_len < 2:
        raise fields.error("conv_L_cache", f"must be at least 2, not {conv_len}")
    shape = ConvShape(fields.positive("hidden_size"), conv_len)
    conv = LayerSpec(mixer=ConvSpec(shape, fields.flag("conv_bias", False)))
    num_layers = fields.positive("num_hidden_layers")
    has_indices = fields.has("full_attn_idxs")
    full = fields.integers("full_attn_idxs") if has_indices else range(num_layers)
    by_index = [_KINDS[layer not in full] for layer in range(num_layers)]
    kinds = layer_kinds(fields, _KINDS, by_index)
    return tuple(LayerSpec() if kind == _KINDS[0] else conv for kind in kinds)
