"""The waiting queue: who is let in next.

By three rules. Urgency: a lower ``priority`` goes first, and each ``aging_seconds`` of waiting
count as one priority, up to the most urgent that waits. Fairness: among the tenants whose first
request is that urgent, the one served least goes first, by its virtual token counter. Order:
the requests of one tenant go by `Request.order`, which is urgency made static.

So a low priority gets through a stream of high ones, and a tenant's long queue, however old, is
no reason why another's only request should wait behind it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, ValuesView
from itertools import takewhile

from sortedcontainers import SortedDict, SortedKeyList, SortedList

from .request import Request, by_order
from .tenants import Tenant, TokenCounters

Place = tuple[int, float, int]
MAX_RIPENED = 8  # lines that become more urgent in one round; the others a round later


class Line:
    """The waiting requests of one tenant."""

    __slots__ = ("level", "place", "requests", "ripens", "tenant")

    def __init__(self, tenant: Tenant) -> None:
        self.tenant = tenant
        self.requests: SortedKeyList[Request] = SortedKeyList(key=by_order)  # at least one
        self.level = 0  # urgency of the first request, as a priority; filed under
        self.place: Place = (0, 0.0, 0)  # within the level: counter when it was filed, then order
        self.ripens = (0.0, 0)  # when the level falls by one, and the first request's serial


class WaitingQueue:
    """Requests that own no page, new or preempted, in the order in which they are to be let in.

    A round begins with `begin_round`. Then `first` is to be removed, or passed over until the next
    round. Each is O(log n + levels), where the levels are those that waiting made more urgent than
    the most urgent priority, one for each ``aging_seconds``.
    """

    def __init__(self, aging_seconds: float) -> None:
        self.counters = TokenCounters()
        self.num_tokens = 0  # of all who wait
        self._aging_seconds = aging_seconds
        self._now = -math.inf
        self._requests: dict[str, Request] = {}  # all of them, by id
        self._passed: list[Request] = []  # those of them that are in no line until the next round
        self._lines: dict[Tenant, Line] = {}
        self._levels: SortedDict[int, SortedDict[Place, Line]] = SortedDict()
        self._ripening: SortedDict[tuple[float, int], Line] = SortedDict()
        self._priorities: SortedList[int] = SortedList()  # of all in lines
        self._last_tenant: Tenant = None  # of the line that was dissolved last

    # -- who is there ---------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def requests(self) -> ValuesView[Request]:
        """All of them, in no order. O(1)."""
        return self._requests.values()

    def __iter__(self) -> Iterator[Request]:
        """In serving order, if each cost its tenant its tokens and nobody came. O(n log n)."""
        rest = WaitingQueue(self._aging_seconds)
        rest.counters, rest._now = self.counters.copy(), self._now
        for request in self._requests.values():
            rest._enter(request)
        while (first := rest.first()) is not None:
            rest.remove(first)
            rest.counters.charge(first.tenant, len(first.tokens))
            yield first

    def num_of(self, tenant: Tenant) -> int:
        """How many requests of a tenant wait. O(1)."""
        line = self._lines.get(tenant)
        num_passed = sum(request.tenant == tenant for request in self._passed)
        return num_passed + (0 if line is None else len(line.requests))

    def add(self, request: Request) -> None:
        """A request begins to wait."""
        if request.tenant not in self._lines:
            self._join(request.tenant)
        self._enter(request)

    def remove(self, request: Request) -> None:
        """A request waits no longer: it is let in, or it ended."""
        if request in self._passed:
            self._passed.remove(request)
        else:
            self._leave(request)
        del self._requests[request.request_id]
        self.num_tokens -= len(request.tokens)

    def charge(self, tenant: Tenant, num_tokens: int) -> None:
        """Tokens were computed for a tenant. O(1): its line moves when it is looked at."""
        self.counters.charge(tenant, num_tokens)

    # -- a round of letting in ------------------------------------------------------------------

    def begin_round(self, now: float) -> None:
        """Those passed over are back, and waiting makes more urgent."""
        self._now = now
        passed, self._passed = self._passed, []
        for request in passed:
            self._enter(request)
        if self._priorities and self._priorities[0] < self._priorities[-1]:
            self._ripen()

    def first(self) -> Request | None:
        """Who is to be let in next."""
        foremost = min(self._urgent(), key=lambda line: line.place, default=None)
        return None if foremost is None else foremost.requests[0]

    def pass_over(self, request: Request) -> None:
        """The next one, please; this one again in the next round."""
        self._leave(request)
        self._passed.append(request)

    # -- lines ----------------------------------------------------------------------------------

    def _urgent(self) -> list[Line]:
        """Of each level that is as urgent as the most urgent request, the line served least."""
        if not self._levels:
            return []
        # Waiting makes a request as urgent as the most urgent that waits, and no more than that:
        # so those behind a long queue and newcomers differ by what their tenants were served.
        most = max(self._priorities[0], self._levels.keys()[0])
        levels = takewhile(lambda level: level <= most, self._levels)
        return [self._least(self._levels[level]) for level in levels]

    def _join(self, tenant: Tenant) -> None:
        """A tenant begins to wait: it is lifted to those who are served, else to who waited last.

        What others wait for with low priorities does not count: their counters stand still, and
        a newcomer that was lifted to those alone would go before all who are served.
        """
        least = [line.place[0] for line in self._urgent()]
        self.counters.forget(self._lines)
        self.counters.lift(tenant, min(least, default=self.counters[self._last_tenant]))

    def _enter(self, request: Request) -> None:
        if request.request_id not in self._requests:
            self._requests[request.request_id] = request
            self.num_tokens += len(request.tokens)
        self._priorities.add(request.priority)
        line = self._lines.get(request.tenant)
        if line is None:
            line = self._lines[request.tenant] = Line(request.tenant)
        elif request.order < line.requests[0].order:
            self._unfile(line)
        else:
            line.requests.add(request)
            return
        line.requests.add(request)
        self._file(line, self._level(request))

    def _leave(self, request: Request) -> None:
        line = self._lines[request.tenant]
        is_first = line.requests[0] is request
        if is_first:
            self._unfile(line)
        line.requests.remove(request)
        self._priorities.remove(request.priority)
        if not line.requests:
            del self._lines[line.tenant]
            self._last_tenant = line.tenant
        elif is_first:
            self._file(line, self._level(line.requests[0]))

    def _ripen(self) -> None:
        for _ in range(min(MAX_RIPENED, len(self._ripening))):
            (time, _), line = self._ripening.peekitem(0)
            if time > self._now:
                return
            self._unfile(line)
            self._file(line, min(line.level - 1, self._level(line.requests[0])))

    def _level(self, request: Request) -> int:
        waited = max(0.0, self._now - request.arrival_time)
        return request.priority - int(waited / self._aging_seconds)

    def _file(self, line: Line, level: int) -> None:
        request: Request = line.requests[0]
        gained = request.priority - level + 1
        line.level = level
        line.place = (self.counters[line.tenant], *request.order)
        line.ripens = (request.arrival_time + gained * self._aging_seconds, request.serial)
        if level not in self._levels:
            self._levels[level] = SortedDict()
        self._levels[level][line.place] = self._ripening[line.ripens] = line

    def _unfile(self, line: Line) -> None:
        lines = self._levels[line.level]
        del lines[line.place], self._ripening[line.ripens]
        if not lines:
            del self._levels[line.level]

    def _least(self, lines: SortedDict[Place, Line]) -> Line:
        """The line of a level whose tenant was served least.

        Counters only grow, so a line that is filed too early is found and filed anew here.
        """
        while True:
            place, line = lines.peekitem(0)
            count = self.counters[line.tenant]
            if count == place[0]:
                found: Line = line
                return found
            del lines[place]
            line.place = (count, *place[1:])
            lines[line.place] = line

    def check(self) -> None:
        """Asserts that every request is in one line or passed over, and every line filed. O(n)."""
        lined = [request for line in self._lines.values() for request in line.requests]
        assert len({*lined, *self._passed}) == len(lined) + len(self._passed), "queued twice"
        assert {*lined, *self._passed} == set(self._requests.values()), "a request is in no line"
        assert self.num_tokens == sum(len(request.tokens) for request in self._requests.values())
        assert list(self._priorities) == sorted(request.priority for request in lined)
        assert set(self._ripening.values()) == set(self._lines.values()), "a line does not ripen"
        filed = [(level, *item) for level, at in self._levels.items() for item in at.items()]
        assert len(filed) == len(self._lines), "a line is not filed, or twice"
        for level, place, line in filed:
            assert self._lines[line.tenant] is line, "a line was dissolved and is filed"
            assert (level, place) == (line.level, line.place), "a line is filed at a wrong place"
            assert place[0] <= self.counters[line.tenant], "a counter fell"
            assert place[1:] == line.requests[0].order, "a line is filed by another request"
