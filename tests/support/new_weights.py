"""Checkpoints with the architecture of another one and other weights."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Change = Callable[[dict[str, Tensor]], None]
FILE = "model.safetensors"


def unchanged(tensors: dict[str, Tensor]) -> None:
    """Leave the new weights as they are."""


def retrained(source: Path, folder: Path, change: Change = unchanged, *, seed: int = 1) -> Path:
    """Copy a checkpoint with every weight moved at random; ``change`` edits the new tensors."""
    shutil.copytree(source, folder)
    generator = torch.Generator().manual_seed(seed)
    tensors = load_file(source / FILE)
    for name in sorted(tensors):
        old = tensors[name]
        noise = torch.randn(old.shape, generator=generator) * 0.2 * float(old.float().std() + 0.01)
        tensors[name] = (old.float() + noise).to(old.dtype)
    change(tensors)
    save_file(tensors, folder / FILE, metadata={"format": "pt"})
    return folder


def digest(file: Path) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    return hashlib.sha256(file.read_bytes()).hexdigest()
