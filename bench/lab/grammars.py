"""What grammar libraries cost: llguidance, ours over it, and xgrammar where it can be imported.

Each compiles the same schemas and then writes random answers, token by token: one of the tokens
that the mask allows, drawn with the same numbers.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol, cast

import jsonschema
import numpy as np
import torch
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from numpy.typing import NDArray

from ...api.build.model_files import BUILTIN
from ...api.structured.compiler import compile_grammar
from ...api.structured.matcher import Grammar, GrammarMatcher, Vocabulary
from ...api.text.tokenizer import Tokenizer
from .schemas import Schema

EOS = 2  # of the built-in vocabulary
NUM_TOKENS = 128  # of an answer, at most
NUM_DRAFTS = 8
CHECKED = jsonschema.FormatChecker(("uuid", "ipv4"))


class Wide:
    """The built-in vocabulary and pairs of its tokens, up to ``size`` tokens: as wide as a model's.

    Stands in for a `Tokenizer`; texts are tokenised as the built-in one does it.
    """

    is_byte_level = True

    def __init__(self, tokenizer: Tokenizer, size: int) -> None:
        self.special_ids = tokenizer.special_ids
        self.encode_word = tokenizer.encode_word
        self._texts = [
            tokenizer.token_bytes(token_id) for token_id in sorted(tokenizer.vocab.values())
        ]
        words = [text for i, text in enumerate(self._texts) if i not in self.special_ids]
        known, rng = set(self._texts), random.Random(7)
        while len(self._texts) < size:
            pair = rng.choice(words) + rng.choice(words)
            if pair not in known:
                known.add(pair)
                self._texts.append(pair)

    def token_bytes(self, token_id: int) -> bytes:
        """What a token stands for."""
        return self._texts[token_id]


class Walker(Protocol):
    """One answer being written."""

    def allowed(self) -> NDArray[np.bool_]:
        """Which tokens may come next, [vocab]."""

    def push(self, token_id: int) -> bool:
        """Take a token; whether it was allowed."""

    def roll_back(self, count: int) -> None:
        """Take so many tokens back."""

    def copy(self) -> object:
        """Another one in the same state."""


class Library(Protocol):
    """Compiles schemas over one vocabulary."""

    name: str

    def compile(self, schema: Schema) -> Callable[[], Walker]:
        """What begins an answer."""


class Guidance:
    """llguidance alone, as bits."""

    name = "llguidance"

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self.tokenizer = LLTokenizer(cast(TokenizerWrapper, vocabulary))

    def compile(self, schema: Schema) -> Callable[[], Walker]:
        prototype = compile_grammar("json_schema", json.dumps(schema), self.tokenizer)
        return lambda: _GuidanceWalker(prototype.deep_copy(), self.vocabulary.end)


class _GuidanceWalker:
    def __init__(self, matcher: LLMatcher, end: int) -> None:
        self._matcher, self._end = matcher, end

    def allowed(self) -> NDArray[np.bool_]:
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        mask = np.unpackbits(bits, count=self._end + 1, bitorder="little").view(np.bool_)
        mask[EOS] = mask[self._end]
        return mask[: self._end]

    def push(self, token_id: int) -> bool:
        return self._matcher.try_consume_tokens([token_id]) == 1

    def roll_back(self, count: int) -> None:
        self._matcher.rollback(count)

    def copy(self) -> object:
        return self._matcher.deep_copy()


class Ours(Guidance):
    """The engine's own matcher: what a step pays."""

    name = "foretoken over llguidance"

    def compile(self, schema: Schema) -> Callable[[], Walker]:
        anew = partial(compile_grammar, "json_schema", json.dumps(schema), self.tokenizer)
        grammar = Grammar(anew(), self.vocabulary, anew)
        return lambda: _OwnWalker(grammar.matcher(frozenset({EOS})))


class _OwnWalker:
    def __init__(self, matcher: GrammarMatcher) -> None:
        self._matcher, self._output, self._tail = matcher, array("q"), list[int]()

    def allowed(self) -> NDArray[np.bool_]:
        mask = self._matcher.allowed(self._output, 0, self._tail)
        return np.zeros(0, dtype=np.bool_) if mask is None else np.frombuffer(mask, dtype=np.bool_)

    def push(self, token_id: int) -> bool:
        self._tail.append(token_id)
        return True

    def roll_back(self, count: int) -> None:
        del self._tail[len(self._tail) - count :]

    def copy(self) -> object:
        return self._matcher.fork().forced(self._output, 0, 0)


class Peer:
    """xgrammar; no package of ours depends on it. Raises ImportError."""

    name = "xgrammar"

    def __init__(self, vocabulary: Vocabulary) -> None:
        import xgrammar

        self._library: Any = xgrammar
        info = xgrammar.TokenizerInfo(vocabulary.tokens, stop_token_ids=[EOS])
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        self._size = len(vocabulary.tokens)

    def compile(self, schema: Schema) -> Callable[[], Walker]:
        compiled = self._compiler.compile_json_schema(
            json.dumps(schema), any_whitespace=False, separators=(", ", ": ")
        )
        return lambda: _PeerWalker(self._library, compiled, self._size)


class _PeerWalker:
    def __init__(self, library: Any, compiled: object, size: int) -> None:  # noqa: ANN401 - xgrammar is untyped
        self._matcher = library.GrammarMatcher(compiled)
        self._size = size
        self._bits = torch.full((1, (size + 31) // 32), -1, dtype=torch.int32)

    def allowed(self) -> NDArray[np.bool_]:
        self._bits.fill_(-1)
        self._matcher.fill_next_token_bitmask(self._bits)
        bits = self._bits.numpy().view(np.uint8)[0]
        return np.unpackbits(bits, count=self._size, bitorder="little").view(np.bool_)

    def push(self, token_id: int) -> bool:
        return bool(self._matcher.accept_token(token_id))

    def roll_back(self, count: int) -> None:
        self._matcher.rollback(count)

    def copy(self) -> object:
        return self._matcher.fork()


def vocabularies(wide: int) -> Iterator[Vocabulary]:
    """The built-in one, and one of ``wide`` tokens."""
    tokenizer = Tokenizer.load(BUILTIN / "target", max_model_len=512)
    size = max(tokenizer.vocab.values()) + 1
    yield Vocabulary(tokenizer, size, frozenset({EOS}))
    yield Vocabulary(cast(Tokenizer, Wide(tokenizer, wide)), wide, frozenset({EOS}))
    tokenizer.close()


def measure(
    library: Library, schemas: Sequence[Schema], vocabulary: Vocabulary
) -> dict[str, object]:
    """One row of the table; times of a token are of its mask and of taking it."""
    compile_s: list[float] = []
    mask_s: list[float] = []
    copy_s: list[float] = []
    draft_s: list[float] = []
    failed, valid, ended = 0, 0, 0
    for index, schema in enumerate(schemas):
        began = time.perf_counter()
        try:
            begin = library.compile(schema)
        except (ValueError, RuntimeError):
            failed += 1
            continue
        compile_s.append(time.perf_counter() - began)
        path = _walk(begin(), random.Random(index), mask_s, copy_s, draft_s)
        if path is not None:
            ended += 1
            valid += is_valid(b"".join(vocabulary.tokens[i] for i in path), schema)
    return {
        "vocabulary": vocabulary.size,
        "library": library.name,
        "refused": failed,
        "valid": valid / max(1, ended),
        "compile ms p50": 1e3 * statistics.median(compile_s),
        "compile ms p99": 1e3 * _p99(compile_s),
        "token us p50": 1e6 * statistics.median(mask_s),
        "token us p99": 1e6 * _p99(mask_s),
        "copy us": 1e6 * statistics.median(copy_s),
        f"{NUM_DRAFTS} back and forth us": 1e6 * statistics.median(draft_s),
    }


def _walk(
    walker: Walker,
    rng: random.Random,
    mask_s: list[float],
    copy_s: list[float],
    draft_s: list[float],
) -> list[int] | None:
    """The answer if it ended."""
    path: list[int] = []
    while len(path) < NUM_TOKENS:
        began = time.perf_counter()
        mask = walker.allowed()
        masked = time.perf_counter()
        allowed = np.flatnonzero(mask)
        token_id = int(allowed[rng.randrange(len(allowed))])
        if token_id == EOS:
            return path
        chosen = time.perf_counter()
        if not walker.push(token_id):
            raise RuntimeError("a mask allows a token that is refused")
        mask_s.append(masked - began + time.perf_counter() - chosen)
        path.append(token_id)
        if len(path) == NUM_DRAFTS:
            copy_s.append(_seconds(walker.copy))
            draft_s.append(_seconds(lambda: _back_and_forth(walker, path)))
    return None


def _back_and_forth(walker: Walker, path: Sequence[int]) -> None:
    """Back to the beginning, and forth again with all masks on the way."""
    walker.roll_back(len(path))
    for token_id in path:
        walker.allowed()
        walker.push(token_id)


def _seconds(job: Callable[[], object]) -> float:
    began = time.perf_counter()
    job()
    return time.perf_counter() - began


def is_valid(text: str | bytes, schema: object) -> bool:
    """Whether this is JSON of the schema; formats that Python's own checks misjudge pass."""
    try:
        jsonschema.validate(json.loads(text), schema, format_checker=CHECKED)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


def _p99(values: Sequence[float]) -> float:
    return sorted(values)[min(len(values) - 1, int(0.99 * len(values)))]
