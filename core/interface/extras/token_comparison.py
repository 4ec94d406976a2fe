"""TokenComparison: comparison of one token of a recorded answer with the model's own token."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Sequence
from typing import NamedTuple

# Reasons for which a token is excluded, in the order in which the sampler applies them.
EXCLUDERS = (
    "allowed_token_ids",
    "constraint",
    "bad_words",
    "min_tokens",
    "top_k",
    "min_p",
    "top_p",
)


class TokenComparison(NamedTuple):
    """The model's own token at one position, after the recorded tokens before it.

    ``own`` is -1 if the model could choose none. ``margin``: by how much the score of the own token
    is higher than the recorded token's; infinite if the recorded token is excluded.
    ``excluded_by``: index in `EXCLUDERS`, or -1. The raw log-probabilities of both tokens are NaN
    if they were not computed. They are known, as is ``excluded_by``, for the first different token
    of a step and for the first token that is compared. After the whole answer, where no token is
    recorded, the log-probability of the own token is known.
    """

    position: int  # index in the answer
    own: int
    margin: float = 0.0
    given_logprob: float = math.nan
    own_logprob: float = math.nan
    excluded_by: int = -1

    @property
    def excluder(self) -> str | None:
        """The reason for which the recorded token is excluded; None if it is not excluded."""
        return EXCLUDERS[self.excluded_by] if self.excluded_by >= 0 else None


WIDTH = len(TokenComparison._fields)


def comparison_numbers(compared: Sequence[TokenComparison]) -> array[float]:
    """Return the entries as float32 numbers, [len(compared) * WIDTH]."""
    return array("f", [number for each in compared for number in each])


def comparisons_of(numbers: array[float]) -> Iterator[TokenComparison]:
    """Yield the entries of numbers from `comparison_numbers`."""
    for at in range(0, len(numbers), WIDTH):
        position, own, margin, given, mine, excluded_by = numbers[at : at + WIDTH]
        yield TokenComparison(int(position), int(own), margin, given, mine, int(excluded_by))
