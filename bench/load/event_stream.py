"""Parses server-sent events from bytes, regardless of how these are split into chunks.

The format is the one of the HTML standard, section "Server-sent events".
"""

from __future__ import annotations

import re
from dataclasses import dataclass

MAX_LINE_BYTES = 64 * 2**20
_LINE_END = re.compile(rb"\r\n|\n|\r")
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class Event:
    """One event; ``kind`` is its ``event:`` line, "message" by default."""

    data: str
    kind: str = "message"
    id: str = ""  # The last id in the stream, from this event or an earlier one.


class EventParser:
    """Incremental parser; an event without an end is dropped."""

    def __init__(self) -> None:
        self._rest: list[bytes] = []  # Pieces of the unfinished line.
        self._rest_len = 0
        self._after_cr = False  # Whether the last chunk ended with a carriage return.
        self._is_first = True
        self._data: list[str] = []
        self._kind = ""
        self._id = ""

    def feed(self, chunk: bytes) -> list[Event]:
        """Return the events that end in this chunk.

        Raises ValueError for a line that is too long.
        """
        if not chunk:
            return []
        if self._after_cr:
            chunk = chunk.removeprefix(b"\n")
        self._after_cr = chunk.endswith(b"\r")
        return [event for line in self._lines(chunk) if (event := self._read(line)) is not None]

    def _lines(self, chunk: bytes) -> list[bytes]:
        """Return the lines that end in this chunk. Earlier chunks are not searched again."""
        *lines, rest = _LINE_END.split(chunk)
        if self._rest_len + len(lines[0] if lines else rest) > MAX_LINE_BYTES:
            raise ValueError(f"the stream has a line of more than {MAX_LINE_BYTES} bytes")
        if lines:
            lines[0] = b"".join([*self._rest, lines[0]])
            self._rest, self._rest_len = [], 0
        self._rest.append(rest)
        self._rest_len += len(rest)
        return lines

    def _read(self, line: bytes) -> Event | None:
        if self._is_first:
            self._is_first = False
            line = line.removeprefix(_BOM)
        if not line:
            return self._end()
        # A comment line has an empty name.
        name, _, value = line.decode("utf-8", "replace").partition(":")
        value = value.removeprefix(" ")
        if name == "data":
            self._data.append(value)
        elif name == "event":
            self._kind = value
        elif name == "id" and "\0" not in value:
            self._id = value
        return None

    def _end(self) -> Event | None:
        data, kind = self._data, self._kind
        self._data, self._kind = [], ""
        return Event("\n".join(data), kind or "message", self._id) if data else None
