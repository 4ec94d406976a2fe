"""Pairs of kernels and values, where all combinations would prove no more."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest


@pytest.fixture
def take(request: pytest.FixtureRequest) -> Callable[[Sequence[Any], int, int], Any]:
    """Return a function that picks the ``place``-th of the ``share`` values that a house meets.

    Each of the file's houses goes on where the one before it ended. So a value meets several of
    them, with other number formats, backends and models, and a house meets ``share`` values.
    """
    turn: int = request.node.callspec.indices["house"]
    return lambda values, share, place: values[(turn * share + place) % len(values)]
