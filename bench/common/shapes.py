"""Checkpoints made on the spot: real shapes, random weights, acceptance under control.

Random weights make acceptance meaningless, so the pair is built to agree: every layer of the
target but the first writes only ``eps`` times its output, and the draft is the first layer. The
smaller ``eps``, the more they agree. Acceptance of such a pair is simulated, not real.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Glm4MoeLiteConfig,
    GraniteMoeHybridConfig,
    Lfm2Config,
    LlamaConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)


def qwen3_06b(**changes: object) -> Qwen3Config:
    """The shape of Qwen3-0.6B, or of another Qwen3."""
    shape: dict[str, Any] = {
        "vocab_size": 151936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
    }
    return Qwen3Config(**shape | changes)


def qwen3_8b(**changes: object) -> Qwen3Config:
    """The shape of Qwen3-8B."""
    shape: dict[str, Any] = {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": False,
    }
    return qwen3_06b(**shape | changes)


def tiny_qwen3(**changes: object) -> Qwen3Config:
    """A Qwen3 for rehearsals."""
    shape: dict[str, Any] = {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 2048,
    }
    return qwen3_06b(**shape | changes)


def qwen25_05b() -> Qwen2Config:
    """The shape of Qwen2.5-0.5B."""
    return Qwen2Config(
        vocab_size=151936,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        tie_word_embeddings=True,
    )


def llama32_1b(**changes: object) -> LlamaConfig:
    """The shape of Llama-3.2-1B, or of another Llama 3."""
    shape: dict[str, Any] = {
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
    }
    return LlamaConfig(**shape | changes)


def llama3_8b(**changes: object) -> LlamaConfig:
    """The shape of Llama-3-8B."""
    shape: dict[str, Any] = {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
    }
    return llama32_1b(**shape | changes)


def qwen3_moe_1b(**changes: object) -> Qwen3MoeConfig:
    """Qwen3-MoE in small: 0.9 billion parameters, of which a token uses 0.2."""
    shape: dict[str, Any] = {
        "vocab_size": 32768,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 512,
        "norm_topk_prob": True,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
    }
    config = Qwen3MoeConfig(**shape | changes)
    config.head_dim = 64  # OpenVINO's converter asks for it
    return config


def qwen35_08b(**changes: object) -> Qwen3_5TextConfig:
    """The shape of Qwen3.5-0.8B: three layers of the delta rule, then one of attention."""
    shape = _QWEN35 | {"intermediate_size": 3584, "num_hidden_layers": 24}
    return Qwen3_5TextConfig(**shape | changes)


def qwen35_moe_1b() -> Qwen3_5MoeTextConfig:
    """Qwen3.6-35B-A3B in small: 16 of its 40 layers, 32 experts of which a token uses 4."""
    return Qwen3_5MoeTextConfig(
        **_QWEN35 | {"vocab_size": 32768},
        num_hidden_layers=16,
        num_experts=32,
        num_experts_per_tok=4,
        moe_intermediate_size=512,
        shared_expert_intermediate_size=512,
    )


def tiny_qwen35() -> Qwen3_5TextConfig:
    """A Qwen3.5 for rehearsals: a layer of the delta rule, then one of attention."""
    return Qwen3_5TextConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        layer_types=["linear_attention", "full_attention"],
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )


_QWEN35: dict[str, Any] = {
    "vocab_size": 248320,
    "hidden_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}


def lfm2_1b() -> Lfm2Config:
    """The shape of LFM2-1.2B: short convolutions, and six layers of attention."""
    attention = (2, 5, 8, 10, 12, 14)
    kinds = ["full_attention" if index in attention else "conv" for index in range(16)]
    return Lfm2Config(
        vocab_size=65536,
        hidden_size=2048,
        intermediate_size=12288,
        num_hidden_layers=16,
        layer_types=kinds,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=8192,
    )


def granite4h_1b() -> GraniteMoeHybridConfig:
    """The shape of Granite 4.0 H 1B: Mamba-2, and four layers of attention without positions."""
    kinds = ["attention" if index in (5, 15, 25, 35) else "mamba" for index in range(40)]
    return GraniteMoeHybridConfig(
        vocab_size=100352,
        hidden_size=1536,
        intermediate_size=4096,
        shared_intermediate_size=4096,
        num_hidden_layers=40,
        layer_types=kinds,
        num_attention_heads=12,
        num_key_value_heads=4,
        num_local_experts=0,
        num_experts_per_tok=0,
        mamba_n_heads=48,
        mamba_d_head=64,
        mamba_d_state=128,
        mamba_n_groups=1,
        attention_multiplier=1 / 128,
        embedding_multiplier=12.0,
        logits_scaling=6.0,
        residual_multiplier=0.22,
        position_embedding_type="nope",
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    )


def glm_flash_1b() -> Glm4MoeLiteConfig:
    """GLM-4.7-Flash in small: 16 of its 47 layers with latent attention, 16 experts."""
    return Glm4MoeLiteConfig(
        vocab_size=32768,
        hidden_size=1024,
        intermediate_size=3072,
        moe_intermediate_size=512,
        num_hidden_layers=16,
        mlp_layer_types=["dense"] + ["sparse"] * 15,
        n_routed_experts=16,
        max_position_embeddings=8192,
    )


def write_config(folder: Path, config: PretrainedConfig) -> Path:
    """Write a ``config.json`` in bfloat16, all that random weights need; returns the folder."""
    config.dtype = "bfloat16"
    config.save_pretrained(folder)
    return folder


@torch.inference_mode()
def write_pair(folder: Path, config: PretrainedConfig, dtype: torch.dtype, *, eps: float) -> None:
    """Write ``folder/target`` and ``folder/draft``, unless they are there."""
    if (folder / "draft" / "config.json").is_file():
        return
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM
    target = model.from_config(config, dtype=dtype)
    for index, layer in enumerate(target.model.layers):
        layer.self_attn.o_proj.weight *= 0.2 * (eps if index else 1.0)
        mlp = layer.mlp
        down = mlp.experts.down_proj if hasattr(mlp, "experts") else mlp.down_proj.weight
        down *= 8 * (eps if index else 1.0)
    target.save_pretrained(folder / "target")
    target.model.layers = target.model.layers[:1]
    target.config.num_hidden_layers = 1
    if hasattr(target.config, "layer_types"):
        target.config.layer_types = ["full_attention"]
    target.save_pretrained(folder / "draft")
