"""The parts of a vocabulary and of a matcher that the search for completions uses."""

from __future__ import annotations

from typing import Protocol, Self

import numpy as np
from numpy.typing import NDArray


class Tokens(Protocol):
    """A vocabulary, as far as the search for completions uses it."""

    size: int
    end: int  # id of a token that stands for the end of the answer
    special_token_ids: NDArray[np.int64]
    tokens: list[bytes]  # bytes of each token, by id; the name of a special token
    texts: list[bytes]  # bytes of each token, by id; empty for a special token

    def __call__(self, text: str, /) -> list[int]:
        """Return the token ids of a text."""

    def id_of(self, text: bytes) -> int | None:
        """Return the id of the token with exactly these bytes; None if no token has them."""

    def spell(self, text: bytes) -> list[int]:
        """Return ids that spell the bytes, always with the longest token that fits."""

    def longest(self, text: bytes) -> int | None:
        """Return the longest token with which the text begins; None if no token fits."""


class Matcher(Protocol):
    """The position of one output in a grammar, with the interface of llguidance's `LLMatcher`.

    No method raises an error: after a failure, `is_error` stays true.
    """

    def deep_copy(self) -> Self:
        """Copy the matcher with its state."""

    def try_consume_tokens(self, tokens: list[int], /) -> int:
        """Consume tokens as far as they are allowed. Return the number of consumed tokens."""

    def rollback(self, num_tokens: int, /) -> bool:
        """Undo the last ``num_tokens`` consumed tokens. Return whether it succeeded."""

    def validate_tokens(self, tokens: list[int], /) -> int:
        """Return the number of leading tokens that are allowed. The position does not change."""

    def compute_bitmask(self) -> bytes:
        """Return the mask of the next token, one bit per token."""

    def compute_ff_tokens(self) -> list[int]:
        """Return the tokens that must follow."""

    def compute_ff_bytes(self) -> bytes:
        """Return the bytes that must follow."""

    def is_accepting(self) -> bool:
        """Whether the answer may end here."""

    def is_stopped(self) -> bool:
        """Whether only the end of the answer may follow."""

    def is_error(self) -> bool:
        """Whether the matcher has failed."""

    def get_error(self) -> str:
        """Return why the matcher has failed."""
