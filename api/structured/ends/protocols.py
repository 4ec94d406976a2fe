"""The parts of a vocabulary and of a matcher that closing needs."""

from __future__ import annotations

from typing import Protocol, Self

import numpy as np
from numpy.typing import NDArray


class Tokens(Protocol):
    """The operations on a vocabulary that closing needs."""

    size: int
    end: int  # the token that stands for the end of the answer
    special_token_ids: NDArray[np.int64]
    tokens: list[bytes]  # by token id, special ones by name
    texts: list[bytes]  # the same, empty for special tokens

    def __call__(self, text: str, /) -> list[int]:
        """Ids of a text."""

    def id_of(self, text: bytes) -> int | None:
        """Return the id of the token with exactly these bytes."""

    def spell(self, text: bytes) -> list[int]:
        """Token ids of these bytes, greedily by the longest token."""

    def longest(self, text: bytes) -> int | None:
        """Return the longest token that the text begins with."""


class Matcher(Protocol):
    """Follows one output by a grammar, as llguidance's `LLMatcher` does.

    One that fails stays failed. None of its methods raises an error.
    """

    def deep_copy(self) -> Self:
        """Copy the matcher with its state."""

    def try_consume_tokens(self, tokens: list[int], /) -> int:
        """Consume tokens as far as they are allowed; how many were."""

    def rollback(self, num_tokens: int, /) -> bool:
        """Go back over the last tokens."""

    def validate_tokens(self, tokens: list[int], /) -> int:
        """Count the leading tokens that are allowed."""

    def compute_bitmask(self) -> bytes:
        """Compute the mask of the next token, one bit a token."""

    def compute_ff_tokens(self) -> list[int]:
        """Compute the tokens that are sure to follow."""

    def compute_ff_bytes(self) -> bytes:
        """Compute the bytes that are sure to follow."""

    def is_accepting(self) -> bool:
        """Whether the answer may end here."""

    def is_stopped(self) -> bool:
        """Whether nothing may follow but the end."""

    def is_error(self) -> bool:
        """Whether the matcher has failed."""

    def get_error(self) -> str:
        """Why the matcher has failed."""
