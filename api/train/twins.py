"""Folders of safetensors with the weights of GGUF files, which can be trained or changed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import torch
from safetensors.torch import save_file
from torch import Tensor

from ...core.model.opening import open_model
from ...core.ops.quantize import QuantizedWeight
from .policy import FILE

Weights: TypeAlias = dict[str, Tensor]


def write_twin(
    file: Path,
    out: Path,
    *,
    dtype: torch.dtype = torch.float32,
    change: Callable[[Weights], Weights] = lambda weights: weights,
) -> Path:
    """Write a GGUF file's model in Hugging Face layout, with weights of ``dtype``; return ``out``.

    ``change`` gets the dequantized weights by name and returns the weights to write. A complete
    folder is left unchanged. Raises `ModelLoadError`, and ValueError for tensors that have no plain
    values.
    """
    done = out / FILE
    if done.exists():
        return out
    from transformers import AutoConfig, AutoTokenizer

    out.mkdir(parents=True, exist_ok=True)
    config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
    config.dtype = dtype
    config.save_pretrained(out)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(out)
    checkpoint = open_model(file).checkpoint
    weights = {name: _plain(name, checkpoint.read(name)) for name in checkpoint.shapes}
    tensors = {name: each.to(dtype).contiguous() for name, each in change(weights).items()}
    part = out / "part"
    save_file(tensors, part, {"format": "pt"})
    part.rename(done)
    return out


def _plain(name: str, weight: object) -> Tensor:
    if isinstance(weight, QuantizedWeight):
        weight = weight.dequantize()
    if not isinstance(weight, Tensor):
        raise ValueError(f"{name} has no plain values")
    return weight
