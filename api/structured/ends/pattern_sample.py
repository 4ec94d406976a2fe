"""Short texts that a regular expression probably matches. The grammar checks them later."""

from __future__ import annotations

from dataclasses import dataclass

OF_CLASS = {"d": "0", "w": "a", "s": " ", "D": "a", "W": "-", "S": "a"}
CONTROL = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "0": "\0", "b": "\b"}
TRIED = "a0A -_.:/,;!#$%&*+<=>?@'\"~^|é\\()[]{}\n"
MAX_CHARS, MAX_DEPTH = 2000, 32


class _NoSampleError(Exception):
    """Raised for a pattern that is invalid or has unsupported syntax, such as look-around."""


def samples(pattern: str) -> list[str]:
    """Return a text for each alternative of a pattern, shortest first.

    The list is empty for unsupported syntax, such as look-around.
    """
    reader = _Reader(pattern)
    try:
        found = reader.alternatives(0)
        if reader.at < len(pattern):
            return []
    except (_NoSampleError, IndexError, ValueError, OverflowError):
        return []
    return sorted(dict.fromkeys(found), key=len)


@dataclass
class _Reader:
    """Reads a pattern from left to right and returns a matching text."""

    pattern: str
    at: int = 0

    def _peek(self) -> str:
        return self.pattern[self.at : self.at + 1]

    def _take(self, count: int = 1) -> str:
        text = self.pattern[self.at : self.at + count]
        if len(text) < count:
            raise _NoSampleError
        self.at += count
        return text

    def _up_to(self, end: str) -> str:
        text = self.pattern[self.at : self.pattern.index(end, self.at)]
        self.at += len(text) + len(end)
        return text

    def alternatives(self, depth: int) -> list[str]:
        """Return a text for each branch, up to the end of the group."""
        if depth > MAX_DEPTH:
            raise _NoSampleError
        found = [self._sequence(depth)]
        while self._peek() == "|":
            self.at += 1
            found.append(self._sequence(depth))
        return found

    def _sequence(self, depth: int) -> str:
        parts: list[str] = []
        while (char := self._peek()) and char not in "|)":
            parts.append(self._atom(depth) * self._times())
            if sum(map(len, parts)) > MAX_CHARS:
                raise _NoSampleError
        return "".join(parts)

    def _atom(self, depth: int) -> str:
        char = self._take()
        if char == "(":
            return self._group(depth)
        if char == "[":
            return self._set()
        if char == "\\":
            return self._escape(in_set=False)
        return {"^": "", "$": "", ".": "a"}.get(char, char)

    def _group(self, depth: int) -> str:
        if self._peek() == "?":
            self.at += 1
            if self._peek() in "=!" or self.pattern.startswith(("<=", "<!"), self.at):
                raise _NoSampleError
            if self._peek() in "P<":
                self._up_to(">")
            else:
                self._up_to(":")
        found = self.alternatives(depth + 1)
        if self._take() != ")":
            raise _NoSampleError
        return min(found, key=len)

    def _escape(self, *, in_set: bool) -> str:
        char = self._take()
        if char in OF_CLASS:
            return OF_CLASS[char]
        if char in "xu":
            return self._by_number(2 if char == "x" else 4)
        if char in "pP":
            name = self._up_to("}") if self._peek() == "{" else self._take()
            is_upper = "Lu" in name or "Upper" in name
            return "0" if "N" in name else "A" if is_upper else "a"
        if (char == "b" and not in_set) or char in "BAzZ":
            raise _NoSampleError
        return CONTROL.get(char, char)

    def _by_number(self, num_digits: int) -> str:
        if self._peek() == "{":
            self.at += 1
            return chr(int(self._up_to("}"), 16))
        return chr(int(self._take(num_digits), 16))

    def _set(self) -> str:
        is_negated = self._peek() == "^"
        self.at += is_negated
        ranges: list[tuple[str, str]] = []
        while not ranges or self._peek() != "]":
            first = last = self._member()
            if self._peek() == "-" and self.pattern[self.at + 1 : self.at + 2] != "]":
                self.at += 1
                last = self._member()
            ranges.append((first, last))
        self.at += 1
        if not is_negated:
            return next((char for char in "0aA" if _is_in(char, ranges)), ranges[0][0])
        return next(char for char in TRIED if not _is_in(char, ranges))

    def _member(self) -> str:
        char = self._take()
        if char == "[" and self._peek() == ":":
            name = self._up_to(":]")
            return "0" if "digit" in name else "A" if "upper" in name else "a"
        return self._escape(in_set=True) if char == "\\" else char

    def _times(self) -> int:
        """Return the minimum number of repetitions, which the next characters specify."""
        times = 1
        while (char := self._peek()) and char in "*+?{":
            if char == "{":
                end = self.pattern.find("}", self.at)
                low = self.pattern[self.at + 1 : max(end, 0)].split(",")[0]
                if not low.isdigit():
                    break
                times *= int(low)
                self.at = end + 1
            else:
                times *= char == "+"
                self.at += 1
                if self._peek() and self._peek() in "?+":
                    self.at += 1  # the mark of a lazy or possessive repetition
                continue
        return times


def _is_in(char: str, ranges: list[tuple[str, str]]) -> bool:
    return any(low <= char <= high for low, high in ranges)
