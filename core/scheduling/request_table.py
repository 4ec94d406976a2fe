"""RequestTable: every request from its arrival to its end, and the limits on requests."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from msgspec.structs import replace
from sortedcontainers import SortedDict

from ...radix_cache import KVLease, PrefixCache
from ...radix_cache.audit import Steps
from ..errors import InvalidRequest, PromptTooLong, QueueFull
from ..interface.request import Request, RequestStatus, Tenant, by_order
from ..interface.sampling import beyond_vocabulary
from .leases import awaits_prefix, would_fit
from .page_loads import PageLoads
from .request_queue import WaitingQueue

# A tenant is a ``cache_salt`` or an API key; all requests without either are one tenant.
MULTI_TENANT_SECONDS = 600.0  # time for which a tenant counts as present after a request
MAX_PASSED = 16  # maximum number of requests that one round passes over


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """Limits of a step and of the queue, in tokens and requests.

    ``max_slowdown``: how many times longer a step with decoding requests may take because it
    computes prompt tokens, too. ``aging_seconds``: waiting time that lowers the priority number of
    a request by one. ``max_priority``: the greatest absolute value of a priority. ``kv_budget``:
    number of tokens of each answer that keep their KV, unless the request sets its own; 0: no KV is
    packed. ``takes_images``: whether the model has an image encoder, so that prompts may have
    images.
    """

    max_batch_tokens: int
    max_running: int
    max_queued: int
    max_model_len: int
    vocab_size: int
    max_slowdown: float = math.inf
    aging_seconds: float = 10.0
    max_priority: float = math.inf
    kv_budget: int = 0
    takes_images: bool = False


class PendingArrivals(NamedTuple):
    """Numbers of requests that are accepted but not queued yet; they take up room in the queue."""

    num_all: int = 0
    num_own: int = 0  # number of such requests from the tenant of the request to check


NO_ARRIVALS = PendingArrivals()


def check_fits(request: Request, capacity: int) -> None:
    """Raise `PromptTooLong` if the prompt exceeds `longest_prompt`; `InvalidRequest` if empty."""
    if not request.tokens:
        raise InvalidRequest("prompt must have at least one token", param="prompt")
    most = longest_prompt(capacity, generates=request.sampling.generates)
    if len(request.tokens) > most:
        raise PromptTooLong(len(request.tokens), most, context=capacity)


def longest_prompt(capacity: int, *, generates: bool) -> int:
    """Return the maximum number of prompt tokens, if prompt and answer have at most ``capacity``.

    A request that generates needs room for one token of its answer.
    """
    return capacity - generates


def max_len_of(request: Request, capacity: int) -> int:
    """Return the maximum length of prompt and answer in tokens, which is at most ``capacity``."""
    if not request.sampling.generates:
        return len(request.tokens)
    wanted = request.sampling.params.max_tokens
    return capacity if wanted is None else min(capacity, request.prompt_len + wanted)


def kv_budget_of(request: Request, default: int) -> int:
    """Return how many tokens of the answer keep their KV; 0 means all.

    ``default``: the engine's budget, or 0 if the engine packs no KV. Raises `InvalidRequest` for a
    request with a budget if the engine packs no KV, or if the request wants log-probabilities of
    its prompt.
    """
    params = request.sampling.params
    pools = request.sampling.pooling is not None and not request.sampling.compares
    keeps_all = params.prompt_logprobs is not None or pools
    if params.kv_budget is not None:
        if not default:
            message = "kv_budget needs a server that is started with --kv-evict"
            raise InvalidRequest(message, param="kv_budget")
        if keeps_all:
            message = "kv_budget cannot be combined with prompt_logprobs"
            raise InvalidRequest(message, param="kv_budget")
    return 0 if keeps_all else params.kv_budget or default


def check_token_ids(request: Request, vocab_size: int) -> None:
    """Raise `InvalidRequest` for an unknown token id in the prompt, prediction or a parameter."""
    fields: dict[str, Collection[int]] = {
        "prompt": _text_of(request),
        "prediction": request.prediction or (),
    }
    if (pooling := request.sampling.pooling) is not None:
        fields["token_ids"] = [*chain.from_iterable(pooling.rows)]
    for param, ids in (fields | request.sampling.token_id_fields()).items():
        if message := beyond_vocabulary(param, ids, vocab_size):
            raise InvalidRequest(message, param=param)


def _text_of(request: Request) -> Collection[int]:
    """Return the token ids of a prompt without its image rows, whose ids are below 0.

    Raises `InvalidRequest` for images that overlap, exceed the prompt or stand at its end, and if
    log-probabilities of a prompt with images are requested.
    """
    images = request.extras.images
    if not images:
        return request.tokens
    wants_logprobs = request.sampling.params.prompt_logprobs is not None
    if wants_logprobs:
        message = "prompt_logprobs is not supported for prompts with images"
        raise InvalidRequest(message, param="prompt_logprobs")
    rows = {start + at for image in images for start, count in image.runs for at in range(count)}
    if len(rows) < sum(image.num_rows for image in images) or max(rows) >= len(request.tokens):
        raise InvalidRequest("the rows of images overlap or exceed the prompt", param="prompt")
    if len(request.tokens) - 1 in rows:
        raise InvalidRequest("a prompt cannot end with an image", param="prompt")
    return [token_id for at, token_id in enumerate(request.tokens) if at not in rows]


def check_priority(request: Request, most: float) -> None:
    """Raise `InvalidRequest` for a priority that is more than ``most`` away from 0.

    A priority outweighs waiting time, so an unbounded one could starve other requests.
    """
    if not -most <= request.priority <= most:
        message = f"priority must be from -{most} to {most} (the server's --max-priority)"
        raise InvalidRequest(message, param="priority")


class RequestTable:
    """Waiting and running requests; each request is in exactly one of the two.

    Only its methods change ``running``, ``waiting`` and `Request.status`. ``capacity``: maximum
    number of tokens of one request, prompt and answer together.
    """

    def __init__(self, limits: SchedulerLimits, capacity: int) -> None:
        self.capacity = capacity
        self.running: dict[str, Request] = {}  # sorted by `Request.order`
        self.waiting = WaitingQueue(limits.aging_seconds)
        self._limits = limits
        self._by_id: dict[str, Request] = {}
        self._due: SortedDict[tuple[float, int], Request] = SortedDict()  # requests by deadline

        # The tenant of the latest request; empty before the first request.
        self._last_tenants: tuple[Tenant, ...] = ()
        self._shared_until = -math.inf  # time until which several tenants count as present
        self._num_arrived = 0
        self._now = 0.0  # time of the latest arrival or round

        # The serial number of the request that did not fit last, the version of the tree then, and
        # the number of available pages.
        self._refused: tuple[int, int] | None = None
        self._refused_at = 0

    def __len__(self) -> int:
        return len(self._by_id)

    @property
    def ids(self) -> Collection[str]:
        """Ids of all requests, in the order of arrival."""
        return self._by_id.keys()

    def of_session(self, session: str) -> list[Request]:
        """Return the requests of a session. O(requests)."""
        return [each for each in self._by_id.values() if each.cache.session == session]

    def get(self, request_id: str) -> Request | None:
        """Return the request with this id, or None."""
        return self._by_id.get(request_id)

    def check(self, request: Request, pending: PendingArrivals | None = NO_ARRIVALS) -> None:
        """Raise an error for a request that cannot be served.

        ``pending``: requests that are about to be added; None: this request will not be queued, so
        the room in the queue is not checked. Raises `QueueFull`, `PromptTooLong`, or
        `InvalidRequest` for token ids outside the vocabulary, images for a model without an image
        encoder, a priority beyond the limit, a request id that is in use, and a KV budget for an
        engine that packs no KV.
        """
        if request.request_id in self._by_id:
            raise InvalidRequest(f"request_id {request.request_id} is in use", param="request_id")
        check_fits(request, self.capacity)
        if request.extras.images and not self._limits.takes_images:
            raise InvalidRequest("the model takes no images", param="prompt")
        check_token_ids(request, self._limits.vocab_size)
        check_priority(request, self._limits.max_priority)
        kv_budget_of(request, self._limits.kv_budget)
        if pending is not None:
            self._check_room(request, pending)

    def _check_room(self, request: Request, pending: PendingArrivals) -> None:
        """Raise `QueueFull` for a request for which the queue has no room.

        While several tenants are present, no tenant may hold more places of the queue than are
        free. So one tenant that floods the queue gets half of the places, two tenants get a third
        each, and a new tenant still finds a place. A single tenant may use the whole queue, also
        beside prompts that the server computes ahead, which are no tenant's.
        """
        most = self._limits.max_queued + self._limits.max_running
        num_free = most - len(self._by_id) - pending.num_all
        if not request.extras.is_idle_prefill:
            if self._last_tenants not in ((), (request.tenant,)):
                self._shared_until = self._now + MULTI_TENANT_SECONDS
            self._last_tenants = (request.tenant,)
        if num_free <= 0:
            num_waiting = len(self.waiting) + pending.num_all
            raise QueueFull(f"the queue is full: {num_waiting} requests are waiting")
        if self._now >= self._shared_until:
            return
        num_own = self.waiting.num_of(request.tenant) + pending.num_own
        num_soon = self._limits.max_running - len(self.running)  # requests that can run at once
        if num_own - num_soon >= min(num_free, self._limits.max_queued):
            raise QueueFull(
                f"the queue is full for this tenant: {num_own} of its requests are waiting"
            )

    def add(self, request: Request, now: float) -> None:
        """Queue a request that `check` accepted."""
        request.max_len = max_len_of(request, self.capacity)
        if budget := kv_budget_of(request, self._limits.kv_budget):
            request.extras = replace(request.extras, kv_budget=budget)
        request.arrival_time, request.serial = now, self._num_arrived
        request.urgency = now + request.priority * self._limits.aging_seconds
        request.usage.prompt_tokens = request.num_given
        request.usage.image_tokens = sum(image.num_rows for image in request.extras.images)
        self._num_arrived += 1
        self._now = now
        self.waiting.add(request)
        self._by_id[request.request_id] = request
        if request.deadline is not None:
            self._due[now + request.deadline, request.serial] = request

    def begin_round(self, now: float) -> None:
        """Begin a round of admissions at time ``now``."""
        self._now = now
        self.waiting.begin_round(now)

    def candidates(self, cache: PrefixCache, loads: PageLoads | None) -> Iterator[Request]:
        """Yield the requests to admit in order; the caller admits each before it takes the next.

        A request is passed over while its prefix is being looked up, fetched, or computed for
        another request.
        """
        num_passed = 0
        while num_passed < MAX_PASSED and (request := self.waiting.first()) is not None:
            if len(self.running) >= self._limits.max_running:
                return
            if loads is not None:  # the pool may have evicted pages since the request arrived
                loads.look_up(request, self._now)
            if awaits_prefix(cache, request, self._computed_now(loads)):
                self.waiting.pass_over(request)
                num_passed += 1
                continue
            if not self._fits(cache, request):
                return  # later requests must not take pages before this one
            yield request

    def _fits(self, cache: PrefixCache, request: Request) -> bool:
        """Whether a waiting request fits into the pool now.

        A request that did not fit is compared again only after a change of the cached pages or of
        their locks (an admission or an end of a request is one), or if more pages are available.
        Otherwise the running requests have grown, and the room has not. With recurrent states or
        packing the room may change without either, so the request is compared in each round.
        """
        num_available = cache.num_available_pages
        refused = request.serial, cache.tree.version
        is_settled = cache.states is None and not self._limits.kv_budget
        if is_settled and refused == self._refused and num_available <= self._refused_at:
            return False
        fits = would_fit(cache, request, self.running.values())
        self._refused = None if fits else refused
        self._refused_at = num_available
        return fits

    def short_ones(
        self, cache: PrefixCache, loads: PageLoads | None, most: tuple[int, int]
    ) -> Iterator[Request]:
        """Yield requests that may run before their turn; the caller admits each.

        ``most`` is a priority and a number of tokens. A request may run early if its priority is
        lower, which is more urgent. With an equal priority it may have at most half of the tokens
        left to compute. Only the shortest request of each tenant is considered.
        """
        tried: set[Tenant] = set()
        priority, num_tokens = most

        def may_run(request: Request) -> bool:
            is_short = (request.priority, 2 * request.num_uncached) <= (priority, num_tokens)
            return is_short and request.tenant not in tried

        while len(self.running) < self._limits.max_running and len(tried) < MAX_PASSED:
            request = self.waiting.shortest(may_run)
            if request is None:
                return
            if loads is not None:
                loads.look_up(request, self._now)
            if awaits_prefix(cache, request, self._computed_now(loads)) or not would_fit(
                cache, request, self.running.values()
            ):
                tried.add(request.tenant)
            else:
                yield request

    def _computed_now(self, loads: PageLoads | None) -> Iterable[Request]:
        """Return the running and fetched requests, whose pages other requests may wait for."""
        return chain(self.running.values(), () if loads is None else loads.fetched)

    def admit(self, request: Request) -> None:
        """Move a waiting request to ``running``. O(1) if it is last in order, else O(n log n)."""
        self.waiting.remove(request)
        last = next(reversed(self.running.values()), request)
        self.running[request.request_id] = request
        request.status = RequestStatus.RUNNING
        if request.order < last.order:
            in_order = sorted(self.running.values(), key=by_order)
            self.running.clear()
            self.running.update((each.request_id, each) for each in in_order)

    def requeue(self, request: Request) -> None:
        """Move a running request back to the queue."""
        del self.running[request.request_id]
        request.status = RequestStatus.WAITING
        self.waiting.add(request)

    def victim(self, planned: Iterable[str]) -> Request | None:
        """Return the request to preempt: the last running request in order that is not planned.

        A request whose pages are being loaded is not preempted. Returns None if no request is left.
        """
        last_first = reversed(self.running.values())
        free = (
            each
            for each in last_first
            if each.transfer.load is None and each.request_id not in planned
        )
        return next(free, None)

    def discard(self, request: Request) -> None:
        """Remove a request that ended."""
        if request.status is RequestStatus.RUNNING:
            del self.running[request.request_id]
        else:
            self.waiting.remove(request)
        request.status = RequestStatus.FINISHED
        del self._by_id[request.request_id]
        if request.deadline is not None:
            del self._due[request.arrival_time + request.deadline, request.serial]

    @property
    def next_deadline(self) -> float | None:
        """Time of the next deadline; None: no request has a deadline."""
        return self._due.peekitem(0)[0][0] if self._due else None

    def expired(self, now: float) -> list[Request]:
        """Return the requests whose deadline has passed. O(log n + number of such requests)."""
        count = self._due.bisect_right((now, self._num_arrived))
        return list(self._due.values()[:count])

    def checks(self, cache: PrefixCache, other_leases: Sequence[KVLease] = ()) -> Steps:
        """Assert the invariants of requests and of their pages, in parts. O(n log n + pages).

        Each iteration checks one part; nothing may change until the last one. ``other_leases``:
        leases that no running request holds.
        """
        self._check_order()
        leases = [each.lease for each in self.running.values() if each.lease is not None]
        yield from cache.checks([*leases, *other_leases])
        assert len(leases) == len(self.running), "a running request has no lease"
        for request in self.waiting.requests:
            assert request.lease is None, "a waiting request has a lease"
            assert request.num_computed == 0, "a waiting request counts computed tokens"
            assert request.status is RequestStatus.WAITING, "a waiting request has the wrong status"
        for request in self.running.values():
            assert request.num_pending >= 1, "a running request has no token to compute"

    def _check_order(self) -> None:
        self.waiting.check()
        running = list(self.running.values())
        assert running == sorted(running, key=by_order), "running requests are out of order"
        ids = [*self.running, *(request.request_id for request in self.waiting.requests)]
        assert len(ids) == len(self._by_id), "a request is both running and waiting, or neither"
        assert set(ids) == set(self._by_id), "a running or waiting request is not in the table"
        timed = {request for request in self._by_id.values() if request.deadline is not None}
        assert set(self._due.values()) == timed, (
            "the listed deadlines are not those of the requests"
        )
