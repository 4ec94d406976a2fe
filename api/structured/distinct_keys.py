"""A matcher for JSON without duplicate keys in an object.

The grammar library counts every property that is written. If a schema requires a number of
properties that it does not name, duplicate keys would count twice, although parsers read them as
one property.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .ends.protocols import Matcher

QUOTE, ESCAPE, COMMA = b'"'[0], b"\\"[0], b","[0]
MOST_DEPTH = 32  # maximum lookahead in tokens
OBJECT, LIST, CLOSING = b"{"[0], b"["[0], b"]}"


class _Position(NamedTuple):
    """A position in a JSON text.

    ``open``: for each open bracket, the keys of the object so far; None for a list. ``key``: the
    beginning of the key that is being written. ``is_text``: the position is inside a string.
    ``is_key_next``: the next string is a key.
    """

    open: tuple[frozenset[bytes] | None, ...] = ()
    key: bytes | None = None
    is_text: bool = False
    is_escaped: bool = False
    is_key_next: bool = False

    def after(self, text: bytes) -> _Position | None:
        """Return the position after a text, or None if the text repeats a key."""
        position: _Position | None = self
        for byte in text:
            if position is not None:
                position = position._in_text(byte) if position.is_text else position._between(byte)
        return position

    @property
    def may_be_stuck(self) -> bool:
        """Whether the object might already have every key that can be written here.

        This is possible before a key, and inside a key that is a prefix of an existing key.
        """
        keys = self.open[-1] if self.open else None
        if not keys:
            return False
        if not self.is_text:
            return self.is_key_next
        return self.key is not None and any(each.startswith(self.key) for each in keys)

    def _in_text(self, byte: int) -> _Position | None:
        if byte == QUOTE and not self.is_escaped:
            keys = self.open[-1] if self.open else None
            if self.key is None or keys is None:
                return self._replace(is_text=False)
            if self.key in keys:
                return None
            known = (*self.open[:-1], keys | {self.key})
            return self._replace(open=known, key=None, is_text=False)
        is_escaped = byte == ESCAPE and not self.is_escaped
        key = None if self.key is None else self.key + bytes([byte])
        return self._replace(key=key, is_escaped=is_escaped)

    def _between(self, byte: int) -> _Position:
        if byte == QUOTE:
            return self._replace(
                key=b"" if self.is_key_next else None, is_text=True, is_key_next=False
            )
        if byte in (OBJECT, LIST):
            is_object = byte == OBJECT
            keys: frozenset[bytes] | None = frozenset() if is_object else None
            return self._replace(open=(*self.open, keys), is_key_next=is_object)
        if byte in CLOSING:
            return self._replace(open=self.open[:-1], is_key_next=False)
        if byte == COMMA:
            return self._replace(is_key_next=bool(self.open) and self.open[-1] is not None)
        return self


class DistinctKeysMatcher:
    """A `Matcher` that wraps another and bans tokens that repeat a key.

    It also bans tokens after which only existing keys could be written, such as a comma when all
    keys that the schema allows are written. ``matcher``: a matcher that has consumed no tokens.
    ``texts``: the bytes of each token.
    """

    def __init__(self, matcher: Matcher, texts: Sequence[bytes]) -> None:
        self._matcher = matcher
        self._texts = texts
        self._positions = [_Position()]  # the position at the beginning and after each token
        marks = [i for i, text in enumerate(texts) if QUOTE in text or COMMA in text]
        self._marks = np.array(marks, dtype=int)
        self._ids: dict[bytes, list[int]] = {}
        for token_id, text in enumerate(texts):
            self._ids.setdefault(text, []).append(token_id)

    def deep_copy(self) -> DistinctKeysMatcher:
        """Copy the matcher with its state."""
        copy = object.__new__(DistinctKeysMatcher)
        copy._matcher, copy._texts = self._matcher.deep_copy(), self._texts
        copy._positions, copy._marks, copy._ids = [*self._positions], self._marks, self._ids
        return copy

    def try_consume_tokens(self, tokens: list[int], /) -> int:
        """Consume tokens as far as they are allowed. Return the number of consumed tokens."""
        positions = self._along(tokens)
        count = self._matcher.try_consume_tokens(tokens[: len(positions)])
        self._positions += positions[:count]
        return count

    def rollback(self, num_tokens: int, /) -> bool:
        """Undo the last ``num_tokens`` consumed tokens. Return whether it succeeded."""
        del self._positions[len(self._positions) - num_tokens :]
        return self._matcher.rollback(num_tokens)

    def validate_tokens(self, tokens: list[int], /) -> int:
        """Return the number of leading tokens that are allowed. The position does not change."""
        return self._matcher.validate_tokens(tokens[: len(self._along(tokens))])

    def compute_bitmask(self) -> bytes:
        """Return the mask of the next token, one bit per token."""
        here = self._positions[-1]
        bits = self._matcher.compute_bitmask()
        if not any(here.open):
            return bits
        mask = np.unpackbits(np.frombuffer(bits, dtype=np.uint8), bitorder="little")
        for token_id in self._watched(here, mask):
            mask[token_id] = self._can_continue(self._matcher, here, token_id, MOST_DEPTH)
        return np.packbits(mask, bitorder="little").tobytes()

    def _watched(self, here: _Position, mask: NDArray[np.uint8]) -> list[int]:
        """Return the allowed tokens that may repeat a key, or after which no new key may fit."""
        found: list[int] = self._marks[mask[self._marks] > 0].tolist()
        keys = here.open[-1]
        if here.key is None or not keys:
            return found
        size = len(here.key)
        rests = {each[size:] for each in keys if each.startswith(here.key)}
        parts = {rest[:end] for rest in rests for end in range(1, len(rest) + 1)}
        return [*found, *(i for part in parts for i in self._ids.get(part, ()) if mask[i])]

    def _can_continue(
        self, matcher: Matcher, position: _Position, token_id: int, depth: int
    ) -> bool:
        """Whether a token repeats no key, and the output can go on without repeating one."""
        following = position.after(self._texts[token_id])
        if following is None or not following.may_be_stuck or not depth:
            return following is not None
        matcher = matcher.deep_copy()
        if matcher.try_consume_tokens([token_id]) != 1:
            return False
        bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        allowed = np.flatnonzero(np.unpackbits(bits, bitorder="little")[: len(self._texts)])
        later: list[int] = []
        for each in allowed.tolist():
            after = following.after(self._texts[each])
            if after is not None and not after.may_be_stuck:
                return True
            later += [each] if after is not None else []
        return any(self._can_continue(matcher, following, each, depth - 1) for each in later)

    def compute_ff_tokens(self) -> list[int]:
        """Return the tokens that must follow."""
        tokens = self._matcher.compute_ff_tokens()
        return tokens[: len(self._along(tokens))]

    def compute_ff_bytes(self) -> bytes:
        """Return the bytes that must follow."""
        return self._matcher.compute_ff_bytes()

    def is_accepting(self) -> bool:
        """Whether the answer may end here."""
        return self._matcher.is_accepting()

    def is_stopped(self) -> bool:
        """Whether only the end of the answer may follow."""
        return self._matcher.is_stopped()

    def is_error(self) -> bool:
        """Whether the matcher has failed."""
        return self._matcher.is_error()

    def get_error(self) -> str:
        """Return why the matcher has failed."""
        return self._matcher.get_error()

    def _along(self, tokens: Sequence[int]) -> list[_Position]:
        """Return the position after each token, up to the first token that repeats a key."""
        positions: list[_Position] = []
        position = self._positions[-1]
        for token_id in tokens:
            text = self._texts[token_id] if token_id < len(self._texts) else b""
            following = position.after(text)
            if following is None:
                break
            position = following
            positions.append(position)
        return positions
