"""FrontSession: one connection of a replica to its front."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any, NamedTuple, Protocol

from ....core.errors import EngineDead, ForetokenError
from ....core.interface.extras.transfers import PageOffer
from ....core.interface.request import Delta, FinishReason
from ...runtime.preprocess import submit as submit_to
from ..wire.forms import WireError, shown_error, usage_form
from ..wire.messages import (
    Abort,
    Answer,
    Beat,
    Call,
    Drop,
    Fetch,
    FromFront,
    FromReplica,
    Leaving,
    Step,
    Submit,
)
from .hosted_engine import HostedEngine, HostedRequest

logger = logging.getLogger(__name__)
BEAT_SECONDS = 1.0
MOST_SILENT = 2  # missing beats of a front that are tolerated
MOST_UNHEARD = 30  # beats to wait for a front's first message before connecting again
CANNOT_FETCH = "could not read the KV pages of a prompt"
NEWS_SECONDS = 0.01  # time that page news wait to be sent together with deltas


class FrontLink(Protocol):
    """A connection to a front, such as `transport.ReplicaSocket`."""

    async def receive(self) -> FromFront | WireError | None:
        """Return the next message, a `WireError` for an invalid one, or None at the end.

        The end means that the front has closed the connection.
        """

    def send(self, message: FromReplica) -> bool:
        """Send a message; return False if the front is gone or does not read."""

    def close(self) -> None:
        """Close the connection."""


class Ending(Enum):
    """The ways in which a connection can end."""

    LOST = "lost"  # the front closed the connection, was silent, or sent an invalid message
    REFUSED = "refused"  # the front refuses this replica
    LEFT = "left"  # the replica left


class Ended(NamedTuple):
    """The end of a connection and its reason."""

    ending: Ending
    reason: str


@dataclass(slots=True, eq=False)
class _Live:
    """A request, from the front's message to the last delta.

    ``hosted`` is None until the engine has the request.
    """

    request_id: str  # the front's id
    task: asyncio.Task[None] | None = None
    hosted: HostedRequest | None = None
    offer: PageOffer | None = None  # pages of another replica, until the engine has them


class FrontSession:
    """Serves the requests of a front over one connection, until the connection ends.

    A front has accepted the replica once it has sent any message but `Leaving`.
    """

    def __init__(self, hosted: HostedEngine, link: FrontLink) -> None:
        self.is_joined = asyncio.Event()
        self._hosted, self._link = hosted, link
        self._live: dict[str, _Live] = {}
        self._calls: set[asyncio.Task[None]] = set()
        self._deltas: list[tuple[str, Delta]] = []  # deltas to send in this turn of the loop
        self._due: dict[str, HostedRequest] = {}  # requests whose usage is sent with the deltas
        self._handed: dict[str, bytes] = {}  # held prompts that are sent with the deltas
        self._flush_handle: asyncio.Handle | None = None
        self._news_handle: asyncio.TimerHandle | None = None
        self._num_silent = 0  # beats since the front's last message
        self._is_broken = False  # a message could not be sent
        self._left: asyncio.Future[Ended] = asyncio.get_running_loop().create_future()

    async def run(self) -> Ended:
        """Send the greeting, and serve until the connection ends; then abort all requests."""
        self._greet()
        tasks: list[asyncio.Future[Ended]] = [
            self._left,  # first: `leave` may also have made the front close the connection
            asyncio.create_task(self._read()),
            asyncio.create_task(self._beat()),
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            return next(task for task in tasks if task in done).result()
        finally:
            self._end(tasks)

    def leave(self, reason: str, *, has_failed: bool = False) -> None:
        """End the connection; the front moves the requests to other replicas."""
        if not self._left.done():
            self._flush()
            self._send(Leaving(reason=reason, has_failed=has_failed))
            self._left.set_result(Ended(Ending.LEFT, reason))

    # -- messages of the front ------------------------------------------------------------------

    async def _read(self) -> Ended:
        while True:
            message = await self._link.receive()
            match message:
                case None:
                    return Ended(Ending.LOST, "it closed the connection")
                case WireError():
                    return self._refuse(message)
                case Leaving(reason=reason):
                    return Ended(Ending.REFUSED, reason)
            self._num_silent = 0
            self.is_joined.set()
            self._take(message)

    def _refuse(self, error: WireError) -> Ended:
        """End a connection to a front of another version, or to a process that is no front."""
        reason = f"it sent {error}"
        self._send(Leaving(reason=f"the front sent {error}"))
        return Ended(Ending.LOST if self.is_joined.is_set() else Ending.REFUSED, reason)

    def _take(self, message: Submit | Abort | Drop | Fetch | Call | Beat) -> None:
        match message:
            case Submit():
                self._submit(message)
            case Abort():
                self._abort(message.request_id)
            case Drop():
                self._hosted.drop(message.name)
            case Fetch():
                self._fetch(message.submit)
            case Call():
                self._begin(self._answer(message))

    def _begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start a task that is cancelled when the connection ends."""
        task = asyncio.create_task(work)
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)
        return task

    def _fetch(self, submit: Submit) -> None:
        """Read pages for a future request, which is served without them if reading fails."""
        try:
            offer = self._hosted.offer_of(submit)
        except WireError as error:
            _log_unless_on_purpose(error, CANNOT_FETCH)
            return
        if offer is not None:
            # A callback, because a task that is cancelled before it begins runs no code.
            task = self._begin(self._hosted.fetch(submit, offer))
            task.add_done_callback(partial(self._fetched, offer))

    def _fetched(self, offer: PageOffer, task: asyncio.Task[None]) -> None:
        """Let the other replica free the offered pages if they were not read."""
        error = None if task.cancelled() else task.exception()
        if task.cancelled() or error is not None:
            self._hosted.end_offer(offer)
        if isinstance(error, Exception):
            _log_unless_on_purpose(error, CANNOT_FETCH)

    async def _answer(self, call: Call) -> None:
        try:
            answer = Answer(call_id=call.call_id, result=await self._hosted.answer(call.question))
        except Exception as error:
            _log_unless_on_purpose(error, "a call from the front failed")
            answer = Answer(call_id=call.call_id, error=shown_error(error))
        self._send(answer)

    # -- requests -------------------------------------------------------------------------------

    def _submit(self, message: Submit) -> None:
        """Serve a request. Drop an earlier one with its id, which the front has forgotten."""
        self._drop(self._live.pop(message.request_id, None))
        live = self._live[message.request_id] = _Live(message.request_id)
        try:
            live.offer = self._hosted.offer_of(message)
        except WireError as error:
            self._fail(live, error)
            return
        live.task = asyncio.create_task(self._serve(live, message))

    async def _serve(self, live: _Live, message: Submit) -> None:
        try:
            hosted = await self._hosted.make(message)
            self._hosted.hand_over(message, hosted.request, live.offer)
            stream = submit_to(self._hosted.engine, hosted.request)
            live.hosted, live.offer = hosted, None
            async for delta in stream:
                self._note(live, delta)
        except EngineDead as error:
            if self._hosted.engine.alive:
                self._note(live, Delta(error=error))
            else:
                self.leave(str(error), has_failed=True)
        except Exception as error:
            self._fail(live, error)
        finally:
            self._end_offer(live)

    def _fail(self, live: _Live, error: Exception) -> None:
        _log_unless_on_purpose(error, "a request failed")
        self._note(live, Delta(error=shown_error(error)))

    def _abort(self, request_id: str) -> None:
        """Abort a request; its last delta reports the abort."""
        if (live := self._live.get(request_id)) is None:
            return
        if live.hosted is None:
            self._drop(live)
            self._note(live, Delta(finish_reason=FinishReason.ABORT))
        else:
            self._hosted.engine.abort(live.hosted.request.request_id)

    def _drop(self, live: _Live | None) -> None:
        """End a request without sending a delta."""
        if live is None:
            return
        if live.task is not None:
            live.task.cancel()
        self._end_offer(live)  # the task may not have begun
        if live.hosted is not None:
            self._hosted.engine.abort(live.hosted.request.request_id)

    def _end_offer(self, live: _Live) -> None:
        """Let the other replica free offered pages that the engine did not take."""
        offer, live.offer = live.offer, None
        self._hosted.end_offer(offer)

    # -- messages to the front ------------------------------------------------------------------

    def _greet(self) -> None:
        """Send the greeting and all pages in the cache, and report changes from now on."""
        self._send(self._hosted.hello)
        load = self._hosted.load
        for pages in self._hosted.pages.take_all():
            self._send(Step(load=load, pages=pages))
        self._hosted.pages.on_news = self._news_came
        self._say_alive()

    def _say_alive(self) -> None:
        self._send(Beat(load=self._hosted.load, unready=self._hosted.engine.readiness))

    async def _beat(self) -> Ended:
        """Send beats, and return when the front has been silent for too long.

        Beats are sent only after the front's first message: without a listening process they would
        be queued and later be sent all at once.
        """
        while not self._is_broken:
            await asyncio.sleep(BEAT_SECONDS)
            joined = self.is_joined.is_set()
            self._num_silent += 1
            if self._num_silent > (MOST_SILENT if joined else MOST_UNHEARD):
                return Ended(Ending.LOST, f"it sent nothing for {self._num_silent} heartbeats")
            if joined:
                self._say_alive()
        return Ended(Ending.LOST, "it does not read its messages")

    def _note(self, live: _Live, delta: Delta) -> None:
        """Queue a delta; all deltas of one turn of the event loop are sent together."""
        hosted = live.hosted
        self._deltas.append((live.request_id, delta))
        if hosted is not None:
            hosted.text.take()
            if hosted.needs_usage(delta):
                self._due[live.request_id] = hosted
        if delta.terminal:
            handed = None if hosted is None else self._hosted.handed(hosted.request)
            if handed is not None:
                self._handed[live.request_id] = handed
            if self._live.get(live.request_id) is live:
                del self._live[live.request_id]
            if hosted is not None:
                self._hosted.note_end(hosted.request)
        if self._flush_handle is None:
            self._flush_handle = asyncio.get_running_loop().call_soon(self._flush)

    def _news_came(self) -> None:
        """Send page news a little later, together with the deltas of the same step."""
        if self._news_handle is None:
            loop = asyncio.get_running_loop()
            self._news_handle = loop.call_later(NEWS_SECONDS, self._flush)

    def _flush(self) -> None:
        self._cancel_handles()
        deltas, self._deltas = self._deltas, []
        due, self._due = self._due, {}
        now, pages = self._hosted.engine.now, self._hosted.pages.take()
        handed, self._handed = {**self._parts(), **self._handed} if pages else self._handed, {}
        if deltas or pages:
            usages = {id_: usage_form(each.request.usage, now) for id_, each in due.items()}
            load = self._hosted.load
            self._send(Step(deltas=deltas, usages=usages, handed=handed, load=load, pages=pages))

    def _parts(self) -> dict[str, bytes]:
        """Return newly computed parts of prompts, held for other replicas, by request id."""
        parts = {
            live.request_id: self._hosted.part(live.hosted)
            for live in self._live.values()
            if live.hosted is not None
        }
        return {request_id: part for request_id, part in parts.items() if part is not None}

    def _cancel_handles(self) -> None:
        for handle in (self._flush_handle, self._news_handle):
            if handle is not None:
                handle.cancel()
        self._flush_handle = self._news_handle = None

    def _send(self, message: FromReplica) -> None:
        if not self._left.done() and not self._link.send(message):
            self._is_broken = True

    # -- the end --------------------------------------------------------------------------------

    def _end(self, tasks: list[asyncio.Future[Ended]]) -> None:
        """Cancel all tasks, drop all requests, and close the connection."""
        self._cancel_handles()
        self._hosted.pages.on_news = _nothing
        for task in tasks:
            task.cancel()
        for call in self._calls:
            call.cancel()
        for live in self._live.values():
            self._drop(live)
        self._live.clear()
        self._hosted.adapters.clear()
        self._link.close()


def _log_unless_on_purpose(error: Exception, text: str) -> None:
    if not isinstance(error, ForetokenError):
        logger.exception(text)


def _nothing() -> None:
    pass
