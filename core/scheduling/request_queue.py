"""WaitingQueue: the waiting requests in the order of their admission.

Three rules decide. Urgency: a lower ``priority`` goes first, and each ``aging_seconds`` of waiting
lower it by one, but not below the lowest priority of the waiting requests. Fairness: among the
tenants whose first request has this urgency, the tenant with the lowest virtual token counter goes
first. Order: the requests of one tenant are sorted by `Request.order`, which never changes.

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
MAX_PROMOTED = 8  # maximum number of tenants whose urgency rises in one round
MAX_KNOWN = 4096  # maximum number of counters kept for tenants without waiting requests


class VirtualTokenCounter:
    """Counters of the tokens computed for each tenant.

    Only the differences between tenants matter. When a tenant begins to wait, its counter is raised
    to ``floor``, the least counter of the waiting tenants, so an idle tenant saves up no credit
    (Sheng et al., "Fairness in Serving Large Language Models", 2024). A counter at or below
    ``floor`` need not be kept, because it would be raised anyway. At most ``MAX_KNOWN`` other
    counters of tenants that do not wait are kept.
    """

    def __init__(self) -> None:
        self.floor = 0  # least counter of a tenant that begins to wait; never decreases
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
        """Raise the counter of a tenant that begins to wait to at least ``least`` tokens. O(1)."""
        self.floor = max(self.floor, least)
        self._counts[tenant] = max(self[tenant], self.floor)

    def forget(self, waiting: Container[Tenant]) -> None:
        """Drop counters that are not needed, but none of ``waiting`` tenants. O(1) on average."""
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
    requests: SortedKeyList[Request] = field(default_factory=_in_order)  # never empty
    level: int = 0  # urgency of the first request, as a priority; key of `_levels`

    # The tenant's counter when the queue was last sorted in, then `Request.order` of its first one.
    sort_key: SortKey = (0, 0.0, 0)

    # Time when the level decreases by one, and the first request's serial.
    promote_at: tuple[float, int] = (0.0, 0)


class WaitingQueue:
    """The waiting requests, new or preempted, in the order of their admission; they own no pages.

    A round of admissions begins with `begin_round`. Then the caller removes the request that
    `first` returns, or passes it over until the next round, and calls `first` again. Each call is
    O(log n + levels), where levels is the number of different urgencies that can go first.
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
        # Sorted priorities of all requests in the tenants' queues.
        self._priorities: SortedList[int] = SortedList()
        self._last_tenant: Tenant = None  # tenant whose queue became empty last

        # All waiting requests of each tenant, the request with the least left to compute first.
        self._by_work: dict[Tenant, SortedKeyList[Request]] = {}

    # -- content --------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def requests(self) -> ValuesView[Request]:
        """All waiting requests, unsorted. O(1)."""
        return self._requests.values()

    def __iter__(self) -> Iterator[Request]:
        """Yield the requests in the order of admission if no further request arrives. O(n log n).

        Each yielded request adds its number of tokens to a copy of its tenant's counter.
        """
        remaining = WaitingQueue(self._aging_seconds)
        remaining.counters, remaining._now = self.counters.copy(), self._now
        for request in self._requests.values():
            remaining._enter(request)
        while (first := remaining.first()) is not None:
            remaining.remove(first)
            remaining.counters.charge(first.tenant, len(first.tokens))
            yield first

    def num_of(self, tenant: Tenant) -> int:
        """Return the number of waiting requests of ``tenant``. O(1)."""
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
        """Add computed tokens to a tenant's counter. O(1): `first` sorts the queues again."""
        self.counters.charge(tenant, num_tokens)

    # -- a round of admission -------------------------------------------------------------------

    def begin_round(self, now: float) -> None:
        """Begin a round: return passed-over requests to their queues, and raise urgencies.

        ``now`` is in seconds; the urgency of a request rises with the time that it has waited.
        """
        self._now = now
        passed, self._passed = self._passed, []
        for request in passed:
            self._enter(request)
        if self._priorities and self._priorities[0] < self._priorities[-1]:
            self._promote()

    def first(self) -> Request | None:
        """Return the request to admit next; None if no request is left in this round."""
        foremost = min(self._urgent(), key=lambda tenant_queue: tenant_queue.sort_key, default=None)
        return None if foremost is None else foremost.requests[0]

    def shortest(self, may_run: Callable[[Request], bool]) -> Request | None:
        """Return the shortest request of a tenant, or None if ``may_run`` is false for all tenants.

        Each tenant's request with the least left to compute is considered, if ``may_run`` is true
        for it. The lowest priority goes first, then the lowest counter of the tenant. O(tenants).
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
        """Skip ``request`` until the next round."""
        self._leave(request)
        self._passed.append(request)

    # -- tenants' queues ------------------------------------------------------------------------

    def _urgent(self) -> list[TenantQueue]:
        """Return the least served tenant's queue of each urgency whose requests can go first."""
        if not self._levels:
            return []
        # All levels below the lowest waiting priority count as equally urgent. So old and new
        # requests are ordered by the tokens that their tenants were served.
        most = max(self._priorities[0], self._levels.keys()[0])
        levels = takewhile(lambda level: level <= most, self._levels)
        return [self._least(self._levels[level]) for level in levels]

    def _join(self, tenant: Tenant) -> None:
        """Raise the counter of a tenant that begins to wait to the least one of urgent tenants.

        If no tenant waits, the counter of the tenant that waited last is used. Less urgent tenants
        are ignored: they are not served now, so their counters stay low, and a new tenant with such
        a counter would go before all tenants that are served.
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

        A counter may have grown since its queue was sorted in: such a queue is sorted in again.
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
        """Assert the queue's invariants, such as that no request is queued twice. O(n log n)."""
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
