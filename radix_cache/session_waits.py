"""How long sessions wait between two turns, and what their pages are worth until the next turn.

A turn of an agent mostly ends with the call of a tool, and the next turn has the result. So the
time of the next turn is predicted from the times that earlier calls of the same tool took, in this
session and in all sessions of the process. Callers name tools by labels of their choice.

The worth of a page is the hit density of LHD (Beckmann et al., NSDI 2018): the chance that the next
turn reads the page, divided by the seconds for which the page must be kept until then. Continuum
(Li et al., arXiv 2511.02230) prices the time to keep the pages of a session in the same way.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Generic, TypeAlias, TypeVar

Item = TypeVar("Item")
Session: TypeAlias = tuple[str | None, str]
"""Namespace and name of a session."""

LEAST_OBSERVED = 3  # minimum number of observed times to predict a wait
PER_LABEL, PER_SESSION = 48, 8  # kept times of a label: in total, and of a session
OWN_WEIGHT = 3  # weight of a time that was observed in the session itself
MAX_LABELS, MAX_SESSIONS = 1024, 4096
QUANTILE, MARGIN = 0.95, 1.25  # pages are kept for this quantile of the times, multiplied by 1.25
LEAST_TTL = 1.0  # seconds
SHORTEST = 0.05  # seconds; shorter waits are raised to this time
RANK_SECONDS = 1.0  # time between two sorts by worth


class Waits:
    """The distribution of observed waits, in seconds. There must be at least one."""

    def __init__(self, seconds: Sequence[float]) -> None:
        self._seconds = sorted(max(each, SHORTEST) for each in seconds)
        self._sums = [0.0, *accumulate(self._seconds)]

    def ttl(self, most: float) -> float:
        """Return for how many seconds to keep a page, at most ``most``.

        Return 0 if all observed waits were longer than ``most``.
        """
        if self._seconds[0] > most:
            return 0.0
        at = min(int(QUANTILE * len(self._seconds)), len(self._seconds) - 1)
        return min(max(LEAST_TTL, MARGIN * self._seconds[at]), most)

    def worth(self, age: float) -> float:
        """Return the expected hits of a page per second for which it is kept from now on.

        ``age``: seconds since the wait began. The page is assumed to be dropped after the observed
        wait for which the result is highest. To rely less on few observations, one more wait is
        assumed, longer than all observed ones. O(waits).
        """
        first, num_waits = bisect_right(self._seconds, age), len(self._seconds)
        if first == num_waits:
            return 1.0 / ((age + SHORTEST) * (num_waits + 1))
        best = 0.0
        for index in range(first, num_waits):
            num_hits = index + 1 - first
            num_later = num_waits - index
            room = self._sums[index + 1] - self._sums[first] - num_hits * age
            room += num_later * (self._seconds[index] - age)
            best = max(best, num_hits / max(room, SHORTEST))
        return best


@dataclass(slots=True)
class _Waiting:
    """A session and its present wait."""

    since: float  # time when the wait began, in seconds
    label: str | None = None  # None: the cause of the wait is unknown
    waits: Waits | None = None  # earlier waits with this label; None with too few observations
    next_label: str | None = None  # label of the wait after the running turn
    # latest times in this session, by label
    own: dict[str, deque[float]] = field(default_factory=dict)


class SessionWaits:
    """The present wait of each session, and the times of earlier waits by label.

    ``most``: maximum time for which to keep a session's pages, in seconds. Pages are kept for this
    time if the wait cannot be predicted. At most `MAX_SESSIONS` sessions and `MAX_LABELS` labels
    are kept; the least recently used ones are forgotten.
    """

    def __init__(self, most: float) -> None:
        self.most = most
        self.predicts = False  # whether any wait was predicted yet
        self._times: OrderedDict[str, deque[float]] = OrderedDict()
        self._sessions: OrderedDict[Session, _Waiting] = OrderedDict()

    def turn(self, session: Session, began: float, now: float) -> str | None:
        """Record a turn that began to read the cache at ``began`` and ends at ``now``. O(1).

        Return the label of the wait after this turn, if `expect` was called before the turn ended.
        """
        waiting = self._sessions.get(session)
        if waiting is None:
            waiting = self._sessions[session] = _Waiting(now)
        elif waiting.label is not None and began >= waiting.since:
            self._observe(waiting.own, waiting.label, began - waiting.since)
        waiting.since, waiting.label, waiting.waits = now, None, None
        label, waiting.next_label = waiting.next_label, None
        self._sessions.move_to_end(session)
        if len(self._sessions) > MAX_SESSIONS:
            self._sessions.popitem(last=False)
        return label

    def _observe(self, own: dict[str, deque[float]], label: str, seconds: float) -> None:
        self._times.setdefault(label, deque(maxlen=PER_LABEL)).append(seconds)
        self._times.move_to_end(label)
        if len(self._times) > MAX_LABELS:
            self._times.popitem(last=False)
        if label in own or len(own) < PER_SESSION:
            own.setdefault(label, deque(maxlen=PER_SESSION)).append(seconds)

    def expect(self, session: Session, label: str) -> float | None:
        """Record what a session waits for; return for how many seconds to keep its pages.

        Return 0 if its wait will be too long to keep the pages, and None if the session is unknown
        or its turn has not ended. O(times log times).
        """
        waiting = self._sessions.get(session)
        if waiting is None:
            return None
        if waiting.label is not None:
            waiting.next_label = label
            return None
        waiting.label = label
        times = self._times.get(label, ())
        if len(times) < LEAST_OBSERVED:
            return self.most
        own = [*waiting.own.get(label, ())] * (OWN_WEIGHT - 1)
        waiting.waits, self.predicts = Waits([*times, *own]), True
        return waiting.waits.ttl(self.most)

    def worth(self, session: Session, now: float) -> float:
        """Return the worth of a page of a session, in hits per second of keeping it. O(times)."""
        waiting = self._sessions.get(session)
        if waiting is None or waiting.waits is None:
            return 1.0 / max(self.most, SHORTEST)
        return waiting.waits.worth(now - waiting.since)

    def end(self, session: Session) -> None:
        """Forget a session. Unknown sessions are ignored."""
        self._sessions.pop(session, None)


class Ranking(Generic[Item]):
    """Items in ascending order of worth; the order is computed again after `RANK_SECONDS`."""

    def __init__(self) -> None:
        self._time = 0.0
        self._items: deque[Item] = deque()

    def least_first(
        self,
        items: Iterable[Item],
        among: Container[Item],
        worth: Callable[[Item], float],
        now: float,
    ) -> Iterator[Item]:
        """Iterate over ``items`` in ascending order of ``worth``.

        The last order is used until it is `RANK_SECONDS` old: items that are no longer in ``among``
        are left out, and items that are newer than the order are missing. Items of equal worth
        stay in the order of ``items``. O(n log n) to sort, otherwise O(1) for each item.
        """
        if not self._items or now - self._time >= RANK_SECONDS:
            self._time, self._items = now, deque(sorted(items, key=worth))
        while self._items and self._items[0] not in among:
            self._items.popleft()
        return (item for item in self._items if item in among)
