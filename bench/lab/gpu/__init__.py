"""All measurements on a GPU, in one command: ``python -m foretoken.bench.lab.gpu``."""

from __future__ import annotations

from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run the stages; return the exit code."""
    from .check import main as check

    return check(argv)
