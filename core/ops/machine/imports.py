"""Imports of large packages without the garbage collector."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Import modules while the garbage collector rests; nothing is done if it is off anyway.

    Nearly all objects of an import stay, and the collector would look through all of them again
    and again. For torch and the engine that takes a fifth of the time.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
