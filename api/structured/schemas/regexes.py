"""Translation of the patterns of JSON schemas from ECMAScript's syntax to Rust's.

The grammar library supports Rust's syntax without look-around. Syntax that has an equivalent is
rewritten. A look-ahead at the beginning of a pattern becomes an additional pattern.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

MAX_PATTERN = 10_000  # maximum length of a pattern in characters
_SURROGATES = re.compile(r"\\u([dD][89abAB][0-9a-fA-F]{2})\\u([dD][c-fC-F][0-9a-fA-F]{2})")
_PART = re.compile(
    r"(?P<code>\\[xupP]\{[^}]*\})|\\c(?P<control>[A-Za-z])|\\(?P<edge>[AzZ])|(?P<any>\[\^\])|(?P<set>\[)"
    r"|(?P<count>\{[0-9]+(?:,[0-9]*)?\})|(?P<upto>\{,[0-9]+\})|(?P<brace>[{}])"
    r"|\(\?(?P<look><?[=!])|\((?P<named>\?P?<)|(?P<other>\\.|.)",
    re.DOTALL,
)
_IN_SET = re.compile(r"\\[xupP]\{[^}]*\}|\\.|\[:\^?\w+:\]|.", re.DOTALL)
_DOUBLE = "&-~"  # doubled, each is an operator in a Rust character set
_NOT_BLANK = frozenset((r"\s*$", r"^\s*$", r"\s*\Z"))
_NOT_EMPTY = frozenset(("$", "^$"))


class NotRegularError(ValueError):
    """Raised for a pattern with look-around or back references, which is not regular."""


def translated(pattern: str) -> str:
    """Return the pattern in Rust's syntax. Raises `NotRegularError` if that is impossible."""
    if len(pattern) > MAX_PATTERN:
        raise NotRegularError(f"the pattern has more than {MAX_PATTERN} characters")
    return "".join(_parts(_SURROGATES.sub(_joined, pattern)))


def _joined(found: re.Match[str]) -> str:
    high, low = int(found[1], 16), int(found[2], 16)
    return f"\\x{{{0x10000 + ((high - 0xD800) << 10) + low - 0xDC00:X}}}"


def _parts(pattern: str) -> Iterator[str]:
    at = 0
    while at < len(pattern):
        found = _PART.match(pattern, at)
        assert found is not None
        at = found.end()
        if found["look"]:
            raise NotRegularError("look-around is not supported")
        if found["code"]:
            yield found["code"]
        elif found["set"]:
            text, at = _set(pattern, at)
            yield text
        elif found["control"]:
            yield f"\\x{ord(found['control'].upper()) - 64:02X}"
        elif found["edge"]:
            yield "^" if found["edge"] == "A" else "$"
        elif found["any"]:
            yield r"[\s\S]"
        elif found["upto"]:
            yield "{0" + found["upto"][1:]
        elif found["brace"]:
            yield f"\\{found['brace']}"
        else:
            yield _checked(found[0])


def _checked(part: str) -> str:
    if part in (r"\b", r"\B"):
        raise NotRegularError("word boundaries are not supported")
    if part[0] == "\\" and part[1:].isdigit() and part != r"\0":
        raise NotRegularError("back references are not supported")
    return r"\x00" if part == r"\0" else part


def _set(pattern: str, at: int) -> tuple[str, int]:
    """Return the character set whose opening bracket is before ``at``, and the index after it."""
    text = "[^" if pattern.startswith("^", at) else "["
    at += len(text) - 1
    last = ""
    while not pattern.startswith("]", at) or text in ("[", "[^"):
        found = _IN_SET.match(pattern, at)
        if found is None:
            raise NotRegularError("a bracket [ is not closed")
        part = found[0]
        if part == r"\b":
            part = r"\x08"
        elif part == "[" or (part in _DOUBLE and part == last):
            part = f"\\{part}"
        last = found[0]
        text, at = text + part, found.end()
    return f"{text}]", at + 1


def split_looks(pattern: str) -> tuple[list[str], list[str]]:
    """Return patterns that together replace a pattern with leading look-aheads.

    Also return the look-aheads that are not supported. Only look-aheads directly after ``^`` are
    split off.
    """
    patterns: list[str] = []
    lost: list[str] = []
    rest = pattern.removeprefix("^")
    has_begin = rest != pattern
    while (has_begin or not patterns) and rest.startswith(("(?=", "(?!")) and has_begin:
        end = _group_end(rest)
        inner, is_positive = rest[3:end], rest[2] == "="
        rest = rest[end + 1 :]
        if is_positive:
            patterns.append(f"^(?:{inner})" if not inner.startswith("^") else inner)
        elif inner in _NOT_BLANK:
            patterns.append(r"\S")
        elif inner in _NOT_EMPTY:
            patterns.append(r"[\s\S]")
        else:
            lost.append(inner)
    return [*patterns, f"^{rest}" if has_begin else rest], lost


def _group_end(text: str) -> int:
    """Return the index of the bracket that closes the first group.

    Raises `NotRegularError` if the group is not closed.
    """
    depth, at = 0, 0
    while at < len(text):
        if text[at] == "\\":
            at += 1
        elif text[at] == "[":
            at = _set(text, at + 1)[1] - 1
        elif text[at] in "()":
            depth += 1 if text[at] == "(" else -1
            if depth == 0:
                return at
        at += 1
    raise NotRegularError("a bracket ( is not closed")


def none_of(texts: Sequence[str]) -> str:
    """Return a pattern that matches all texts except these."""
    return f"^(?:{_others(sorted(set(texts)))})$"


def _others(texts: list[str]) -> str:
    """Return a pattern that matches all texts except these, as a tree of their common prefixes."""
    by_first: dict[str, list[str]] = {}
    for text in texts:
        if text:
            by_first.setdefault(text[0], []).append(text[1:])
    branches = [] if "" in texts else [""]
    if by_first:
        firsts = "".join(map(_escaped, by_first))
        branches.append(rf"[^{firsts}][\s\S]*")
        branches += (f"{_escaped(first)}(?:{_others(rest)})" for first, rest in by_first.items())
    else:
        branches.append(r"[\s\S]+")
    return "|".join(branches)


def _escaped(char: str) -> str:
    return f"\\x{{{ord(char):X}}}"
