"""LoRA adapters with random numbers, in PEFT's form."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import PretrainedConfig

NUM_ADAPTERS = 4
RANK = 16
_SCALE = 0.02  # of A and B: the model goes on to say many different tokens


def write_adapters(folder: Path, config: PretrainedConfig) -> None:
    """Write ``folder/adapters/0`` and so on, unless they are there."""
    for number in range(NUM_ADAPTERS):
        home = folder / "adapters" / str(number)
        if (home / "adapter_config.json").is_file():
            continue
        home.mkdir(parents=True, exist_ok=True)
        generator = torch.Generator().manual_seed(number)
        tensors = {}
        for layer in range(config.num_hidden_layers):
            for name, (num_out, num_in) in _matrices(config).items():
                prefix = f"base_model.model.model.layers.{layer}.{name}"
                for part, shape in (("lora_A", (RANK, num_in)), ("lora_B", (num_out, RANK))):
                    random = torch.randn(shape, generator=generator) * _SCALE
                    tensors[f"{prefix}.{part}.weight"] = random.to(torch.bfloat16)
        save_file(tensors, home / "adapter_model.safetensors")
        targets = [name.rpartition(".")[2] for name in _matrices(config)]
        settings = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": "",
            "r": RANK,
            "lora_alpha": 2 * RANK,
            "target_modules": targets,
        }
        (home / "adapter_config.json").write_text(json.dumps(settings), encoding="utf-8")


def _matrices(config: PretrainedConfig) -> dict[str, tuple[int, int]]:
    """Outputs and inputs of a layer's matrices."""
    width, mlp = config.hidden_size, config.intermediate_size
    heads = config.num_attention_heads * config.head_dim
    kv_heads = config.num_key_value_heads * config.head_dim
    return {
        "self_attn.q_proj": (heads, width),
        "self_attn.k_proj": (kv_heads, width),
        "self_attn.v_proj": (kv_heads, width),
        "self_attn.o_proj": (width, heads),
        "mlp.gate_proj": (mlp, width),
        "mlp.up_proj": (mlp, width),
        "mlp.down_proj": (width, mlp),
    }
