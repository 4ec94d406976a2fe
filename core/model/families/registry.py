"""Families by the ``model_type`` of a config.json, and the parsing of their configs."""

from __future__ import annotations

from collections.abc import Callable

from ...errors import ModelLoadError
from ..description.config import DecoderConfig
from ..description.fields import Fields, UnsupportedConfig
from ..formats.quantized import read_scheme
from . import dense, experts, gemma4, hybrid, latent, lfm, mamba, minimax

MODEL_FAMILIES: dict[str, Callable[[Fields], DecoderConfig]] = {
    "arcee": dense.arcee,
    "bamba": mamba.bamba,
    "cohere": dense.cohere,
    "cohere2": dense.cohere2,
    "deepseek_v2": latent.deepseek_v2,
    "deepseek_v3": latent.deepseek_v3,
    "dots1": experts.dots1,
    "ernie4_5": dense.ernie,
    "exaone4": dense.exaone4,
    "falcon_h1": mamba.falcon_h1,
    "gemma": dense.gemma,
    "gemma2": dense.gemma2,
    "gemma3_text": dense.gemma3,
    "gemma4_text": gemma4.gemma4,
    "glm": dense.glm,
    "glm4": dense.glm4,
    "glm4_moe": experts.glm4_moe,
    "glm4_moe_lite": latent.glm4_moe_lite,
    "gpt_oss": experts.gpt_oss,
    "granite": dense.granite,
    "granitemoehybrid": mamba.granite_hybrid,
    "helium": dense.helium,
    "hunyuan_v1_dense": dense.hunyuan,
    "hunyuan_v1_moe": experts.hunyuan_moe,
    "lfm2": lfm.lfm2,
    "lfm2_moe": lfm.lfm2_moe,
    "llama": dense.llama,
    "minicpm3": latent.minicpm3,
    "minimax": minimax.minimax,
    "minimax_m2": experts.minimax_m2,
    "ministral3": dense.ministral3,
    "mistral": dense.mistral,
    "mixtral": experts.mixtral,
    "nemotron": dense.nemotron,
    "nemotron_h": mamba.nemotron_h,
    "olmo2": dense.olmo2,
    "olmo3": dense.olmo3,
    "olmo_hybrid": hybrid.olmo_hybrid,
    "olmoe": experts.olmoe,
    "phi3": dense.phi3,
    "qwen2": dense.qwen2,
    "qwen2_moe": experts.qwen2_moe,
    "qwen3": dense.qwen3,
    "qwen3_5_moe_text": hybrid.qwen3_5_moe,
    "qwen3_5_text": hybrid.qwen3_5,
    "qwen3_moe": experts.qwen3_moe,
    "qwen3_next": hybrid.qwen3_next,
    "smollm3": dense.smollm3,
    "starcoder2": dense.starcoder2,
    "youtu": latent.youtu,
}

# transformers has these text models only inside multimodal ones. Their fields come with the
# defaults of transformers' classes, which differ from the families' defaults.
TEXT_FAMILIES: dict[str, Callable[[Fields], DecoderConfig]] = {
    "gemma4_unified_text": gemma4.gemma4_unified,
    "qwen2_5_omni_text": dense.qwen2,
    "qwen2_5_vl_text": dense.qwen2,
    "qwen2_vl_text": dense.qwen2,
    "qwen3_omni_moe_text": experts.qwen3_moe,
    "qwen3_vl_moe_text": experts.qwen3_vl_moe,
    "qwen3_vl_text": dense.qwen3,
}

# Only foretoken's own decoder keeps the recurrent states of the types below.
OWN_ONLY = (
    "bamba",
    "falcon_h1",
    "granitemoehybrid",
    "lfm2",
    "lfm2_moe",
    "minimax",
    "nemotron_h",
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "qwen3_next",
)


def parse_config(fields: Fields) -> DecoderConfig:
    """Return the config of a config.json. Raises `ModelLoadError` or `UnsupportedConfig`."""
    model_type = fields.text("model_type")
    family = MODEL_FAMILIES.get(model_type) or TEXT_FAMILIES.get(model_type)
    if family is None:
        supported = ", ".join(sorted(MODEL_FAMILIES))
        raise fields.unsupported(
            "model_type", f"{model_type!r} is not supported; supported: {supported}"
        )
    _refuse_unsupported(fields)
    try:
        return _check(family(fields), fields)
    except UnsupportedConfig as error:
        if model_type in OWN_ONLY:  # No other decoder supports these types.
            raise ModelLoadError(str(error)) from None
        raise


def _refuse_unsupported(fields: Fields) -> None:
    """Raise `ModelLoadError` for settings that would silently be computed wrongly."""
    read_scheme(fields)
    if fields.flag("is_encoder_decoder", False):
        raise fields.error("is_encoder_decoder", "is not supported: only decoders are")


def _check(config: DecoderConfig, fields: Fields) -> DecoderConfig:
    for layer in range(config.num_layers):
        num_heads, num_kv_heads, head_dim = config.heads_of(layer)
        if num_heads % num_kv_heads:
            problem = f"is {num_kv_heads}, which does not divide {num_heads} attention heads"
            raise fields.error("num_key_value_heads", problem)
        if head_dim % 2:
            raise fields.error("head_dim", f"must be even, not {head_dim}")
    return config
