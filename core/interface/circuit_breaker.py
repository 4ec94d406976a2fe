"""CircuitBreaker: when to give up a part that fails and that the engine can do without."""

from __future__ import annotations

import math


class CircuitBreaker:
    """Opens at the ``max_failures``-th failure in close succession.

    Each success takes off ``forgiven`` failures; by default all of them, so that only failures in
    a row count. The owner reads ``is_open`` after each failure and drops the part.
    """

    def __init__(self, max_failures: int, *, forgiven: float = math.inf) -> None:
        self._max_failures = max_failures
        self._forgiven = forgiven
        self._num_failures = 0.0  # less those that were forgiven

    @property
    def is_open(self) -> bool:
        """Whether the part is to be given up."""
        return self._num_failures >= self._max_failures

    def record_failure(self) -> None:
        """Count a failure."""
        self._num_failures += 1

    def record_success(self) -> None:
        """Forgive failures that lie back."""
        self._num_failures = max(0.0, self._num_failures - self._forgiven)
