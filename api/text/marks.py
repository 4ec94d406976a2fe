"""Marks: texts that a tokenizer reads as special tokens anywhere in a text.

A text that spells out a mark forges a token that only a template should write, such as the end of a
turn. A mark is broken up by inserting a character after its first character: tokenizers then do not
recognise the mark, templates render it unchanged, and the character is removed before encoding.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import count

MIN_CHARS = 2  # minimum length of a mark: a shorter one cannot be broken up
MIN_EDGE = 2  # minimum length of a part of a mark at the start or end of a text
_PRIVATE = (range(0xE0F0, 0xF900), range(0xF0000, 0xFFFFE))  # private-use characters


class Marks:
    """Finds and breaks up the marks in texts.

    A part of a mark at the start or end of a text is treated like a mark, since adjacent text may
    complete it.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self.names = frozenset(name for name in names if is_mark(name))

    def __bool__(self) -> bool:
        return bool(self.names)

    def is_in(self, text: str) -> bool:
        """Whether a text contains a mark, or a part of a mark at its start or end.

        O(text), for any number of marks.
        """
        if self._pattern.search(text) is not None:
            return True
        if text[-MIN_EDGE:] in self._tail_ends or text[:MIN_EDGE] in self._head_starts:
            return any(self._edges(text))
        return False

    def is_in_any(self, texts: Sequence[str]) -> bool:
        """Whether a text contains a mark, or a part of a mark at its start or end. O(texts)."""
        if self._pattern.search(self._separator.join(texts)) is not None:
            return True
        tails, heads = self._tail_ends, self._head_starts
        for text in texts:
            if (text[-MIN_EDGE:] in tails or text[:MIN_EDGE] in heads) and self.is_in(text):
                return True
        return False

    def found(self, text: str) -> list[str]:
        """Return the marks in a text, in order."""
        return self._pattern.findall(text)

    def broken(self, text: str, breaker: str) -> str:
        """Return the text with ``breaker`` inserted into each mark.

        It is also inserted into a part of a mark at the start or end of the text.
        """
        cuts = sorted({*self._inside(text), *self._edges(text)})
        pieces = zip([0, *cuts], [*cuts, len(text)], strict=True)
        return breaker.join(text[start:end] for start, end in pieces)

    def parts(self, text: str) -> list[str]:
        """Return the text split inside each mark."""
        cuts = self._inside(text)
        pieces = zip([0, *cuts], [*cuts, len(text)], strict=True)
        return [text[start:end] for start, end in pieces]

    def _inside(self, text: str) -> list[int]:
        """Return for each mark a position inside it."""
        return [found.start() + 1 for found in self._starts.finditer(text)]

    def _edges(self, text: str) -> Iterator[int]:
        """Yield positions inside the parts of marks at the start or end of the text."""
        if text[-MIN_EDGE:] in self._tail_ends:
            first = max(0, len(text) - self._most_chars + 1)
            for start in range(first, len(text) - MIN_EDGE + 1):
                if text[start:] in self._beginnings:
                    yield start + 1
        if text[:MIN_EDGE] in self._head_starts:
            for end in range(MIN_EDGE, min(len(text), self._most_chars - 1) + 1):
                if text[:end] in self._endings:
                    yield end - 1

    @cached_property
    def _separator(self) -> str:
        """A character that no mark contains, so that none is found across two joined texts."""
        used = {char for name in self.names for char in name}
        return next(char for char in map(chr, count()) if char not in used)

    @cached_property
    def _most_chars(self) -> int:
        return max(map(len, self.names), default=0)

    @cached_property
    def _beginnings(self) -> frozenset[str]:
        return frozenset(name[:n] for name in self.names for n in range(MIN_EDGE, len(name)))

    @cached_property
    def _endings(self) -> frozenset[str]:
        return frozenset(name[-n:] for name in self.names for n in range(MIN_EDGE, len(name)))

    @cached_property
    def _tail_ends(self) -> frozenset[str]:
        return frozenset(each[-MIN_EDGE:] for each in self._beginnings)

    @cached_property
    def _head_starts(self) -> frozenset[str]:
        return frozenset(each[:MIN_EDGE] for each in self._endings)

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        return re.compile(any_of(self.names))

    @cached_property
    def _starts(self) -> re.Pattern[str]:
        """A pattern that matches at the start of each mark, even inside another mark."""
        return re.compile(f"(?={any_of(self.names)})")


def is_mark(name: str) -> bool:
    """Whether a token is a mark: not a word, a number or white space."""
    return len(name) >= MIN_CHARS and not name.isalnum() and not name.isspace()


def unused_char(texts: Iterable[str]) -> str | None:
    """Return a private-use character that no text contains, not even escaped.

    Return None if there is no such character.
    """
    known = list(texts)
    return next(
        (
            char
            for char in map(chr, _private())
            if not any(char in text or escape(char) in text for text in known)
        ),
        None,
    )


def escape(char: str) -> str:
    """Return the ASCII escape of a private-use character in JSON and Python."""
    return char.encode("unicode_escape").decode()


def _private() -> Iterator[int]:
    for codes in _PRIVATE:
        yield from codes


def any_of(words: Iterable[str]) -> str:
    """Return a regular expression that matches any of the words, and is fast for many words.

    Common beginnings of words are tried once, and common ends are shared.
    """
    tree: dict[str, dict[str, object]] = {}
    for word in words:
        at: dict[str, object] = tree  # type: ignore[assignment]
        for char in word:
            at = at.setdefault(char, {})  # type: ignore[assignment]
        at[""] = {}
    return _expression(tree) if tree else "(?!)"  # type: ignore[arg-type]


def _expression(tree: dict[str, object]) -> str:
    by_rest: defaultdict[str, list[str]] = defaultdict(list)
    for char, rest in tree.items():
        if char:
            by_rest[_expression(rest)].append(char)  # type: ignore[arg-type]
    options = [_char_class(chars) + rest for rest, chars in by_rest.items()]
    if "" in tree:
        options.append("")  # last, so that the longest word is tried first
    return options[0] if len(options) == 1 else f"(?:{'|'.join(options)})"


def _char_class(chars: list[str]) -> str:
    if len(chars) == 1:
        return re.escape(chars[0])
    return f"[{''.join(map(re.escape, sorted(chars)))}]"
