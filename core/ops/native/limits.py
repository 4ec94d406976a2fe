"""Measured limits of the machine, the roofline for benchmarks of the kernels."""

from __future__ import annotations

import time
from collections.abc import Callable

from .library import NativeLibrary
from .memory import HugeArena

_READ_BYTES = 256 << 20  # far more than the caches' size
_ROUNDS = 1000


def best_seconds(call: Callable[[], object], *, repeats: int = 5) -> float:
    """Return the seconds of the shortest of a few runs; other load only makes a run longer."""
    shortest = float("inf")
    for _ in range(repeats):
        started = time.perf_counter()
        call()
        shortest = min(shortest, time.perf_counter() - started)
    return shortest


def read_bandwidth(library: NativeLibrary) -> float:
    """Return the bytes per second that the thread pool reads from memory in huge pages."""
    data = HugeArena().zeros((_READ_BYTES,)).fill_(1)
    seconds = best_seconds(lambda: library.c.ft_read(data.data_ptr(), data.nbytes))
    return data.nbytes / seconds


def matrix_rate(library: NativeLibrary) -> float:
    """Return the bfloat16 operations per second of the thread pool, with float32 sums.

    All operands are in registers.
    """
    operations = library.c.ft_multiply(_ROUNDS)
    return float(operations / best_seconds(lambda: library.c.ft_multiply(_ROUNDS)))
