"""Replicas: the `ServingEngine` of a front, which sends requests to connected replicas.

All text and all state of the API are in this process, so the loss of a replica ends no answer:
another replica resumes the request after its output so far, as after a preemption, and generates
the same tokens.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from array import array
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from ....core.engine.crash_dump import stacks, write_report
from ....core.engine.inbox import TokenStream
from ....core.errors import EngineDead, InvalidRequest, Unavailable
from ....core.interface.extras.adapter import salt_of
from ....core.interface.request import Request
from ....core.scheduling.request_table import (
    check_fits,
    check_priority,
    check_token_ids,
    max_len_of,
)
from ....core.telemetry.overview import RecentRequest
from ...types.request_context import session_id, tenant_of
from ...types.results import Body
from ..wire.forms import WireError, ids_form
from ..wire.messages import (
    Answer,
    Audit,
    Beat,
    CacheInfo,
    FlushCache,
    FlushPrefix,
    FromReplica,
    Hello,
    Leaving,
    Metrics,
    Overview,
    Step,
)
from .dispatcher import DeadReplicaError, Dispatcher
from .front_adapters import FrontAdapters
from .front_metrics import FrontMetrics
from .merged import merged_audit, merged_cache, merged_overview
from .questions import ask_all, body_in, bytes_of, number_of
from .replica_link import MAX_REASON, ReplicaLink
from .roster import NO_REPLICA, NOT_RUNNING, RequestRoom, Roster
from .routing import Route, Router

logger = logging.getLogger(__name__)
BEAT_SECONDS = 1.0
METRICS_SECONDS = 2.0  # timeout of a replica's metrics for a scrape
MAX_IMAGE_BYTES = 24 * 2**20  # per request; images and prompt fit into `transport.MAX_MESSAGE`
SHUTTING_DOWN, CLOSED = "the engine is shutting down", "the engine was closed"


class Replicas:
    """A `ServingEngine` over the connected replicas. Belongs to one event loop.

    ``wanted`` replicas must have connected before the first request is served. ``tokenizer`` is the
    hash of the front's own tokenizer. When no replica is left, a request waits for at most
    ``failover_seconds``.
    """

    def __init__(
        self,
        address: str,
        *,
        key: str | None,
        tokenizer: str,
        wanted: int = 1,
        route: Route = Route.KV,
        failover_seconds: float = 30.0,
        dump_dir: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
        beat_seconds: float = BEAT_SECONDS,
    ) -> None:
        self.failure: BaseException | None = None
        self.draining = False
        self.hung = False
        self.metrics = FrontMetrics(self._loads, self._metric_texts)
        self._address, self._key = address, key
        self._dump_dir, self._clock, self._beat_seconds = dump_dir, clock, beat_seconds
        self._roster = Roster(
            tokenizer=tokenizer,
            wanted=wanted,
            clock=clock,
            on_joined=self._joined,
            on_lost=self._lost,
        )
        self._dispatcher = Dispatcher(
            self._roster,
            Router[bytes](route, fingerprint=None),  # replicas are named by peer
            self.metrics,
            failover_seconds=failover_seconds,
            clock=clock,
        )
        self.adapters = FrontAdapters(self._roster, self._dispatcher.serve_waiting)
        self._task: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None

    # -- state ----------------------------------------------------------------------------------

    @property
    def alive(self) -> bool:
        """Whether the front is running, with or without replicas."""
        return self._task is not None and not self._task.done() and not self._task.cancelling()

    @property
    def readiness(self) -> str | None:
        """Reason why new requests are refused now, or None."""
        if self.draining:
            return SHUTTING_DOWN
        if not self.alive:
            return NOT_RUNNING
        if (missing := self._roster.missing) is not None:
            return missing
        reasons = [each.unready for each in self._roster.links.values()]
        return None if None in reasons else reasons[0]

    @property
    def now(self) -> float:
        """Seconds on the front's clock."""
        return self._clock()

    @property
    def address(self) -> str:
        """The address for replicas; available after `start`."""
        return self._roster.socket.address

    @property
    def limits(self) -> RequestRoom:
        """Numbers of requests that all replicas accept; if none is connected, the last numbers."""
        return self._roster.room

    @property
    def page_size(self) -> int:
        """Tokens per page of the prefix cache; available after the first replica's greeting."""
        return self._roster.greeting.page_size

    @property
    def num_pages(self) -> int:
        """Number of pages of all KV pools."""
        return sum(each.hello.num_pages for each in self._roster.links.values())

    def describe(self) -> list[Body]:
        """Return a row for each replica."""
        now, owed = self._clock(), self._dispatcher.owed
        return [each.describe(now, owed(each)) for each in self._roster.links.values()]

    # -- requests -------------------------------------------------------------------------------

    def submit(self, request: Request) -> TokenStream:
        """Accept a request and return the stream of its answer.

        Raises `EngineDead`, `Unavailable`, `QueueFull`, `PromptTooLong` and `InvalidRequest`.
        """
        if self.draining or not self.alive:
            raise EngineDead(SHUTTING_DOWN if self.draining else NOT_RUNNING)
        if (missing := self._roster.missing) is not None:
            raise Unavailable(missing)
        self.check(request)
        request.max_len = max_len_of(request, self._roster.greeting.max_model_len)
        return self._dispatcher.submit(request, _session_of(request))

    def check(self, request: Request) -> None:
        """Raise an error for a request that `submit` would refuse even with an empty queue.

        Raises `PromptTooLong` and `InvalidRequest`.
        """
        hello = self._roster.greeting
        check_fits(request, hello.max_model_len)
        check_token_ids(request, hello.vocab_size)
        check_priority(request, self._roster.max_priority)
        if sum(image.num_bytes for image in request.extras.images) > MAX_IMAGE_BYTES:
            message = (
                f"the images take more than {MAX_IMAGE_BYTES} bytes when sent to a replica: "
                "send fewer or smaller images, or set their detail to low"
            )
            raise InvalidRequest(message, param="messages")

    def abort(self, request_id: str) -> None:
        """Abort a request between two steps; unknown and finished ones are ignored."""
        self._dispatcher.abort(request_id)

    def expect_turn(self, session: str, label: str, namespace: str | None = None) -> None:
        """Tell the replica that served a session's latest request what the session waits for."""
        self._dispatcher.sessions.expect(session, label, namespace)

    # -- messages of replicas -------------------------------------------------------------------

    async def _read(self) -> None:
        while True:
            peer, message = await self._roster.socket.receive()
            if message is None:
                self._roster.disconnected(peer)
            elif (link := self._roster.links.get(peer)) is not None:
                self._hear(link, message)
            else:
                self._roster.greet(peer, message)

    def _hear(self, link: ReplicaLink, message: FromReplica | WireError) -> None:
        try:
            link.num_silent_beats = 0
            self._follow(link, message)
        except DeadReplicaError as error:
            self._roster.lose(link, "died", str(error))
        except WireError as error:
            self._roster.lose(link, "wrong", str(error))

    def _follow(self, link: ReplicaLink, message: FromReplica | WireError) -> None:
        match message:
            case Step():
                self._dispatcher.take_step(link, message)
            case Answer():
                link.answered(message)
            case Beat():
                link.load, link.unready = message.load or link.load, message.unready
            case Leaving(has_failed=True):
                why = f"{message.reason[:MAX_REASON]!r}"
                raise DeadReplicaError(f"the replica's engine ended: {why}")
            case Leaving():
                why = f"{message.reason[:MAX_REASON]!r}"
                self._roster.lose(link, "left", f"the replica left: {why}")
            case Hello():
                raise WireError("the replica sent a second greeting")
            case WireError():
                raise message

    def _joined(self, link: ReplicaLink) -> None:
        self.adapters.equip(link)
        self._dispatcher.add(link)

    def _lost(self, link: ReplicaLink, cause: str) -> None:
        self.metrics.lost(cause)
        self._dispatcher.remove(link)

    async def _beat_on(self) -> None:
        while True:
            await asyncio.sleep(self._beat_seconds)
            self.beat()

    def beat(self) -> None:
        """Send a beat to all replicas, remove silent replicas, and place waiting requests.

        Called once per second.
        """
        self._roster.beat()
        self._dispatcher.serve_waiting()

    # -- life -----------------------------------------------------------------------------------

    async def start(self) -> None:
        """Listen for replicas. Raises `EngineDead` after `close`, and errors of `Roster.open`."""
        if self.draining:
            raise EngineDead(CLOSED)
        if self._task is None:
            self._roster.open(self._address, self._key)
            self._task = asyncio.create_task(self._run(), name="foretoken-replicas")

    async def first(self) -> Hello:
        """Wait for the first replica's greeting and return it.

        Raises `InvalidRequest` if the replica has another tokenizer.
        """
        return await self._roster.when_first()

    async def complete(self) -> None:
        """Wait until all wanted replicas have connected, or until `close`."""
        await self._roster.complete.wait()

    async def _run(self) -> None:
        error = EngineDead(CLOSED)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._read())
                group.create_task(self._beat_on())
        except asyncio.CancelledError:
            raise
        except BaseException as failure:
            logger.critical("the front failed and stops", exc_info=failure)
            self.failure, error = failure, EngineDead("the front failed")
        finally:
            self._dispatcher.end_all(None if self.draining else error)

    async def close(self, *, drain_seconds: float = 0.0) -> None:
        """Refuse new requests, wait ``drain_seconds`` for running ones, and abort the rest.

        Idempotent.
        """
        self.draining = True
        self._roster.complete.set()
        if self._closing is None:
            self._closing = asyncio.create_task(self._close(drain_seconds))
        await asyncio.shield(self._closing)

    async def _close(self, drain_seconds: float) -> None:
        if self.alive and drain_seconds > 0:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._dispatcher.idle.wait(), drain_seconds)
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        self.adapters.close()
        self._roster.close()

    # -- calls to all replicas ------------------------------------------------------------------

    async def flush_cache(self, *namespaces: str | None) -> int:
        """Drop unused cached prefixes on all replicas; return the number of freed pages."""
        question = FlushCache(namespaces=list(namespaces))
        return sum((await ask_all(self._roster, question, number_of)).values())

    async def flush_prefix(self, tokens: array[int], namespace: str | None = None) -> int:
        """Drop cached prefixes that begin with ``tokens``; return the number of freed pages.

        All replicas drop them. Raises `InvalidRequest` for tokens that do not fill a page.
        """
        question = FlushPrefix(tokens=ids_form(tokens), namespace=namespace)
        return sum((await ask_all(self._roster, question, number_of)).values())

    async def end_session(self, session: str) -> bool:
        """Unpin a session's pages on all replicas; return whether any had pages of it."""
        live = [each.request for each in self._dispatcher.live.values()]
        return await self._dispatcher.sessions.end(session, live)

    async def room_for(self, request: Request) -> int:
        """Return how many pages no pin and no request holds on a new request's replica.

        The result is 0 if no replica has room for the request, or if the replica does not answer.
        """
        link = self._dispatcher.replica_for(request, _session_of(request))
        links = [] if link is None else [link]
        found = await ask_all(self._roster, CacheInfo(), body_in, links=links, skips=True)
        pools: Iterable[Mapping[str, Any]] = found.values()
        return sum(each.get("free_pages", 0) + each.get("evictable_pages", 0) for each in pools)

    async def cache_info(self, namespace: str | None = None) -> Body:
        """Return occupancy and hit counters of each replica, and their sums."""
        question = CacheInfo(namespace=namespace)
        found = await ask_all(self._roster, question, body_in, skips=True)
        each = [{"number": link.number, "pid": link.hello.pid, **found[link]} for link in found]
        return {**merged_cache(self.page_size, list(found.values())), "replicas": each}

    async def overview(self, finished: Iterable[RecentRequest] = ()) -> Body:  # noqa: ARG002
        """Return counts and state merged over all replicas, and a row for each replica.

        Each request has the number of its replica. ``finished`` is ignored: each replica remembers
        its own finished requests.
        """
        found = await ask_all(self._roster, Overview(), body_in, skips=True)
        views = {link.number: body for link, body in found.items()}
        return {**merged_overview(views), "replicas": self.describe()}

    async def audit(self) -> Body:
        """Audit all replicas; "ok" if all are. Raises `EngineDead` and `Unavailable`."""
        if not self.alive:
            raise EngineDead(NOT_RUNNING)
        found = await ask_all(self._roster, Audit(), body_in)
        if not found:
            raise Unavailable(NO_REPLICA)
        return merged_audit({link.number: body for link, body in found.items()})

    async def _metric_texts(self) -> Mapping[str, bytes]:
        found = await ask_all(
            self._roster, Metrics(), bytes_of, seconds=METRICS_SECONDS, skips=True
        )
        return {str(link.number): text for link, text in found.items()}

    # -- reports --------------------------------------------------------------------------------

    def _loads(self) -> Mapping[str, tuple[int, int]]:
        return {
            str(each.number): (self._dispatcher.owed(each), len(each.requests))
            for each in self._roster.links.values()
        }

    def report(self, reason: str) -> Body:
        """Return a report of the front. Any thread may call this, even if the loop is stuck."""
        now = self._clock()
        return {
            "reason": reason,
            "now": now,
            "pid": os.getpid(),
            "failure": None if self.failure is None else type(self.failure).__name__,
            "replicas": [each.describe(now, 0) for each in list(self._roster.links.values())],
            "requests": [each.describe(now) for each in list(self._dispatcher.live.values())],
            "threads": stacks(),
        }

    def dump(self, report: Body) -> None:
        """Write a report to the dump folder, if there is one."""
        if self._dump_dir is not None:
            write_report(report, self._dump_dir)


def _session_of(request: Request) -> str | None:
    """Return the session or tenant whose requests share a replica with the present request.

    The tenant is not the request's: a request in idle time has none, and belongs to its session.
    """
    return session_id() or tenant_of(salt_of(request.namespace))
