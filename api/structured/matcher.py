"""GrammarMatcher: llguidance follows one request's output, wherever drafts may lead it.

A matcher is at one path at a time. It goes to another one by rolling back to what the two share
and consuming the rest; the masks along its path are kept, since a draft model asks for each of
them, and the verifier asks again.

Where the grammar forces bytes, only the token that the tokenizer itself would write is allowed:
so a run of such tokens is known in advance, and the text is tokenised as the model saw it in
training. (Guidance's fast-forward tokens, https://github.com/guidance-ai/llguidance.)
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import takewhile
from time import perf_counter
from typing import TypeVar

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from ...core.interface.sampling import ConstraintFailed, Mask
from ..text.tokenizer import Tokenizer
from .closing import LEAST_ZONE, Closer

T = TypeVar("T")
NUM_FORCED_TEXTS = 4096  # whose tokens are kept: requests of one schema share them
FORCED_CHARS = 256  # of a forced text that are tokenised as the model would; more is never needed
FREE_SECONDS, SECONDS_PER_TOKEN = 1.0, 0.02  # that an answer may spend on its grammar
QUICK_SECONDS = 0.1  # a grammar that compiles in less may be compiled again by the model thread
MAX_ERROR_CHARS = 300
FREE_TOKENS = 64  # further above the shortest end than about so many, nothing is narrowed
_PLAINLY = {  # a part of what llguidance says, and what it means here
    "NoExtensionBias": "no token of the model is allowed here",
    "coerce_one_of": "oneOf is supported only where its branches exclude each other; use anyOf",
}
_SOURCE = re.compile(r"\n +\d+ \| |\n<grammar>")  # the grammar, which an error ends with
_OF_SCHEMA = "failed to compile JSON schema: "  # one inside a grammar


class Vocabulary:
    """The model's tokens for llguidance, and tokenisation of texts inside an answer.

    It adds one more token, ``end``, behind the model's own: it stands for the end of the answer.
    """

    is_tokenizer_wrapper = True
    bos_token_id = None
    eos_token_id = None  # let llguidance add it

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: frozenset[int]) -> None:
        self.size = self.end = vocab_size
        self.tokens = [tokenizer.token_bytes(token_id) for token_id in range(vocab_size)]
        # A token that ends the answer is never a part of its text, however it is spelt.
        special = {i for i in tokenizer.special_ids | eos_ids if 0 <= i < vocab_size}
        self.special_token_ids = np.array(sorted(special), dtype=np.int64)
        self.texts = [b"" if i in special else each for i, each in enumerate(self.tokens)]
        self._ids = {text: i for i, text in reversed([*enumerate(self.texts)]) if text}
        self._byte_ids = [self._ids.get(bytes([value])) for value in range(256)]
        self._longest = max(map(len, self._ids), default=0)
        self._encode = tokenizer.encode_word
        self._forced = lru_cache(NUM_FORCED_TEXTS)(self._tokenize)
        self.closer = Closer(self)

    def __call__(self, text: str) -> list[int]:
        """Ids of a text that stands inside a longer one; they spell exactly these bytes.

        Of a long one the end is spelt byte by byte: by then it will have been asked for anew.
        """
        ids = list(self._forced(text[:FORCED_CHARS]))
        if len(text) > FORCED_CHARS and self._spells(ids, text[:FORCED_CHARS]):
            rest = [self._byte_ids[value] for value in text[FORCED_CHARS:].encode()]
            ids += rest[: rest.index(None)] if None in rest else rest  # type: ignore[arg-type]
        return ids

    def id_of(self, text: bytes) -> int | None:
        """The token that is exactly this."""
        return self._ids.get(text)

    def _spells(self, ids: Sequence[int], text: str) -> bool:
        return b"".join(self.texts[token_id] for token_id in ids) == text.encode()

    def _tokenize(self, text: str) -> tuple[int, ...]:
        """The tokenizer's own ids, if need be behind a line break, else the longest ones.

        Some tokenizers put a space before a text's first word.
        """
        data = text.encode()
        for before in ("", "\n"):
            ids = self._ending(self._encode(before + text), data)
            if ids is not None:
                return ids
        return tuple(self.spell(data))

    def _ending(self, ids: Sequence[int], data: bytes) -> tuple[int, ...] | None:
        """The last of ``ids`` if they spell ``data``, nothing more and nothing less."""
        length = 0
        for index in range(len(ids), -1, -1):
            if length == len(data):
                found = tuple(ids[index:])
                return found if b"".join(self.texts[i] for i in found) == data else None
            if index == 0 or not (0 <= ids[index - 1] < self.size):
                return None
            length += len(self.texts[ids[index - 1]])
        return None

    def spell(self, data: bytes) -> list[int]:
        """The longest token that fits, over and over; stops at a byte that no token begins with."""
        ids: list[int] = []
        at = 0
        while at < len(data):
            lengths = range(min(self._longest, len(data) - at), 0, -1)
            length = next((n for n in lengths if data[at : at + n] in self._ids), 0)
            if not length:
                break
            ids.append(self._ids[data[at : at + length]])
            at += length
        return ids


@dataclass(frozen=True, slots=True, eq=False)
class Grammar:
    """A compiled grammar, shared by requests, which copy its matcher.

    Copies share the states of the lexer, whose number is limited; `anew` shares nothing.
    """

    prototype: LLMatcher
    vocabulary: Vocabulary
    compile: Callable[[], LLMatcher]
    seconds: float = 0.0  # that compiling took
    least: int | None = None  # tokens of the shortest answer that is known; None: cut as it comes

    def anew(self) -> LLMatcher:
        """A matcher with states of its own. Raises `ConstraintFailed` where that takes long."""
        if self.seconds > QUICK_SECONDS:
            raise ConstraintFailed("the grammar is too complex to be matched")
        return self.compile()

    def matcher(self, stop_ids: frozenset[int], limit: int | None = None) -> GrammarMatcher:
        """A constraint whose complete answers end with any of ``stop_ids``.

        ``limit``: output tokens, the stop token included, within which the answer is to be
        completed; None: wherever that takes it.
        """
        return GrammarMatcher(self, stop_ids, limit)


class GrammarMatcher:
    """A `Constraint` by a grammar. Copied from the grammar when it is first asked."""

    def __init__(
        self, grammar: Grammar, stop_ids: frozenset[int], limit: int | None = None
    ) -> None:
        self._grammar = grammar
        self.limit = limit
        least = grammar.least or 0
        self._zone = max(LEAST_ZONE, FREE_TOKENS // 2 + least)
        self._horizon = FREE_TOKENS + self._zone + 2 * least  # nothing is narrowed before it
        self._narrowed: set[int] = set()  # places on the path, behind the sure tokens
        self._is_closed_early = False
        self._stop_ids = frozenset(i for i in stop_ids if 0 <= i < grammar.vocabulary.size)
        self._stops = sorted(self._stop_ids)
        self._matcher: LLMatcher | None = None
        self._seconds = 0.0  # that it took
        self._num_sure = 0  # tokens of the output that are consumed: they never change
        self._tail: list[int] = []  # what is consumed behind them
        self._masks: dict[int, Mask] = {}  # by tokens before, none of fewer than the sure ones

    def fork(self) -> GrammarMatcher:
        """Another one at the beginning of the output."""
        return GrammarMatcher(self._grammar, self._stop_ids, self.limit)

    def closed_early(self, num_output: int) -> bool:
        """Whether an output of so many tokens had fewer to choose from, to end in time."""
        return self._is_closed_early or any(place < num_output for place in tuple(self._narrowed))

    def allowed(self, tokens: array[int], start: int, tail: Sequence[int]) -> Mask | None:
        """Mask of the tokens that may follow, [vocab]; see `Constraint`."""
        return self._sound(lambda: self._allowed(tokens, start, tail))

    def forced(self, tokens: array[int], start: int, most: int) -> Sequence[int]:
        """Tokens that must follow, up to the end of the answer if there is a single one."""
        return self._sound(lambda: self._forced(tokens, start, most))

    def count_allowed(self, tokens: array[int], start: int, guess: Sequence[int]) -> int:
        """Leading tokens of ``guess`` that fit, whether or not they are the forced ones."""
        return self._sound(lambda: self._count_allowed(tokens, start, guess))

    def _sound(self, job: Callable[[], T]) -> T:
        """A matcher that fails stays broken, and others wear it out: one of its own tries again."""
        if self._seconds > FREE_SECONDS + SECONDS_PER_TOKEN * self._num_sure:
            raise ConstraintFailed("the grammar takes too much time for each token: simplify it")
        began = perf_counter()
        try:
            return self._twice(job)
        finally:
            self._seconds += perf_counter() - began

    def _twice(self, job: Callable[[], T]) -> T:
        try:
            return job()
        except ConstraintFailed:
            self._restart(self._grammar.anew())
        try:
            return job()
        except ConstraintFailed:
            self._restart(None)
            raise

    # -- what may follow, once ------------------------------------------------------------------

    def _allowed(self, tokens: array[int], start: int, tail: Sequence[int]) -> Mask | None:
        new = self._new(tokens, start, tail)
        depth = self._num_sure + len(new)
        is_known = depth in self._masks and _common_len(self._tail, new) == len(new)
        is_allowed = is_known or self._goto(new)
        self._settle(len(tokens) - start)
        if is_allowed and not is_known:
            self._masks[depth] = self._mask(depth)
        return self._masks[depth] if is_allowed else None

    def _forced(self, tokens: array[int], start: int, most: int) -> Sequence[int]:
        run: list[int] = []
        self._goto(self._new(tokens, start, ()))
        self._settle(len(tokens) - start)
        while len(run) < most and (more := self._forced_now()):
            more = more[: most - len(run)]
            run += more
            if not self._consume(more):
                break
        return run

    def _count_allowed(self, tokens: array[int], start: int, guess: Sequence[int]) -> int:
        self._goto(self._new(tokens, start, ()))
        self._settle(len(tokens) - start)
        possible = [*takewhile(self._is_text, guess)]
        count: int = self._live.validate_tokens(possible) if possible else 0
        self._check()
        follows = count < len(guess) and count == len(possible) and guess[count] in self._stop_ids
        return count + follows

    # -- the path -------------------------------------------------------------------------------

    @property
    def _live(self) -> LLMatcher:
        if self._matcher is None:
            self._matcher = self._grammar.prototype.deep_copy()
        return self._matcher

    def _restart(self, matcher: LLMatcher | None) -> None:
        self._matcher = matcher
        self._num_sure = 0
        self._tail.clear()
        self._masks.clear()
        self._narrowed.clear()

    def _new(self, tokens: array[int], start: int, tail: Sequence[int]) -> list[int]:
        """The path behind the sure tokens."""
        return [*tokens[start + self._num_sure :], *tail]

    def _goto(self, new: Sequence[int]) -> bool:
        """Be at the path that ends so; False where that is refused, at a prefix of it then."""
        same = _common_len(self._tail, new)
        if same < len(self._tail):
            self._roll_back(len(self._tail) - same)
        return self._consume(new[same:])

    def _settle(self, num_output: int) -> None:
        """Count the first ``num_output`` of the consumed tokens as output that will not change."""
        num_new = num_output - self._num_sure
        if num_new > len(self._tail):
            raise ConstraintFailed("the grammar does not allow the answer so far")
        if num_new > 0:
            del self._tail[:num_new]
            self._num_sure = num_output
            self._is_closed_early = self.closed_early(num_output)
            self._narrowed = {place for place in self._narrowed if place >= num_output}
            self._masks = {depth: m for depth, m in self._masks.items() if depth >= num_output}

    def _consume(self, token_ids: Sequence[int]) -> bool:
        """Go on along these tokens as far as they are allowed; whether all are."""
        possible = [*takewhile(self._is_text, token_ids)]
        count = self._live.try_consume_tokens(possible) if possible else 0
        self._check()
        self._tail += possible[:count]
        return count == len(token_ids)

    def _roll_back(self, count: int) -> None:
        self._live.rollback(count)
        self._check()
        del self._tail[len(self._tail) - count :]
        last = self._num_sure + len(self._tail)
        self._masks = {depth: mask for depth, mask in self._masks.items() if depth <= last}
        self._narrowed = {place for place in self._narrowed if place <= last}

    def _is_text(self, token_id: int) -> bool:
        """Whether the answer goes on behind this token."""
        return 0 <= token_id < self._grammar.vocabulary.size and token_id not in self._stop_ids

    # -- what may follow it ---------------------------------------------------------------------

    def _mask(self, depth: int) -> Mask:
        bits = np.frombuffer(self._live.compute_bitmask(), dtype=np.uint8)
        self._check()
        vocabulary = self._grammar.vocabulary
        mask = np.unpackbits(bits, count=vocabulary.end + 1, bitorder="little").view(np.bool_)
        is_complete, mask = mask[vocabulary.end], mask[: vocabulary.size]
        special = vocabulary.special_token_ids  # a complement of texts lets them in
        for token_id in special[mask[special]].tolist():
            mask[token_id] = self._live.validate_tokens([token_id]) == 1
        num_left = self._horizon + 1 if self.limit is None else self.limit - depth
        if num_left <= self._horizon and self._grammar.least is not None:
            self._narrow(mask, depth, num_left)
        if is_complete:
            mask[self._stops] = True
        return mask.data

    def _narrow(self, mask: NDArray[np.bool_], depth: int, num_left: int) -> None:
        """Leave what can still be completed by the limit."""
        closer, began = self._grammar.vocabulary.closer, perf_counter()
        if closer.narrow(self._live, mask, depth, num_left, self._zone):
            self._narrowed.add(depth)
        self._check()
        self._seconds -= perf_counter() - began  # its work is bounded by steps

    def _forced_now(self) -> Sequence[int]:
        """The tokens that must come next, if the grammar forces some."""
        if self._live.is_stopped():
            self._check()
            return self._stops if len(self._stops) == 1 else ()
        forced: Sequence[int] = self._live.compute_ff_tokens()
        self._check()
        return forced

    def _check(self) -> None:
        if self._live.is_error():
            raise ConstraintFailed(
                f"the grammar cannot be matched further: {error_text(self._live)}"
            )


def error_text(matcher: LLMatcher) -> str:
    """The error of a matcher as one line for the caller."""
    text = matcher.get_error().partition("<backtrace>")[0].replace("<non-verbose/>", "")
    reason = _SOURCE.split(text, maxsplit=1)[0]
    for part, said in _PLAINLY.items():
        if part in reason:
            return said
    _, of_schema, problem = reason.partition(_OF_SCHEMA)
    return " ".join((problem if of_schema else text).split())[:MAX_ERROR_CHARS]


def _common_len(first: Sequence[int], second: Sequence[int]) -> int:
    """Leading tokens that two sequences share."""
    length = 0
    for ours, theirs in zip(first, second, strict=False):
        if ours != theirs:
            break
        length += 1
    return length
