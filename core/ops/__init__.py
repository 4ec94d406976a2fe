"""The operations of a decoder step, one backend chosen at start."""

from __future__ import annotations

import torch

from ..errors import ModelLoadError
from .base import Exactness, ForwardPlan, HeadLayout, HeadNorm, Ops, PackedLinear
from .torch_ops import TorchOps

__all__ = [
    "Exactness",
    "ForwardPlan",
    "HeadLayout",
    "HeadNorm",
    "Ops",
    "PackedLinear",
    "TorchOps",
    "choose_ops",
]


def choose_ops(device: torch.device | str, *, exact: Exactness = "spec") -> Ops:
    """The backend for a device. Raises `ModelLoadError` when the device is not there."""
    kind = torch.device(device).type
    if kind not in ("cpu", "cuda"):
        raise ModelLoadError(f"device {kind} is not supported; use cpu or cuda")
    if kind == "cuda" and not torch.cuda.is_available():
        raise ModelLoadError("device cuda was asked for, but torch sees no CUDA device")
    return TorchOps(exact=exact)
