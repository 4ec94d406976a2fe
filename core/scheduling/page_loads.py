"""PageLoads: loads of KV pages from tiers for requests that wait or run.

The prefix of a waiting request is looked up in the tiers, and the request is not admitted until the
result is known. If loading takes less time than computing, the request gets pages for the found KV
at its admission, but no step computes it until the pages are loaded. Meanwhile no step touches
these pages, so the I/O thread writes to them directly. Then the request continues as after a prefix
hit. KV that is missing, late or damaged is computed. A request of a model with recurrent states
resumes only after the last page: the state there is loaded first, and without the state, or without
one of the pages, everything is computed.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Collection

from msgspec.structs import replace

from ...radix_cache import Eviction, KVLease, PrefixCache
from ..interface.extras.tiers import KVTiers, PageLoad
from ..interface.extras.transfers import PageOffer
from ..interface.request import Request
from .leases import cache_limit, publish, readable_len, reads_prefix

LOOKUP_SECONDS = 0.05  # time limit of a look-up; after it, no page counts as found
MEETING_SECONDS = 0.5  # time limit of a look-up that must first connect to a peer

# A load is late after this multiple of its estimated time, but not before this number of seconds.
LATE, LATE_SECONDS = 3.0, 0.25

# After this time without a load, a load is tried even if its estimate is longer than computing.
TRIAL_SECONDS = 30.0


class PageLoads:
    """The look-ups and loads of pages that are under way.

    Only the scheduler and the engine's I/O change them. ``on_order`` is called when there is a new
    look-up or load for the I/O thread, ``on_offer`` when there is a peer to connect to or to
    notify. A request may have an offer of pages in another engine, the peer (`Transfer.offer`). The
    offered pages are looked up like pages of a tier, once the I/O thread has connected to the peer.
    The offer ends when its request no longer waits for the pages: the request was admitted without
    a load, the load ended or was late, or the request was preempted or ended. A *fetched* request
    is not scheduled: its pages are loaded into the tree for another request with the same prompt,
    and nothing is computed for it.
    """

    def __init__(self, cache: PrefixCache, tiers: KVTiers) -> None:
        self.tiers = tiers
        self.look_ups: deque[PageLoad] = deque()  # look-ups for the I/O thread to make
        self.loads: deque[PageLoad] = deque()  # loads for the I/O thread to make, in order
        self.meetings: deque[PageOffer] = deque()  # offers whose peers to connect to
        self.ended_offers: deque[PageOffer] = deque()  # offers whose peers to notify of the end
        self.num_offers = 0  # number of offers that have not ended
        self.on_offer: Callable[[], None] = lambda: None
        self.num_late = 0
        self.on_order: Callable[[PageLoad], None] = lambda _: None
        self._cache = cache
        self._tries_at = 0.0  # time from which a load that seems too slow is tried again
        self._awaited: dict[str, PageLoad] = {}  # look-ups and loads under way, by request id

        # Admitted requests whose pages are being loaded.
        self._loading: dict[str, Request] = {}
        self._fetched: dict[str, Request] = {}  # fetched requests whose fetch has not ended

        # Finished look-ups of fetched requests whose loads have not begun.
        self._found_fetches: list[PageLoad] = []
        self._now = 0.0  # time of the latest round
        self._loaded_pages = array("q")  # page ids loaded since the last plan

        # Leases that requests gave up while the I/O thread still writes to their pages.
        self._leases: dict[PageLoad, KVLease] = {}
        # Return whether a request fits into the pool beside the running requests.
        self.has_room: Callable[[Request], bool] = lambda _: True

    @property
    def num_loading(self) -> int:
        """Number of running requests that no step computes, because their pages are loading."""
        return len(self._loading) - len(self._loading.keys() & self._fetched.keys())

    @property
    def fetched(self) -> Collection[Request]:
        """Fetched requests, whose tokens are cut off one token after the offered pages."""
        return self._fetched.values()

    @property
    def leases(self) -> list[KVLease]:
        """Leases of fetched requests, and leases whose pages the I/O thread still uses."""
        fetched = [each.lease for each in self._fetched.values() if each.lease is not None]
        return [*self._leases.values(), *fetched]

    # -- offers ---------------------------------------------------------------------------------

    def meet(self, request: Request) -> None:
        """Order a connection to the peer of a request's offer, if the request has an offer.

        This must precede `look_up`.
        """
        offer = request.transfer.offer
        if offer is not None:
            self.num_offers += 1
            self.meetings.append(offer)
            self.on_offer()

    def end_offer(self, offer: PageOffer) -> None:
        """Order a notice to the peer that made ``offer``: it may free the pages."""
        self.ended_offers.append(offer)
        self.on_offer()

    def _leave_offer(self, request: Request) -> None:
        """End the offer of a request, if it has one."""
        offer = request.transfer.offer
        if offer is not None:
            request.transfer = replace(request.transfer, offer=None)
            self.num_offers -= 1
            self.end_offer(offer)

    # -- fetches --------------------------------------------------------------------------------

    def fetch(self, request: Request, now: float) -> None:
        """Load the pages of a request's offer into the tree, if the pool has room for its prompt.

        Pages that are missing, late or damaged are left out. No running request is preempted to
        make room.
        """
        offer = request.transfer.offer
        if offer is not None:  # tokens after the offered pages are not needed
            del request.tokens[len(offer.page_ids) * self._cache.page_size + 1 :]
        self._fetched[request.request_id] = request
        self.meet(request)
        self.look_up(request, now)
        if request.transfer.load is None:
            self._end_fetch(request)

    def begin_fetches(self, now: float) -> None:
        """Begin the loads of fetched requests whose pages were found; no step may be under way."""
        found, self._found_fetches = self._found_fetches, []
        for load in found:
            request = self._fetched.get(load.request_id)
            if request is not None and request.transfer.load is load:
                self._begin_fetch(request, now)

    def _begin_fetch(self, request: Request, now: float) -> None:
        if not self.has_room(request):
            self._end_fetch(request)
            return
        request.lease = self._cache.acquire(
            request.tokens, namespace=request.namespace, is_first=False
        )
        request.num_computed = request.lease.num_cached_tokens
        self.begin(request, now, 0.0)
        if request.transfer.load is None:
            self._end_fetch(request)

    def _end_fetch(self, request: Request) -> None:
        """End a fetch, and publish the loaded pages."""
        del self._fetched[request.request_id]
        self.leave(request)
        lease, request.lease = request.lease, None
        if lease is not None:
            self._cache.release(lease, request.tokens, request.num_computed)

    # -- before admission -----------------------------------------------------------------------

    def look_up(self, request: Request, now: float) -> None:
        """Look up the pages of a waiting request that are not in the pool.

        Nothing is looked up for fewer than `KVTiers.least_tokens` tokens. A second look-up is made
        only if the pool has lost pages of the request since the first one.
        """
        size, last, offer = self._cache.page_size, request.transfer.load, request.transfer.offer
        if not reads_prefix(request) or not self.tiers.is_open:
            return
        if self._cache.states is not None and not request.cache.write:
            return  # a loaded state must be published, which this request may not do
        first = self._cache.match_len(request.tokens, namespace=request.namespace) // size
        is_known = last is not None and (first >= last.first or not _is_done(last))
        readable = readable_len(request)
        num_tokens = readable // size * size - first * size
        if is_known or num_tokens < self.tiers.least_tokens:
            return
        due = now + (LOOKUP_SECONDS if offer is None else MEETING_SECONDS)
        load = PageLoad(
            request.request_id, request.tokens[: readable + 1], request.namespace, first, due
        )
        load.offer = offer
        self._await(request, load)
        self.look_ups.append(load)
        self.on_order(load)

    def _await(self, request: Request, load: PageLoad) -> None:
        self._awaited[request.request_id] = load
        request.transfer = replace(request.transfer, load=load)

    def _take(self, request: Request) -> PageLoad | None:
        """Return a request's look-up or load, if it has one, and remove it from the request."""
        load = request.transfer.load
        if load is not None:
            request.transfer = replace(request.transfer, load=None)
        return load

    def found(self, load: PageLoad, keys: list[bytes]) -> None:
        """Record the result of a look-up: the keys of the pages found."""
        offer = load.offer
        if offer is not None and offer.is_met and len(keys) < len(offer.page_ids):
            self._cache.transfers.refused["foreign"] += 1
        if not load.is_over:
            load.keys, load.is_found = keys, True
            del self._awaited[load.request_id]
            if load.request_id in self._fetched:
                self._found_fetches.append(load)

    def is_late(self, now: float) -> bool:
        """Whether the next `begin_round` will give up a look-up or a load."""
        return any(each.due <= now for each in self._awaited.values())

    def begin_round(self, now: float) -> None:
        """Give up look-ups and loads that are past their time limit, and begin fetches.

        No step may be under way: a step that was launched ahead may still write KV of a request
        that ended, whose pages are free already.
        """
        self._now = now
        for load in [each for each in self._awaited.values() if each.due <= now]:
            if load.request_id in self._loading:
                self._give_up(self._loading[load.request_id], load)
            else:
                self._end(load)
            if (request := self._fetched.get(load.request_id)) is not None:
                self._end_fetch(request)
        self.begin_fetches(now)

    def _end(self, load: PageLoad) -> None:
        load.is_over = True
        self._awaited.pop(load.request_id, None)
        self._loading.pop(load.request_id, None)
        if not load.is_in_thread:
            self._free_state(load)

    def _free_state(self, load: PageLoad) -> None:
        """Free the slot that was reserved for the state of a load, if there is one."""
        slot, load.state_slot = load.state_slot, None
        if slot is not None:
            self._cache.end_state_load(slot)

    # -- from admission on ----------------------------------------------------------------------

    def begin(self, request: Request, now: float, compute_seconds: float) -> None:
        """Begin to load the pages of a newly admitted request, if that is faster than computing.

        ``compute_seconds``: seconds to compute one token; 0 if unknown, then the pages are loaded.
        """
        self._begin(request, now, compute_seconds)
        if request.transfer.load is None:
            self._leave_offer(request)

    def _begin(self, request: Request, now: float, compute_seconds: float) -> None:
        load = self._take(request)
        if load is None or request.lease is None:
            return
        size, first = self._cache.page_size, request.num_computed // self._cache.page_size
        num_tokens = len(load.keys) * size - request.num_computed
        if num_tokens < self.tiers.least_tokens or not self.tiers.is_open:
            return
        seconds = self.tiers.load_seconds(num_tokens // size + self._num_queued_pages())
        computing = compute_seconds * num_tokens
        if 0 < computing < seconds:
            if now < self._tries_at:
                return
            seconds = computing / LATE
        self._tries_at = now + TRIAL_SECONDS
        if not self._begin_state(load):
            return
        if not self._cache.extend(request.lease, len(load.keys) * size):
            self._free_state(load)
            return
        load.first = first
        load.page_ids = request.lease.page_ids[first : len(load.keys)]
        load.due = now + max(LATE * seconds, LATE_SECONDS * self._num_calls(load))
        self._await(request, load)
        self._loading[request.request_id] = request
        self._order(load)

    def _begin_state(self, load: PageLoad) -> bool:
        """Reserve a slot for the state of a load, if the model has recurrent states.

        Returns False if no slot is free.
        """
        if self._cache.states is None:
            return True
        load.state_slot, load.lacks_state = self._cache.begin_state_load(), True
        load.state_position = len(load.keys) * self._cache.page_size
        return load.state_slot is not None

    def _num_calls(self, load: PageLoad) -> int:
        """Return how long the load's next I/O call may take, as a multiple of a call for pages.

        A call that loads a recurrent state may take as long as several calls that load pages.
        """
        num_pages = self.tiers.num_state_pages if load.lacks_state else 1
        return -(-num_pages // self.tiers.pages_per_call)

    def _num_queued_pages(self) -> int:
        loads = [
            load for each in self._loading.values() if (load := each.transfer.load) is not None
        ]
        num_state_pages = sum(each.lacks_state for each in loads) * self.tiers.num_state_pages
        return num_state_pages + sum(len(each.page_ids) - each.num_loaded for each in loads)

    def _order(self, load: PageLoad) -> None:
        self.loads.append(load)
        self.on_order(load)

    def loaded(self, load: PageLoad, num_asked: int, num_pages: int, now: float) -> None:
        """Record the result of a call of the I/O thread: ``num_pages`` of ``num_asked`` arrived.

        Each call gets a time limit of its own, because the time of all calls may be unknown.
        """
        load.is_in_thread = False
        if load.is_over:
            self._release_ended(load)
            return
        load.num_loaded += num_pages
        if num_pages == num_asked and load.num_loaded < len(load.page_ids):
            seconds = self.tiers.load_seconds(self._num_queued_pages())
            load.due = now + max(LATE * seconds, LATE_SECONDS)
            self._order(load)
            return
        request = self._loading[load.request_id]
        self._keep_loaded(request, load)
        if load.num_loaded < len(load.page_ids):
            request.usage.cache_loss = Eviction("unsound", self._now)
        if request.request_id in self._fetched:
            self._end_fetch(request)
        self.forget(request)

    def state_loaded(self, load: PageLoad, now: float, *, is_loaded: bool) -> None:
        """Record whether a state was loaded completely; then load its pages, or end the load."""
        load.is_in_thread = False
        if load.is_over:
            self._release_ended(load)
            return
        load.lacks_state = False
        if is_loaded:
            seconds = self.tiers.load_seconds(self._num_queued_pages())
            load.due = now + max(LATE * seconds, LATE_SECONDS)
            self._order(load)
            return
        request = self._loading[load.request_id]
        request.usage.cache_loss = Eviction("unsound", self._now)
        self.forget(request)

    def _release_ended(self, load: PageLoad) -> None:
        """Free the slot and the lease of an ended load, which the I/O thread no longer uses."""
        self._free_state(load)
        if (lease := self._leases.pop(load, None)) is not None:
            self._cache.release(lease, load.tokens, 0, keep=False)

    def _keep_loaded(self, request: Request, load: PageLoad) -> None:
        """Count loaded pages as computed, and publish them.

        For a model with recurrent states this is done only if all pages were loaded.
        """
        num_tokens = load.num_loaded * self._cache.page_size
        if not num_tokens:
            return
        if self._cache.states is not None and load.num_loaded < len(load.page_ids):
            return
        request.num_computed += num_tokens
        if request.num_preemptions == 0 and request.request_id not in self._fetched:
            usage = request.usage
            usage.loaded_tokens += num_tokens
            usage.cached_tokens += num_tokens
            usage.cache_loss = self._cache.eviction_log.find(
                request.namespace, request.tokens, request.num_computed
            )
            request.num_tokens_accounted = usage.cached_tokens
            if not request.extras.is_idle_prefill:
                self._cache.num_hits += num_tokens
        ids = set(load.page_ids[: load.num_loaded])
        publish(self._cache, request)
        slot, load.state_slot = load.state_slot, None
        if slot is not None:
            self._cache.end_state_load(slot, request.lease, request.num_computed)
        if request.lease is not None:  # the tree may already have had equal pages of its own
            kept = request.lease.page_ids[load.first : load.first + load.num_loaded]
            self._loaded_pages.extend(each for each in kept if each in ids)

    def take_loaded_pages(self) -> array[int]:
        """Return the ids of the pages that were loaded and kept since the last call."""
        pages, self._loaded_pages = self._loaded_pages, array("q")
        return pages

    def return_loaded_pages(self, page_ids: array[int]) -> None:
        """Put back the loaded pages of a plan that was discarded."""
        self._loaded_pages = page_ids + self._loaded_pages

    def _give_up(self, request: Request, load: PageLoad) -> None:
        """Give up a load, so that the request computes the late pages.

        Pages under I/O stay with the old lease until the I/O thread no longer uses them.
        """
        self.num_late += 1
        self.tiers.note_late()
        lease = request.lease
        if not load.is_in_thread:
            self._keep_loaded(request, load)
        elif lease is not None:
            if request.cache.write:
                self._keep_loaded(request, load)
            wanted = [] if lease.state is None else list(lease.state.wanted)
            self._keep_lease(load, lease)
            request.lease = self._cache.acquire(
                request.tokens,
                namespace=request.namespace,
                limit=cache_limit(request),
                is_first=False,
            )
            request.num_computed = request.lease.num_cached_tokens
            for position, rank in wanted:
                if request.lease.state is not None and position > request.num_computed:
                    request.lease.state.want(position, rank)
        request.usage.cache_loss = Eviction("late", self._now)
        self.forget(request)

    def forget(self, request: Request) -> None:
        """End a request's look-up or load, if any, and its offer, if any."""
        load = self._take(request)
        if load is not None:
            self._end(load)
        self._leave_offer(request)

    def leave(self, request: Request) -> None:
        """End a request's load before the request releases its lease.

        If the I/O thread still writes to its pages, the lease is taken from the request and
        released later.
        """
        load, lease = request.transfer.load, request.lease
        self.forget(request)
        if load is not None and lease is not None and load.is_in_thread:
            self._keep_lease(load, lease)
            request.lease = None

    def _keep_lease(self, load: PageLoad, lease: KVLease) -> None:
        """Keep a lease until the I/O thread's call for its pages ends; free the other pages."""
        num_pages = load.first + load.num_loaded + self.tiers.pages_per_call
        self._cache.free_state(lease)
        self._cache.shrink(lease, num_pages * self._cache.page_size)
        self._leases[load] = lease

    def close(self) -> None:
        """Release all leases; the I/O thread must have made its last call."""
        for request in list(self._fetched.values()):
            self._end_fetch(request)
        for load in list(self._leases):
            self._release_ended(load)


def _is_done(load: PageLoad) -> bool:
    return load.is_found or load.is_over
