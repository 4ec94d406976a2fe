"""Hints from a grammar's schemas about its completions: short values, and the ends of values."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import islice

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from ..grammar_text import guidance_text
from ..rewinding import named_tokens
from ..schemas.walk import schemas_of, walk
from .pattern_sample import samples
from .protocols import Tokens
from .search import NARROW, WIDE, EndSearch, Hints
from .spelling import text_of
from .token_table import TokenTable

Ids = Sequence[int]
Schema = Mapping[str, object]
MAX_LEAVES = 48  # maximum number of schemas per grammar for which a short value is searched
MAX_VALUES = 512  # maximum number of short values and ends of values
MAX_MARKS = 48
MAX_SUFFIXES = 40  # maximum number of suffixes per value
LEAF_NODES, WIDE_NODES = 500, 200
NUM_KEPT = 2048  # number of cached short values, which several schemas may share
MAX_NUMBER = 1e15
MAX_SAMPLES = 4  # maximum number of texts per pattern
OF_TEXT = ("pattern", "format", "minLength", "maxLength")
OF_NUMBER = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_LAZY = re.compile(r"^\w+\[lazy\]: /\(\?s:\.\*\)((?:\\.|[^\\/])+)/$", re.MULTILINE)
_BEFORE_TOKEN = re.compile(  # the end of a text, and the token after it
    r"^(\w+_LAST): /\(\?s:\.\*\)((?:\\.|[^\\/])+)/ & .*\n\w+: (?:.* )?\1 <\[(\d+)\]>", re.MULTILINE
)


class HintFinder:
    """Finds hints for the grammars of one vocabulary."""

    def __init__(
        self,
        tokens: Tokens,
        table: TokenTable,
        tokenizer: LLTokenizer,
        limits: Mapping[str, int | bool],
    ) -> None:
        self._tokens = tokens
        self._table = table
        self._tokenizer = tokenizer
        self._limits = limits
        self.short_text = lru_cache(NUM_KEPT)(self._short_text)

    def hints(self, field: str, source: str) -> Hints:
        """Return the hints for a grammar. ``field``: its kind; ``source``: its text."""
        leaves = (leaf for schema in schemas_of(field, source) for leaf in _leaves(schema))
        texts: set[bytes] = set()
        for leaf in islice(leaves, MAX_LEAVES):
            texts.add(leaf if isinstance(leaf, bytes) else self.short_text(json.dumps(leaf)))
            texts.update(_guesses(leaf))
        found = {part for text in texts if text for part in _parts(text)}
        by_length = sorted(found, key=lambda text: (len(text), text))
        values = [ids for text in by_length[:MAX_VALUES] if (ids := self._spelt(text))]
        return Hints(
            [*self._marks(field, source)][:MAX_MARKS],
            sorted(values, key=len),
            [*self._named(field, source)],
        )

    def _named(self, field: str, source: str) -> Iterator[int]:
        """Yield the tokens with text that a grammar refers to by number."""
        if field == "grammar":
            for token_id in sorted(named_tokens(source)):
                if token_id < self._tokens.size and self._tokens.texts[token_id]:
                    yield token_id

    def _spelt(self, text: bytes) -> list[int]:
        ids = self._tokens.spell(text)
        return ids if text_of(self._tokens, ids) == text else []

    def _short_text(self, leaf: str) -> bytes:
        """Return the shortest JSON that a short search finds for a small schema, else b""."""
        schema = json.loads(leaf)
        parts = dict.fromkeys(part for text in _guesses(schema) for part in _parts(text))
        values = [ids for text in parts if (ids := self._spelt(text))]
        hints = Hints(self._text_ends(), sorted(values, key=len))
        for each in _anchored(schema):
            source = guidance_text("json_schema", json.dumps(each))
            limits = LLParserLimits(**self._limits)  # type: ignore[arg-type]
            matcher = LLMatcher(self._tokenizer, source, log_level=0, limits=limits)
            if matcher.is_error():
                continue
            search = EndSearch(matcher, self._tokens, self._table, hints)
            end = search.find(LEAF_NODES, NARROW)
            most = None if end is None else len(end) - 1
            end = search.find(WIDE_NODES, WIDE, most) or end
            if end is not None:
                return text_of(self._tokens, end)
        return b""

    def _text_ends(self) -> list[Ids]:
        quote = self._tokens.id_of(b'"')
        return [] if quote is None else [[quote]]

    def _marks(self, field: str, source: str) -> Iterator[Ids]:
        """Yield the texts that may end a free text: a quotation mark, and delimiters in the
        grammar.
        """
        yield from self._text_ends()
        if field != "grammar":
            return
        yield from ([token_id] for token_id in sorted(named_tokens(source)))
        for mark in dict.fromkeys(_LAZY.findall(source)):
            if ids := self._tokens(re.sub(r"\\(.)", r"\1", mark)):
                yield ids
        for _, mark, token_id in dict.fromkeys(_BEFORE_TOKEN.findall(source)):
            if ids := self._tokens(re.sub(r"\\(.)", r"\1", mark)):
                yield [*ids, int(token_id)]


def _leaves(schema: object) -> Iterator[Schema | bytes]:
    """Yield the schemas of restricted strings and numbers, and the shortest value of each enum."""
    for each in walk(schema):
        values = each.get("enum")
        if isinstance(values, list) and len(values) > 1:
            yield min((_written(value) for value in values), key=len)
        for type_name, keys in (("string", OF_TEXT), ("number", OF_NUMBER)):
            found = {key: each[key] for key in keys if key in each}
            types = each.get("type", type_name)
            names = types if isinstance(types, list) else [types]
            if found and (
                type_name in names or (type_name, "integer") in [("number", n) for n in names]
            ):
                is_integer = type_name == "number" and "integer" in names
                yield {"type": "integer" if is_integer else type_name, **found}


def _near_bounds(leaf: Schema) -> list[bytes]:
    """Return numbers next to a schema's bounds, as JSON."""
    multiple = leaf.get("multipleOf")
    step = multiple if isinstance(multiple, int) and multiple > 0 else 1
    found: list[float] = []
    for key in OF_NUMBER[:4]:
        if isinstance(bound := leaf.get(key), int | float) and abs(bound) < MAX_NUMBER:
            whole = math.floor(bound / step) * step
            found += [
                bound,
                *(whole + steps * step for steps in (-1, 0, 1, 2)),
                math.floor(bound) + 0.5,
            ]
    return [_written(int(value) if value == int(value) else value) for value in found]


def _written(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode(errors="replace")


def _anchored(schema: Schema) -> Iterator[Schema]:
    """Yield the schema with its pattern anchored, which is faster to search, then unchanged."""
    pattern = schema.get("pattern")
    if isinstance(pattern, str):
        yield {**schema, "pattern": f"^(?:{pattern})$"}
    yield schema


def _guesses(leaf: Schema | bytes) -> list[bytes]:
    """Return values that the schema may allow: numbers near its bounds, texts for its pattern."""
    if isinstance(leaf, bytes):
        return []
    if not isinstance(pattern := leaf.get("pattern"), str):
        return _near_bounds(leaf)
    return [_written(text) for text in samples(pattern)[:MAX_SAMPLES]]


def _parts(text: bytes) -> Iterator[bytes]:
    """Yield a text and its suffixes."""
    yield text
    yield from (text[at:] for at in range(max(1, len(text) - MAX_SUFFIXES), len(text) - 1))
