"""The checkpoint in 8 bits as vLLM loads it: ``vllm/int8``, in the compressed-tensors format.

Weights are scaled per channel and activations per token, symmetrically. The vocabulary stays in
bfloat16, because vLLM does not quantise a tied output layer.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

_INT8 = {"num_bits": 8, "type": "int", "symmetric": True}
QUANTIZATION = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": _INT8 | {"strategy": "channel", "dynamic": False},
            "input_activations": _INT8 | {"strategy": "token", "dynamic": True},
        }
    },
}


def convert(checkpoint: Path, forms: Sequence[str]) -> None:
    """Write the target in 8 bits unless it exists or was not requested.

    Bfloat16 needs no conversion.
    """
    source, out = checkpoint / "target", checkpoint / "vllm" / "int8"
    if "int8" not in forms or (out / "config.json").is_file():
        return
    out.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        tensors |= _quantized(name, tensor) if "_proj." in name else {name: tensor}
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    for name in ("generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / name, out / name)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = QUANTIZATION
    (out / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")


def _quantized(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    scale = (weight.float().abs().amax(dim=1, keepdim=True) / 127).clamp(min=1e-12)
    rounded = (weight.float() / scale).round().clamp(-127, 127).to(torch.int8)
    return {name: rounded, f"{name}_scale": scale}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("forms", nargs="+")
    convert(**vars(parser.parse_args()))
