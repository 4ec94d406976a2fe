"""How long sessions wait between two turns, and what their pages are worth until the next turn.

A turn of an agent mostly ends with the call of a tool, and the next turn brings the result. So the
next turn is predicted from the times that calls of the same tool took before: in this session, and
in all sessions of its namespace. Tools are known by labels, which mean nothing to this package. The
label "" stands for a person, whose times predict only waits of the same session.

The worth of a page is the hit density of LHD (Beckmann et al., NSDI 2018): the chance that the next
turn reads the page, divided by the seconds for which the page must be kept until then. Continuum
(Li et al., arXiv 2511.02230) prices the time to keep the pages of a session in the same way.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, islice
from math import inf
from typing import Generic, TypeAlias, TypeVar

Item = TypeVar("Item")
Session: TypeAlias = tuple[str | None, str]
"""Namespace and name of a session."""

LEAST_OBSERVED = 3  # fewest times of a label from which a wait is predicted
PER_LABEL, PER_SESSION = 48, 8  # latest times of a label that are kept, in all and in one session
OWN_LABELS = 8  # latest labels of which a session's own times are kept
OWN_WEIGHT = 3  # weight of a time of the session itself
MAX_LABELS, MAX_SESSIONS = 1024, 4096
QUANTILE, MARGIN = 0.95, 1.25  # pages are kept for this quantile of the times, multiplied by 1.25
LEAST_TTL = 1.0  # seconds
SHORTEST = 0.05  # seconds; shorter waits count as long as this
RANK_SECONDS, MAX_RANKED = 1.0, 256  # time between two sorts by worth, and items of a sort


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
    is_own: bool = False  # whether the session's own times suffice for ``waits``
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
        # Times by namespace and label.
        self._times: OrderedDict[tuple[str | None, str], deque[float]] = OrderedDict()
        self._sessions: OrderedDict[Session, _Waiting] = OrderedDict()

    def turn(self, session: Session, began: float, now: float) -> str | None:
        """Record a turn that began to read the cache at ``began`` and ends at ``now``. O(1).

        Return the label of the wait after this turn, if `expect` was called before the turn ended.
        """
        waiting = self._sessions.get(session)
        if waiting is None:
            waiting = self._sessions[session] = _Waiting(now)
        elif waiting.label is not None and began >= waiting.since:
            self._observe(session[0], waiting.own, waiting.label, began - waiting.since)
        waiting.since, waiting.label, waiting.waits, waiting.is_own = now, None, None, False
        label, waiting.next_label = waiting.next_label, None
        self._sessions.move_to_end(session)
        if len(self._sessions) > MAX_SESSIONS:
            self._sessions.popitem(last=False)
        return label

    def _observe(
        self, namespace: str | None, own: dict[str, deque[float]], label: str, seconds: float
    ) -> None:
        if label:
            self._times.setdefault((namespace, label), deque(maxlen=PER_LABEL)).append(seconds)
            self._times.move_to_end((namespace, label))
            if len(self._times) > MAX_LABELS:
                self._times.popitem(last=False)
        own[label] = own.pop(label, deque[float](maxlen=PER_SESSION))
        own[label].append(seconds)
        if len(own) > OWN_LABELS:
            del own[next(iter(own))]

    def expect(self, session: Session, label: str, *, is_running: bool = False) -> float | None:
        """Record what a session waits for; return how long to keep its pages, in seconds.

        0 means that keeping them would be in vain, and None that the session is unknown or its wait
        has a label already. Then the label belongs to the next wait if a turn ``is_running``, and
        is ignored otherwise. O(times log times).
        """
        waiting = self._sessions.get(session)
        if waiting is None:
            return None
        if waiting.label is not None:
            if is_running:
                waiting.next_label = label
            return None
        waiting.label = label
        own = waiting.own.get(label, ())
        times = self._times.get((session[0], label), ()) if label else own
        if len(times) >= LEAST_OBSERVED:
            waiting.waits = Waits([*times, *[*own] * (OWN_WEIGHT - 1)])
            waiting.is_own, self.predicts = len(own) >= LEAST_OBSERVED, True
        return self.ttl(session)

    def ttl(self, session: Session) -> float:
        """Return how long to keep a session's pages from the start of its wait, in seconds."""
        waiting = self._sessions.get(session)
        if waiting is None or waiting.waits is None:
            return self.most
        return waiting.waits.ttl(self.most)

    def is_predicted(self, session: Session) -> bool:
        """Whether the end of a session's present wait is predicted. O(1)."""
        waiting = self._sessions.get(session)
        return waiting is not None and waiting.waits is not None

    def is_own(self, session: Session) -> bool:
        """Whether the session's own times suffice to predict its present wait. O(1)."""
        waiting = self._sessions.get(session)
        return waiting is not None and waiting.is_own

    def worth(self, session: Session, now: float) -> float:
        """Return the worth of a page of a session, in hits per second of keeping it. O(times)."""
        waiting = self._sessions.get(session)
        if waiting is None or waiting.waits is None:
            return 1.0 / max(self.most, SHORTEST)
        return waiting.waits.worth(now - waiting.since)

    def end(self, name: str) -> None:
        """Forget a session in all namespaces. O(sessions)."""
        for session in [each for each in self._sessions if each[1] == name]:
            del self._sessions[session]


class Ranking(Generic[Item]):
    """Items in ascending order of worth; the order is computed again after `RANK_SECONDS`."""

    def __init__(self) -> None:
        self._due = -inf  # time of the next sort
        self._items: deque[Item] = deque()
        self._is_cut = False  # whether the last sort left items out

    def least_first(
        self,
        items: Callable[[], Iterable[Item]],
        among: Container[Item],
        worth: Callable[[Item], float],
        now: float,
    ) -> Iterator[Item]:
        """Iterate over ``items`` in ascending order of ``worth``.

        The item that is worth least comes first; among equals, the first of ``items``. A sort takes
        the first `MAX_RANKED` of ``items``, which is called only for a sort. Items that are newer
        than the sort are missing. O(MAX_RANKED) calls of ``worth`` for a sort, else O(1) for each
        item.
        """
        while self._items and self._items[0] not in among:
            self._items.popleft()
        if now >= self._due or (self._is_cut and not self._items):
            found = list(islice(items(), MAX_RANKED))
            self._due, self._is_cut = now + RANK_SECONDS, len(found) == MAX_RANKED
            self._items = deque(sorted(found, key=worth))
        return (item for item in self._items if item in among)
