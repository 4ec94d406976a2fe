"""The model's tokens for llguidance, and tokenization of texts inside an answer."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from ..text.tokenizer import Tokenizer

NUM_FORCED_TEXTS = 4096  # number of cached encodings, which requests with the same schema share
FORCED_CHARS = 256  # number of characters of a forced text that are tokenized at a time


class Vocabulary:
    """The model's tokens for llguidance, and tokenization of texts inside an answer.

    A token ``end`` is added after the model's own. It stands for the end of the answer.
    """

    is_tokenizer_wrapper = True
    bos_token_id = None
    eos_token_id = None  # llguidance adds a token for the end

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: frozenset[int]) -> None:
        self.size = self.end = vocab_size
        self.tokens = [tokenizer.token_bytes(token_id) for token_id in range(vocab_size)]
        # A token that ends the answer is never part of its text, however it is spelt.
        special = {i for i in tokenizer.special_ids | eos_ids if 0 <= i < vocab_size}
        self.special_token_ids = np.array(sorted(special), dtype=np.int64)
        self.texts = [b"" if i in special else each for i, each in enumerate(self.tokens)]
        self._ids = {text: i for i, text in reversed([*enumerate(self.texts)]) if text}
        self._byte_ids = [self._ids.get(bytes([value])) for value in range(256)]
        self._lengths = [0] * 256  # length of the longest token by first byte
        for text in self._ids:
            self._lengths[text[0]] = max(self._lengths[text[0]], len(text))
        self._encode = tokenizer.encode_word
        self._forced = lru_cache(NUM_FORCED_TEXTS)(self._tokenize)

    def __call__(self, text: str) -> list[int]:
        """Return the ids of a text as part of a longer text. They spell exactly these bytes.

        Characters after the first `FORCED_CHARS` are encoded byte by byte: llguidance asks for
        their ids again before it needs them.
        """
        ids = list(self._forced(text[:FORCED_CHARS]))
        if len(text) > FORCED_CHARS and self._spells(ids, text[:FORCED_CHARS]):
            rest = [self._byte_ids[value] for value in text[FORCED_CHARS:].encode()]
            ids += rest[: rest.index(None)] if None in rest else rest  # type: ignore[arg-type]
        return ids

    def id_of(self, text: bytes) -> int | None:
        """Return the token with exactly these bytes; None if no token has them."""
        return self._ids.get(text)

    def _spells(self, ids: Sequence[int], text: str) -> bool:
        return b"".join(self.texts[token_id] for token_id in ids) == text.encode()

    def _tokenize(self, text: str) -> tuple[int, ...]:
        """Return the ids with which the tokenizer encodes a text.

        Some tokenizers put a space before the first word of a text; then it is encoded after a line
        break. If that does not help, the ids of the longest matching tokens are returned.
        """
        data = text.encode()
        for before in ("", "\n"):
            ids = self._ending(self._encode(before + text), data)
            if ids is not None:
                return ids
        return tuple(self.spell(data))

    def _ending(self, ids: Sequence[int], data: bytes) -> tuple[int, ...] | None:
        """Return the ids at the end of ``ids`` that spell exactly ``data``; None if none do."""
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
        """Return the ids of the longest matching tokens, up to a byte that no token begins with."""
        ids: list[int] = []
        while data and (token_id := self.longest(data)) is not None:
            ids.append(token_id)
            data = data[len(self.texts[token_id]) :]
        return ids

    def longest(self, data: bytes) -> int | None:
        """Return the longest token with which these bytes begin; None if no token fits."""
        for length in range(min(self._lengths[data[0]], len(data)), 0, -1):
            if (token_id := self._ids.get(data[:length])) is not None:
                return token_id
        return None
