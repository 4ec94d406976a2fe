"""Dispatcher: sends requests to replicas, and moves them when a replica is lost."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from msgspec.structs import replace

from ....core.engine.inbox import NUM_TIMES, TokenStream, retry_seconds
from ....core.errors import (
    DeadlineExceeded,
    EngineDead,
    InvalidRequest,
    QueueFull,
    Unavailable,
)
from ....core.interface.extras.adapter import adapter_of
from ....core.interface.request import Delta, FinishReason, Request, Usage
from ....core.scheduling.output_processor import late_end
from ..wire.forms import WireError
from ..wire.messages import (
    KEY_BYTES,
    Abort,
    Step,
    drop_of,
    fetch_of,
    page_keys,
    prefill_of,
    submit_of,
)
from .front_metrics import FrontMetrics
from .front_sessions import FrontSessions
from .live_request import MAX_LOSSES, HeldPrompt, LiveRequest, aborted
from .replica_link import MAX_REASON, ReplicaLink
from .roster import NO_REPLICA, Roster
from .routing import Choice, Router

PREFILL_TOKENS = 256  # uncached prompt tokens from which a prefill replica computes a prompt


class DeadReplicaError(WireError):
    """Raised if a message from a replica shows that the replica no longer serves."""


class Dispatcher:
    """The live requests of a front, and the replica of each. Belongs to one event loop.

    A request whose replica was lost waits until another has room. While no replica is connected, it
    waits for at most ``failover_seconds``. A new request never waits: if no replica has room, it is
    refused.
    """

    def __init__(
        self,
        roster: Roster,
        router: Router[bytes],
        metrics: FrontMetrics,
        *,
        failover_seconds: float,
        clock: Callable[[], float],
    ) -> None:
        self.live: dict[str, LiveRequest] = {}  # all requests that have not ended
        self.idle = asyncio.Event()  # set while there is no live request
        self.idle.set()
        self.sessions = FrontSessions(roster)
        self._roster, self._router, self._metrics = roster, router, metrics
        self._failover_seconds, self._clock = failover_seconds, clock
        self._places: dict[str, ReplicaLink] = {}  # replica of each request that has one
        self._waiting: dict[str, LiveRequest] = {}  # requests without a replica
        self._finished: deque[float] = deque(maxlen=NUM_TIMES)  # end times since `idle` was set

    def owed(self, link: ReplicaLink) -> int:
        """Return the number of tokens left to compute for a replica's requests."""
        return self._router.owed(link.peer)

    # -- from callers ---------------------------------------------------------------------------

    def submit(self, request: Request, session: str | None) -> TokenStream:
        """Send a new request to a replica, and return its stream.

        Raises `InvalidRequest`, `QueueFull`, and `Unavailable` if no replica is connected or none
        has the request's adapter.
        """
        if request.request_id in self.live:
            raise InvalidRequest(f"request_id {request.request_id} is in use", param="request_id")
        now = self._clock()
        live = LiveRequest(request, session, now)
        if self._waiting or not self._place(live, now):
            if not self._roster.links:
                raise Unavailable(NO_REPLICA)
            self._check_adapter(request)
            raise self._queue_full()
        self.live[request.request_id] = live
        self.idle.clear()
        self._metrics.observe_arrival(request, now)
        return live.stream

    def _check_adapter(self, request: Request) -> None:
        links = self._roster.links.values()
        name = adapter_of(request.namespace)
        if name is not None and not any(request.extras.adapter in link.adapters for link in links):
            raise Unavailable(f"no connected replica has loaded the adapter {name}; retry later")

    def replica_for(self, request: Request, session: str | None) -> ReplicaLink | None:
        """Return the replica that a new request would be sent to now; None if none has room."""
        now = self._clock()
        choice = self._choose(LiveRequest(request, session, now), now, is_sent=False)
        return None if choice is None else self._roster.links[choice.replica]

    def abort(self, request_id: str) -> None:
        """Abort a request between two steps; unknown and finished ones are ignored."""
        live = self.live.get(request_id)
        if live is None:
            return
        live.is_aborted = True
        if (link := self._places.get(request_id)) is None:
            self._finish(live, aborted())
        else:
            self._roster.send(link, Abort(request_id=request_id))

    def end_all(self, error: EngineDead | None) -> None:
        """End all requests with an error, or as aborted if it is None."""
        for live in list(self.live.values()):
            self._finish(live, aborted() if error is None else Delta(error=error))

    # -- from replicas --------------------------------------------------------------------------

    def add(self, link: ReplicaLink) -> None:
        """Send requests to a replica from now on, beginning with the waiting ones."""
        hello = link.hello
        self._router.join(link.peer, page_size=hello.page_size, fingerprint=hello.fingerprint)
        self.serve_waiting()

    def remove(self, link: ReplicaLink) -> None:
        """Move the requests of a lost replica."""
        lives = list(link.requests.values())
        for live in lives:
            live.is_prefilling = False
            del self._places[live.request.request_id]
            self._router.end(live.request.request_id)
        link.requests.clear()
        self._forget_reader(link.peer)
        self._router.leave(link.peer)
        for live in lives:
            self._move(live)

    def take_step(self, link: ReplicaLink, step: Step) -> None:
        """Process a step's page news and deltas.

        Raises `WireError` for values that no engine sends.
        """
        link.load = step.load
        for news in step.pages:
            if len(news.keys) > link.hello.num_pages * KEY_BYTES:
                raise WireError(f"the replica reports more than {link.hello.num_pages} KV pages")
            change = self._router.stored if news.is_stored else self._router.dropped
            change(link.peer, page_keys(news))
        if self._router.num_pages(link.peer) > link.hello.num_pages:
            raise WireError(f"the replica reports more than {link.hello.num_pages} KV pages")
        now = self._clock()
        for request_id, delta in step.deltas:
            live = link.request_of(request_id)
            if live is not None and live.is_prefilling:
                self._take_prefill(live, delta, step.handed.get(request_id), now)
            elif live is not None:
                link.check_tokens(delta, live)
                self._take_delta(link, live, delta, step.usages.get(request_id), now)
        for request_id, handed in step.handed.items():
            live = link.requests.get(request_id)
            if live is not None and live.is_prefilling:
                self._take_part(live, HeldPrompt(handed, link.peer, drop_of(handed)), now)
        if step.deltas:
            self._metrics.notify.observe_replica_step(link.number)

    def _take_delta(
        self, link: ReplicaLink, live: LiveRequest, delta: Delta, usage: Usage | None, now: float
    ) -> None:
        request = live.request
        _check_lives(live, delta)
        was_terminal, is_first = delta.terminal, delta.token_ids and not request.num_output
        live.take(delta, usage, now)
        if delta.terminal and not was_terminal:
            self.abort(request.request_id)
        if delta.terminal:
            self._end(live, now)
        elif is_first:
            self._router.progress(request.request_id, len(request.tokens))
        self._deliver(live, delta, now, replica=link.number)

    def _take_prefill(
        self, live: LiveRequest, delta: Delta, handed: bytes | None, now: float
    ) -> None:
        """Process a delta of a request whose prompt is computed for another replica.

        After the last delta, the request goes to the replica that generates the answer, unless it
        was aborted. Tokens in the delta are ignored: the other replica samples the same ones.
        """
        _check_lives(live, delta)
        if not delta.terminal:
            return
        request_id = live.request.request_id
        holder = self._places[request_id]
        held = None if handed is None else HeldPrompt(handed, holder.peer, drop_of(handed))
        del self._places[request_id]
        holder.forget(request_id)
        self._router.end(request_id)
        live.is_prefilling, live.held, live.waits_since = False, held, now
        if live.is_aborted:
            self._finish(live, aborted())
            return
        self._waiting[request_id] = live
        self._serve_one(live, now)
        if self._waiting:  # a replica may have room for them now
            asyncio.get_running_loop().call_soon(self.serve_waiting)

    # -- parts of prompts -----------------------------------------------------------------------

    def _take_part(self, live: LiveRequest, part: HeldPrompt, now: float) -> None:
        """Let the replica that will generate the answer read the prompt's pages computed so far.

        It later finds these pages in its own prefix cache, and reads only the missing ones.
        """
        links = self._roster.links
        if live.reader is None and not live.is_aborted:
            choice = self._choose(live, now, is_sent=False)
            if choice is not None and links[choice.replica].role in ("decode", "both"):
                live.reader = choice.replica
        reader = None if live.reader is None else links.get(live.reader)
        live.part = part
        if reader is None:
            self._free(part)
            return
        page_size = reader.hello.page_size
        if not self._roster.send(
            reader, fetch_of(live.request, part.transfer, page_size=page_size)
        ):
            self._free(part)

    def _forget_reader(self, peer: bytes) -> None:
        """Free the KV pages of prompts that other replicas hold for a replica that is lost."""
        for live in self.live.values():
            if live.reader == peer:
                live.reader = None
                if live.part is not None:
                    self._free(live.part)

    def _free(self, held: HeldPrompt) -> None:
        """Tell the holder to free pages that no replica reads; it ignores pages already freed."""
        if held.holder in self._roster.links:
            # `Roster.send` is not used, since it may remove a replica; `Roster.beat` will do so.
            self._roster.socket.send(held.holder, held.drop)

    # -- placing a request ----------------------------------------------------------------------

    def _place(self, live: LiveRequest, now: float) -> bool:
        """Send a request to a replica; return False if none has room."""
        request = live.request
        if self._place_prompt(live, now):
            return True
        while (choice := self._choose(live, now)) is not None:
            link = self._roster.links[choice.replica]
            submit = submit_of(request, elapsed=live.elapsed(now))
            held = live.held if link.role in ("decode", "both") else None
            if held is not None:
                submit = replace(submit, transfer=held.transfer)
            if not self._roster.send(link, submit):
                continue
            if held is not None:
                live.held = None  # the replica frees the pages when it has read them
            self._drop_prompt(live)
            live.sent(now)
            self.sessions.placed(request, link)
            self._note_place(live, link, choice)
            self._metrics.observe_place(request, choice.hit_tokens)
            return True
        return False

    def _drop_prompt(self, live: LiveRequest) -> None:
        """Free the held pages of a prompt, if there are any."""
        held, live.held = live.held, None
        if held is not None:
            self._free(held)

    def _note_place(self, live: LiveRequest, link: ReplicaLink, choice: Choice[bytes]) -> None:
        request_id = live.request.request_id
        link.requests[request_id] = live
        self._places[request_id] = link
        self._router.begin(request_id, choice)

    def _place_prompt(self, live: LiveRequest, now: float) -> bool:
        """Send the prompt of a request to a prefill replica; return False if it was not sent.

        The replica that generates the answer is chosen after the prompt has been computed.
        """
        links = self._roster.links
        for_prompts = {
            peer
            for peer, each in links.items()
            if each.role == "prefill" and each.unready is None and each.takes(live.request)
        }
        if not (for_prompts and live.may_be_prefilled):
            return False
        choice = self._choose(live, now, is_sent=False)
        if choice is None or links[choice.replica].role not in ("decode", "both"):
            return False
        if choice.num_tokens - choice.hit_tokens < PREFILL_TOKENS:
            return False
        request = live.request
        choice = self._router.choose(
            request.tokens,
            request.namespace,
            session=live.session,
            now=now,
            excluded=links.keys() - for_prompts,
        )
        live.was_prefilled = True
        message = prefill_of(request, elapsed=live.elapsed(now))
        if choice is None or not self._roster.send(links[choice.replica], message):
            return False
        live.is_prefilling = True
        self._note_place(live, links[choice.replica], choice)
        return True

    def _choose(
        self, live: LiveRequest, now: float, *, is_sent: bool = True
    ) -> Choice[bytes] | None:
        """Return the replica for a request: a ready one, else any with room, or None."""
        links = self._roster.links
        full = {peer for peer, each in links.items() if not each.takes(live.request)}
        for_prompts = {peer for peer, each in links.items() if each.role == "prefill"}
        # Prefill replicas compute whole requests only if there are no other replicas.
        if len(for_prompts) < len(links):
            full |= for_prompts
        unready = {peer for peer, each in links.items() if each.unready is not None}
        for excluded in (full | unready, full) if unready else (full,):
            choice = self._router.choose(
                live.request.tokens,
                live.request.namespace,
                session=live.session,
                cache=live.request.cache,
                now=now,
                excluded=excluded,
                is_sent=is_sent,
                is_idle_prefill=live.request.extras.is_idle_prefill,
            )
            if choice is not None:
                return choice
        return None

    def _move(self, live: LiveRequest) -> None:
        if live.is_aborted:
            self._finish(live, aborted())
            return
        now = self._clock()
        live.lose(now)
        if live.request.extras.is_idle_prefill:  # the pages before its own are lost, too
            self._finish(live, Delta(error=EngineDead("the replica of a prompt was lost")))
            return
        if live.num_losses >= MAX_LOSSES:
            message = f"the request failed: {MAX_LOSSES} replicas were lost while serving it"
            self._finish(live, Delta(error=EngineDead(message)))
            return
        self._metrics.moved.inc()
        self._waiting[live.request.request_id] = live
        self._serve_one(live, now)

    def serve_waiting(self) -> None:
        """Send waiting requests to replicas, and end those that waited too long."""
        now = self._clock()
        for live in list(self._waiting.values()):
            if live.request.request_id in self._waiting:  # else the request has ended meanwhile
                self._serve_one(live, now)

    def _serve_one(self, live: LiveRequest, now: float) -> None:
        if live.is_late(now):
            self._finish(live, late_end(live.request))
        elif self._place(live, now):
            self._waiting.pop(live.request.request_id, None)
        elif not self._roster.links and now - live.waits_since >= self._failover_seconds:
            message = f"no replica connected within {self._failover_seconds:g} s"
            self._finish(live, Delta(error=Unavailable(message)))

    # -- the end of a request -------------------------------------------------------------------

    def _queue_full(self) -> QueueFull:
        num_waiting = max(0, len(self.live) - self._roster.room.max_running)
        full = QueueFull(f"the queue is full: {num_waiting} requests are waiting")
        full.retry_after = retry_seconds(self._finished, num_waiting)
        return full

    def _finish(self, live: LiveRequest, delta: Delta) -> None:
        """End a request with a delta made by the front, not by a replica."""
        now = self._clock()
        live.request.usage.total_time = live.elapsed(now)
        if isinstance(delta.error, DeadlineExceeded):
            delta.error.retry_after = self._queue_full().retry_after
        self._end(live, now)
        self._deliver(live, delta, now)

    def _end(self, live: LiveRequest, now: float) -> None:
        """Remove a request from all tables."""
        request_id = live.request.request_id
        del self.live[request_id]
        self._waiting.pop(request_id, None)
        self._finished.append(now)
        self._drop_prompt(live)
        self.sessions.ended(live.request)
        if (link := self._places.pop(request_id, None)) is not None:
            link.forget(request_id)
            self._router.end(request_id)
        if self._waiting:  # a replica may have room for them now
            asyncio.get_running_loop().call_soon(self.serve_waiting)
        elif not self.live:
            self.idle.set()
            self._finished.clear()

    def _deliver(
        self, live: LiveRequest, delta: Delta, now: float, *, replica: int | None = None
    ) -> None:
        live.stream.push(delta)
        self._metrics.observe_delta(live.request, delta, now, replica=replica)


def _check_lives(live: LiveRequest, delta: Delta) -> None:
    """Raise `DeadReplicaError` for a delta that an engine sends only when it stops."""
    if isinstance(delta.error, EngineDead):
        raise DeadReplicaError(f"the replica's engine ended: {str(delta.error)[:MAX_REASON]!r}")
    is_abort = delta.finish_reason is FinishReason.ABORT and delta.stop_reason is None
    if is_abort and not live.is_aborted:
        raise DeadReplicaError("the replica aborted a request that the front did not abort")
