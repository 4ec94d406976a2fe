"""A Lark grammar as one regular expression, for texts that are written inside a JSON string.

The grammar library can spell the texts of a pattern as JSON, but cannot do this for a grammar. A
grammar without recursion is a regular expression. A rule that contains itself is unrolled to a few
levels: every text of the pattern is a text of the grammar, but deeper nesting is left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

MAX_CHARS = 9_000  # maximum length of a pattern
MAX_RULES = 5_000  # maximum number of references to rules that are replaced by their patterns
LEVELS = (8, 4, 3, 2, 1)  # levels of recursion to unroll: the first that fits into a pattern
_DECIMAL, _EXPONENT = r"(?:[0-9]+\.[0-9]*|\.[0-9]+)", "(?:[eE][+-]?[0-9]+)"
_FLOAT = f"(?:[0-9]+{_EXPONENT}|{_DECIMAL}{_EXPONENT}?)"
_NUMBER = f"(?:{_DECIMAL}|[0-9]+){_EXPONENT}?"
COMMON = {
    "LF": r"\n", "CR": r"\r", "NEWLINE": r"(?:\r?\n)+", "WS": r"[ \t\f\r\n]+",
    "WS_INLINE": r"[ \t]+", "DIGIT": "[0-9]", "HEXDIGIT": "[0-9a-fA-F]", "INT": "[0-9]+",
    "SIGNED_INT": "[+-]?[0-9]+", "DECIMAL": _DECIMAL, "FLOAT": _FLOAT, "NUMBER": _NUMBER,
    "SIGNED_FLOAT": f"[+-]?{_FLOAT}", "SIGNED_NUMBER": f"[+-]?{_NUMBER}", "LCASE_LETTER": "[a-z]",
    "UCASE_LETTER": "[A-Z]", "LETTER": "[A-Za-z]", "WORD": "[A-Za-z]+",
    "CNAME": "[_A-Za-z][_A-Za-z0-9]*", "ESCAPED_STRING": r'"(?:[^"\\\n]|\\.)*"',
}  # fmt: skip
"""Terminals of Lark's ``common`` library (https://lark-parser.readthedocs.io)."""
_TOKEN = re.compile(
    r"(?P<blank>[ \t\f]+|//[^\n]*|\\\n)|(?P<line>[\r\n]+)"
    r'|(?P<text>"(?:\\.|[^"\\\n])*"i?)'
    r"|(?P<pattern>/(?:\\.|\[(?:\\.|[^\]\\\n])*\]|[^/\\\n\[])+/[imslux]*)"
    r"|(?P<directive>%\w+)|(?P<rule>[?!]*\w+(?:\.-?\d+)?[ \t]*:)|(?P<name>\w+)"
    r"|(?P<count>[?*+]|~\s*\d+(?:\s*\.\.\s*\d+)?|\{\s*\d*\s*,?\s*\d*\s*\})"
    r"|(?P<range>\.\.)|(?P<alias>->)|(?P<joint>[()\[\]|,.])"
)
Token = tuple[str, str]
"""The kind of a token, and its text."""


def regex_of(grammar: str) -> str:
    """Return a pattern, in the syntax of Rust, for texts of a Lark grammar.

    Raises ValueError for what a pattern cannot express, and for a pattern that is too long.
    """
    rules, ignored = _rules(grammar)
    if "start" not in rules:
        raise ValueError("there is no rule named start")
    for levels in LEVELS:
        pattern = _Writer(rules, ignored, levels).rule("start")
        if pattern is not None and len(pattern) <= MAX_CHARS:
            return pattern
    if pattern is None:
        raise ValueError("the rule start never ends")
    raise ValueError(f"the grammar as a pattern has more than {MAX_CHARS} characters")


def _tokens(grammar: str) -> Iterator[Token]:
    at = 0
    while at < len(grammar):
        found = _TOKEN.match(grammar, at)
        if found is None:
            line = grammar.count("\n", 0, at) + 1
            raise ValueError(f"{grammar[at : at + 10]!r} in line {line} is not supported")
        at = found.end()
        if found.lastgroup != "blank":
            yield str(found.lastgroup), found[0].strip() or "\n"


def _rules(grammar: str) -> tuple[dict[str, list[Token]], list[list[Token]]]:
    """Return the tokens of each rule by its name, and the tokens of each ``%ignore``."""
    statements: list[tuple[str, list[Token]]] = []
    for kind, text in _tokens(grammar):
        if kind in ("rule", "directive"):
            statements.append((text, []))
        elif kind != "line":
            if not statements:
                raise ValueError(f"{text!r} stands before the first rule")
            statements[-1][1].append((kind, text))
    rules: dict[str, list[Token]] = {}
    for head, body in statements:
        if head == "%import":
            rules |= {name: [("common", known)] for name, known in _imports(body)}
        elif not head.startswith("%"):
            rules[re.sub(r"[?!:\s]|\.-?\d+", "", head)] = body
        elif head != "%ignore":
            raise ValueError(f"{head} is not supported")
    return rules, [body for head, body in statements if head == "%ignore"]


def _imports(body: list[Token]) -> Iterator[tuple[str, str]]:
    """Yield the name of each imported terminal, with the name that it has in the library."""
    names = [text for kind, text in body if kind == "name"]
    if names[:1] != ["common"]:
        raise ValueError("only terminals of the library common can be imported")
    has_alias = any(kind == "alias" for kind, _ in body)
    for name in names[1:2] if has_alias else names[1:]:
        if name not in COMMON:
            raise ValueError(f"common has no terminal {name}")
        yield (names[2] if has_alias else name), name


class _Writer:
    """Writes rules as patterns; None stands for a rule that no text follows.

    ``levels``: how often a rule may be open inside itself.
    """

    def __init__(
        self, rules: Mapping[str, list[Token]], ignored: list[list[Token]], levels: int
    ) -> None:
        self._rules = rules
        self._levels = levels
        self._open: dict[str, int] = {}
        self._num_chars = self._num_rules = 0
        self._between = ""
        parts = [part for body in ignored if (part := self._either([*body], "")) is not None]
        self._between = f"(?:{'|'.join(parts)})*" if parts else ""

    def rule(self, name: str) -> str | None:
        """Return the pattern of a rule."""
        if name not in self._rules:
            raise ValueError(f"there is no rule named {name}")
        self._num_rules += 1
        if self._num_rules > MAX_RULES:
            raise ValueError(f"the rules refer to rules more than {MAX_RULES} times")
        if self._open.get(name, 0) >= self._levels or self._num_chars > len(LEVELS) * MAX_CHARS:
            return None
        self._open[name] = self._open.get(name, 0) + 1
        # Ignored text stands between the terminals of a rule, and not inside a terminal.
        between = self._between if name.islower() else ""
        first, tails = _left_recursion(name, self._rules[name])
        pattern = self._either(first, between)
        if first:
            raise ValueError(f"{first[0][1]!r} is not expected in the rule {name}")
        if pattern is not None and tails:
            tail = self._either(tails, between)
            pattern += "" if tail is None else f"(?:{between}{tail})*"
        self._open[name] -= 1
        self._num_chars += len(pattern or "")
        return pattern

    def _either(self, tokens: list[Token], between: str) -> str | None:
        """Return the pattern of the alternatives at the beginning of ``tokens``; consume them."""
        found: list[str] = []
        while True:
            part = self._sequence(tokens, between)
            if part is not None and part not in found:
                found.append(part)
            if not tokens or tokens[0][1] != "|":
                break
            tokens.pop(0)
        if not found:
            return None
        return found[0] if len(found) == 1 else f"(?:{'|'.join(found)})"

    def _sequence(self, tokens: list[Token], between: str) -> str | None:
        parts: list[str | None] = []
        while tokens and tokens[0][1] not in ("|", ")", "]"):
            if tokens[0][0] == "alias":
                del tokens[:2]
                continue
            part = self._atom(tokens, between)
            if tokens and tokens[0][0] == "count":
                part = _counted(part, tokens.pop(0)[1], between)
            parts.append(part)
        known = [part for part in parts if part is not None]
        return between.join(known) if len(known) == len(parts) else None

    def _atom(self, tokens: list[Token], between: str) -> str | None:
        kind, text = tokens.pop(0)
        if kind == "common":
            return COMMON[text]
        if kind == "name":
            return self.rule(text)
        if kind == "text":
            if tokens and tokens[0][0] == "range":
                last = tokens[1][1]
                del tokens[:2]
                return f"[{re.escape(_value(text))}-{re.escape(_value(last))}]"
            literal = re.escape(_value(text))
            return f"(?i:{literal})" if text.endswith("i") else literal
        if kind == "pattern":
            inner, _, flags = text[1:].rpartition("/")
            inner = re.sub(r"^\^|(?<!\\)\$$", "", inner).replace(r"\/", "/")
            return f"(?{flags}:{inner})"
        if text in "([":
            inside = self._either(tokens, between)
            if not tokens or tokens.pop(0)[1] != {"(": ")", "[": "]"}[text]:
                raise ValueError(f"a bracket {text} is not closed")
            return _counted(inside, "?", between) if text == "[" else inside
        raise ValueError(f"{text!r} is not expected here")


def _left_recursion(name: str, body: Sequence[Token]) -> tuple[list[Token], list[Token]]:
    """Return the alternatives that do not begin with the rule itself, and the tails of the others.

    ``a: b | a c`` becomes ``b`` and ``c``, since it means ``b`` and any number of ``c``.
    """
    alternatives: list[list[Token]] = [[]]
    depth = 0
    for token in body:
        depth += (token[1] in ("(", "[")) - (token[1] in (")", "]"))
        if token[1] == "|" and not depth:
            alternatives.append([])
        else:
            alternatives[-1].append(token)
    first = [each for each in alternatives if each[:1] != [("name", name)] or len(each) == 1]
    tails = [each[1:] for each in alternatives if each not in first and each[1][0] != "count"]
    joint = ("joint", "|")
    return (
        [token for each in first for token in (joint, *each)][1:],
        [token for each in tails for token in (joint, *each)][1:],
    )


def _value(literal: str) -> str:
    """Return the text of a literal. Raises ValueError."""
    return str(json.loads(literal.removesuffix("i")))


def _counted(part: str | None, count: str, between: str) -> str | None:
    """Return the pattern of a repeated part, with ``between`` between two repetitions."""
    if count[0] in "~{":
        bounds = re.findall(r"\d+", count)
        is_open = count[0] == "{" and "," in count and len(bounds) == 1
        least, most = int(bounds[0]), None if is_open else int(bounds[-1])
    else:
        least, most = {"?": (0, 1), "*": (0, None), "+": (1, None)}[count]
    if part is None:
        return "" if least == 0 else None
    if between and most != 1:
        more = "" if most is None else str(most - 1)
        whole = f"(?:{part}(?:{between}{part}){{{max(0, least - 1)},{more}}})"
        return whole if least else f"(?:{whole})?"
    return (
        f"(?:{part}){count}"
        if count in "?*+"
        else f"(?:{part}){{{least},{'' if most is None else most}}}"
    )


# -- a check --------------------------------------------------------------------------------------


class _Bytes:
    """A tokenizer with one token for each byte."""

    bos_token_id, eos_token_id = None, 256
    tokens = (*(bytes([byte]) for byte in range(256)), b"<end>")
    special_token_ids = (256,)

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


@cache
def _tokenizer() -> LLTokenizer:
    return LLTokenizer(TokenizerWrapper(_Bytes()))


def matches(pattern: str, text: str) -> bool:
    """Whether a pattern in Rust's syntax matches the whole text; False for an invalid pattern.

    The time is linear in the text, which Python's backtracking ``re`` does not promise.
    """
    grammar = LLMatcher.grammar_from_regex(pattern)
    matcher = LLMatcher(_tokenizer(), grammar, log_level=0)
    ids = list(text.encode(errors="replace"))
    return (
        not matcher.is_error()
        and matcher.try_consume_tokens(ids) == len(ids)
        and matcher.is_accepting()
    )
