"""Writes SmolLM2 with permuted weights, so that a 4-bit copy differs from the model.

The weights come from a 4-bit file, so a 4-bit copy with the same groups would be the model itself,
and every draft of it would be right. Here residual dimensions, MLP units and value dimensions are
permuted: the logits are the same except for the order of sums, but the groups of 32 weights differ.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor

from ..api.build.model_files import checked_smollm2
from ..api.train.twins import Weights, write_twin

SEED = 3
_READS_STREAM = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
_ADDS_TO_STREAM = ("o_proj", "down_proj")


def write_off_grid(out: Path) -> Path:
    """Write the folder in Hugging Face format, in bfloat16; a complete folder is left unchanged."""

    def permuted(weights: Weights) -> Weights:
        heads = json.loads((out / "config.json").read_text())
        return _permuted(weights, heads["num_attention_heads"], heads["num_key_value_heads"])

    return write_twin(checked_smollm2(), out, dtype=torch.bfloat16, change=permuted)


def _permuted(weights: dict[str, Tensor], num_heads: int, num_kv_heads: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(SEED)
    hidden = len(weights["model.norm.weight"])
    stream = torch.randperm(hidden, generator=generator)
    found = {name: _in_stream_order(name, weight, stream) for name, weight in weights.items()}
    layers = {name.split(".")[2] for name in weights if name.startswith("model.layers.")}
    for layer in sorted(layers, key=int):
        prefix = f"model.layers.{layer}."
        _permute_units(found, f"{prefix}mlp.", generator)
        _permute_values(found, f"{prefix}self_attn.", num_heads, num_kv_heads, generator)
    return found


def _in_stream_order(name: str, weight: Tensor, stream: Tensor) -> Tensor:
    kind = name.removesuffix(".weight").rsplit(".", 1)[-1]
    if kind in _READS_STREAM or kind in ("embed_tokens", "lm_head"):
        return weight[:, stream]
    if kind in _ADDS_TO_STREAM or kind.endswith("norm"):
        return weight[stream]
    raise ValueError(f"{name} is not a tensor of SmolLM2")


def _permute_units(weights: dict[str, Tensor], prefix: str, generator: torch.Generator) -> None:
    gate, up, down = (f"{prefix}{each}_proj.weight" for each in ("gate", "up", "down"))
    units = torch.randperm(len(weights[gate]), generator=generator)
    weights[gate], weights[up] = weights[gate][units], weights[up][units]
    weights[down] = weights[down][:, units]


def _permute_values(
    weights: dict[str, Tensor],
    prefix: str,
    num_heads: int,
    num_kv_heads: int,
    generator: torch.Generator,
) -> None:
    """Permute the value dimensions of each head, and the columns of ``o_proj`` that read them."""
    v, o = f"{prefix}v_proj.weight", f"{prefix}o_proj.weight"
    head_dim, group = len(weights[v]) // num_kv_heads, num_heads // num_kv_heads
    orders = [torch.randperm(head_dim, generator=generator) for _ in range(num_kv_heads)]
    values = torch.cat([head * head_dim + order for head, order in enumerate(orders)])
    read = [head * head_dim + orders[head // group] for head in range(num_heads)]
    weights[v], weights[o] = weights[v][values], weights[o][:, torch.cat(read)]
