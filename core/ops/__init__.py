"""The operations of a decoder step, one backend chosen at start."""

from __future__ import annotations

import logging
from typing import Literal, TypeAlias

import torch

from ..errors import ModelLoadError
from .base import Exactness, ForwardPlan, HeadLayout, HeadNorm, Ops, PackedLinear
from .torch_ops import TorchOps

__all__ = [
    "Backend",
    "Exactness",
    "ForwardPlan",
    "HeadLayout",
    "HeadNorm",
    "Ops",
    "PackedLinear",
    "Quantize",
    "TorchOps",
    "choose_ops",
]


logger = logging.getLogger(__name__)
Backend: TypeAlias = Literal["auto", "native", "torch"]
Quantize: TypeAlias = Literal["none", "int8", "int4"]


def choose_ops(
    device: torch.device | str,
    *,
    exact: Exactness = "spec",
    backend: Backend = "torch",
    dtype: torch.dtype = torch.float32,
    heads: HeadLayout | None = None,
    quantize: Quantize = "none",
) -> Ops:
    """The backend for a device, a dtype and a shape of heads.

    ``auto`` takes the native kernels where they can be had. Raises `ModelLoadError` when the
    device is not there, or the native kernels are asked for, as by ``quantize``, and are not.
    """
    kind = torch.device(device).type
    if kind not in ("cpu", "cuda"):
        raise ModelLoadError(f"device {kind} is not supported; use cpu or cuda")
    if kind == "cuda" and not torch.cuda.is_available():
        raise ModelLoadError("device cuda was asked for, but torch sees no CUDA device")
    native = _native_ops(kind, dtype, heads, quantize) if backend != "torch" else None
    if native is None and backend == "native":
        raise ModelLoadError("backend native cannot be had here (the log says why); use torch")
    if native is None and quantize != "none":
        raise ModelLoadError(f"quantize {quantize} needs the native backend")
    return native or TorchOps(exact=exact)


def _native_ops(
    kind: str, dtype: torch.dtype, heads: HeadLayout | None, quantize: Quantize
) -> Ops | None:
    """The native kernels, if they suit; a log line says why not."""
    from ..native import native_library
    from ..native.plan import unsuited
    from .native_ops import NativeOps

    problem = f"device {kind}" if kind != "cpu" else unsuited(dtype, heads)
    if problem:
        logger.warning("the native kernels do not support %s: torch computes", problem)
        return None
    library = native_library()
    return None if library is None else NativeOps(library, quantize)
