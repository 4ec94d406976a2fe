"""The kind of product for bfloat16 weights in linear layers, chosen once per process by timing.

AVX-512 has an instruction for products of bfloat16 pairs. On some CPUs it takes about half as long
as float32 products of the same weights, on others one and a half times as long. The sums of the two
kinds differ in their last bits. A row must have the same bits in every batch, so one kind is used
for all numbers of rows.
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
"""The environment variable that sets the kind; unset or ``auto``: the faster one is measured."""

_KINDS: tuple[Products, ...] = get_args(Products)
_MARGIN = 1.1  # float32 is chosen if it is at least this many times faster
_SIZE = 512  # rows and columns of the measured weight: 512 KiB fit into the second-level cache
_ROWS = 64  # with fewer rows both kinds would wait for memory
_ROUNDS = 5


@functools.cache
def bfloat16_products(library: NativeLibrary) -> Products:
    """Return the kind for this process: the one that `SETTING` names, else the faster one.

    Raises ValueError for an unknown value of `SETTING`.
    """
    requested = os.environ.get(SETTING, "auto")
    if requested == "auto":
        return choose_products(library)
    for kind in _KINDS:
        if kind == requested:
            logger.info("multiplying bfloat16 weights as %s, because %s is set", kind, SETTING)
            return kind
    raise ValueError(f"{SETTING} must be auto, bfloat16 or float32, not {requested!r}")


def choose_products(
    library: NativeLibrary,
    measure: Callable[[NativeLibrary, Products], float] | None = None,
) -> Products:
    """Return the kind of product that takes less time.

    ``measure`` returns seconds; the shortest of a few measurements counts, and float32 must be
    `_MARGIN` times faster. Only AVX-512 is measured. A matrix unit is always faster with bfloat16.
    Without an instruction for pairs both kinds have the same bits, and float32 widens each
    activation once instead of once per weight.
    """
    if library.variant in ("amx", "amx-emulated"):
        return "bfloat16"
    if library.variant != "avx512":
        return "float32"
    measure = measure or products_seconds
    # The kinds alternate, so that a load on the machine for a while slows both.
    rounds = [[measure(library, kind) for kind in _KINDS] for _ in range(_ROUNDS)]
    narrow, wide = (min(seconds) for seconds in zip(*rounds, strict=True))
    chosen: Products = "float32" if wide * _MARGIN < narrow else "bfloat16"
    logger.info(
        "multiplying bfloat16 weights as %s: %d rows take %.0f us as bfloat16, %.0f as float32",
        chosen,
        _ROWS,
        narrow * 1e6,
        wide * 1e6,
    )
    return chosen


def products_seconds(library: NativeLibrary, products: Products) -> float:
    """Return the seconds of the shortest of a few calls of a linear layer in the cache."""
    weight = torch.ones(_SIZE, _SIZE, dtype=torch.bfloat16)
    packed = pack_linear(library, weight, None, products=products)
    x = torch.ones(_ROWS, _SIZE, dtype=torch.bfloat16)
    return best_seconds(lambda: linear(library, x, packed), repeats=2)
