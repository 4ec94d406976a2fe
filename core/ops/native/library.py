"""NativeLibrary: the C functions of one variant, and calls that take tensors."""

from __future__ import annotations

import ctypes
import logging
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from .build import NativeBuildError, engine_variants, load
from .declarations import signatures
from .recipe import Variant

logger = logging.getLogger(__name__)

DTYPES = {torch.float32: 0, torch.bfloat16: 1}  # of activations, as in common.h


class NativeLibrary:
    """The kernels of one variant. Calls free the GIL."""

    def __init__(self, variant: Variant, library: ctypes.CDLL) -> None:
        self.variant = variant
        self.c = library
        for name, result, arguments in signatures():
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


def address(tensor: Tensor | None) -> int | None:
    """Return the address of a tensor's numbers, or None (NULL in C) without a tensor."""
    return None if tensor is None else tensor.data_ptr()


@cache
def _load(variant: Variant) -> NativeLibrary:
    return NativeLibrary(variant, load(variant))


@cache
def _say_why(reason: str) -> None:
    logger.warning("native kernels are not available, PyTorch is used instead: %s", reason)
