"""Answer: what a variant said to a task with one seed."""

from __future__ import annotations

from typing import Any

from msgspec import Struct


class Answer(Struct, kw_only=True):
    """One answer. ``calls``: its tool calls as objects with ``name`` and ``arguments``.

    ``is_cut``: whether it reached the limit on tokens. ``num_tokens``: its length in tokens.
    """

    text: str
    calls: list[dict[str, Any]] = []
    is_cut: bool = False
    num_tokens: int = 0
