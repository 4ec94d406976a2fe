"""What a chat template may build: it is a program, and the memory it takes is everybody's.

The sandbox of jinja2 keeps it from what it must not reach, and from ranges of more than 100,000.
Here its texts are bounded: all that it writes, and what sums, products and powers make. Not so
what ``~`` and filters such as ``center`` make: the author of a template is trusted that far, and
its time is bounded (see worker.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from transformers.utils import chat_template_utils

from ...core.errors import ModelLoadError
from .chat_template import TooLong

_most_chars: ContextVar[int | None] = ContextVar("most_chars", default=None)


@contextmanager
def bounded(most_chars: int) -> Iterator[None]:
    """What templates render inside has at most so many characters; raises `TooLong`."""
    token = _most_chars.set(most_chars)
    try:
        yield
    finally:
        _most_chars.reset(token)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """That of jinja2, with bounds where they are set."""

    intercepted_binops = frozenset({"+", "*", "**"})

    @staticmethod
    def concat(pieces: Iterable[str]) -> str:
        """The text of a template, a block or a macro. What is too long is counted, not kept."""
        most = _most_chars.get()
        if most is None:
            return "".join(pieces)
        kept: list[str] = []
        num_chars = 0
        for piece in pieces:
            num_chars += len(piece)
            if num_chars > most:
                kept.clear()
            elif piece:
                kept.append(piece)
        _check(num_chars)
        return "".join(kept)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:  # noqa: ANN401 - values of a template
        """The result, unless it would be too long."""
        _check(_size(operator, left, right))
        return super().call_binop(context, operator, left, right)


def _check(num_chars: int) -> None:
    most = _most_chars.get()
    if most is not None and num_chars > most:
        raise TooLong(num_chars)


def _size(operator: str, left: object, right: object) -> int:
    """Characters or entries of what comes of it, bits of a number."""
    if operator == "+" and isinstance(left, Sized) and isinstance(right, Sized):
        return len(left) + len(right)
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length()
        if operator == "**":
            return bits * right if bits > 1 else 1
        return bits + right.bit_length()
    if isinstance(left, Sized) and isinstance(right, int):
        return len(left) * right
    if isinstance(left, int) and isinstance(right, Sized):
        return len(right) * left
    return 0


def install() -> None:
    """Have transformers compile chat templates so; it asks nobody which environment to take.

    Raises `ModelLoadError` for a version of it that takes another one: it would have no bounds.
    """
    if not hasattr(chat_template_utils, "ImmutableSandboxedEnvironment"):
        raise ModelLoadError("this version of transformers leaves chat templates without bounds")
    chat_template_utils.ImmutableSandboxedEnvironment = BoundedEnvironment
