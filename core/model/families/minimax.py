"""MiniMax's family with lightning attention in place of attention in most layers."""

from __future__ import annotations

from ...ops.mixers.recurrent import RecurrentShape
from ...ops.weights import Routing
from ..description.config import DecoderConfig, LayerSpec, LightningSpec
from ..description.fields import Fields
from ..description.fold import Fold
from .experts import MIXTRAL_NAMES, top_k_of, with_experts
from .shared import base_config, layer_kinds, window_of, with_defaults

_KINDS = ("full_attention", "linear_attention")
# These are the defaults of the config class.
_DEFAULTS = {
    "max_position_embeddings": 131072,
    "num_experts_per_tok": 2,
    "num_local_experts": 8,
    "num_key_value_heads": 8,
}


def minimax(fields: Fields) -> DecoderConfig:
    """Describe MiniMax-Text-01 and M1: lightning attention or attention, then experts.

    Source: arXiv 2501.08313. The output of attention or experts is added to its normed input, not
    to the stream before the norm. The sum is ``alpha * stream + beta * output``: alpha is a factor
    on the stream, and beta / alpha is folded into the output.
    """
    fields = with_defaults(fields, _DEFAULTS)
    num_heads = fields.positive("num_attention_heads")
    head_dim = fields.positive("head_dim", fields.positive("hidden_size") // num_heads)
    if fields.text("hidden_act", "silu") != "silu":  # Lightning attention uses it, too.
        raise fields.error("hidden_act", "other than silu is not supported")
    full, full_scale = _factors(fields, "full_attn")
    lightning, lightning_scale = _factors(fields, "linear_attn")
    mlp, mlp_scale = _factors(fields, "mlp")
    shape = RecurrentShape(num_heads, num_heads, head_dim, head_dim, conv_len=1)
    kinds = {
        _KINDS[0]: LayerSpec(window=window_of(fields), factors=(full, mlp)),
        _KINDS[1]: LayerSpec(mixer=LightningSpec(shape), factors=(lightning, mlp)),
    }
    routing = Routing(top_k_of(fields), renorm=0.0, factor=mlp_scale)
    every_second = [_KINDS[layer % 2] for layer in range(fields.positive("num_hidden_layers"))]
    layers = tuple(kinds[kind] for kind in layer_kinds(fields, _KINDS, every_second))
    return base_config(
        fields,
        theta=1e6,
        eps=1e-5,
        partial=fields.positive("rotary_dim", head_dim) / head_dim,
        attention_bias=False,
        norms_stream=True,
        layers=with_experts(
            fields, layers, routing, names=MIXTRAL_NAMES, width="intermediate_size"
        ),
        fold=Fold(attention_out_scale=full_scale, mixer_out_scale=lightning_scale),
    )


def _factors(fields: Fields, name: str) -> tuple[float, float]:
    """Return alpha and beta / alpha for the outputs of one kind of layer part."""
    alpha = fields.above_zero(f"{name}_alpha_factor", 1.0)
    return alpha, fields.above_zero(f"{name}_beta_factor", 1.0) / alpha
