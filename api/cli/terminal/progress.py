"""One line on stderr while a model is loaded: ``loading smollm2 (93.6 MiB) ... 2.1 s``."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Awaitable

from ....core.config import format_size
from ...build.model_files import name_and_bytes

TICK = 0.1  # seconds


async def watch_loading(model: str | None, loading: Awaitable[None]) -> None:
    """Await ``loading`` and write the line, with the seconds that it took at its end.

    A terminal shows them as they pass. No line for a model that is not there, nor for one that may
    have to be downloaded, which has progress bars of its own.
    """
    found = name_and_bytes(model)
    if found is None or sys.stderr is None:
        await loading
    else:
        await _watch(f"loading {found[0]} ({format_size(found[1])}) ... ", loading)


async def _watch(line: str, loading: Awaitable[None]) -> None:
    began = time.monotonic()
    if not _is_rewritable():
        await loading  # if it fails, the error is the only line
        print(f"{line}{time.monotonic() - began:.1f} s", file=sys.stderr, flush=True)
        return
    print(line, end="", file=sys.stderr, flush=True)
    ticker = asyncio.create_task(_tick(line, began))
    try:
        await loading
    except BaseException:
        print(file=sys.stderr)
        raise
    finally:
        ticker.cancel()
    print(f"\r{line}{time.monotonic() - began:.1f} s", file=sys.stderr, flush=True)


def _is_rewritable() -> bool:
    return sys.stderr.isatty() and os.environ.get("TERM") != "dumb"


async def _tick(line: str, began: float) -> None:
    while True:
        await asyncio.sleep(TICK)
        print(f"\r{line}{time.monotonic() - began:.1f} s", end="", file=sys.stderr, flush=True)
