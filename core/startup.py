"""Progress of a start: how much of a long step is done, and the seconds of each step."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

T = TypeVar("T")
STARTUP = "foretoken.start"
"""Logger of the seconds of each step of a start, at level debug."""
logger = logging.getLogger(STARTUP)

LOADING, COMPILING = "loading", "compiling the kernels"
"""Steps whose progress is told: a model's weights are read, or C code is compiled."""
on_progress: ContextVar[Callable[[str, float], None]] = ContextVar(
    "on_progress", default=lambda _step, _share: None
)
"""Called with a step and the share of it that is done, from 0 to 1, in any thread."""


@contextmanager
def timed(step: str) -> Iterator[None]:
    """Log what a step took."""
    began = time.perf_counter()
    try:
        yield
    finally:
        log_seconds(step, time.perf_counter() - began)


def log_seconds(step: str, seconds: float) -> None:
    """Log what a step took."""
    logger.debug("%-22s %6.2f s", step, seconds)


class WeightReader:
    """Reads tensors by name, and tells how much of them is read.

    ``shapes``: of all tensors. Called from one thread.
    """

    def __init__(self, shapes: Mapping[str, Sequence[int]]) -> None:
        self._sizes = {name: math.prod(shape) for name, shape in shapes.items()}
        self._total = max(1, sum(self._sizes.values()))
        self._done, self._seconds = 0, 0.0
        self._tell = on_progress.get()

    def counted(self, read: Callable[[str], T]) -> Callable[[str], T]:
        """Return ``read``, counted."""

        def read_one(name: str) -> T:
            began = time.perf_counter()
            value = read(name)
            self._seconds += time.perf_counter() - began
            self._done += self._sizes.get(name, 0)
            self._tell(LOADING, min(1.0, self._done / self._total))
            return value

        return read_one

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Log what reading took in the block, and what the rest of it took, which is packing."""
        began = time.perf_counter()
        yield
        log_seconds("  weights: reading", self._seconds)
        log_seconds("  weights: packing", time.perf_counter() - began - self._seconds)
