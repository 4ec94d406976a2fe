"""Choice of the backend that computes, made once at start."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Literal, TypeAlias

import torch

from ..errors import ModelLoadError
from ..interface.kv_codec import KV_CODECS, KvDtype
from .base import Exactness, Ops
from .machine.device import choose_device
from .quantize import Quantize
from .torch.torch_ops import TorchOps, keep_rows_exact
from .weights import HeadLayout

logger = logging.getLogger(__name__)
Backend: TypeAlias = Literal["auto", "native", "triton", "torch"]


def choose_ops(
    device: torch.device | str,
    *,
    exact: Exactness = "spec",
    backend: Backend = "torch",
    dtype: torch.dtype = torch.float32,
    heads: Sequence[HeadLayout] = (),
    quantize: Quantize = "none",
    kv_dtype: KvDtype = "auto",
) -> Ops:
    """Return the backend for a device, an activation dtype, head layouts and a KV dtype.

    ``auto`` takes the device's kernels (native on a CPU, Triton on a GPU) if they are available,
    else torch, and logs why. Raises `ModelLoadError` if the device is missing, or if kernels are
    unavailable that were requested by name, by ``quantize`` or by a KV dtype that torch lacks.
    """
    device = choose_device(device)
    found: Ops | str = "--backend torch was given"
    if backend == "triton" or (backend == "auto" and device.type == "cuda"):
        found = _triton_ops(device, exact, dtype, heads, quantize, kv_dtype)
    elif backend != "torch":
        found = _native_ops(device, dtype, heads, quantize, kv_dtype)
    if not isinstance(found, str):
        return found
    _refuse_torch(backend, quantize, kv_dtype, found)
    if backend == "auto":
        logger.warning("using the slower PyTorch backend: %s", found)
    if device.type == "cpu":
        keep_rows_exact(exact)
    return TorchOps(exact=exact)


def _refuse_torch(backend: Backend, quantize: Quantize, kv_dtype: KvDtype, why: str) -> None:
    """Raise ModelLoadError if torch cannot replace the unavailable kernels."""
    if backend in ("native", "triton"):
        raise ModelLoadError(f"backend {backend} is not available: {why}")
    if quantize != "none":
        others = " or triton" if quantize == "int8" else ""
        raise ModelLoadError(f"quantize {quantize} needs the native backend{others}: {why}")
    is_native = KV_CODECS[kv_dtype].native_code is not None
    if not is_native and backend == "auto":  # torch would compute such KV slower than plain KV
        raise ModelLoadError(f"kv_cache_dtype {kv_dtype} needs a GPU and the triton backend: {why}")


def _triton_ops(
    device: torch.device,
    exact: Exactness,
    dtype: torch.dtype,
    heads: Sequence[HeadLayout],
    quantize: Quantize,
    kv_dtype: KvDtype,
) -> Ops | str:
    """Return the Triton backend, or why it is unsuitable. Imports Triton only if it is needed."""
    from .triton.availability import launch_problem, unsuited

    if quantize == "int4":
        return "there are no Triton kernels for int4; use device cpu"
    if problem := unsuited(device, dtype, heads, kv_dtype):
        return problem
    from .triton.triton_ops import TritonOps

    if device.type == "cuda" and (problem := launch_problem()):
        return problem

    return TritonOps(exact=exact, quantize=quantize)


def _native_ops(
    device: torch.device,
    dtype: torch.dtype,
    heads: Sequence[HeadLayout],
    quantize: Quantize,
    kv_dtype: KvDtype,
) -> Ops | str:
    """Return the native backend, or why it is unsuitable."""
    from .native import native_library
    from .native.native_ops import NativeOps
    from .native.products import bfloat16_products
    from .native.structs.plan import unsuited

    problem = f"device {device.type}" if device.type != "cpu" else unsuited(dtype, heads, kv_dtype)
    if problem:
        return f"the native kernels do not support {problem}"
    library = native_library()
    if library is None:
        return "the native kernels are not available (the log says why)"
    if dtype != torch.bfloat16:
        return NativeOps(library, quantize)
    return NativeOps(library, quantize, products=bfloat16_products(library))
