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
from itertools import takewhile
from time import perf_counter
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from ...core.interface.sampling import ConstraintFailed, Mask
from .closing import Between, ClosingPath
from .ends.closer import Closer
from .ends.protocols import Matcher
from .vocabulary import Vocabulary

T = TypeVar("T")
FREE_SECONDS, SECONDS_PER_TOKEN = 1.0, 0.02  # that an answer may spend on its grammar
QUICK_SECONDS = 0.1  # a grammar that compiles in less may be compiled again by the model thread
MAX_ERROR_CHARS = 300
_PLAINLY = {  # a part of what llguidance says, and what it means here
    "NoExtensionBias": "no token of the model is allowed here",
    "coerce_one_of": "oneOf is supported only where its branches exclude each other; use anyOf",
}
_SOURCE = re.compile(r"\n +\d+ \| |\n<grammar>")  # the grammar, which an error ends with
_OF_SCHEMA = "failed to compile JSON schema: "  # one inside a grammar


@dataclass(frozen=True, slots=True, eq=False)
class Grammar:
    """A compiled grammar, shared by requests, which copy its matcher.

    Copies share the states of the lexer, whose number is limited; `anew` shares nothing.
    """

    prototype: Matcher
    vocabulary: Vocabulary
    compile: Callable[[], Matcher]
    closer: Closer
    seconds: float = 0.0  # that compiling took
    shortest: Sequence[int] | None = None  # answer that is known; None: cut as it comes

    @property
    def least(self) -> int | None:
        """Tokens of the shortest answer that is known."""
        return None if self.shortest is None else len(self.shortest)

    def anew(self) -> Matcher:
        """Return a matcher with states of its own.

        Raises `ConstraintFailed` where that takes long.
        """
        if self.seconds > QUICK_SECONDS:
            raise ConstraintFailed("the grammar is too complex to be matched")
        return self.compile()

    def matcher(self, stop_ids: frozenset[int], limit: int | None = None) -> GrammarMatcher:
        """Return a constraint whose complete answers end with any of ``stop_ids``.

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
        self._closing: ClosingPath | None = None
        if limit is not None and grammar.shortest is not None:
            self._closing = ClosingPath(grammar.closer, grammar.shortest, limit)
        self._narrowed: set[int] = set()  # places on the path, behind the sure tokens
        self._is_closed_early = False
        self._stop_ids = frozenset(i for i in stop_ids if 0 <= i < grammar.vocabulary.size)
        self._stops = sorted(self._stop_ids)
        self._matcher: Matcher | None = None
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
        """Return a matcher that fails stays broken, and others wear it out: one of its own
        tries again.
        """
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
            behind = [*tokens[start + self._num_sure :], *tail]

            def between(first: int, last: int) -> Sequence[int]:
                sure = tokens[start + first : start + min(last, self._num_sure)]
                at = max(0, first - self._num_sure), max(0, last - self._num_sure)
                return [*sure, *behind[at[0] : at[1]]]

            self._masks[depth] = self._mask(depth, between)
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
    def _live(self) -> Matcher:
        if self._matcher is None:
            self._matcher = self._grammar.prototype.deep_copy()
        return self._matcher

    def _restart(self, matcher: Matcher | None) -> None:
        self._matcher = matcher
        self._num_sure = 0
        self._tail.clear()
        self._masks.clear()
        self._forget(0)

    def _new(self, tokens: array[int], start: int, tail: Sequence[int]) -> list[int]:
        """Return the path behind the sure tokens."""
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
            self._forget(num_output + len(self._tail))

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
        self._forget(last)

    def _forget(self, last: int) -> None:
        """Forget what closing has found behind a place."""
        self._narrowed = {place for place in self._narrowed if place <= last}
        if self._closing is not None:
            self._closing.forget(self._num_sure, last)

    def _is_text(self, token_id: int) -> bool:
        """Whether the answer goes on behind this token."""
        return 0 <= token_id < self._grammar.vocabulary.size and token_id not in self._stop_ids

    # -- what may follow it ---------------------------------------------------------------------

    def _mask(self, depth: int, between: Between) -> Mask:
        bits = np.frombuffer(self._live.compute_bitmask(), dtype=np.uint8)
        self._check()
        vocabulary = self._grammar.vocabulary
        mask = np.unpackbits(bits, count=vocabulary.end + 1, bitorder="little").view(np.bool_)
        is_complete, mask = mask[vocabulary.end], mask[: vocabulary.size]
        special = vocabulary.special_token_ids  # a complement of texts lets them in
        for token_id in special[mask[special]].tolist():
            mask[token_id] = self._live.validate_tokens([token_id]) == 1
        if self._closing is not None:
            self._narrow(self._closing, mask, depth, between)
        if is_complete:
            mask[self._stops] = True
        return mask.data

    def _narrow(
        self, closing: ClosingPath, mask: NDArray[np.bool_], depth: int, between: Between
    ) -> None:
        """Leave what can still be completed by the limit."""
        began = perf_counter()
        if closing.narrow(self._live, mask, depth, between):
            self._narrowed.add(depth)
        self._check()
        self._seconds -= perf_counter() - began  # its work is bounded by nodes

    def _forced_now(self) -> Sequence[int]:
        """Return the tokens that must come next, if the grammar forces some."""
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


def error_text(matcher: Matcher) -> str:
    """Return the error of a matcher as one line for the caller."""
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
