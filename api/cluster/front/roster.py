"""Roster: the replicas that are connected to a front, from their greeting to their loss."""

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
NOT_RUNNING, NO_REPLICA = "the engine is not running", "no replica is there"
MAX_SILENT_BEATS = 3  # of ours, without a message: two of its own are missing then
REFUSAL_SECONDS = 10.0  # in which a refusal that is repeated is not logged again
TOLD_CAUSES = ("wrong", "died", "left")  # those that a replica hears why the front parts with it
MODEL_FACTS = (
    "name", "vocab_size", "tokenizer", "page_size", "max_model_len", "eos_token_ids", "pooling",
)  # fmt: skip
"""Fields of `Hello` that all replicas of a front must have in common."""

BITS_FACTS = ("kernels", "fingerprint", "exact")
"""Fields that decide whether two replicas compute the same bits."""


class UnfitError(WireError):
    """A replica that this front does not take."""


@dataclass(frozen=True, slots=True)
class RequestRoom:
    """Numbers of requests that all replicas accept together."""

    max_running: int
    max_queued: int


class Roster:
    """The replicas of a front. Belongs to one event loop.

    ``wanted`` of them must have come before the front is complete; ``tokenizer`` is the hash of
    the front's own. ``on_joined`` is called with a replica that was taken, ``on_lost`` with one
    that is not in ``links`` any longer, and the cause, one of `CAUSES`.
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
        self.room = RequestRoom(0, 0)  # of the last replicas that were there
        self.max_priority = math.inf
        self.num_joined = 0  # ever
        self.complete = asyncio.Event()  # the wanted ones were all there once
        self.first: asyncio.Future[Hello] = asyncio.get_running_loop().create_future()
        self._on_joined, self._on_lost = on_joined, on_lost
        self._tokenizer, self._wanted, self._clock = tokenizer, wanted, clock
        self._logged_refusal, self._refused_at = "", -math.inf  # the last one that was logged
        self._has_warned = False
        self._socket: FrontSocket | None = None

    @property
    def socket(self) -> FrontSocket:
        """The socket at which replicas dial in. Raises `EngineDead` before `open`."""
        if self._socket is None:
            raise EngineDead(NOT_RUNNING)
        return self._socket

    @property
    def missing(self) -> str | None:
        """Why no request can be sent; None if there are replicas, and the wanted ones came."""
        if not self.complete.is_set():
            return f"waiting for replicas: {len(self.links)} of {self._wanted} are there"
        return None if self.links else NO_REPLICA

    @property
    def greeting(self) -> Hello:
        """The greeting of the first replica. Raises `Unavailable` before that came."""
        if not self.first.done():
            raise Unavailable(NO_REPLICA)
        return self.first.result()

    def open(self, address: str, key: str | None) -> None:
        """Listen. Raises `InvalidRequest` for an address that cannot be used."""
        from ..wire.transport import FrontSocket  # needs an extra

        self._socket = FrontSocket(address, key, clock=self._clock)

    async def when_first(self) -> Hello:
        """Return the first replica's greeting.

        Raises `InvalidRequest` if it has another tokenizer.
        """
        logger.info("waiting for %d replicas at %s", self._wanted, self.socket.address)
        return await asyncio.shield(self.first)

    def send(self, link: ReplicaLink, message: FromFront) -> bool:
        """Send to a replica; one that does not read is lost, and False is returned."""
        sent = self.socket.send(link.peer, message)
        if not sent:
            self.lose(link, "closed", "it does not read")
        return sent

    def beat(self) -> None:
        """Show the replicas that the front lives; part with silent ones."""
        for link in list(self.links.values()):
            link.num_silent_beats += 1
            if link.num_silent_beats >= MAX_SILENT_BEATS:
                self.lose(link, "silent", "it sends no beats")
            else:
                self.send(link, Beat())

    def lose(self, link: ReplicaLink, cause: str, reason: str) -> None:
        """Part with a replica. ``cause``: one of `CAUSES`."""
        if self.links.get(link.peer) is not link:
            return
        del self.links[link.peer]
        level = logging.INFO if cause == "left" else logging.WARNING
        logger.log(level, "%s is lost: %s; requests to move: %d", link, reason, len(link.requests))
        if cause in TOLD_CAUSES:
            self.socket.part(link.peer, Leaving(reason=reason))
        elif cause == "silent":  # without a word: a replica that wakes up dials anew
            self.socket.part(link.peer)
        link.fail_calls()
        self._count_room()
        self._on_lost(link, cause)

    def close(self) -> None:
        """Part with all replicas, and listen no longer."""
        if self._socket is None:
            return
        for link in self.links.values():
            link.fail_calls()
        self.links.clear()
        if not self.first.done():
            self.first.set_exception(EngineDead(NOT_RUNNING))
            self.first.exception()  # maybe it is waited for, maybe not
        self._socket.close()

    # -- who comes ------------------------------------------------------------------------------

    def disconnected(self, peer: bytes) -> None:
        """Note that a connection was closed."""
        if (link := self.links.get(peer)) is not None:
            self.lose(link, "closed", "its connection closed")

    def greet(self, peer: bytes, message: FromReplica | WireError) -> None:
        """Take or refuse a replica by its first message."""
        try:
            hello = _hello_in(message)
            self._check_fits(hello)
        except WireError as error:
            self._log_refusal(str(error))
            self.socket.part(peer, Leaving(reason=str(error)))
            return
        self._join(peer, hello)

    def _log_refusal(self, reason: str) -> None:
        """Log a refusal, unless it is repeated at once: a broken peer dials again and again."""
        now = self._clock()
        if reason != self._logged_refusal or now - self._refused_at >= REFUSAL_SECONDS:
            self._logged_refusal, self._refused_at = reason, now
            logger.warning("a replica is refused: %s", reason)

    def _check_fits(self, hello: Hello) -> None:
        """Refuse a replica of another model. Raises `UnfitError`."""
        if self.first.done():
            first = self.first.result()
            _check_same_model(hello, first)
            if not (_same_bits(hello, first) or self._has_warned):
                self._has_warned = True
                logger.warning(
                    "replicas compute in different ways (%s, %s): tokens may differ when a request "
                    "moves", first.kernels, hello.kernels,
                )  # fmt: skip
        elif hello.tokenizer != self._tokenizer:
            message = f"MODEL has another tokenizer than the replicas, which serve {hello.name}"
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
            logger.info("%s joined: %d of %d are there", link, num_there, self._wanted)
        else:
            logger.info("%s joined: %d are there", link, num_there)
        if not self.first.done():
            self.first.set_result(hello)
        self.socket.send(peer, Beat())  # it knows now that it is taken
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
        raise WireError("its first message was no greeting")
    return message


def _role_of(hello: Hello) -> str | None:
    settings = body_of(hello.settings)
    return str(settings.get("role") or "both") if settings.get("kv_transfer") else None


def _check_same_model(hello: Hello, first: Hello) -> None:
    """Raise `UnfitError` for a replica whose model is not that of the first one."""
    for name in MODEL_FACTS:
        ours, theirs = getattr(first, name), getattr(hello, name)
        if ours != theirs:
            raise UnfitError(f"its {name} is {_shown(theirs)}, that of the others {_shown(ours)}")


def _same_bits(hello: Hello, first: Hello) -> bool:
    """Whether the two compute equal tokens, as far as they say."""
    return all(getattr(hello, name) == getattr(first, name) for name in BITS_FACTS)


def _shown(value: object) -> str:
    return str(value)[:MAX_REASON]
