"""NativeLibrary: every C function's signature, and calls that take tensors."""

from __future__ import annotations

import ctypes
import logging
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from .build import NativeBuildError, engine_variants, load
from .recipe import Variant

logger = logging.getLogger(__name__)

_I32, _I64, _PTR = ctypes.c_int, ctypes.c_int64, ctypes.c_void_p

DTYPES = {torch.float32: 0, torch.bfloat16: 1}  # of activations, as in common.h

# name: (result, arguments)
_SIGNATURES: dict[str, tuple[object, tuple[object, ...]]] = {
    "ft_set_threads": (_I32, (_I32,)),
    "ft_lanes": (_I32, ()),
    "ft_tile_rows": (_I32, ()),
    "ft_linear": (_I32, (_PTR, _PTR, _I32, _I64, _PTR, _I32)),
    "ft_rough_copy": (None, (_PTR, _PTR)),
    "ft_pack": (None, (_I32, _PTR, _I64, _I64, _I64, _PTR)),
    "ft_panel_bytes": (_I64, (_I32, _I64)),
    "ft_unpack_rows": (None, (_PTR, _PTR, _I64, ctypes.c_float, _PTR, _I32)),
    "ft_add_norm": (None, (_PTR, _PTR, ctypes.c_float, _PTR, _PTR, _I64, _I64, _I32)),
    "ft_activate": (None, (_PTR, _PTR, _I64, _I64, _PTR, _I32)),
    "ft_gate": (None, (_PTR, _PTR, _I64, _I64, _I32)),
    "ft_recur": (_I32, (_PTR, _PTR, _PTR, _PTR, _PTR, _I32)),
    "ft_short_conv": (None, (_PTR, _PTR, _PTR, _PTR, _I32)),
    "ft_rope_write": (None, (_PTR, _PTR, _PTR, _PTR, _PTR, _I64, _PTR)),
    "ft_mixture": (_I32, (_PTR, _PTR, _PTR, _PTR, _I64, _I32)),
    "ft_embedding": (None, (_PTR, _PTR, _PTR, _I64, _I64)),
    "ft_attention": (_I32, (_PTR, _PTR, _PTR, _PTR, _PTR, _I64, _PTR)),
    "ft_attention_blocks": (_I64, (_PTR, _PTR, _PTR, _I64)),
    "ft_add_lora": (_I32, (_PTR, _I64, _PTR, _PTR, _I32)),
    "ft_forward": (
        _I32,
        (
            *(_PTR, _PTR, _PTR, _I64, _PTR, _PTR, _I64, _PTR),
            *(_I64, _PTR, _I64, _PTR, _PTR, _PTR, _I64, _PTR),
        ),
    ),
    "ft_choose": (_I32, (_PTR, _I64, _PTR, _PTR, _I64, _PTR, _PTR, _PTR)),
    "ft_best": (_I32, (_PTR, _I64, _PTR, _PTR, _I64, _PTR, _I64, _PTR, _PTR, _PTR)),
    "ft_row_pass": (
        _I32,
        (
            *(_PTR, ctypes.c_float, _PTR, _I64, _PTR, _I64, _PTR),
            *(_PTR, _I64, _PTR, _I64, _PTR, _PTR, _PTR),
        ),
    ),
    "ft_read": (None, (_PTR, _I64)),
    "ft_multiply": (ctypes.c_double, (_I64,)),
}


class NativeLibrary:
    """The kernels of one variant. Calls free the GIL."""

    def __init__(self, variant: Variant, library: ctypes.CDLL) -> None:
        self.variant = variant
        self.c = library
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments

    @property
    def file_name(self) -> str:
        """The library's, as `build` made it: another one for other sources, flags or CPUs."""
        return Path(self.c._name).name

    @property
    def lanes(self) -> int:
        """Floats in a vector of this variant."""
        return int(self.c.ft_lanes())

    @property
    def tile_rows(self) -> int:
        """Rows that share each load of a weight, of the most common kinds."""
        return int(self.c.ft_tile_rows())

    def linear(self, weight: ctypes.Structure, x: Tensor, out: Tensor) -> None:
        """``x`` [T, in_features] to ``out`` [T, out_features], both dense."""
        x_dtype, y_dtype = DTYPES[x.dtype], DTYPES[out.dtype]
        failed = self.c.ft_linear(
            ctypes.byref(weight), x.data_ptr(), x_dtype, len(x), out.data_ptr(), y_dtype
        )
        if failed:
            raise MemoryError("no memory for the rows of a linear layer")

    def set_threads(self, threads: int) -> int:
        """Resize the pool, the calling thread included; how many there are now."""
        return int(self.c.ft_set_threads(threads))


def native_library(variant: Variant | None = None) -> NativeLibrary | None:
    """The kernels, built on first use; None (and one log line) where they cannot be had.

    Without a ``variant`` the fastest that the machine can run and compile, though never "scalar".
    """
    try:
        candidates = (variant,) if variant else engine_variants()
    except NativeBuildError as error:
        _say_why(str(error))
        return None
    for candidate in candidates:
        try:
            return _load(candidate)
        except (NativeBuildError, OSError) as error:  # an old compiler may know less than the CPU
            reason = str(error)
            logger.info("the native kernels for %s cannot be built: %s", candidate, reason)
    _say_why(reason)
    return None


@cache
def _load(variant: Variant) -> NativeLibrary:
    return NativeLibrary(variant, load(variant))


@cache
def _say_why(reason: str) -> None:
    logger.warning("native kernels are not available, PyTorch is used instead: %s", reason)
