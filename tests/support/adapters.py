"""LoRA adapters of random numbers as PEFT writes them, and the models that they make of a base."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
FUSED = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")  # of Phi-3 and GLM


def pairs_of(
    model: nn.Module, targets: Sequence[str], rank: int, seed: int
) -> dict[str, tuple[Tensor, Tensor]]:
    """A and B of each linear whose name ends with one of the targets; float32."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) * 0.25

    return {
        name: (draw(rank, module.in_features), draw(module.out_features, rank))
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and name.endswith(tuple(targets))
    }


def write_adapter(
    folder: Path,
    model: nn.Module,
    *,
    targets: Sequence[str] = ALL,
    rank: int = 4,
    alpha: float = 6.0,
    seed: int = 0,
    ranks: dict[str, int] | None = None,
    alphas: dict[str, float] | None = None,
    prefix: str = "base_model.model.",
    more: dict[str, Tensor] | None = None,
    **config: Any,
) -> Path:
    """Write an adapter for a transformers model. ``ranks``, ``alphas``: by target."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = dict(more or {})
    for index, target in enumerate(targets):
        own = (ranks or {}).get(target, rank)
        for name, (a, b) in pairs_of(model, [target], own, seed * 100 + index).items():
            tensors[f"{prefix}{name}.lora_A.weight"] = a
            tensors[f"{prefix}{name}.lora_B.weight"] = b
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "anything",
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.05,
        "bias": "none",
        "target_modules": sorted(targets),
        "rank_pattern": ranks or {},
        "alpha_pattern": alphas or {},
        "init_lora_weights": True,
        "use_dora": False,
        "use_rslora": False,
        "modules_to_save": None,
        "layers_to_transform": None,
        **config,
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings), "utf-8")
    return folder


def merged(
    model: nn.Module,
    *,
    targets: Sequence[str] = ALL,
    rank: int = 4,
    alpha: float = 6.0,
    seed: int = 0,
    ranks: dict[str, int] | None = None,
    alphas: dict[str, float] | None = None,
    is_stabilised: bool = False,
) -> Any:
    """The model with an adapter of `write_adapter` in its weights, in float32."""
    made = copy.deepcopy(model)
    modules = dict(made.named_modules())
    for index, target in enumerate(targets):
        own, own_alpha = (ranks or {}).get(target, rank), (alphas or {}).get(target, alpha)
        scale = own_alpha / (math.sqrt(own) if is_stabilised else own)
        for name, (a, b) in pairs_of(model, [target], own, seed * 100 + index).items():
            weight = modules[name].weight
            weight.data = (weight.data.double() + scale * (b.double() @ a.double())).float()
    return made
