"""Checkpoints made on the spot: real shapes, random weights, acceptance under control.

Random weights make acceptance meaningless, so the pair is built to agree: every layer of the
target but the first writes only ``eps`` times its output, and the draft is the first layer. The
smaller ``eps``, the more they agree. Acceptance of such a pair is simulated, not real.
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM


def qwen3_06b() -> Qwen3Config:
    """The shape of Qwen3-0.6B."""
    return Qwen3Config(
        vocab_size=151936,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    )


@torch.inference_mode()
def write_pair(folder: Path, config: Qwen3Config, dtype: torch.dtype, *, eps: float) -> None:
    """Write ``folder/target`` and ``folder/draft``, unless they are there."""
    if (folder / "draft" / "config.json").is_file():
        return
    torch.manual_seed(0)
    target: Qwen3ForCausalLM = Qwen3ForCausalLM(config).to(dtype=dtype)  # type: ignore[call-arg]
    for index, layer in enumerate(target.model.layers):
        layer.self_attn.o_proj.weight *= 0.2 * (eps if index else 1.0)
        layer.mlp.down_proj.weight *= 8 * (eps if index else 1.0)
    target.save_pretrained(folder / "target")
    target.model.layers = target.model.layers[:1]
    target.config.num_hidden_layers = 1
    target.config.layer_types = ["full_attention"]
    target.save_pretrained(folder / "draft")
