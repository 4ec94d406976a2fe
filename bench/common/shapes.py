"""Checkpoints written when needed: real shapes, random weights, controlled acceptance.

Random weights make acceptance meaningless, so a target and its draft are built to agree: every
layer of the target except the first adds only ``eps`` times its output, and the draft is the first
layer. The smaller ``eps`` is, the more often they agree. Their acceptance is simulated, not real.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

PRESETS: dict[str, dict[str, Any]] = tomllib.loads(
    Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
)


def shape(name: str, **changes: object) -> PretrainedConfig:
    """Return the config of a preset in shapes.toml, with some fields changed."""
    fields = PRESETS[name] | changes
    while base := fields.pop("like", None):
        fields = PRESETS[base] | fields
    config: PretrainedConfig = AutoConfig.for_model(fields.pop("model_type"), **fields)
    return config


def write_config(folder: Path, config: PretrainedConfig) -> Path:
    """Write a ``config.json`` in bfloat16 for a model with random weights; return the folder."""
    config.dtype = "bfloat16"
    config.save_pretrained(folder)
    return folder


@torch.inference_mode()
def write_pair(folder: Path, config: PretrainedConfig, dtype: torch.dtype, *, eps: float) -> None:
    """Write ``folder/target`` and ``folder/draft``, unless they exist."""
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
