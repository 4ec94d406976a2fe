"""Folders of safetensors made from GGUF files, whose packed weights cannot be trained."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from ...core.model.opening import open_model
from ...core.ops.quantize import QuantizedWeight
from .policy import FILE


def write_float32(file: Path, out: Path) -> Path:
    """Write a GGUF file's model in Hugging Face layout, dequantized to float32; return the folder.

    A complete folder is left unchanged. Raises `ModelLoadError`, and ValueError for tensors that
    have no plain values.
    """
    done = out / FILE
    if done.exists():
        return out
    from transformers import AutoConfig, AutoTokenizer

    out.mkdir(parents=True, exist_ok=True)
    config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
    config.dtype = torch.float32
    config.save_pretrained(out)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(out)
    checkpoint = open_model(file).checkpoint
    tensors = {name: _plain(name, checkpoint.read(name)) for name in checkpoint.shapes}
    part = out / "part"
    save_file(tensors, part, {"format": "pt"})
    part.rename(done)
    return out


def _plain(name: str, weight: object) -> Tensor:
    if isinstance(weight, QuantizedWeight):
        weight = weight.dequantize()
    if not isinstance(weight, Tensor):
        raise ValueError(f"{name} has no plain values")
    return weight.float().contiguous()
