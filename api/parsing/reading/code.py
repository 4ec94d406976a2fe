"""Markdown code in a text: between backticks, and between fences on their own lines."""

from __future__ import annotations

import re

_PLAIN = re.compile(r"[^\n`~]+")
MIN_FENCE = 3


class CodeState:
    """Follows a text piece by piece, and knows whether its end is inside code."""

    def __init__(self) -> None:
        self.is_line_start = True  # only white space since the line began
        self._fence = ""  # fence that opened the present block; "" outside of blocks
        self._may_be_inline = False  # this line begins with the fence, which may be inline code
        self._num_ticks = 0  # number of backticks that opened inline code in this line
        self._run = ""  # backticks or tildes at the end of the text
        self._begins_line = False  # whether `_run` begins a line

    @property
    def is_block(self) -> bool:
        """Whether the next character, unless it is a backtick or tilde, is between fences."""
        self._end_run("")
        return bool(self._fence)

    @property
    def is_code(self) -> bool:
        """Whether the next character, unless it is a backtick or tilde, is code."""
        return self.is_block or bool(self._num_ticks)

    def add(self, text: str) -> None:
        """Append a piece of the text."""
        at = 0
        while at < len(text):
            if found := _PLAIN.match(text, at):
                self._end_run(text[at])
                self.is_line_start &= found[0].isspace()
                at = found.end()
                continue
            if text[at] == "\n":
                self._end_run("\n")
                self.is_line_start, self._may_be_inline, self._num_ticks = True, False, 0
            else:
                self._tick(text[at])
            at += 1

    def _tick(self, char: str) -> None:
        if self._run[:1] != char:
            self._end_run(char)
            self._begins_line = self.is_line_start
        self._run += char
        self.is_line_start = False

    def _end_run(self, char: str) -> None:
        """End a run of backticks or tildes before ``char``, which is "" if it is unknown."""
        run, self._run = self._run, ""
        if not run:
            return
        if self._begins_line and len(run) >= MIN_FENCE:
            if not self._fence:
                self._fence, self._may_be_inline = run, True
            elif run.startswith(self._fence) and not char.isalnum():
                self._fence = ""
        elif run[0] == "`" and self._may_be_inline:
            self._fence, self._may_be_inline = "", False
        elif run[0] == "`" and not self._fence:
            if not self._num_ticks:
                self._num_ticks = len(run)
            elif self._num_ticks == len(run):
                self._num_ticks = 0
