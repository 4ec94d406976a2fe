"""Delimiters that end an incomplete value, unless they are text inside a string."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..output_parser import Ended, Malformed, Reading, Source


@dataclass(frozen=True, slots=True)
class Ends:
    """Delimiters at which a value ends even if it is incomplete; each begins with "<", "[" or "`".

    A delimiter inside a string may be text. After optional white space, a delimiter in ``closing``
    ends the string only if the end of the text follows, or another delimiter that ends the string.
    A delimiter in ``begins`` ends it only if one of the texts follows that ``begins`` lists for the
    delimiter.
    """

    closing: tuple[str, ...] = ()
    begins: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def marks(self) -> tuple[str, ...]:
        """All delimiters."""
        return (*self.closing, *self.begins)

    def here(self, source: Source, at: int = 0) -> Reading[bool]:
        """Whether a delimiter is at offset ``at`` of the unread text."""
        return bool(self.marks and (yield from source.which(self.marks, at)))

    def in_string(self, source: Source, at: int = 0) -> Reading[bool]:
        """Whether a delimiter that ends a string is at offset ``at`` of the unread text."""
        for _ in range(len(self.closing) + 1):  # each delimiter closes at most once
            mark = yield from source.which(self.marks, at)
            if not mark:
                return False
            at = yield from source.after_white(at + len(mark))
            if mark in self.begins:
                return bool((yield from source.which(self.begins[mark], at)))
            if not (yield from source.char(at)):
                return not source.is_cut
        return False

    def closes(self, source: Source, bracket: str) -> Reading[bool]:
        """Take the bracket that closes a list, and return whether the list ends here.

        Another closing bracket also ends the list, but is not taken. Raises `Malformed` if a
        delimiter comes, and `Ended` at the end of the text.
        """
        if (yield from source.literal(bracket)):
            return True
        char = yield from source.peek()
        if not char:
            raise Ended
        if (yield from self.here(source)):
            raise Malformed
        return char in (")", "]", "}")


NO_ENDS = Ends()
