"""RequestInbox: passes arrivals and aborts to the engine's loop, and deltas back to callers."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence

from ..errors import DeadlineExceeded, EngineDead
from ..interface.request import Delta, Request, Tenant
from ..scheduling.request_table import PendingArrivals
from ..scheduling.scheduler import Event, Scheduler
from ..telemetry.metrics import EngineMetrics

MIN_RETRY_SECONDS, MAX_RETRY_SECONDS = 1.0, 60.0
NUM_TIMES = 64  # number of recently finished requests from which the rate is computed


class RequestInbox:
    """Arrivals and aborts since the last step, and the streams of all requests.

    Callers of the engine use `accept`, `abort` and `notify`; the engine's loop uses the other
    methods. All calls must be made on one event loop.
    """

    def __init__(self, scheduler: Scheduler, metrics: EngineMetrics) -> None:
        self.streams: dict[str, TokenStream] = {}  # streams of requests that have not ended
        self.wake = asyncio.Event()  # set when the loop has something to do
        self.idle = asyncio.Event()  # set while the engine has no request
        self._scheduler, self._metrics = scheduler, metrics
        self._arrived: list[tuple[Request, float]] = []  # requests with their times of arrival
        self._num_arrived: Counter[Tenant] = Counter()  # number of arrivals by tenant
        self._aborted: list[str] = []
        self._events: list[Event] = []  # events to deliver

        # Times at which the latest requests ended; cleared when the engine is idle.
        self._finished: deque[float] = deque(maxlen=NUM_TIMES)

    @property
    def arrived(self) -> list[Request]:
        """The accepted requests that the scheduler does not have yet."""
        return [request for request, _ in self._arrived]

    def pending_arrivals(self, tenant: Tenant) -> PendingArrivals:
        """Return the numbers of accepted requests that the scheduler does not have yet. O(1).

        They are counted for all tenants together and for ``tenant``.
        """
        return PendingArrivals(len(self._arrived), self._num_arrived[tenant])

    def accept(self, request: Request, now: float) -> TokenStream:
        """Accept a checked request and return its stream."""
        stream = self.streams[request.request_id] = TokenStream(request)
        self._arrived.append((request, now))
        self._num_arrived[request.tenant] += 1
        self._metrics.observe_arrival(request, now)
        self.notify()
        return stream

    def abort(self, request_id: str) -> None:
        """Abort a request; an unknown id is ignored."""
        if request_id in self.streams:
            self._aborted.append(request_id)
            self.notify()

    def notify(self) -> None:
        """Wake the loop for another round."""
        self.idle.clear()
        self.wake.set()

    def retry_after(self) -> float:
        """Return the seconds until the queue is empty if requests end as fast as recently."""
        return retry_seconds(self._finished, len(self._scheduler.waiting) + len(self._arrived))

    def drain(self, now: float) -> None:
        """Pass arrivals and aborts to the scheduler, and end requests past their deadline."""
        arrived, self._arrived = self._arrived, []
        self._num_arrived.clear()
        for request, arrival_time in arrived:
            self._scheduler.add(request, arrival_time)
        aborted, self._aborted = self._aborted, []
        for request_id in aborted:
            self.queue_events(self._scheduler.abort(request_id, now))
        late = self._scheduler.expire(now)
        for _, delta in late:
            if isinstance(delta.error, DeadlineExceeded):
                delta.error.retry_after = self.retry_after()
        self.queue_events(late)

    @property
    def num_undelivered(self) -> int:
        """Number of events that are not delivered yet."""
        return len(self._events)

    def queue_events(self, events: Iterable[Event]) -> None:
        """Queue events for `deliver`."""
        self._events += events

    def deliver(self, now: float) -> None:
        """Push the queued events into their streams."""
        events, self._events = self._events, []
        for request, delta in events:
            self.streams[request.request_id].push(delta)
            self._metrics.observe_delta(request, delta, now)
            if delta.terminal:
                del self.streams[request.request_id]
                # A late abort must not end a later request with the same id.
                self._aborted = [id_ for id_ in self._aborted if id_ != request.request_id]
                self._finished.append(now)

    def mark_idle(self) -> None:
        """Record that no request is left.

        The times of finished requests are dropped, because idle time would lower their rate.
        """
        self.idle.set()
        self._finished.clear()

    def fail_streams(self, error: EngineDead) -> None:
        """End all open streams with ``error``."""
        for stream in self.streams.values():
            stream.push(Delta(error=error))
        self.streams.clear()
        self._arrived.clear()
        self._num_arrived.clear()
        self.idle.set()


def retry_seconds(finished: Sequence[float], num_requests: int) -> float:
    """Return the estimated seconds until ``num_requests`` have finished, from 1 to 60.

    ``finished``: ascending times in seconds at which recent requests ended, which give the rate.
    """
    if len(finished) < 2 or finished[-1] <= finished[0]:
        return MIN_RETRY_SECONDS
    rate = (len(finished) - 1) / (finished[-1] - finished[0])
    return min(MAX_RETRY_SECONDS, max(MIN_RETRY_SECONDS, num_requests / rate))


class TokenStream:
    """Async iterator over the `Delta`s of one request, for one reader.

    The engine never waits for a reader: unread deltas are merged into one. The last delta has a
    finish reason; if the request failed, the iterator raises its error instead.
    """

    def __init__(self, request: Request) -> None:
        self.request = request
        self._slot: Delta | None = None
        self._ended = False  # whether the last delta was pushed

        # The future of a reader that waits for the next delta.
        self._waiter: asyncio.Future[None] | None = None
        self._on_end: Callable[[], None] | None = None

    @property
    def ended(self) -> bool:
        """Whether the request has ended, even if not all deltas were read."""
        return self._ended

    def when_ended(self, call: Callable[[], None]) -> None:
        """Call ``call`` once when the request ends, or now if it has ended already."""
        if self._ended:
            call()
        else:
            self._on_end = call

    def push(self, delta: Delta) -> None:
        """Add a delta for the reader. Only the engine calls this, on the event loop."""
        if self._ended:
            return
        if self._slot is None:
            self._slot = delta
        else:
            self._slot.merge(delta)
        self._ended = delta.terminal
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
        if self._ended and self._on_end is not None:
            self._on_end()

    def __aiter__(self) -> TokenStream:
        return self

    async def __anext__(self) -> Delta:
        while self._slot is None:
            if self._ended:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        delta, self._slot = self._slot, None
        if delta.error is None:
            return delta
        if delta.token_ids:  # return the tokens first, and raise the error at the next call
            self._slot = Delta(error=delta.error)
            delta.error = None
            return delta
        # Several streams may raise the same error, so its traceback would grow each time.
        raise delta.error.with_traceback(None)
