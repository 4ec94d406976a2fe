"""The command ``foretoken``."""

from __future__ import annotations

from collections.abc import Sequence

from ...core.ops.machine.imports import uncollected
from ..runtime.interrupts import ending_at_once
from .clock import BEGAN


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return the exit status of the process."""
    with ending_at_once(), uncollected():  # imports need no cleanup after Ctrl-C
        from .commands import main as run
    return run(argv)


__all__ = ["BEGAN", "main"]
