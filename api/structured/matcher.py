"""GrammarMatcher: follows one request's output with llguidance, along any draft.

A matcher is at one path at a time. To reach another path, it rolls back to the common prefix and
consumes the rest. Masks along its path are kept, since a draft model and the verifier ask for the
same ones.

If the grammar forces bytes, only the tokens with which the tokenizer encodes them are allowed. Runs
of such tokens are known in advance, and the text is tokenized as in the model's training. These are
Guidance's fast-forward tokens (https://github.com/guidance-ai/llguidance).
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
FREE_SECONDS, SECONDS_PER_TOKEN = 1.0, 0.02  # time limit of an answer, and its increase per token
QUICK_SECONDS = 0.1  # compile time below which the model thread may compile a grammar again
MAX_ERROR_CHARS = 300
_PLAINLY = {  # parts of llguidance's messages, and their replacements
    "NoExtensionBias": "no token of the model is allowed here",
    "coerce_one_of": "oneOf is supported only if its branches exclude each other; use anyOf",
}
_SOURCE = re.compile(r"\n +\d+ \| |\n<grammar>")  # the grammar's text at the end of an error
_OF_SCHEMA = "failed to compile JSON schema: "  # prefix of errors in a schema inside a grammar


@dataclass(frozen=True, slots=True, eq=False)
class Grammar:
    """A compiled grammar, shared by requests that copy its matcher.

    Copies share the states of the lexer, whose number is limited. A matcher from `anew` shares
    nothing.
    """

    prototype: Matcher
    vocabulary: Vocabulary
    compile: Callable[[], Matcher]
    closer: Closer
    seconds: float = 0.0  # compile time in seconds
    # the shortest answer; None if unknown: a token limit then truncates answers
    shortest: Sequence[int] | None = None

    @property
    def least(self) -> int | None:
        """Number of tokens of the shortest known answer."""
        return None if self.shortest is None else len(self.shortest)

    def anew(self) -> Matcher:
        """Return a matcher with lexer states of its own.

        Raises `ConstraintFailed` if compiling takes too long.
        """
        if self.seconds > QUICK_SECONDS:
            raise ConstraintFailed("the grammar is too complex to be matched")
        return self.compile()

    def matcher(self, stop_ids: frozenset[int], limit: int | None = None) -> GrammarMatcher:
        """Return a constraint whose complete answers end with one of ``stop_ids``.

        ``limit``: number of output tokens, including the stop token, within which the answer must
        be complete; None for no limit.
        """
        return GrammarMatcher(self, stop_ids, limit)


class GrammarMatcher:
    """A `Constraint` that enforces a grammar. It copies the grammar's matcher at its first query.

    Settled tokens are consumed output tokens that cannot change any more.
    """

    def __init__(
        self, grammar: Grammar, stop_ids: frozenset[int], limit: int | None = None
    ) -> None:
        self._grammar = grammar
        self.limit = limit
        self._closing = self._new_closing()
        self._narrowed: set[int] = set()  # positions after the settled tokens with a narrowed mask
        self._is_closed_early = False
        self._stop_ids = frozenset(i for i in stop_ids if 0 <= i < grammar.vocabulary.size)
        self._stops = sorted(self._stop_ids)
        self._matcher: Matcher | None = None
        self._seconds = 0.0  # seconds spent on matching
        self._num_settled = 0  # number of settled tokens
        self._tail: list[int] = []  # consumed tokens after the settled tokens
        self._masks: dict[int, Mask] = {}  # by the number of output tokens before the mask

    def fork(self) -> GrammarMatcher:
        """Return a new constraint for another output with the same grammar."""
        return GrammarMatcher(self._grammar, self._stop_ids, self.limit)

    def closed_early(self, num_output: int) -> bool:
        """Whether an output of this length was restricted to complete it within the limit."""
        return self._is_closed_early or any(place < num_output for place in tuple(self._narrowed))

    def allowed(self, tokens: array[int], start: int, tail: Sequence[int]) -> Mask | None:
        """Return the mask [vocab] of the tokens that may follow; None if ``tail`` is not allowed.

        The output is ``tokens`` from ``start`` on, followed by the draft tokens ``tail``.
        """
        return self._with_retry(lambda: self._allowed(tokens, start, tail))

    def forced(self, tokens: array[int], start: int, most: int) -> Sequence[int]:
        """Return the tokens that must follow, at most ``most``.

        The last one may be an end token, if only one is possible.
        """
        return self._with_retry(lambda: self._forced(tokens, start, most))

    def count_allowed(self, tokens: array[int], start: int, guess: Sequence[int]) -> int:
        """Return how many leading tokens of ``guess`` are allowed, forced or not."""
        return self._with_retry(lambda: self._count_allowed(tokens, start, guess))

    def _with_retry(self, job: Callable[[], T]) -> T:
        """Run a job and return its result. If it fails, run it once more with a new matcher.

        A failed matcher stays failed, and other requests may have exhausted the shared lexer
        states. Raises `ConstraintFailed` if that fails too or the grammar takes too much time.
        """
        if self._seconds > FREE_SECONDS + SECONDS_PER_TOKEN * self._num_settled:
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

    # -- queries
    # ------------------------------------------------------------------------------------

    def _allowed(self, tokens: array[int], start: int, tail: Sequence[int]) -> Mask | None:
        new = self._new(tokens, start, tail)
        depth = self._num_settled + len(new)
        is_known = depth in self._masks and _common_len(self._tail, new) == len(new)
        is_allowed = is_known or self._goto(new)
        self._settle(len(tokens) - start)
        if is_allowed and not is_known:
            behind = [*tokens[start + self._num_settled :], *tail]

            def between(first: int, last: int) -> Sequence[int]:
                sure = tokens[start + first : start + min(last, self._num_settled)]
                at = max(0, first - self._num_settled), max(0, last - self._num_settled)
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
        self._num_settled = 0
        self._tail.clear()
        self._masks.clear()
        self._narrowed.clear()
        self._closing = self._new_closing()  # the one so far has forgotten the first positions

    def _new_closing(self) -> ClosingPath | None:
        shortest = self._grammar.shortest
        if self.limit is None or shortest is None:
            return None
        return ClosingPath(self._grammar.closer, shortest, self.limit)

    def _new(self, tokens: array[int], start: int, tail: Sequence[int]) -> list[int]:
        """Return the tokens after the settled tokens: the rest of the output, and ``tail``."""
        return [*tokens[start + self._num_settled :], *tail]

    def _goto(self, new: Sequence[int]) -> bool:
        """Move the matcher after the settled tokens and ``new``. Return whether it is there.

        If ``new`` is not allowed, the matcher is after an allowed prefix.
        """
        same = _common_len(self._tail, new)
        if same < len(self._tail):
            self._roll_back(len(self._tail) - same)
        return self._consume(new[same:])

    def _settle(self, num_output: int) -> None:
        """Mark the first ``num_output`` of the consumed tokens as settled.

        Raises `ConstraintFailed` if fewer tokens were consumed.
        """
        num_new = num_output - self._num_settled
        if num_new > len(self._tail):
            raise ConstraintFailed("the grammar does not match the answer so far")
        if num_new > 0:
            del self._tail[:num_new]
            self._num_settled = num_output
            self._is_closed_early = self.closed_early(num_output)
            self._narrowed = {place for place in self._narrowed if place >= num_output}
            self._masks = {depth: m for depth, m in self._masks.items() if depth >= num_output}
            self._forget(num_output + len(self._tail))

    def _consume(self, token_ids: Sequence[int]) -> bool:
        """Consume these tokens as far as they are allowed. Return whether all are."""
        possible = [*takewhile(self._is_text, token_ids)]
        count = self._live.try_consume_tokens(possible) if possible else 0
        self._check()
        self._tail += possible[:count]
        return count == len(token_ids)

    def _roll_back(self, count: int) -> None:
        self._live.rollback(count)
        self._check()
        del self._tail[len(self._tail) - count :]
        last = self._num_settled + len(self._tail)
        self._masks = {depth: mask for depth, mask in self._masks.items() if depth <= last}
        self._forget(last)

    def _forget(self, last: int) -> None:
        """Forget narrowed masks and searched completions after the position ``last``."""
        self._narrowed = {place for place in self._narrowed if place <= last}
        if self._closing is not None:
            self._closing.forget(self._num_settled, last)

    def _is_text(self, token_id: int) -> bool:
        """Whether a token is in the vocabulary and does not end the answer."""
        return 0 <= token_id < self._grammar.vocabulary.size and token_id not in self._stop_ids

    # -- masks
    # --------------------------------------------------------------------------------------

    def _mask(self, depth: int, between: Between) -> Mask:
        bits = np.frombuffer(self._live.compute_bitmask(), dtype=np.uint8)
        self._check()
        vocabulary = self._grammar.vocabulary
        mask = np.unpackbits(bits, count=vocabulary.end + 1, bitorder="little").view(np.bool_)
        is_complete, mask = mask[vocabulary.end], mask[: vocabulary.size]
        special = vocabulary.special_token_ids  # the library wrongly allows them in negated texts
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
        """Restrict the mask to tokens after which the answer can be completed within the limit."""
        began = perf_counter()
        if closing.narrow(self._live, mask, depth, between):
            self._narrowed.add(depth)
        self._check()
        self._seconds -= perf_counter() - began  # narrowing is limited in nodes, not in time

    def _forced_now(self) -> Sequence[int]:
        """Return the tokens that must come next, if the grammar forces any."""
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
    """Return the error of a matcher as one line of text for the caller."""
    text = matcher.get_error().partition("<backtrace>")[0].replace("<non-verbose/>", "")
    reason = _SOURCE.split(text, maxsplit=1)[0]
    for part, said in _PLAINLY.items():
        if part in reason:
            return said
    _, of_schema, problem = reason.partition(_OF_SCHEMA)
    return " ".join((problem if of_schema else text).split())[:MAX_ERROR_CHARS]


def _common_len(first: Sequence[int], second: Sequence[int]) -> int:
    """Return the length of the common prefix."""
    length = 0
    for ours, theirs in zip(first, second, strict=False):
        if ours != theirs:
            break
        length += 1
    return length
