"""FinishRate: how fast requests finish, so that those turned away know when to come back."""

from __future__ import annotations

from collections import deque

MIN_RETRY_SECONDS, MAX_RETRY_SECONDS = 1.0, 60.0
NUM_TIMES = 64


class FinishRate:
    """The rate over the last requests that finished without a pause between them."""

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=NUM_TIMES)

    def note(self, now: float) -> None:
        """A request finished."""
        self._times.append(now)

    def clear(self) -> None:
        """Nothing runs: a rate measured over idle time would be too low."""
        self._times.clear()

    def seconds_for(self, num_requests: int) -> float:
        """Until so many have finished, at this rate; 1 to 60 seconds."""
        times = self._times
        if len(times) < 2 or times[-1] <= times[0]:
            return MIN_RETRY_SECONDS
        rate = (len(times) - 1) / (times[-1] - times[0])
        return min(MAX_RETRY_SECONDS, max(MIN_RETRY_SECONDS, num_requests / rate))
