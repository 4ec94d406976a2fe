"""Properties of a vocabulary that a search for completions needs, computed once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from .protocols import Tokens

MARKS = frozenset(b'"\\')  # bytes with a meaning inside a JSON string
NO_BYTE = 256
FREE = b"qQ <!;"  # bytes that are all allowed only if text is unrestricted


class TokenTable:
    """Arrays with properties of the tokens of a vocabulary, by token id.

    ``bytes`` and ``byte_ids``: the bytes that are tokens by themselves, and their ids. ``longer``:
    the tokens whose first byte is not a token by itself, shortest first.
    """

    def __init__(self, tokens: Tokens) -> None:
        texts = tokens.texts
        self.special = tokens.special_token_ids
        self.lengths = np.array([len(text) for text in texts], dtype=np.int64)
        self.firsts = np.array([text[0] if text else NO_BYTE for text in texts], dtype=np.int64)
        self.groups = _groups(texts, tokens.special_token_ids)
        self.is_partial = np.array([not _is_utf8(text) for text in texts], dtype=np.bool_)
        known = {value: tokens.id_of(bytes([value])) for value in range(256)}
        self.bytes = np.array([b for b, i in known.items() if i is not None], dtype=np.int64)
        self.byte_ids = np.array([i for i in known.values() if i is not None], dtype=np.int64)
        self.longer = self._longer()
        self.num_missing_bytes = len(set(self.firsts[self.longer].tolist()))
        self.free = np.array([i for byte in FREE if (i := known[byte]) is not None], dtype=np.int64)
        self.letters = _by_length(texts, _is_letters)
        self.digits = _by_length(texts, bytes.isdigit)

    def _longer(self) -> NDArray[np.int64]:
        is_missing = ~np.isin(self.firsts, self.bytes) & (self.firsts != NO_BYTE)
        ids = np.flatnonzero(is_missing)
        return ids[np.lexsort((ids, self.lengths[ids]))]

    def is_free(self, mask: NDArray[np.bool_]) -> bool:
        """Whether a mask [vocab] allows unrestricted text."""
        return len(self.free) > 0 and bool(mask[self.free].all())

    def allowed(self, bits: bytes) -> Allowed:
        """Return the tokens that a bit mask allows."""
        return Allowed(self, np.frombuffer(bits, dtype=np.uint8))


class Allowed:
    """The tokens that a bit mask allows."""

    def __init__(self, table: TokenTable, bits: NDArray[np.uint8]) -> None:
        self._table = table
        self._bits = bits

    def has(self, token_id: int) -> bool:
        """Whether the token is allowed."""
        return bool(self._bits[token_id >> 3] >> (token_id & 7) & 1)

    def _among(self, ids: NDArray[np.int64]) -> NDArray[np.bool_]:
        found: NDArray[np.bool_] = (self._bits[ids >> 3] >> (ids & 7) & 1).astype(np.bool_)
        return found

    @cached_property
    def by_byte(self) -> dict[int, int]:
        """The shortest allowed token for each first byte: usually the token of that byte alone."""
        table = self._table
        is_allowed = self._among(table.byte_ids)
        found = dict(
            zip(table.bytes[is_allowed].tolist(), table.byte_ids[is_allowed].tolist(), strict=True)
        )
        if len(found) < table.num_missing_bytes:
            self._add_longer(found)
        return found

    def _add_longer(self, found: dict[int, int]) -> None:
        """Add tokens for first bytes that are not tokens by themselves."""
        table = self._table
        for token_id in table.longer[self._among(table.longer)].tolist():
            found.setdefault(int(table.firsts[token_id]), token_id)

    @property
    def special(self) -> list[int]:
        """The allowed special tokens."""
        special: list[int] = self._table.special[self._among(self._table.special)].tolist()
        return special

    @cached_property
    def is_free(self) -> bool:
        """Whether unrestricted text is allowed."""
        free = self._table.free
        return len(free) > 0 and bool(self._among(free).all())


def _groups(texts: Sequence[bytes], special: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the group number of each token [vocab].

    Tokens without a quotation mark and backslash are in group 0. Other tokens are in the same group
    if their texts from the first such mark on are equal. Each special token has its own group.
    """
    numbers: dict[bytes, int] = {b"": 0}
    groups = np.zeros(len(texts), dtype=np.int64)
    for token_id, text in enumerate(texts):
        if not MARKS.isdisjoint(text):
            marked = text[min(map(text.index, MARKS.intersection(text))) :]
            groups[token_id] = numbers.setdefault(marked, len(numbers))
    groups[special] = len(numbers) + np.arange(len(special))
    return groups


def _by_length(texts: Sequence[bytes], fits: Callable[[bytes], bool]) -> list[int]:
    """Return a token of each length of at least two bytes, longest first.

    ``fits``: whether the text of a token may be used.
    """
    found: dict[int, int] = {}
    for token_id, text in enumerate(texts):
        if len(text) > 1 and fits(text):
            found.setdefault(len(text), token_id)
    return [found[length] for length in sorted(found, reverse=True)]


def _is_letters(text: bytes) -> bool:
    return text.isalpha() and text.islower()


def _is_utf8(text: bytes) -> bool:
    """Whether the bytes of a token are whole characters in UTF-8."""
    if text.isascii():
        return True
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True
