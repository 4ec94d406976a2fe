"""Which source drafted which part of an answer, as colours of a terminal."""

from __future__ import annotations

import os
from collections import Counter, deque
from collections.abc import Callable
from typing import TextIO

from .results import TextDelta

COLOURS = {"green": 32, "cyan": 36, "magenta": 35, "yellow": 33, "blue": 34, "red": 31}
RESET = "\x1b[0m"


def wants_colour(stream: TextIO) -> bool:
    """NO_COLOR says no, then FORCE_COLOR says yes; else a terminal has colours and a file none."""
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return stream.isatty() and os.environ.get("TERM") != "dumb"


class Palette:
    """A colour for each source, in the order in which they are met; the target itself has none."""

    def __init__(self, *, coloured: bool) -> None:
        self.coloured = coloured
        self._sources: list[str] = []

    def name(self, source: str) -> str:
        """The colour of a source."""
        if not source:
            return "plain"
        if source not in self._sources:
            self._sources.append(source)
        return list(COLOURS)[self._sources.index(source) % len(COLOURS)]

    def paint(self, text: str, source: str) -> str:
        """The text in the colour of a source."""
        name = self.name(source)
        if not text or not source or not self.coloured:
            return text
        return f"\x1b[{COLOURS[name]}m{text}{RESET}"


class Painter:
    """Paints one answer. It only adds escapes to the text that it is given.

    That text may lag behind the tokens. ``push`` says how many characters a token brings to the
    whole text; those wait in a queue until they are shown.
    """

    def __init__(self, palette: Palette, push: Callable[[int], str]) -> None:
        self._palette = palette
        self._push = push
        self._ahead: deque[tuple[int, str]] = deque()  # characters not shown yet, and their source
        self._counts: Counter[str] = Counter()

    def paint(self, delta: TextDelta) -> str:
        """The text of the next delta."""
        for token_id, source in zip(delta.token_ids, delta.sources, strict=True):
            self._ahead.append((len(self._push(token_id)), source))
            self._counts[source] += 1
        parts, start = [], 0
        while start < len(delta.text):
            rest = len(delta.text) - start
            size, source = self._ahead.popleft() if self._ahead else (rest, "")
            if size > rest:
                self._ahead.appendleft((size - rest, source))
            parts.append(self._palette.paint(delta.text[start : start + size], source))
            start += size
        return "".join(parts)

    def legend(self) -> str:
        """One line: how many tokens each source brought, and its colour."""
        parts = []
        for source, count in self._counts.items():
            colour = f" = {self._palette.name(source)}" if self._palette.coloured else ""
            parts.append(f"{source or 'the target itself'}{colour}: {count}")
        return f"[tokens by source: {', '.join(parts)}]"
