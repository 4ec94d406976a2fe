"""Closing structured output in time: which tokens leave room for the shortest end of an answer.

Near the limit of a request's tokens, the mask of a grammar keeps only tokens after which the output
can still be completed and ended: a JSON object closes instead of being cut in the middle of a
string. The end is found by a walk on the matcher that closes what is open, so its length is an
upper bound, and it is counted in tokens and steps, never in time. What is allowed is a function of
the request's own output and limit: answers stay the same for every drafter and batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from llguidance import LLMatcher

Ids = Sequence[int]
MAX_STEPS = 96  # choices on the way to an end: forced runs of tokens are one
MAX_TOKENS = 1024  # of such an end
LEAST_ZONE = 32  # tokens above the end's length from which on tokens are looked at
FEW = 256  # allowed tokens that are tried one by one; of more, those of a kind together
NUM_SAMPLES = 4  # short ones and long ones of a kind
NUM_BYTES = 3  # tokens that complete a character, at most
# What ends a text: a JSON string, an argument of Qwen3-Coder, a thought.
TEXT_ENDS = ('"', "\n</parameter>\n", "</think>", "[/THINK]")
STRUCTURE = (*"}]),0123456789", '"', "null", "true", "-")
SEPARATORS = (*"@.-/:_ T,;+",)
PROBE = "q"  # begins nothing in JSON: where it is allowed, the answer is inside a text
MARKS = frozenset(b'"\\')  # bytes with a meaning inside a text


class Tokens(Protocol):
    """The operations on a vocabulary that closing needs."""

    size: int
    special_token_ids: NDArray[np.int64]
    tokens: list[bytes]  # by token id, special ones by name
    texts: list[bytes]  # the same, empty for special tokens

    def __call__(self, text: str, /) -> list[int]:
        """Ids of a text."""

    def id_of(self, text: bytes) -> int | None:
        """The id of the token with exactly these bytes."""

    def spell(self, text: bytes) -> list[int]:
        """Token ids of these bytes, greedily by the longest token."""


@dataclass(frozen=True, slots=True)
class _At:
    """A place in an answer, its end, and how many tokens the end may have behind the next one."""

    matcher: LLMatcher
    end: Ids
    place: int
    most: int


class Closer:
    """Finds the shortest completions of an output, for one vocabulary."""

    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens
        self._probe = tokens.id_of(PROBE.encode())
        self._structure = self._known(STRUCTURE)
        self._separators = self._known(SEPARATORS)

    def prepare(self) -> None:
        """Classify all tokens (a tenth of a second); otherwise done at first use."""
        _ = self._lengths, self._groups, self._is_partial, self._long_texts, self._text_ends

    # -- the shortest end -------------------------------------------------------------------------

    def end(self, matcher: LLMatcher, place: int = 0, most: int = MAX_TOKENS) -> list[int] | None:
        """Tokens that complete the answer from here, at most so many; None: none were found.

        ``place``: tokens of the answer so far. Behind the first token of an end, the rest of it is
        an end, too. The matcher is where it was afterwards.
        """
        walks = (self._walk(matcher, place + turn, most) for turn in (0, 1))
        ends = [taken for taken in walks if taken is not None]
        return min(ends, key=len, default=None)

    def _walk(self, matcher: LLMatcher, turn: int, most: int) -> list[int] | None:
        """An end where a text that must go on gets letters first at even turns."""
        taken: list[int] = []
        try:
            for _ in range(MAX_STEPS):
                if matcher.is_accepting():
                    return taken if len(taken) <= most else None
                step = self._step(matcher, turn + len(taken))
                num = matcher.try_consume_tokens(list(step)) if step else 0
                taken += step[:num]
                if not num or len(taken) > most or matcher.is_error():
                    return None
            return None
        finally:
            if taken and not matcher.is_error():
                matcher.rollback(len(taken))

    def _step(self, matcher: LLMatcher, turn: int) -> Ids:
        """The next tokens towards an end."""
        forced = matcher.compute_ff_tokens()
        if forced:
            return list(forced)
        started = self._tokens.spell(matcher.compute_ff_bytes())
        if started and matcher.validate_tokens(started) == len(started):
            return started  # bytes that are sure, though not in which tokens
        if self.is_text(matcher):
            return self._end_text(matcher) or self._more_text(matcher, turn)
        for token_id in (*self._structure, *self._continuations):
            if matcher.validate_tokens([token_id]) == 1:
                return [token_id]
        return self._longest_allowed(matcher)

    def is_text(self, matcher: LLMatcher) -> bool:
        """Whether the output is inside a string."""
        return self._probe is not None and matcher.validate_tokens([self._probe]) == 1

    def _end_text(self, matcher: LLMatcher) -> Ids:
        for ids in self._text_ends:
            if matcher.validate_tokens(ids) == len(ids) and self._has_ended(matcher, ids):
                return ids
        return ()

    def _has_ended(self, matcher: LLMatcher, ids: Ids) -> bool:
        """Whether the string ends after these tokens."""
        num = matcher.try_consume_tokens(list(ids))
        try:
            return num == len(ids) and (matcher.is_accepting() or not self.is_text(matcher))
        finally:
            matcher.rollback(num)

    def _more_text(self, matcher: LLMatcher, turn: int) -> Ids:
        """Add characters to a string that may not end yet, of alternating kinds."""
        first, second = self._long_texts, self._separators
        for token_id in (*first, *second) if turn % 2 == 0 else (*second, *first):
            if matcher.validate_tokens([token_id]) == 1:
                return [token_id]
        return self._longest_allowed(matcher)

    def _longest_allowed(self, matcher: LLMatcher) -> Ids:
        bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        allowed = np.flatnonzero(np.unpackbits(bits, count=self._tokens.size, bitorder="little"))
        if not len(allowed):
            return ()
        return [int(allowed[np.argmax(self._lengths[allowed])])]

    # -- what may follow --------------------------------------------------------------------------

    def narrow(
        self, matcher: LLMatcher, mask: NDArray[np.bool_], place: int, num_left: int, zone: int
    ) -> bool:
        """Ban every token after which the output cannot end in time; whether any was banned.

        ``mask`` [vocab] allows what the grammar does, stop tokens aside, and is changed in place.
        ``place``: tokens of the answer so far. ``num_left``: tokens that may still come, the stop
        token included. ``zone``: with more tokens than that above the shortest end, nothing is
        banned. Where no end can be reached
        any more, nothing is banned either: the answer is cut by its limit.
        """
        end = self.end(matcher, place)
        if end is None or not len(end) < num_left <= len(end) + 1 + zone:
            return False
        if not end and self.is_text(matcher):
            return False  # words, which may be cut anywhere
        allowed = np.flatnonzero(mask)
        banned = self._banned(_At(matcher, end, place, num_left - 2), allowed)
        if not len(banned) or (len(banned) == len(allowed) and end):
            return False
        mask[banned] = False
        return True

    def _banned(self, at: _At, allowed: NDArray[np.int64]) -> NDArray[np.int64]:
        """Tokens among ``allowed`` behind which every known end is too long."""
        if len(allowed) <= FEW:
            return self._late(at, allowed)
        group, partial = self._groups[allowed], self._is_partial[allowed]
        banned = [self._late_groups(at, allowed[group > 0])]
        whole = allowed[(group == 0) & ~partial]
        if len(self._late(at, self._samples(whole))):
            banned.append(whole[whole != at.end[0]] if at.end else whole)
        if len(at.end) + NUM_BYTES > at.most:
            banned.append(allowed[partial & (group == 0)])
        return np.concatenate(banned)

    def _samples(self, token_ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """The shortest and the longest: a text may lack characters, or have room for few."""
        lengths = self._lengths[token_ids]
        if len(token_ids) <= 2 * NUM_SAMPLES:
            return token_ids
        first = np.argpartition(lengths, NUM_SAMPLES)[:NUM_SAMPLES]
        last = np.argpartition(lengths, len(lengths) - NUM_SAMPLES)[-NUM_SAMPLES:]
        found: NDArray[np.int64] = token_ids[np.concatenate([first, last])]
        return found

    def _late_groups(self, at: _At, token_ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Find late tokens like `_late`; of tokens with the same end the longest only is tried."""
        groups = self._groups[token_ids]
        by_length = np.lexsort((self._lengths[token_ids], groups))
        last = by_length[np.flatnonzero(np.diff(groups[by_length], append=0))]
        late = self._groups[self._late(at, token_ids[last])]
        is_late: NDArray[np.bool_] = np.isin(groups, late)
        return token_ids[is_late]

    def _late(self, at: _At, token_ids: NDArray[np.int64]) -> NDArray[np.int64]:
        late = [i for i in token_ids.tolist() if not self._is_in_time(at, i)]
        return np.array(late, dtype=np.int64)

    def _is_in_time(self, at: _At, token_id: int) -> bool:
        """Whether the output can be completed in time after this token.

        Mostly the end that is known already still fits behind it.
        """
        if at.matcher.try_consume_tokens([token_id]) != 1:
            return False
        try:
            if len(at.end) <= at.most and self._completes(at.matcher, at.end):
                return True
            return self.end(at.matcher, at.place + 1, at.most) is not None
        finally:
            at.matcher.rollback(1)

    def _completes(self, matcher: LLMatcher, end: Ids) -> bool:
        if not end:
            return bool(matcher.is_accepting())
        if matcher.validate_tokens(list(end)) < len(end):
            return False
        num = matcher.try_consume_tokens(list(end))
        try:
            return num == len(end) and bool(matcher.is_accepting())
        finally:
            matcher.rollback(num)

    # -- the vocabulary ---------------------------------------------------------------------------

    def _known(self, texts: Sequence[str]) -> list[int]:
        ids = (self._tokens.id_of(text.encode()) for text in texts)
        return [each for each in ids if each is not None]

    @cached_property
    def _text_ends(self) -> list[list[int]]:
        return [list(ids) for ids in self._spelt(TEXT_ENDS) if ids]

    def _spelt(self, texts: Sequence[str]) -> Iterator[list[int]]:
        for text in texts:
            special = self._tokens.special_token_ids.tolist()
            named = [i for i in special if self._tokens.tokens[i] == text.encode()]
            yield named[:1] or self._tokens(text)

    @cached_property
    def _lengths(self) -> NDArray[np.int64]:
        return np.array([len(text) for text in self._tokens.texts], dtype=np.int64)

    @cached_property
    def _groups(self) -> NDArray[np.int64]:
        """A number for tokens that mean the same inside a text; 0 for those that are only text.

        What counts is what follows from the first mark on. A special token is alone.
        """
        numbers: dict[bytes, int] = {b"": 0}
        groups = np.zeros(len(self._tokens.texts), dtype=np.int64)
        for token_id, text in enumerate(self._tokens.texts):
            marked = text[_first_mark(text) :]
            groups[token_id] = numbers.setdefault(marked, len(numbers))
        special = self._tokens.special_token_ids
        groups[special] = len(numbers) + np.arange(len(special))
        return groups

    @cached_property
    def _is_partial(self) -> NDArray[np.bool_]:
        """Tokens that end inside a character, or begin inside one."""
        return np.array([not _is_utf8(text) for text in self._tokens.texts], dtype=np.bool_)

    @cached_property
    def _continuations(self) -> list[int]:
        """Bytes one of which goes on with any character."""
        ids = (self._tokens.id_of(bytes([value])) for value in (0x80, 0xA0, 0x90))
        return [each for each in ids if each is not None]

    @cached_property
    def _long_texts(self) -> list[int]:
        """Letters, a few tokens of falling length."""
        by_length: dict[int, int] = {}
        for token_id, text in enumerate(self._tokens.texts):
            if text.isalpha() and text.isascii() and text.islower():
                by_length.setdefault(len(text), token_id)
        return [by_length[length] for length in sorted(by_length, reverse=True)]


def _first_mark(text: bytes) -> int:
    """Index of the first mark; the length of a text without any."""
    return next((index for index, byte in enumerate(text) if byte in MARKS), len(text))


def _is_utf8(text: bytes) -> bool:
    if text.isascii():
        return True
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True
