"""Roster: the replicas connected to a front, from their greeting to their loss."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ....core.errors import EngineDead, InvalidRequest, Unavailable
from ..wire.forms import WireError
from ..wire.messages import Beat, FromFront, FromReplica, Hello, Leaving, body_of
from .replica_link import MAX_REASON, ReplicaLink

if TYPE_CHECKING:
    from ..wire.transport import FrontSocket

logger = logging.getLogger(__name__)
NOT_RUNNING, NO_REPLICA = "the engine is not running", "no replica is connected"
MAX_SILENT_BEATS = 3  # beats that the front sends to a silent replica before it is lost
REFUSAL_SECONDS = 10.0  # interval in which a repeated refusal is not logged again
TOLD_CAUSES = ("wrong", "died", "left")  # causes for which a replica is told the reason
MODEL_FACTS = (
    "name", "vocab_size", "tokenizer", "page_size", "max_model_len", "eos_token_ids", "pooling",
)  # fmt: skip
"""Fields of `Hello` that must be equal for all replicas of a front."""

BITS_FACTS = ("kernels", "fingerprint", "exact")
"""Fields that decide whether two replicas compute the same bits."""


class UnfitError(WireError):
    """Raised if the front refuses a replica."""


@dataclass(frozen=True, slots=True)
class RequestRoom:
    """Numbers of requests that all replicas accept together."""

    max_running: int
    max_queued: int


class Roster:
    """The replicas of a front. Belongs to one event loop.

    The front is complete once ``wanted`` replicas are connected. ``tokenizer`` is the hash of the
    front's own tokenizer. ``on_joined`` is called with each accepted replica. ``on_lost`` is called
    with each replica that was removed from ``links``, and with the cause, one of `CAUSES`.
    """

    def __init__(
        self,
        *,
        tokenizer: str,
        wanted: int,
        clock: Callable[[], float],
        on_joined: Callable[[ReplicaLink], None],
        on_lost: Callable[[ReplicaLink, str], None],
    ) -> None:
        self.links: dict[bytes, ReplicaLink] = {}  # by peer, in the order of arrival
        self.room = RequestRoom(0, 0)  # the last known room if no replica is connected
        self.max_priority = math.inf
        self.num_joined = 0  # replicas accepted since the start
        self.complete = asyncio.Event()  # set once all wanted replicas were connected
        self.first: asyncio.Future[Hello] = asyncio.get_running_loop().create_future()
        self._on_joined, self._on_lost = on_joined, on_lost
        self._tokenizer, self._wanted, self._clock = tokenizer, wanted, clock
        self._logged_refusal, self._refused_at = "", -math.inf  # the last logged refusal
        self._has_warned = False
        self._socket: FrontSocket | None = None

    @property
    def socket(self) -> FrontSocket:
        """The socket to which replicas connect. Raises `EngineDead` before `open`."""
        if self._socket is None:
            raise EngineDead(NOT_RUNNING)
        return self._socket

    @property
    def missing(self) -> str | None:
        """The reason why no request can be sent to a replica now, or None."""
        if not self.complete.is_set():
            return f"waiting for replicas: {len(self.links)} of {self._wanted} are connected"
        return None if self.links else NO_REPLICA

    @property
    def greeting(self) -> Hello:
        """The greeting of the first replica. Raises `Unavailable` before it arrives."""
        if not self.first.done():
            raise Unavailable(NO_REPLICA)
        return self.first.result()

    def open(self, address: str, key: str | None) -> None:
        """Listen for replicas. Raises `InvalidRequest` for an unusable address."""
        from ..wire.transport import FrontSocket  # imports zmq, which is optional

        self._socket = FrontSocket(address, key, clock=self._clock)

    async def when_first(self) -> Hello:
        """Wait for the first replica's greeting and return it.

        Raises `InvalidRequest` if the replica has another tokenizer.
        """
        logger.info("waiting for %d replicas at %s", self._wanted, self.socket.address)
        return await asyncio.shield(self.first)

    def send(self, link: ReplicaLink, message: FromFront) -> bool:
        """Send a message to a replica. If it does not read, remove it and return False."""
        sent = self.socket.send(link.peer, message)
        if not sent:
            self.lose(link, "closed", "the replica does not read its messages")
        return sent

    def beat(self) -> None:
        """Send a beat to all replicas, and remove the silent ones."""
        for link in list(self.links.values()):
            link.num_silent_beats += 1
            if link.num_silent_beats >= MAX_SILENT_BEATS:
                self.lose(link, "silent", "the replica stopped sending heartbeats")
            else:
                self.send(link, Beat())

    def lose(self, link: ReplicaLink, cause: str, reason: str) -> None:
        """Remove a replica and end its connection. ``cause``: one of `CAUSES`."""
        if self.links.get(link.peer) is not link:
            return
        del self.links[link.peer]
        level = logging.INFO if cause == "left" else logging.WARNING
        logger.log(level, "%s is lost: %s; requests to move: %d", link, reason, len(link.requests))
        if cause in TOLD_CAUSES:
            self.socket.part(link.peer, Leaving(reason=reason))
        elif cause == "silent":  # a replica that gets no reason connects again
            self.socket.part(link.peer)
        link.fail_calls()
        self._count_room()
        self._on_lost(link, cause)

    def close(self) -> None:
        """Remove all replicas and close the socket."""
        if self._socket is None:
            return
        for link in self.links.values():
            link.fail_calls()
        self.links.clear()
        if not self.first.done():
            self.first.set_exception(EngineDead(NOT_RUNNING))
            self.first.exception()  # marks it as retrieved, since perhaps no task awaits it
        self._socket.close()

    # -- connections ----------------------------------------------------------------------------

    def disconnected(self, peer: bytes) -> None:
        """Remove the replica whose connection was closed."""
        if (link := self.links.get(peer)) is not None:
            self.lose(link, "closed", "the connection was closed")

    def greet(self, peer: bytes, message: FromReplica | WireError) -> None:
        """Accept or refuse a replica by its first message."""
        try:
            hello = _hello_in(message)
            self._check_fits(hello)
        except WireError as error:
            self._log_refusal(str(error))
            self.socket.part(peer, Leaving(reason=str(error)))
            return
        self._join(peer, hello)

    def _log_refusal(self, reason: str) -> None:
        """Log a refusal, unless it was logged just before: a broken peer connects repeatedly."""
        now = self._clock()
        if reason != self._logged_refusal or now - self._refused_at >= REFUSAL_SECONDS:
            self._logged_refusal, self._refused_at = reason, now
            logger.warning("refused a replica: %s", reason)

    def _check_fits(self, hello: Hello) -> None:
        """Raise `UnfitError` for a replica of another model."""
        if self.first.done():
            first = self.first.result()
            _check_same_model(hello, first)
            if not (_same_bits(hello, first) or self._has_warned):
                self._has_warned = True
                logger.warning(
                    "replicas use different kernels (%s, %s): tokens may differ after a request "
                    "moves", first.kernels, hello.kernels,
                )  # fmt: skip
        elif hello.tokenizer != self._tokenizer:
            message = (
                f"MODEL and the replicas have different tokenizers; the replicas serve {hello.name}"
            )
            self.first.set_exception(InvalidRequest(message, param="model"))
            raise UnfitError(message)
        else:
            most = body_of(hello.settings).get("max_priority")
            self.max_priority = most if isinstance(most, int) else math.inf

    def _join(self, peer: bytes, hello: Hello) -> None:
        self.num_joined += 1
        role, now = _role_of(hello), self._clock()
        link = self.links[peer] = ReplicaLink(peer, self.num_joined, hello, now, role)
        self._count_room()
        num_there = len(self.links)
        if num_there >= self._wanted:
            self.complete.set()
        if num_there <= self._wanted:
            logger.info("%s joined: %d of %d are connected", link, num_there, self._wanted)
        else:
            logger.info("%s joined: %d are connected", link, num_there)
        if not self.first.done():
            self.first.set_result(hello)
        self.socket.send(peer, Beat())  # tells the replica that it is accepted
        self._on_joined(link)

    def _count_room(self) -> None:
        hellos = [each.hello for each in self.links.values()]
        if hellos:
            self.room = RequestRoom(
                sum(each.max_running for each in hellos), sum(each.max_queued for each in hellos)
            )


def _hello_in(message: FromReplica | WireError) -> Hello:
    if isinstance(message, WireError):
        raise message
    if not isinstance(message, Hello):
        raise WireError("the replica's first message was not a greeting")
    return message


def _role_of(hello: Hello) -> str | None:
    settings = body_of(hello.settings)
    return str(settings.get("role") or "both") if settings.get("kv_transfer") else None


def _check_same_model(hello: Hello, first: Hello) -> None:
    """Raise `UnfitError` for a replica whose model differs from the first replica's."""
    for name in MODEL_FACTS:
        ours, theirs = getattr(first, name), getattr(hello, name)
        if ours != theirs:
            raise UnfitError(
                f"the replica's {name} is {_shown(theirs)}, but the other replicas have "
                f"{_shown(ours)}"
            )


def _same_bits(hello: Hello, first: Hello) -> bool:
    """Whether two replicas compute equal tokens, according to their greetings."""
    return all(getattr(hello, name) == getattr(first, name) for name in BITS_FACTS)


def _shown(value: object) -> str:
    return str(value)[:MAX_REASON]
