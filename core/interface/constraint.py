"""The protocol of what an answer may consist of; the core knows token ids, and no grammar.

The tokens that may come next depend on the output before them and on nothing else. So with a
constraint, too, a token is a function of its path: the answer is the same for every drafter, depth
and batch.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Protocol

Mask = memoryview
"""One byte for each token of the vocabulary, 1 where it is allowed; read only."""


class ConstraintFailed(Exception):  # noqa: N818 - it fails its request, nothing else
    """The tokens after this output cannot be determined: the request ends with this error."""


class Constraint(Protocol):
    """Follows one request's output. Belongs to one thread; `fork` makes one for another.

    In every call the output so far is ``tokens[start:]``. It only grows from call to call; what is
    guessed to follow it may be anything. Costs grow with what is new, not with the whole output.
    All raise `ConstraintFailed`.
    """

    def allowed(self, tokens: array[int], start: int, tail: Sequence[int]) -> Mask | None:
        """Which tokens may follow the output and then ``tail``.

        None, which is no limit at all, where the tail itself is not allowed or ends the answer:
        what is drawn there is never served.
        """

    def forced(self, tokens: array[int], start: int, most: int) -> Sequence[int]:
        """The tokens that follow for sure, ``most`` at most: nothing else is allowed there."""

    def count_allowed(self, tokens: array[int], start: int, guess: Sequence[int]) -> int:
        """Leading tokens of ``guess`` that may follow the output; cheap, and at times too many."""

    def fork(self) -> Constraint:
        """Another one at the beginning of the output."""
