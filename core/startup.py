"""Progress of a start: the finished share of a long step, and the seconds of each step."""

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
"""Steps whose progress is reported: loading a model's weights, or compiling C code."""
on_progress: ContextVar[Callable[[str, float], None]] = ContextVar(
    "on_progress", default=lambda _step, _share: None
)
"""Called with a step and its finished share, from 0 to 1, in any thread."""


@contextmanager
def timed(step: str) -> Iterator[None]:
    """Log the seconds that the block took."""
    began = time.perf_counter()
    try:
        yield
    finally:
        log_seconds(step, time.perf_counter() - began)


def log_seconds(step: str, seconds: float) -> None:
    """Log the seconds that a step took."""
    logger.debug("%-22s %6.2f s", step, seconds)


class WeightReader:
    """Reader of tensors by name, which reports the share that is read.

    ``shapes``: shapes of all tensors by name. Called from one thread.
    """

    def __init__(self, shapes: Mapping[str, Sequence[int]]) -> None:
        self._sizes = {name: math.prod(shape) for name, shape in shapes.items()}
        self._total = max(1, sum(self._sizes.values()))
        self._done, self._seconds = 0, 0.0
        self._tell = on_progress.get()

    def counted(self, read: Callable[[str], T]) -> Callable[[str], T]:
        """Return a reader that calls ``read``, and counts its seconds and the tensors read."""

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
        """Log the seconds that reading took in the block, and the rest, which is packing."""
        began = time.perf_counter()
        yield
        log_seconds("  weights: reading", self._seconds)
        log_seconds("  weights: packing", time.perf_counter() - began - self._seconds)
