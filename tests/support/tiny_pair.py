"""A tiny target and a draft that often agrees with it: the target with a little noise."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM


@torch.inference_mode()
def write_pair(folder: Path, *, vocab_size: int) -> tuple[Path, Path]:
    """Write both in Hugging Face layout, float32; returns their folders."""
    torch.manual_seed(3)
    model = Qwen3ForCausalLM(_config(vocab_size))
    for parameter in model.parameters():
        if parameter.ndim == 2:  # spread the logits: near-uniform ones would test little
            parameter *= 4
    model.save_pretrained(folder / "target")
    for parameter in model.parameters():
        if parameter.ndim == 2:
            parameter += 0.25 * parameter.std() * torch.randn_like(parameter)
    model.save_pretrained(folder / "draft")
    return folder / "target", folder / "draft"


def _config(vocab_size: int) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        eos_token_id=2,
    )
