"""Tiny random multimodal models of transformers' own classes, whose text is served."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING, PreTrainedConfig

from support.tiny_models import VOCAB, tiny_config

SPECIAL = VOCAB - 1  # stands for images and sounds, and is in no text
_TOWERS = {
    "depth": 1,
    "embed_dim": 32,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_heads": 2,
    "image_size": 28,
    "patch_size": 14,
    "num_position_embeddings": 4,
    "out_hidden_size": 64,
    "fullatt_block_indexes": [0],
    "deepstack_visual_indexes": [0],
    "encoder_layers": 1,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "d_model": 32,
    "output_dim": 64,
    "num_mel_bins": 16,
    "max_source_positions": 20,
    "downsample_hidden_size": 8,
}
_TOWER_CONFIGS = ("vision_config", "audio_config")
_MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
# Model type: its class, and what differs in the config of its text.
MULTIMODAL: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3": ("Gemma3ForConditionalGeneration", {}),
    "gemma4_unified": (
        "Gemma4UnifiedForConditionalGeneration",
        {"layer_types": ["sliding_attention", "full_attention"], "global_head_dim": 32},
    ),
    "idefics3": ("Idefics3ForConditionalGeneration", {}),
    "lfm2_vl": ("Lfm2VlForConditionalGeneration", {"layer_types": ["conv", "full_attention"]}),
    "qwen2_5_omni_thinker": (
        "Qwen2_5OmniThinkerForConditionalGeneration",
        {"rope_parameters": _MROPE},
    ),
    "qwen2_5_vl": ("Qwen2_5_VLForConditionalGeneration", {"rope_parameters": _MROPE}),
    "qwen2_vl": ("Qwen2VLForConditionalGeneration", {"rope_parameters": _MROPE}),
    "qwen3_omni_moe_thinker": (
        "Qwen3OmniMoeThinkerForConditionalGeneration",
        {"rope_parameters": _MROPE | {"mrope_interleaved": True}, "sliding_window": None},
    ),
    "qwen3_vl": (
        "Qwen3VLForConditionalGeneration",
        {"rope_parameters": _MROPE | {"mrope_interleaved": True}},
    ),
    "qwen3_vl_moe": (
        "Qwen3VLMoeForConditionalGeneration",
        {"rope_parameters": _MROPE | {"mrope_interleaved": True}, "sliding_window": None},
    ),
    "smolvlm": ("SmolVLMForConditionalGeneration", {}),
}


def multimodal_config(model_type: str, *, tied: bool = False, **text: Any) -> PreTrainedConfig:
    """A small config of a multimodal type; ``text``: fields of its text model."""
    made = CONFIG_MAPPING[model_type]
    default = made()
    inner = default.get_text_config(decoder=True)
    values = tiny_config(inner.model_type, **(MULTIMODAL[model_type][1] | text)).to_dict()
    values["tie_word_embeddings"] = tied
    towers = {
        name: {key: value for key, value in _TOWERS.items() if hasattr(part, key)}
        for name in _TOWER_CONFIGS
        if (part := getattr(default, name, None)) is not None
    }
    if model_type == "qwen2_vl":  # whose tower gives vectors of that size
        towers["vision_config"]["hidden_size"] = values["hidden_size"]
    tokens = {
        name: SPECIAL
        for name in vars(default)
        if name.endswith(("token_id", "token_index")) and isinstance(getattr(default, name), int)
    }
    if "omni" in model_type:  # the class reads what its config does not declare
        tokens |= {"vision_start_token_id": SPECIAL, "audio_start_token_id": SPECIAL}
    config: PreTrainedConfig = made(
        text_config=values, tie_word_embeddings=tied, **towers, **tokens
    )
    return config


def multimodal_model(model_type: str, *, tied: bool = False, **text: Any) -> Any:
    """A random model, float32, whose outputs differ clearly between tokens."""
    config = multimodal_config(model_type, tied=tied, **text)
    torch.manual_seed(1)
    model = getattr(transformers, MULTIMODAL[model_type][0])(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.normal_(0.0, 1.2 / parameter.shape[-1] ** 0.5)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.1)
        for table in (model.get_input_embeddings(), model.get_output_embeddings()):
            table.weight[SPECIAL] = 0.0  # so that it is never the best
    model.generation_config = transformers.GenerationConfig()
    return model
