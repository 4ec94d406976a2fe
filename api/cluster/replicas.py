"""Replicas: the engine of a front. Others compute: they dial in, and requests go to them.

It is a `ServingEngine`. All text and all state of the API are in this process, so a replica that
is lost costs no answer: a request with its output so far is what a preempted request is already,
and another replica goes on behind it with the same tokens.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import time
from array import array
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from ...core.engine.crash_dump import stacks, write_report
from ...core.engine.inbox import NUM_TIMES, TokenStream, retry_seconds
from ...core.errors import DeadlineExceeded, EngineDead, ForetokenError, InvalidRequest, QueueFull
from ...core.interface.request import Delta, FinishReason, Request
from ...core.scheduling.output_processor import late_end
from ...core.scheduling.request_table import check_fits, check_priority, check_token_ids
from ...core.telemetry.overview import RecentRequest
from ..types.request_context import session_id
from ..types.results import Body
from .forms import DeltaForm, UsageForm, WireError, delta_of, ids_form
from .front_metrics import FrontMetrics
from .front_requests import MAX_LOSSES, LiveRequest, aborted
from .merged import merged_audit, merged_cache, merged_overview
from .replica_link import (
    BEAT_SECONDS,
    CALL_SECONDS,
    MAX_REASON,
    MAX_SILENT_BEATS,
    ReplicaLink,
    UnfitError,
    body_in,
    bytes_of,
    check_same_model,
    number_of,
    same_bits,
)
from .routing import Choice, Route, Router
from .wire import (
    KEY_BYTES,
    Abort,
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
    Question,
    Step,
    body_of,
    page_keys,
    submit_of,
)

if TYPE_CHECKING:
    from .transport import FrontSocket

logger = logging.getLogger(__name__)
METRICS_SECONDS = 2.0  # that a scrape waits for a replica's metrics
REFUSAL_SECONDS = 10.0  # in which a refusal that is repeated is not logged again
SHUTTING_DOWN, CLOSED = "the engine is shutting down", "the engine was closed"
NOT_RUNNING, NO_REPLICA = "the engine is not running", "no replica is there"
T = TypeVar("T")


class DeadReplicaError(WireError):
    """A replica that does not serve any longer, by its own messages."""


@dataclass(frozen=True, slots=True)
class RequestRoom:
    """How many requests all replicas accept together."""

    max_running: int
    max_queued: int


class Replicas:
    """A `ServingEngine` over the replicas that dial in. Belongs to one event loop.

    ``wanted`` replicas must have come before the first request is served; ``tokenizer`` is the
    hash of the front's own. Raises `InvalidRequest` for an address that cannot be used.
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
        self._address, self._key, self._tokenizer = address, key, tokenizer
        self._wanted, self._failover_seconds = wanted, failover_seconds
        self._dump_dir, self._clock, self._beat_seconds = dump_dir, clock, beat_seconds
        self._router = Router[bytes](route, fingerprint=None)  # by peer
        self._links: dict[bytes, ReplicaLink] = {}  # by peer, in the order of arrival
        self._logged_refusal, self._refused_at = "", -math.inf  # the last one that was logged
        self._num_joined = 0
        self._complete = asyncio.Event()  # the wanted ones were all there once
        self._first: asyncio.Future[Hello] | None = None  # the greeting that all must equal
        self._max_priority = math.inf
        self._has_warned = False
        self._room = RequestRoom(0, 0)  # of the last replicas that were there
        self._live: dict[str, LiveRequest] = {}  # all requests that have not ended
        self._places: dict[str, ReplicaLink] = {}  # by request, where one has it
        self._waiting: dict[str, LiveRequest] = {}  # those that no replica has
        self._finished: deque[float] = deque(maxlen=NUM_TIMES)  # times, without a pause between
        self._idle = asyncio.Event()
        self._idle.set()
        self._socket: FrontSocket | None = None
        self._task: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None

    # -- its state ------------------------------------------------------------------------------

    @property
    def alive(self) -> bool:
        """Whether it serves, with replicas or without."""
        return self._task is not None and not self._task.done() and not self._task.cancelling()

    @property
    def readiness(self) -> str | None:
        """Why it cannot take new requests now; None if it can."""
        if (reason := self._refusal) is not None:
            return reason
        reasons = [each.unready for each in self._links.values()]
        return None if None in reasons else reasons[0]

    @property
    def _refusal(self) -> str | None:
        if self.draining:
            return SHUTTING_DOWN
        if not self.alive:
            return NOT_RUNNING
        if not self._complete.is_set():
            return f"waiting for replicas: {len(self._links)} of {self._wanted} are there"
        return None if self._links else NO_REPLICA

    @property
    def now(self) -> float:
        """Seconds on the front's clock."""
        return self._clock()

    @property
    def address(self) -> str:
        """The address at which replicas dial in; only after `start`."""
        return self._open_socket.address

    @property
    def limits(self) -> RequestRoom:
        """How many requests all replicas accept; without any, the last ones did."""
        return self._room

    @property
    def page_size(self) -> int:
        """Tokens of a page of the prefix cache; only after the first replica came."""
        return self._first_hello.page_size

    @property
    def num_pages(self) -> int:
        """Pages of all KV pools."""
        return sum(each.hello.num_pages for each in self._links.values())

    def describe(self) -> list[Body]:
        """A row for each replica."""
        now = self._clock()
        return [each.describe(now, self._router.owed(each.peer)) for each in self._links.values()]

    @property
    def _open_socket(self) -> FrontSocket:
        if self._socket is None:
            raise EngineDead(NOT_RUNNING)
        return self._socket

    @property
    def _first_hello(self) -> Hello:
        if self._first is None or not self._first.done():
            raise EngineDead(NO_REPLICA)
        return self._first.result()

    # -- requests -------------------------------------------------------------------------------

    def submit(self, request: Request) -> TokenStream:
        """Accept a request; its answer arrives on the stream.

        Raises `EngineDead`, `QueueFull`, `PromptTooLong` and `InvalidRequest`.
        """
        if (refusal := self._refusal) is not None:
            raise EngineDead(refusal)
        if request.request_id in self._live:
            raise InvalidRequest(f"request_id {request.request_id} is in use", param="request_id")
        self.check(request)
        now = self._clock()
        most = self._first_hello.max_model_len
        wanted = request.sampling.params.max_tokens
        request.max_len = most if wanted is None else min(most, request.prompt_len + wanted)
        live = LiveRequest(request, session_id() or request.tenant, now)
        if self._waiting or not self._place(live, now):
            if not self._links:
                raise EngineDead(NO_REPLICA)
            raise self._queue_full()
        self._live[request.request_id] = live
        self._idle.clear()
        self.metrics.notify.begin(request, now)
        return live.stream

    def check(self, request: Request) -> None:
        """Refuse a request that `submit` would refuse even with an empty queue; submits nothing.

        Raises `PromptTooLong` and `InvalidRequest`.
        """
        hello = self._first_hello
        check_fits(request, hello.max_model_len)
        check_token_ids(request, hello.vocab_size)
        check_priority(request, self._max_priority)

    def abort(self, request_id: str) -> None:
        """End a request between two steps; unknown and finished ones are ignored."""
        live = self._live.get(request_id)
        if live is None:
            return
        live.is_aborted = True
        link = self._places.get(request_id)
        if link is None:
            self._finish(live, aborted())
        elif not self._open_socket.send(link.peer, Abort(request_id=request_id)):
            self._lose(link, "closed", "it does not read")

    def _queue_full(self) -> QueueFull:
        num_waiting = max(0, len(self._live) - self._room.max_running)
        full = QueueFull(f"the queue is full: {num_waiting} requests are waiting")
        full.retry_after = retry_seconds(self._finished, num_waiting)
        return full

    def _place(self, live: LiveRequest, now: float) -> bool:
        """Send a request to a replica; False where none has room."""
        while (choice := self._choose(live, now)) is not None:
            link, request = self._links[choice.replica], live.request
            message = submit_of(request, elapsed=live.elapsed(now))
            if not self._open_socket.send(link.peer, message):
                self._lose(link, "closed", "it does not read")
                continue
            live.sent(now)
            link.requests[request.request_id] = live
            self._places[request.request_id] = link
            self._router.begin(request.request_id, choice)
            self.metrics.hit_tokens.inc(choice.hit_tokens)
            return True
        return False

    def _choose(self, live: LiveRequest, now: float) -> Choice[bytes] | None:
        """The replica for a request: one that is ready, else any with room."""
        full = {peer for peer, each in self._links.items() if not each.has_room}
        unready = {peer for peer, each in self._links.items() if each.unready is not None}
        for excluded in (full | unready, full) if unready else (full,):
            choice = self._router.choose(
                live.request.tokens,
                live.request.namespace,
                session=live.session,
                cache=live.request.cache,
                now=now,
                excluded=excluded,
            )
            if choice is not None:
                return choice
        return None

    def _finish(self, live: LiveRequest, delta: Delta) -> None:
        """End a request by a delta of the front's own."""
        now = self._clock()
        live.request.usage.total_time = live.elapsed(now)
        if isinstance(delta.error, DeadlineExceeded):
            delta.error.retry_after = self._queue_full().retry_after
        self._end(live, now)
        self._deliver(live, delta, now)

    def _end(self, live: LiveRequest, now: float) -> None:
        """Let go of a request."""
        request_id = live.request.request_id
        del self._live[request_id]
        self._waiting.pop(request_id, None)
        self._finished.append(now)
        if (link := self._places.pop(request_id, None)) is not None:
            link.forget(request_id)
            self._router.end(request_id)
        if self._waiting:  # there is room now
            asyncio.get_running_loop().call_soon(self._serve_waiting)
        elif not self._live:
            self._idle.set()
            self._finished.clear()

    def _deliver(self, live: LiveRequest, delta: Delta, now: float) -> None:
        live.stream.push(delta)
        self.metrics.notify.observe_delta(live.request, delta, now)

    # -- requests of a replica that was lost ----------------------------------------------------

    def _lose(self, link: ReplicaLink, cause: str, reason: str) -> None:
        """Part with a replica; its requests go on elsewhere. ``cause``: one of `CAUSES`."""
        if self._links.get(link.peer) is not link:
            return
        del self._links[link.peer]
        lives = list(link.requests.values())
        level = logging.INFO if cause == "left" else logging.WARNING
        logger.log(level, "%s is lost: %s; requests to move: %d", link, reason, len(lives))
        self.metrics.lost(cause)
        if cause in ("wrong", "died", "left"):
            self._open_socket.part(link.peer, Leaving(reason=reason))
        elif cause == "silent":  # without a word: a replica that wakes up dials anew
            self._open_socket.part(link.peer)
        link.fail_calls()
        for live in lives:
            del self._places[live.request.request_id]
            self._router.end(live.request.request_id)
        link.requests.clear()
        self._router.leave(link.peer)
        self._count_room()
        for live in lives:
            self._move(live)

    def _move(self, live: LiveRequest) -> None:
        if live.is_aborted:
            self._finish(live, aborted())
            return
        now = self._clock()
        live.lose(now)
        if live.num_losses >= MAX_LOSSES:
            message = f"the request was ended: {MAX_LOSSES} replicas were lost while they served it"
            self._finish(live, Delta(error=EngineDead(message)))
            return
        self.metrics.moved.inc()
        self._waiting[live.request.request_id] = live
        self._serve_one(live, now)

    def _serve_waiting(self) -> None:
        """Place the requests that no replica has, or end those that waited too long."""
        now = self._clock()
        for live in list(self._waiting.values()):
            if live.request.request_id in self._waiting:  # a loss meanwhile may have ended it
                self._serve_one(live, now)

    def _serve_one(self, live: LiveRequest, now: float) -> None:
        request_id = live.request.request_id
        if live.is_late(now):
            self._finish(live, late_end(live.request))
        elif self._place(live, now):
            self._waiting.pop(request_id, None)
        elif not self._links and now - live.waits_since >= self._failover_seconds:
            message = f"no replica came within {self._failover_seconds:g} s"
            self._finish(live, Delta(error=EngineDead(message)))

    # -- messages of replicas -------------------------------------------------------------------

    async def _read(self) -> None:
        while True:
            peer, message = await self._open_socket.receive()
            link = self._links.get(peer)
            if link is None and message is not None:
                self._greet(peer, message)
            elif link is not None and message is None:
                self._lose(link, "closed", "its connection closed")
            elif link is not None and message is not None:
                self._hear(link, message)

    def _hear(self, link: ReplicaLink, message: FromReplica | WireError) -> None:
        try:
            link.num_silent_beats = 0
            self._follow(link, message)
        except DeadReplicaError as error:
            self._lose(link, "died", str(error))
        except WireError as error:
            self._lose(link, "wrong", str(error))

    def _follow(self, link: ReplicaLink, message: FromReplica | WireError) -> None:
        match message:
            case Step():
                self._take_step(link, message)
            case Answer():
                link.answered(message)
            case Beat():
                link.load, link.unready = message.load or link.load, message.unready
            case Leaving(has_failed=True):
                raise DeadReplicaError(f"its engine ended: {message.reason[:MAX_REASON]!r}")
            case Leaving():
                self._lose(link, "left", f"it leaves: {message.reason[:MAX_REASON]!r}")
            case Hello():
                raise WireError("a second greeting")
            case WireError():
                raise message

    def _take_step(self, link: ReplicaLink, step: Step) -> None:
        link.load = step.load
        for news in step.pages:
            if len(news.keys) > link.hello.num_pages * KEY_BYTES:
                raise WireError(f"more pages than its {link.hello.num_pages}")
            change = self._router.stored if news.is_stored else self._router.dropped
            change(link.peer, page_keys(news))
        if self._router.num_pages(link.peer) > link.hello.num_pages:
            raise WireError(f"more pages than its {link.hello.num_pages}")
        now = self._clock()
        for form in step.deltas:
            if (live := link.request_of(form)) is not None:
                link.check_tokens(form, live)
                self._take_delta(live, form, step.usages.get(form.request_id), now)
        if step.deltas:
            self.metrics.notify.observe_replica_step(link.number)

    def _take_delta(
        self, live: LiveRequest, form: DeltaForm, usage: UsageForm | None, now: float
    ) -> None:
        request, delta = live.request, delta_of(form)
        if isinstance(delta.error, EngineDead):
            raise DeadReplicaError(f"its engine ended: {str(delta.error)[:MAX_REASON]!r}")
        is_abort = delta.finish_reason is FinishReason.ABORT and delta.stop_reason is None
        if is_abort and not live.is_aborted:
            raise DeadReplicaError("it ended a request that was not aborted")
        was_terminal, is_first = delta.terminal, delta.token_ids and not request.num_output
        live.take(delta, usage, now)
        if delta.terminal and not was_terminal:
            self.abort(request.request_id)
        if delta.terminal:
            self._end(live, now)
        elif is_first:
            self._router.progress(request.request_id, len(request.tokens))
        self._deliver(live, delta, now)

    # -- who comes ------------------------------------------------------------------------------

    def _greet(self, peer: bytes, message: FromReplica | WireError) -> None:
        try:
            if isinstance(message, WireError):
                raise message
            if not isinstance(message, Hello):
                raise WireError("its first message was no greeting")
            self._check_fits(message)
        except WireError as error:
            self._log_refusal(str(error))
            self._open_socket.part(peer, Leaving(reason=str(error)))
            return
        self._join(peer, message)

    def _log_refusal(self, reason: str) -> None:
        """Log a refusal, unless it is repeated at once: a broken peer dials again and again."""
        now = self._clock()
        if reason != self._logged_refusal or now - self._refused_at >= REFUSAL_SECONDS:
            self._logged_refusal, self._refused_at = reason, now
            logger.warning("a replica is refused: %s", reason)

    def _check_fits(self, hello: Hello) -> None:
        """Refuse a replica of another model. Raises `UnfitError`."""
        assert self._first is not None
        if self._first.done():
            first = self._first.result()
            check_same_model(hello, first)
            if not (same_bits(hello, first) or self._has_warned):
                self._has_warned = True
                logger.warning(
                    "replicas compute in different ways (%s, %s): tokens may differ when a request "
                    "moves", first.kernels, hello.kernels,
                )  # fmt: skip
        elif hello.tokenizer != self._tokenizer:
            message = f"MODEL has another tokenizer than the replicas, which serve {hello.name}"
            self._first.set_exception(InvalidRequest(message, param="model"))
            raise UnfitError(message)
        else:
            most = body_of(hello.settings).get("max_priority")
            self._max_priority = most if isinstance(most, int) else math.inf

    def _join(self, peer: bytes, hello: Hello) -> None:
        self._num_joined += 1
        link = ReplicaLink(peer, self._num_joined, hello, self._clock())
        self._links[peer] = link
        self._router.join(peer, page_size=hello.page_size, fingerprint=hello.fingerprint)
        self._count_room()
        num_there = len(self._links)
        if num_there >= self._wanted:
            self._complete.set()
        logger.info("%s joined: %d of %d are there", link, num_there, self._wanted)
        assert self._first is not None
        if not self._first.done():
            self._first.set_result(hello)
        self._open_socket.send(peer, Beat())  # it knows now that it is taken
        self._serve_waiting()

    def _count_room(self) -> None:
        hellos = [each.hello for each in self._links.values()]
        if hellos:
            self._room = RequestRoom(
                sum(each.max_running for each in hellos), sum(each.max_queued for each in hellos)
            )

    async def _beat_on(self) -> None:
        while True:
            await asyncio.sleep(self._beat_seconds)
            self.beat()

    def beat(self) -> None:
        """Show the replicas that the front lives; part with silent ones. Called each second."""
        for link in list(self._links.values()):
            link.num_silent_beats += 1
            if link.num_silent_beats >= MAX_SILENT_BEATS:
                self._lose(link, "silent", "it sends no beats")
            elif not self._open_socket.send(link.peer, Beat()):
                self._lose(link, "closed", "it does not read")
        self._serve_waiting()

    # -- life -----------------------------------------------------------------------------------

    async def start(self) -> None:
        """Listen for replicas. Raises `EngineDead` after `close`."""
        if self.draining:
            raise EngineDead(CLOSED)
        if self._task is not None:
            return
        from .transport import FrontSocket  # needs an extra

        self._socket = FrontSocket(self._address, self._key, clock=self._clock)
        self._first = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._run(), name="foretoken-replicas")

    async def first(self) -> Hello:
        """The first replica's greeting. Raises `InvalidRequest` if it has another tokenizer."""
        if self._first is None:
            raise EngineDead(NOT_RUNNING)
        logger.info("waiting for %d replicas at %s", self._wanted, self.address)
        return await asyncio.shield(self._first)

    async def complete(self) -> None:
        """Wait until all wanted replicas have come, or until `close`."""
        await self._complete.wait()

    async def _run(self) -> None:
        error = EngineDead(CLOSED)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._read())
                group.create_task(self._beat_on())
        except asyncio.CancelledError:
            raise
        except BaseException as failure:
            logger.critical("the front stops", exc_info=failure)
            self.failure, error = failure, EngineDead("the front failed")
        finally:
            for live in list(self._live.values()):
                self._finish(live, aborted() if self.draining else Delta(error=error))

    async def close(self, *, drain_seconds: float = 0.0) -> None:
        """Refuse new requests, wait for running ones, abort those that are left; idempotent."""
        self.draining = True
        self._complete.set()
        if self._closing is None:
            self._closing = asyncio.create_task(self._close(drain_seconds))
        await asyncio.shield(self._closing)

    async def _close(self, drain_seconds: float) -> None:
        if self.alive and drain_seconds > 0:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._idle.wait(), drain_seconds)
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        if self._socket is not None:
            for link in self._links.values():
                link.fail_calls()
            self._links.clear()
            self._socket.close()

    # -- calls ----------------------------------------------------------------------------------

    async def _ask(self, link: ReplicaLink, question: Question, seconds: float) -> Answer:
        message, answer = link.ask(question)
        if not self._open_socket.send(link.peer, message):
            self._lose(link, "closed", "it does not read")
        try:
            return await asyncio.wait_for(answer, seconds)
        except TimeoutError:
            raise ForetokenError(f"{link} did not answer within {seconds:g} s") from None

    async def _ask_all(
        self,
        question: Question,
        read: Callable[[Answer], T],
        *,
        seconds: float = CALL_SECONDS,
        skips: bool = False,
    ) -> dict[ReplicaLink, T]:
        """The answers of all replicas; those that are lost meanwhile are left out.

        Raises what one of them answered, or with ``skips`` leaves it out, too.
        """
        links = list(self._links.values())
        asked: list[Awaitable[Answer]] = [self._ask(each, question, seconds) for each in links]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        found: dict[ReplicaLink, T] = {}
        for link, answer in zip(links, answers, strict=True):
            try:
                if isinstance(answer, BaseException):
                    raise answer
                found[link] = read(answer)
            except WireError as error:
                self._lose(link, "wrong", str(error))
            except EngineDead:
                logger.info("%s is gone and is left out", link)
            except ForetokenError:
                if not skips:
                    raise
        return found

    async def flush_cache(self, *namespaces: str | None) -> int:
        """Drop unused cached prefixes on all replicas; returns how many pages that freed."""
        question = FlushCache(namespaces=list(namespaces))
        return sum((await self._ask_all(question, number_of)).values())

    async def flush_prefix(self, tokens: array[int], namespace: str | None = None) -> int:
        """Drop what begins with these tokens on all replicas; returns how many pages that freed.

        Raises `InvalidRequest` for tokens that do not fill a page.
        """
        question = FlushPrefix(tokens=ids_form(tokens), namespace=namespace)
        return sum((await self._ask_all(question, number_of)).values())

    async def cache_info(self, namespace: str | None = None) -> Body:
        """Occupancy and hit counters of all replicas together, and of each."""
        found = await self._ask_all(CacheInfo(namespace=namespace), body_in, skips=True)
        each = [{"number": link.number, "pid": link.hello.pid, **found[link]} for link in found]
        return {**merged_cache(self.page_size, list(found.values())), "replicas": each}

    async def overview(self, finished: Iterable[RecentRequest] = ()) -> Body:  # noqa: ARG002
        """Counts and state of all replicas together, and a row for each.

        Paths have the number of the replica. Each replica remembers its own requests that ended.
        """
        found = await self._ask_all(Overview(), body_in, skips=True)
        views = {link.number: body for link, body in found.items()}
        return {**merged_overview(views), "replicas": self.describe()}

    async def audit(self) -> Body:
        """Audit all replicas: sound if all are. Raises `EngineDead`."""
        if not self.alive:
            raise EngineDead(NOT_RUNNING)
        found = await self._ask_all(Audit(), body_in)
        if not found:
            raise EngineDead(NO_REPLICA)
        audits = {link.number: body for link, body in found.items()}
        return merged_audit(audits)

    # -- reports --------------------------------------------------------------------------------

    def _loads(self) -> Mapping[str, tuple[int, int]]:
        links = self._links.values()
        return {
            str(each.number): (self._router.owed(each.peer), len(each.requests)) for each in links
        }

    async def _metric_texts(self) -> Mapping[str, bytes]:
        found = await self._ask_all(Metrics(), bytes_of, seconds=METRICS_SECONDS, skips=True)
        return {str(link.number): text for link, text in found.items()}

    def report(self, reason: str) -> Body:
        """Describe the front; any thread may call it, whatever is stuck."""
        now = self._clock()
        return {
            "reason": reason,
            "now": now,
            "pid": os.getpid(),
            "failure": None if self.failure is None else type(self.failure).__name__,
            "replicas": [each.describe(now, 0) for each in list(self._links.values())],
            "requests": [_described(each, now) for each in list(self._live.values())],
            "threads": stacks(),
        }

    def dump(self, report: Body) -> None:
        """Write a report to the dump folder, if there is one."""
        if self._dump_dir is not None:
            write_report(report, self._dump_dir)


def _described(live: LiveRequest, now: float) -> Body:
    request = live.request
    return {
        "id": request.request_id,
        "prompt_tokens": request.prompt_len,
        "output_tokens": request.num_output,
        "age_seconds": live.elapsed(now),
        "losses": live.num_losses,
    }
