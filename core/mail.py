"""Mail: between callers and an engine's loop, in both directions."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable

from .admission import Ahead
from .errors import DeadlineExceeded, EngineDead
from .metrics import EngineMetrics
from .rate import FinishRate
from .request import Delta, Request
from .scheduler import Event, Scheduler
from .stream import TokenStream
from .tenants import Tenant


class Mail:
    """What callers left since the last step, and the streams on which they are told.

    Callers call `take`, `abort` and `stir`, the engine's loop the rest; all on one event loop.
    """

    def __init__(self, scheduler: Scheduler, metrics: EngineMetrics) -> None:
        self.streams: dict[str, TokenStream] = {}  # of requests that have not ended
        self.wake = asyncio.Event()  # something came
        self.idle = asyncio.Event()  # nothing is to be done
        self._scheduler, self._metrics = scheduler, metrics
        self._arrived: list[tuple[Request, float]] = []  # with the time of arrival
        self._num_arrived: Counter[Tenant] = Counter()  # of each tenant
        self._aborted: list[str] = []
        self._events: list[Event] = []  # that nobody was told of yet
        self._rate = FinishRate()

    def ahead_of(self, tenant: Tenant) -> Ahead:
        """Requests that the scheduler does not know yet. O(1)."""
        return Ahead(len(self._arrived), self._num_arrived[tenant])

    def take(self, request: Request, now: float) -> TokenStream:
        """A request that may be served."""
        stream = self.streams[request.request_id] = TokenStream(request)
        self._arrived.append((request, now))
        self._num_arrived[request.tenant] += 1
        self._metrics.observe_arrival(request, now)
        self.stir()
        return stream

    def abort(self, request_id: str) -> None:
        """Somebody wants a request to end; unknown ones have."""
        if request_id in self.streams:
            self._aborted.append(request_id)
            self.stir()

    def stir(self) -> None:
        """Have the loop go round once more."""
        self.idle.clear()
        self.wake.set()

    def retry_after(self) -> float:
        """Seconds until the queue has gone, at the rate at which requests finished lately."""
        return self._rate.seconds_for(len(self._scheduler.waiting) + len(self._arrived))

    def read(self, now: float) -> None:
        """Pass on what came; end what is over."""
        arrived, self._arrived = self._arrived, []
        self._num_arrived.clear()
        for request, arrival_time in arrived:
            self._scheduler.add(request, arrival_time)
        aborted, self._aborted = self._aborted, []
        for request_id in aborted:
            self.tell(self._scheduler.abort(request_id, now))
        late = self._scheduler.expire(now)
        for _, delta in late:
            if isinstance(delta.error, DeadlineExceeded):
                delta.error.retry_after = self.retry_after()
        self.tell(late)

    @property
    def num_untold(self) -> int:
        """Events that nobody was told of yet."""
        return len(self._events)

    def tell(self, events: Iterable[Event]) -> None:
        """To be delivered when the model computes."""
        self._events += events

    def deliver(self, now: float) -> None:
        """Put what is to be told into the streams."""
        events, self._events = self._events, []
        for request, delta in events:
            self.streams[request.request_id].push(delta)
            self._metrics.observe_delta(request, delta, now)
            if delta.terminal:
                del self.streams[request.request_id]
                if self._aborted:  # else it would end the next request of that id
                    self._aborted = [id_ for id_ in self._aborted if id_ != request.request_id]
                self._rate.note(now)

    def rest(self) -> None:
        """Nothing runs and nobody waits."""
        self.idle.set()
        self._rate.clear()

    def end(self, error: EngineDead) -> None:
        """Whoever was not told of an end is told of this one."""
        for stream in self.streams.values():
            stream.push(Delta(error=error))
        self.streams.clear()
        self._arrived.clear()
        self._num_arrived.clear()
        self.idle.set()
