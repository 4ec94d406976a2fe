"""Limits of the Triton kernels and their devices, checked before Triton is imported."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib.util import find_spec

import torch

from ...interface.kv_codec import KV_CODECS, KvDtype
from ..weights import HeadLayout

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MIN_HEAD_DIM, MAX_HEAD_DIM = 16, 256
MAX_GROUP = 64  # query heads per KV head, which share a tile
MIN_CAPABILITY = (8, 0)  # first one with matrix instructions for bfloat16
INTERPRET = "TRITON_INTERPRET"


def unsuited(
    device: torch.device,
    dtype: torch.dtype,
    heads: Sequence[HeadLayout],
    kv_dtype: KvDtype = "auto",
) -> str:
    """Return why the kernels cannot compute a model on a device, or ""."""
    if find_spec("triton") is None:
        return "Triton is not installed (pip install triton)"
    return _unsuited_device(device, dtype, kv_dtype) or _unsuited_model(dtype, heads)


def _unsuited_device(device: torch.device, dtype: torch.dtype, kv_dtype: KvDtype) -> str:
    is_interpreted = os.environ.get(INTERPRET) == "1"
    if device.type == "cuda":
        if is_interpreted:
            return f"{INTERPRET}=1 selects Triton's interpreter, which runs on the CPU only"
        capability = torch.cuda.get_device_capability(device)
        lowest = max(KV_CODECS[kv_dtype].capability, MIN_CAPABILITY)
        if capability < lowest:
            return "compute capability {}.{} is below {}.{}".format(*capability, *lowest)
        return ""
    if not is_interpreted:
        return f"on a CPU only Triton's interpreter runs, for tests: set {INTERPRET}=1"
    if dtype == torch.bfloat16:
        return "Triton's interpreter multiplies bfloat16 wrongly: use float32"
    return ""


def _unsuited_model(dtype: torch.dtype, heads: Sequence[HeadLayout]) -> str:
    if dtype not in DTYPES:
        return f"{dtype} is not supported"
    if problem := next(filter(None, map(unsuited_heads, heads)), ""):
        return problem
    return "no Triton kernels for heads of several shapes" if len(heads) > 1 else ""


def unsuited_heads(heads: HeadLayout) -> str:
    """Return why the kernels cannot compute heads of this shape, or ""."""
    if heads.rank:
        return "no Triton kernels for latent attention"
    dim = heads.head_dim
    if dim & (dim - 1) or not MIN_HEAD_DIM <= dim <= MAX_HEAD_DIM:
        limits = f"a power of two from {MIN_HEAD_DIM} to {MAX_HEAD_DIM}"
        return f"heads of {dim} dimensions are not supported: must be {limits}"
    if heads.group_size > MAX_GROUP:
        return f"{heads.group_size} query heads per KV head, more than {MAX_GROUP}"
    return "" if heads.value_eps is None else "no Triton kernel normalises the values of attention"


def launch_problem() -> str:
    """Return why Triton cannot launch a kernel on this GPU, or "".

    Triton needs a C compiler and Python's headers, and compiles some C at its first use.
    """
    from triton.runtime import driver

    try:
        driver.active.get_current_target()
    except Exception as error:  # driver, compiler and linker raise many types
        message = str(error) or type(error).__name__
        return f"Triton cannot use the GPU: {message.splitlines()[0]}"
    return ""
