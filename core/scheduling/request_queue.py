"""WaitingQueue: the waiting requests in the order of their admission.

Three rules decide. Urgency: a lower ``priority`` goes first, and each ``aging_seconds`` of waiting
count as one priority, up to the most urgent waiting request. Fairness: among the tenants whose
first request has this urgency, the one served least goes first, by its virtual token counter.
Order: the requests of one tenant go by `Request.order`, which never changes.

So a stream of urgent requests does not starve others, and a tenant with one request does not wait
for another tenant's long queue.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Container, Iterator, ValuesView
from dataclasses import dataclass, field
from itertools import takewhile

from sortedcontainers import SortedDict, SortedKeyList, SortedList

from ..interface.request import Request, Tenant, by_order, by_work

SortKey = tuple[int, float, int]
MAX_PROMOTED = 8  # tenants whose urgency rises in one round; the others follow a round later
MAX_KNOWN = 4096  # most counters kept for tenants that do not wait


class VirtualTokenCounter:
    """Counts the tokens computed for each tenant.

    Only differences matter. A tenant that begins to wait is lifted to ``floor``, the least counter
    of the waiting tenants, so idle time saves up no credit (Sheng et al., "Fairness in Serving
    Large Language Models", 2024). A tenant at or below the floor need not be remembered: it would
    be lifted anyway. Of the other tenants, at most ``MAX_KNOWN`` that do not wait are remembered.
    """

    def __init__(self) -> None:
        self.floor = 0  # only rises
        self._counts: dict[Tenant, int] = {}
        self._sweep_at = 2 * MAX_KNOWN

    def __getitem__(self, tenant: Tenant) -> int:
        return self._counts.get(tenant, self.floor)

    def __len__(self) -> int:
        return len(self._counts)

    def charge(self, tenant: Tenant, num_tokens: int) -> None:
        """Add computed tokens to a tenant's counter. O(1)."""
        self._counts[tenant] = self._counts.get(tenant, self.floor) + num_tokens

    def lift(self, tenant: Tenant, least: int) -> None:
        """Lift a tenant that begins to wait to ``least``, the least counter of the others. O(1)."""
        self.floor = max(self.floor, least)
        self._counts[tenant] = max(self[tenant], self.floor)

    def forget(self, waiting: Container[Tenant]) -> None:
        """Drop counters that are not needed; waiting tenants keep theirs. O(1) on average."""
        if len(self._counts) < self._sweep_at:
            return
        kept = {each: count for each, count in self._counts.items() if each in waiting}
        owing = (i for i in self._counts.items() if i[1] > self.floor and i[0] not in waiting)
        kept.update(heapq.nlargest(MAX_KNOWN, owing, key=lambda item: item[1]))
        self._counts = kept
        self._sweep_at = 2 * max(MAX_KNOWN, len(kept))

    def copy(self) -> VirtualTokenCounter:
        """Return a copy."""
        other = VirtualTokenCounter()
        other.floor, other._counts = self.floor, dict(self._counts)
        return other


def _in_order() -> SortedKeyList[Request]:
    return SortedKeyList(key=by_order)


def _work_then_order(request: Request) -> tuple[tuple[int, int], tuple[float, int]]:
    return by_work(request), by_order(request)


@dataclass(slots=True, eq=False)
class TenantQueue:
    """Waiting requests of one tenant."""

    tenant: Tenant
    requests: SortedKeyList[Request] = field(default_factory=_in_order)  # at least one
    level: int = 0  # urgency of the first request, as a priority; key of `_levels`
    sort_key: SortKey = (0, 0.0, 0)  # tenant's counter when last filed, then `by_order`

    # Time when the level falls by one, and the first request's serial.
    promote_at: tuple[float, int] = (0.0, 0)


class WaitingQueue:
    """Requests that own no page, new or preempted, in the order of their admission.

    A round begins with `begin_round`. Then the caller removes the request that `first` returns, or
    passes it over until the next round, and calls `first` again. Each call is O(log n + levels):
    levels are the different urgencies up to the most urgent priority.
    """

    def __init__(self, aging_seconds: float) -> None:
        self.counters = VirtualTokenCounter()
        self.num_tokens = 0  # tokens of all waiting requests
        self._aging_seconds = aging_seconds
        self._now = -math.inf
        self._requests: dict[str, Request] = {}  # all waiting requests by id
        self._passed: list[Request] = []  # requests passed over until the next round
        self._tenant_queues: dict[Tenant, TenantQueue] = {}
        self._levels: SortedDict[int, SortedDict[SortKey, TenantQueue]] = SortedDict()
        self._promotions: SortedDict[tuple[float, int], TenantQueue] = SortedDict()
        # Priorities of all requests in tenants' queues.
        self._priorities: SortedList[int] = SortedList()
        self._last_tenant: Tenant = None  # tenant whose queue was emptied last

        # All requests of each tenant, the shortest first.
        self._by_work: dict[Tenant, SortedKeyList[Request]] = {}

    # -- content --------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def requests(self) -> ValuesView[Request]:
        """All waiting requests, in no order. O(1)."""
        return self._requests.values()

    def __iter__(self) -> Iterator[Request]:
        """Iterate in the order of admission, as if no further request arrived. O(n log n)."""
        remaining = WaitingQueue(self._aging_seconds)
        remaining.counters, remaining._now = self.counters.copy(), self._now
        for request in self._requests.values():
            remaining._enter(request)
        while (first := remaining.first()) is not None:
            remaining.remove(first)
            remaining.counters.charge(first.tenant, len(first.tokens))
            yield first

    def num_of(self, tenant: Tenant) -> int:
        """Return how many requests of a tenant wait. O(1)."""
        tenant_queue = self._tenant_queues.get(tenant)
        num_passed = sum(request.tenant == tenant for request in self._passed)
        return num_passed + (0 if tenant_queue is None else len(tenant_queue.requests))

    def add(self, request: Request) -> None:
        """Queue a request."""
        if request.tenant not in self._tenant_queues:
            self._join(request.tenant)
        self._enter(request)

    def remove(self, request: Request) -> None:
        """Remove a request that is admitted or has ended."""
        if request in self._passed:
            self._passed.remove(request)
        else:
            self._leave(request)
        del self._requests[request.request_id]
        self.num_tokens -= len(request.tokens)
        (own := self._by_work[request.tenant]).remove(request)
        if not own:
            del self._by_work[request.tenant]

    def charge(self, tenant: Tenant, num_tokens: int) -> None:
        """Charge a tenant for computed tokens. O(1): queues are reordered when they are read."""
        self.counters.charge(tenant, num_tokens)

    # -- a round of admission -------------------------------------------------------------------

    def begin_round(self, now: float) -> None:
        """Begin a round: add passed-over requests again, and raise urgencies by waiting time."""
        self._now = now
        passed, self._passed = self._passed, []
        for request in passed:
            self._enter(request)
        if self._priorities and self._priorities[0] < self._priorities[-1]:
            self._promote()

    def first(self) -> Request | None:
        """Return the request to be admitted next, or None."""
        foremost = min(self._urgent(), key=lambda tenant_queue: tenant_queue.sort_key, default=None)
        return None if foremost is None else foremost.requests[0]

    def shortest(self, may_run: Callable[[Request], bool]) -> Request | None:
        """Return the shortest request of the least served tenant, if it ``may_run``.

        Tenants whose shortest request may not run are left out. More urgent requests come first.
        O(tenants).
        """
        return min(
            (own[0] for own in self._by_work.values() if may_run(own[0])),
            key=lambda request: (
                request.priority,
                self.counters[request.tenant],
                _work_then_order(request),
            ),
            default=None,
        )

    def pass_over(self, request: Request) -> None:
        """Skip a request until the next round."""
        self._leave(request)
        self._passed.append(request)

    # -- tenants' queues ------------------------------------------------------------------------

    def _urgent(self) -> list[TenantQueue]:
        """Return the least served tenant's queue per urgency, up to the most urgent priority."""
        if not self._levels:
            return []
        # Waiting raises a request at most to the most urgent waiting priority, so requests of a
        # long queue and new ones are ordered by the tokens that their tenants were served.
        most = max(self._priorities[0], self._levels.keys()[0])
        levels = takewhile(lambda level: level <= most, self._levels)
        return [self._least(self._levels[level]) for level in levels]

    def _join(self, tenant: Tenant) -> None:
        """Lift the counter of a tenant that begins to wait to the least one among urgent tenants.

        If no tenant waits, the tenant that waited last counts. Tenants that wait with low
        priorities do not count: their counters do not change, and a new tenant lifted only to them
        would go before all tenants being served.
        """
        least = [tenant_queue.sort_key[0] for tenant_queue in self._urgent()]
        self.counters.forget(self._tenant_queues)
        self.counters.lift(tenant, min(least, default=self.counters[self._last_tenant]))

    def _enter(self, request: Request) -> None:
        if request.request_id not in self._requests:
            self._requests[request.request_id] = request
            self.num_tokens += len(request.tokens)
            if request.tenant not in self._by_work:
                self._by_work[request.tenant] = SortedKeyList(key=_work_then_order)
            self._by_work[request.tenant].add(request)
        self._priorities.add(request.priority)
        tenant_queue = self._tenant_queues.get(request.tenant)
        if tenant_queue is None:
            tenant_queue = self._tenant_queues[request.tenant] = TenantQueue(request.tenant)
        elif request.order < tenant_queue.requests[0].order:
            self._unfile(tenant_queue)
        else:
            tenant_queue.requests.add(request)
            return
        tenant_queue.requests.add(request)
        self._file(tenant_queue, self._level(request))

    def _leave(self, request: Request) -> None:
        tenant_queue = self._tenant_queues[request.tenant]
        is_first = tenant_queue.requests[0] is request
        if is_first:
            self._unfile(tenant_queue)
        tenant_queue.requests.remove(request)
        self._priorities.remove(request.priority)
        if not tenant_queue.requests:
            del self._tenant_queues[tenant_queue.tenant]
            self._last_tenant = tenant_queue.tenant
        elif is_first:
            self._file(tenant_queue, self._level(tenant_queue.requests[0]))

    def _promote(self) -> None:
        for _ in range(min(MAX_PROMOTED, len(self._promotions))):
            (time, _), tenant_queue = self._promotions.peekitem(0)
            if time > self._now:
                return
            self._unfile(tenant_queue)
            self._file(
                tenant_queue, min(tenant_queue.level - 1, self._level(tenant_queue.requests[0]))
            )

    def _level(self, request: Request) -> int:
        waited = max(0.0, self._now - request.arrival_time)
        return request.priority - int(waited / self._aging_seconds)

    def _file(self, tenant_queue: TenantQueue, level: int) -> None:
        request: Request = tenant_queue.requests[0]
        gained = request.priority - level + 1
        tenant_queue.level = level
        tenant_queue.sort_key = (self.counters[tenant_queue.tenant], *request.order)
        tenant_queue.promote_at = (
            request.arrival_time + gained * self._aging_seconds,
            request.serial,
        )
        if level not in self._levels:
            self._levels[level] = SortedDict()
        self._levels[level][tenant_queue.sort_key] = self._promotions[tenant_queue.promote_at] = (
            tenant_queue
        )

    def _unfile(self, tenant_queue: TenantQueue) -> None:
        tenant_queues = self._levels[tenant_queue.level]
        del tenant_queues[tenant_queue.sort_key], self._promotions[tenant_queue.promote_at]
        if not tenant_queues:
            del self._levels[tenant_queue.level]

    def _least(self, tenant_queues: SortedDict[SortKey, TenantQueue]) -> TenantQueue:
        """Return the queue of a level whose tenant was served least.

        Counters only grow, so a queue that is filed too early is found and refiled here.
        """
        while True:
            sort_key, tenant_queue = tenant_queues.peekitem(0)
            count = self.counters[tenant_queue.tenant]
            if count == sort_key[0]:
                found: TenantQueue = tenant_queue
                return found
            del tenant_queues[sort_key]
            tenant_queue.sort_key = (count, *sort_key[1:])
            tenant_queues[tenant_queue.sort_key] = tenant_queue

    def check(self) -> None:
        """Assert that each request is in one queue or passed over, each queue in a level. O(n)."""
        queues = self._tenant_queues
        queued = [request for each in queues.values() for request in each.requests]
        assert len({*queued, *self._passed}) == len(queued) + len(self._passed), (
            "a request is queued twice"
        )
        assert {*queued, *self._passed} == set(self._requests.values()), "a request is not queued"
        by_work = [request for own in self._by_work.values() for request in own]
        assert sorted(map(id, by_work)) == sorted(map(id, self._requests.values())), (
            "the order by work does not have exactly the waiting requests"
        )
        assert all(self._by_work.values()), "a tenant without requests is kept"
        assert self.num_tokens == sum(len(request.tokens) for request in self._requests.values())
        assert list(self._priorities) == sorted(request.priority for request in queued)
        assert set(self._promotions.values()) == set(queues.values()), (
            "a queue has no time of promotion"
        )
        filed = [(level, *item) for level, at in self._levels.items() for item in at.items()]
        assert len(filed) == len(queues), "a queue is filed twice, or not at all"
        for level, sort_key, each in filed:
            assert queues[each.tenant] is each, "an emptied queue is still filed"
            assert (level, sort_key) == (each.level, each.sort_key), (
                "a queue is filed at another level or key"
            )
            assert sort_key[0] <= self.counters[each.tenant], "a tenant's counter decreased"
            assert sort_key[1:] == each.requests[0].order, (
                "a queue is not filed by its first request"
            )
