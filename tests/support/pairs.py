"""Independent parameters of a test, in pairs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

First, Second, Third = TypeVar("First"), TypeVar("Second"), TypeVar("Third")


def in_pairs(
    first: Sequence[First], second: Sequence[Second], third: Sequence[Third]
) -> list[tuple[First, Second, Third]]:
    """Return every pair of the first two, each with one of the third, in turn.

    Every value meets each value of the other two as well, if the third has no more values than
    either of them.
    """
    return [
        (a, b, third[(row + column) % len(third)])
        for row, a in enumerate(first)
        for column, b in enumerate(second)
    ]
