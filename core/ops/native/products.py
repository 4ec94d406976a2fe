"""The product of bfloat16 weights in linear layers, chosen once per process by measurement.

AVX-512 has an instruction for products of bfloat16 pairs. Some CPUs need about half as long for it
as for float32 products of the same weights, others one and a half times as long. Sums of the two
kinds differ in their last bits. A row must have the same bits in every batch, so one kind serves
all row counts.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from typing import get_args

import torch

from .library import NativeLibrary
from .limits import best_seconds
from .structs.linear import Products, linear, pack_linear

logger = logging.getLogger(__name__)

SETTING = "FORETOKEN_BF16_PRODUCTS"
"""The environment variable that sets the kind; unset or ``auto`` measures."""

_KINDS: tuple[Products, ...] = get_args(Products)
_MARGIN = 1.1  # float32 is taken where it is this many times faster
_SIZE = 512  # of the measured weight: 512 KiB stay in the second-level cache
_ROWS = 64  # at few rows both kinds wait for memory
_ROUNDS = 5


@functools.cache
def bfloat16_products(library: NativeLibrary) -> Products:
    """The kind for this process: as `SETTING` has it, else the faster one.

    Raises ValueError for an unknown value of `SETTING`.
    """
    requested = os.environ.get(SETTING, "auto")
    if requested == "auto":
        return choose_products(library)
    for kind in _KINDS:
        if kind == requested:
            logger.info("bfloat16 weights are multiplied as %s: %s is set", kind, SETTING)
            return kind
    raise ValueError(f"{SETTING} must be auto, bfloat16 or float32, not {requested!r}")


def choose_products(
    library: NativeLibrary,
    measure: Callable[[NativeLibrary, Products], float] | None = None,
) -> Products:
    """The faster kind by the best of a few ``measure`` (seconds); float32 must win clearly.

    Only AVX-512 is measured. A matrix unit is always faster. Without any instruction for pairs both
    kinds are the same bits, and float32 widens each activation once instead of once per weight.
    """
    if library.variant in ("amx", "amx-emulated"):
        return "bfloat16"
    if library.variant != "avx512":
        return "float32"
    measure = measure or products_seconds
    # In turns: what else runs on the machine for a while must not meet one kind alone.
    rounds = [[measure(library, kind) for kind in _KINDS] for _ in range(_ROUNDS)]
    narrow, wide = (min(seconds) for seconds in zip(*rounds, strict=True))
    chosen: Products = "float32" if wide * _MARGIN < narrow else "bfloat16"
    logger.info(
        "bfloat16 weights are multiplied as %s: %d rows take %.0f us as bfloat16, %.0f as float32",
        chosen,
        _ROWS,
        narrow * 1e6,
        wide * 1e6,
    )
    return chosen


def products_seconds(library: NativeLibrary, products: Products) -> float:
    """The shortest of a few calls of a linear layer that lies in the cache."""
    weight = torch.ones(_SIZE, _SIZE, dtype=torch.bfloat16)
    packed = pack_linear(library, weight, None, products=products)
    x = torch.ones(_ROWS, _SIZE, dtype=torch.bfloat16)
    return best_seconds(lambda: linear(library, x, packed), repeats=2)
