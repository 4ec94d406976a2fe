"""How deeply a JSON text is nested, found before it is decoded, at the speed of copying it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_OPENING, _CLOSING, _QUOTE = b"[{", b"]}", b'"'
_OTHERS = bytes(value for value in range(256) if value not in _OPENING + _CLOSING + _QUOTE)
_STEPS = np.array(
    [(value in _OPENING) - (value in _CLOSING) for value in range(256)], dtype=np.int8
)
_BLOCK = 2**16  # bytes that are looked at together, so that they stay in the cache


def is_deeper(data: bytes, depth: int) -> bool:
    """Whether arrays and objects stand more than ``depth`` deep. What is no JSON may be either.

    O(len). A decoder counts for itself only up to the interpreter's limit of about a thousand, and
    a template or a schema compiler that then walks what it decoded may be less careful.
    """
    if sum(data.count(mark) for mark in (b"[", b"{")) <= depth:
        return False
    level = is_text = 0
    marks = _marks(data)
    for start in range(0, len(marks), _BLOCK):
        block = np.frombuffer(marks[start : start + _BLOCK], np.uint8)
        inside = _inside(block) ^ np.uint8(is_text)
        steps = _STEPS[block]
        steps[inside.view(np.bool_)] = 0
        levels = np.cumsum(steps, dtype=np.int32)
        if level + int(levels.max()) > depth:
            return True
        level, is_text = level + int(levels[-1]), int(inside[-1])
    return False


def _marks(data: bytes) -> bytes:
    """The brackets and the quotes, without those that are escaped and without empty texts."""
    escaped = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    return escaped.translate(None, _OTHERS).replace(b'""', b"")


def _inside(block: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """1 where a text is open that began in this block."""
    quotes = (block == ord(_QUOTE)).view(np.uint8)
    inside: npt.NDArray[np.uint8] = np.bitwise_xor.accumulate(quotes)
    return inside
