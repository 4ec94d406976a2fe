"""Conversion of GBNF, llama.cpp's grammar format, to Lark.

Every character becomes a symbol of its own, since longer symbols would match greedily even where a
shorter match is right. The format is described in llama.cpp's grammars/README.md.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

MAX_DEPTH = 200  # maximum nesting depth of brackets
MAX_TIMES = 2**16
ROOT = "root"
EMPTY = '""'
_NAME = r"[A-Za-z0-9_-]+"
_RULE = re.compile(rf"^[ \t]*{_NAME}[ \t]*::=", re.MULTILINE)
_TOKEN = re.compile(
    rf"""(?P<space>[ \t\r\n]+|\#[^\n]*)
    |(?P<rule>{_NAME})[ \t]*::=
    |(?P<name>{_NAME})
    |"(?P<text>(?:\\.|[^"\\])*)"
    |\[(?P<set>(?:\\.|[^\]\\])*)\]
    |(?P<times>[*+?]|\{{[ \t\n]*[0-9]*[ \t\n]*(?:,[ \t\n]*[0-9]*[ \t\n]*)?\}})
    |(?P<mark>[()|.])
    |(?P<special><[^<>\n]+>)""",
    re.VERBOSE | re.DOTALL,
)
_CHAR = re.compile(
    r"\\x(?P<x>[0-9a-fA-F]{2})|\\u(?P<u>[0-9a-fA-F]{4})|\\U(?P<U>[0-9a-fA-F]{8})"
    r"|\\(?P<escape>[nrtfv0\"'\\\[\]\-^/.|(){}*+?$])|(?P<plain>[^\\])",
    re.DOTALL,
)
_ESCAPED = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "0": "\0"}


def is_gbnf(source: str) -> bool:
    """Whether a grammar is written in GBNF: whether it has a rule with ``::=``."""
    return _RULE.search(source) is not None


def lark_of(source: str) -> str:
    """Return the grammar as Lark text.

    Raises ValueError for invalid GBNF, and if the root rule matches no finite text.
    """
    rules = _Reader(source).rules()
    if ROOT not in rules:
        raise ValueError(f"there is no rule named {ROOT}")
    for rule in rules.values():
        for name in rule.references:
            if name not in rules:
                raise ValueError(f"the rule {name} is used but not defined")
    if ROOT not in _ending(rules):
        raise ValueError(f"the rule {ROOT} can never end")
    numbers = {name: f"r{number}" for number, name in enumerate(rules)}
    lines = [f"start: {numbers[ROOT]}"]
    for name, rule in rules.items():
        lines.append(f"{numbers[name]}: {rule.body.lark(numbers)}")
    return "\n".join([*lines, ""])


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a rule: alternatives, a symbol or a rule's name, with its repetitions."""

    branches: Sequence[Sequence[Part]] = ()
    symbol: str = ""
    name: str = ""
    least: int = 1
    most: int | None = 1

    def lark(self, numbers: Mapping[str, str]) -> str:
        """Return the part as Lark text."""
        if self.most == 0:
            return EMPTY
        text = self.symbol or numbers.get(self.name, "")
        if self.branches:
            written = [" ".join(part.lark(numbers) for part in each) for each in self.branches]
            text = f"({' | '.join(each or EMPTY for each in written)})"
        if (self.least, self.most) == (1, 1):
            return text
        return f"({text}{self._times()})"

    def _times(self) -> str:
        known = {(0, None): "*", (1, None): "+", (0, 1): "?"}
        most = "" if self.most is None else self.most
        return known.get((self.least, self.most), f"{{{self.least},{most}}}")

    def ends(self, ending: set[str]) -> bool:
        """Whether the part matches a finite text. ``ending``: names of rules that match one."""
        if self.least == 0 or self.symbol:
            return True
        if self.name:
            return self.name in ending
        return any(all(part.ends(ending) for part in each) for each in self.branches)


@dataclass(slots=True)
class Rule:
    """A rule that is being read."""

    references: set[str] = field(default_factory=set)
    body: Part = field(default_factory=Part)


def _ending(rules: Mapping[str, Rule]) -> set[str]:
    """Return the names of rules that match a finite text."""
    users: dict[str, set[str]] = defaultdict(set)
    for name, rule in rules.items():
        for used in rule.references:
            users[used].add(name)
    ending: set[str] = set()
    left = list(rules)
    while left:
        name = left.pop()
        if name not in ending and rules[name].body.ends(ending):
            ending.add(name)
            left += users[name] - ending
    return ending


class _Reader:
    """A parser that reads a grammar from left to right. A rule extends to the next rule."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._tokens = self._split()
        self._kind, self._text = next(self._tokens, ("", ""))
        self._rule = Rule()

    def _split(self) -> Iterator[tuple[str, str]]:
        """Yield the kind and the text of each token of the source, then an empty kind and text."""
        at = 0
        while at < len(self._source):
            found = _TOKEN.match(self._source, at)
            if found is None:
                line = self._source.count("\n", 0, at) + 1
                raise ValueError(f"line {line}: {self._source[at : at + 20]!r} cannot be parsed")
            kind = found.lastgroup or ""
            at = found.end()
            if kind != "space":
                yield kind, found[kind]
        yield "", ""

    def _next(self) -> str:
        text = self._text
        self._kind, self._text = next(self._tokens, ("", ""))
        return text

    def rules(self) -> dict[str, Rule]:
        """Return all rules by name. If a name has several rules, the last one is used."""
        found: dict[str, Rule] = {}
        while self._kind:
            if self._kind != "rule":
                raise ValueError(f"{self._text!r} is outside of a rule")
            name, self._rule = self._next(), Rule()
            self._rule.body = self._alternatives(0)
            if self._kind not in ("rule", ""):
                raise ValueError(f"the rule {name}: {self._text!r} is not expected here")
            found[name] = self._rule
        return found

    def _alternatives(self, depth: int) -> Part:
        if depth > MAX_DEPTH:
            raise ValueError("the brackets are nested too deeply")
        branches = [self._sequence(depth)]
        while self._text == "|" and self._kind == "mark":
            self._next()
            branches.append(self._sequence(depth))
        return Part(branches)

    def _sequence(self, depth: int) -> list[Part]:
        parts: list[Part] = []
        while self._kind not in ("rule", "") and not (self._kind == "mark" and self._text in ")|"):
            if self._kind == "times":
                if not parts:
                    raise ValueError(f"{self._text!r} has nothing before it to repeat")
                parts[-1] = _repeated(parts[-1], self._next())
            else:
                parts += self._parts(depth)
        return parts

    def _parts(self, depth: int) -> list[Part]:
        """Return the parts of the rule that the next token or group stands for."""
        kind, text = self._kind, self._next()
        if kind == "name":
            self._rule.references.add(text)
            return [Part(name=text)]
        if kind == "text":
            symbols = [Part(symbol=_set([(char, char)])) for char in _chars(text)]
            return symbols if len(symbols) == 1 else [Part([symbols])]
        if kind == "set":
            return [Part(symbol=_set_of(text))]
        if kind == "special":
            return [Part(symbol=text)]
        if text == ".":
            return [Part(symbol="/(?s:.)/")]
        group = self._alternatives(depth + 1)
        if self._next() != ")":
            raise ValueError("a bracket ( is not closed")
        return [group]


def _repeated(part: Part, times: str) -> Part:
    """Return a part with the repetition ``times``.

    A part that already has a repetition is put into a group.
    """
    known: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}
    if times in known:
        least, most = known[times]
    else:
        low, comma, high = (each.strip() for each in times[1:-1].partition(","))
        if not low and not high:
            raise ValueError(f"the repetition {times} needs a number")
        least = int(low or 0)
        most = (int(high) if high else None) if comma else least
        if (most is not None and most < least) or max(least, most or 0) > MAX_TIMES:
            raise ValueError(f"{times} is not a range of numbers up to {MAX_TIMES}")
    if (part.least, part.most) != (1, 1):
        part = Part([[part]])
    return replace(part, least=least, most=most)


def _chars(text: str) -> list[str]:
    """Return the characters of a text in which escape sequences are decoded."""
    chars, at = [], 0
    while at < len(text):
        found = _CHAR.match(text, at)
        if found is None:
            raise ValueError(f"{text[at : at + 10]!r} is not a known escape")
        chars.append(_char(found))
        at = found.end()
    return chars


def _char(found: re.Match[str]) -> str:
    if code := found["x"] or found["u"] or found["U"]:
        number = int(code, 16)
        if number > 0x10FFFF or 0xD800 <= number < 0xE000:
            raise ValueError(f"{found[0]} is not a valid character")
        return chr(number)
    return _ESCAPED.get(found["escape"], found["escape"]) if found["escape"] else found["plain"]


def _set_of(text: str) -> str:
    """Return the symbol for the content of a character set."""
    is_negated = text.startswith("^")
    ranges: list[tuple[str, str]] = []
    found = list(_members(text[is_negated:]))
    at = 0
    while at < len(found):
        (first, _), has_dash = found[at], at + 2 < len(found) and found[at + 1] == ("-", False)
        last = found[at + 2][0] if has_dash else first
        if last < first:
            raise ValueError(f"[{text}] has a range whose end is before its start")
        ranges.append((first, last))
        at += 3 if has_dash else 1
    if not ranges:
        if is_negated:
            return "/(?s:.)/"
        raise ValueError("[] has no characters")
    return _set(ranges, is_negated=is_negated)


def _members(text: str) -> Iterator[tuple[str, bool]]:
    """Yield the characters of a set, and whether each was escaped."""
    at = 0
    while at < len(text):
        found = _CHAR.match(text, at)
        if found is None:
            raise ValueError(f"{text[at : at + 10]!r} is not a known escape")
        yield _char(found), found["plain"] is None
        at = found.end()


def _set(ranges: list[tuple[str, str]], *, is_negated: bool = False) -> str:
    """Return a symbol that matches one character in the ranges, or one outside if negated."""
    inside = "".join(f"\\u{{{ord(first):X}}}-\\u{{{ord(last):X}}}" for first, last in ranges)
    return f"/[{'^' if is_negated else ''}{inside}]/"
