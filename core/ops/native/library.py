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

DTYPES = {torch.float32: 0, torch.bfloat16: 1}  # codes of the activations' dtypes in common.h


class NativeLibrary:
    """The kernels of one variant. Calls release the GIL."""

    def __init__(self, variant: Variant, library: ctypes.CDLL) -> None:
        self.variant = variant
        self.c = library
        for name, result, arguments in signatures():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments

    @property
    def file_name(self) -> str:
        """File name of the library, which differs for other sources, flags or CPUs."""
        return Path(self.c._name).name

    @property
    def lanes(self) -> int:
        """Number of floats in a vector of this variant."""
        return int(self.c.ft_lanes())

    @property
    def tile_rows(self) -> int:
        """Rows that a kernel computes per loaded weight, for the usual kinds of weights."""
        return int(self.c.ft_tile_rows())

    def linear(self, weight: ctypes.Structure, x: Tensor, out: Tensor) -> None:
        """Write the outputs of ``x`` [T, in_features] to ``out`` [T, out_features]; both are dense.

        Raises MemoryError.
        """
        x_dtype, y_dtype = DTYPES[x.dtype], DTYPES[out.dtype]
        failed = self.c.ft_linear(
            ctypes.byref(weight), x.data_ptr(), x_dtype, len(x), out.data_ptr(), y_dtype
        )
        if failed:
            raise MemoryError("no memory for the rows of a linear layer")

    def set_threads(self, threads: int) -> int:
        """Resize the thread pool, calling thread included; return the new number of threads."""
        return int(self.c.ft_set_threads(threads))


def native_library(variant: Variant | None = None) -> NativeLibrary | None:
    """Return the kernels, built on first use, or None (and log why) if they are unavailable.

    Without a ``variant``, the variant is the one that `SETTING` names, else the fastest that the
    machine can run and compile, but never "scalar".
    """
    try:
        candidates = (variant,) if variant else engine_variants()
    except NativeBuildError as error:
        _warn_unavailable(str(error))
        return None
    for candidate in candidates:
        try:
            return _load(candidate)
        except (NativeBuildError, OSError) as error:  # an old compiler may not support the CPU
            reason = str(error)
            logger.info("the native kernels for %s cannot be built: %s", candidate, reason)
    _warn_unavailable(reason)
    return None


def address(tensor: Tensor | None) -> int | None:
    """Return the address of a tensor's data, or None (NULL in C) without a tensor."""
    return None if tensor is None else tensor.data_ptr()


@cache
def _load(variant: Variant) -> NativeLibrary:
    return NativeLibrary(variant, load(variant))


@cache
def _warn_unavailable(reason: str) -> None:
    logger.warning("the native kernels are not available, using PyTorch instead: %s", reason)
