"""foretoken beside other engines: same checkpoint, threads, numbers and workload; see README.md."""

from __future__ import annotations

from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run `python -m foretoken.bench.lab.peers`; the exit code."""
    from .driver import main as drive  # run_*.py of other environments import none of this

    return drive(argv)
