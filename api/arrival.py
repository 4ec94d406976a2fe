"""When the request that is being served arrived, how large it is and when it is given up.

As the caller is (`owners.CALLER`), this is no argument of the routes: what is asked of it happens
deep inside, and none of them can forget to pass it on.
"""

from __future__ import annotations

import time
from contextvars import ContextVar
from dataclasses import dataclass

from ..core.errors import DeadlineExceeded
from .owners import CALLER
from .waiting import Origin

TOO_LATE = "the deadline passed before the request could run"


@dataclass(frozen=True, slots=True)
class Arrival:
    """A body that is there."""

    at: float  # of `time.monotonic`
    num_bytes: int = 0


ARRIVAL: ContextVar[Arrival | None] = ContextVar("arrival", default=None)


def note_arrival(num_bytes: int) -> None:
    """The body of this request has arrived; its deadlines count from here."""
    ARRIVAL.set(Arrival(time.monotonic(), num_bytes))


def arrival() -> Arrival:
    """Of the request that is being served; where there is none, as in the SDK, it is now."""
    return ARRIVAL.get() or Arrival(time.monotonic())


def origin() -> Origin:
    """Whose work is done, and how long the body that it is about."""
    known = ARRIVAL.get()
    return Origin(CALLER.get(), 0 if known is None else known.num_bytes)


def seconds_left(since: Arrival, *limits: float | None) -> float | None:
    """Of the shortest of these times, which count from an arrival; None without any.

    Raises `DeadlineExceeded` where nothing is left.
    """
    given = [each for each in limits if each is not None]
    if not given:
        return None
    left = since.at + min(given) - time.monotonic()
    if left <= 0:
        raise DeadlineExceeded(TOO_LATE)
    return left
