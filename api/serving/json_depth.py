"""Count the nesting, the containers and the values of a JSON text before it is decoded."""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt

Excess = Literal["max_json_depth", "max_json_containers", "max_json_values"]  # fields of `Limits`
_OPENING, _CLOSING, _QUOTE, _COMMA = b"[{", b"]}", b'"', b","
_KEPT = _OPENING + _CLOSING + _QUOTE + _COMMA
_OTHERS = bytes(value for value in range(256) if value not in _KEPT)
_STEPS = np.array(
    [(value in _OPENING) - (value in _CLOSING) for value in range(256)], dtype=np.int8
)
_BLOCK = 2**16  # bytes processed together, so that they stay in the CPU cache


def find_excess(data: bytes, *, depth: int, containers: int, values: int) -> Excess | None:
    """Return the limit that the text exceeds, if any. Invalid JSON may exceed any limit.

    O(len). The depth is limited because the decoder stops only at the interpreter's limit of about
    a thousand levels, and recursive code that later reads the value, such as a template or a schema
    compiler, may fail earlier. Containers are limited because a million containers decode quickly,
    but each garbage collection then scans all of them. Values are limited because decoding holds
    the GIL, in any thread.
    """
    most_containers = data.count(b"[") + data.count(b"{")
    most_values = most_containers + data.count(_COMMA)
    if most_containers <= min(depth, containers) and most_values <= values:
        return None
    level = is_text = num_containers = num_values = 0
    marks = _marks(data)
    for start in range(0, len(marks), _BLOCK):
        block = np.frombuffer(marks[start : start + _BLOCK], np.uint8)
        inside = _inside(block) ^ np.uint8(is_text)
        steps = _STEPS[block]
        steps[inside.view(np.bool_)] = 0
        levels = np.cumsum(steps, dtype=np.int32)
        if level + int(levels.max()) > depth:
            return "max_json_depth"
        num_containers += int(np.count_nonzero(steps > 0))
        if num_containers > containers:
            return "max_json_containers"
        num_values += int(np.count_nonzero((steps > 0) | ((block == ord(_COMMA)) & (inside == 0))))
        if num_values > values:
            return "max_json_values"
        level, is_text = level + int(levels[-1]), int(inside[-1])
    return None


def _marks(data: bytes) -> bytes:
    """Return the brackets, commas and quotes, without escaped characters and empty strings."""
    escaped = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    return escaped.translate(None, _OTHERS).replace(b'""', b"")


def _inside(block: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Return 1 for each byte inside a string that began in this block, else 0."""
    quotes = (block == ord(_QUOTE)).view(np.uint8)
    inside: npt.NDArray[np.uint8] = np.bitwise_xor.accumulate(quotes)
    return inside
