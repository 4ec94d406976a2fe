"""Measured limits of the machine: the roofline beside every figure of the kernels."""

from __future__ import annotations

import time
from collections.abc import Callable

from .library import NativeLibrary
from .memory import HugeArena

_READ_BYTES = 256 << 20  # far more than the caches hold
_ROUNDS = 1000


def best_seconds(call: Callable[[], object], *, repeats: int = 5) -> float:
    """The shortest of a few runs: whatever else runs on the machine only adds."""
    shortest = float("inf")
    for _ in range(repeats):
        started = time.perf_counter()
        call()
        shortest = min(shortest, time.perf_counter() - started)
    return shortest


def read_bandwidth(library: NativeLibrary) -> float:
    """Bytes a second that the pool reads from memory, in huge pages as the weights are."""
    data = HugeArena().zeros((_READ_BYTES,)).fill_(1)
    seconds = best_seconds(lambda: library.c.ft_read(data.data_ptr(), data.nbytes))
    return data.nbytes / seconds


def matrix_rate(library: NativeLibrary) -> float:
    """bfloat16 operations a second that the pool computes from registers, sums in float32."""
    operations = library.c.ft_multiply(_ROUNDS)
    return float(operations / best_seconds(lambda: library.c.ft_multiply(_ROUNDS)))
