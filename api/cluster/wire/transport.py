"""Transport: the ZMQ sockets between a front and its replicas.

The front listens, replicas dial in. A message that cannot be sent at once is not sent: the other
side is gone, or does not read. With a cluster key all bytes are encrypted (CURVE), and a process
without the key is not heard; beyond loopback a key is required.

The front limits the messages and bytes of each connection, before it reads them: a replica that
sends more than an engine has to say costs the others no time.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import ipaddress
import os
import socket as sockets
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Generic, TypeVar, cast

import zmq
import zmq.asyncio
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from ....core.errors import InvalidRequest
from .forms import WireError
from .messages import FromFront, FromReplica, Leaving, encode, from_front, from_replica

CLUSTER_KEY = "FORETOKEN_CLUSTER_KEY"
MAX_MESSAGE = 2**25  # bytes; a prompt of a million tokens has 8 MiB
MAX_UNSENT = 10_000  # messages to one process; it reads more in a second
MAX_UNREAD = 32  # messages of one replica in the front; more wait where they come from
MESSAGES_PER_SECOND = 4000  # of one replica: more than any engine has steps
MAX_MESSAGES = 16_000  # at once: what came while the front was held up
BYTES_PER_SECOND = 2**25  # of one replica; a million deltas have as many
MAX_BYTES = 2**27  # at once
LINGER_MS = 500  # for what was sent last
PARTING_SECONDS = 0.5  # for a replica to read why the front parts with it, and to close
M = TypeVar("M")


def cluster_key() -> str | None:
    """The secret that a front and its replicas share, from the environment."""
    return os.environ.get(CLUSTER_KEY) or None


def check_address(address: str, key: str | None, *, param: str = "front") -> None:
    """Raise `InvalidRequest` for what is no ``tcp://HOST:PORT``, or is open without a key."""
    scheme, separator, rest = address.partition("://")
    host, colon, port = rest.rpartition(":")
    if scheme != "tcp" or not (separator and colon and host) or not _is_port(port):
        raise InvalidRequest(f"{param} must be tcp://HOST:PORT, not {address!r}", param=param)
    if key is None and not _is_loopback(host.strip("[]")):
        message = f"{param}: {host} is open to other machines: set {CLUSTER_KEY} on both sides"
        raise InvalidRequest(message, param=param)


def _is_port(text: str) -> bool:
    return text.isascii() and text.isdecimal() and int(text) < 2**16


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _front_keys(key: str) -> tuple[bytes, bytes]:
    """The front's public and secret key of CURVE, in Z85; the cluster's key decides both.

    The public one is in no message, and the first message of a connection needs it: a process that
    has it has the cluster's key.
    """
    secret = z85.encode(
        hashlib.scrypt(key.encode(), salt=b"foretoken", n=2**14, r=8, p=1, dklen=32)
    )
    return zmq.curve_public(secret), secret


class _Link(Generic[M]):
    """A socket, and news of closed connections, as one stream."""

    def __init__(self, kind: int, decode: Callable[[bytes], M], max_unread: int) -> None:
        self._context = zmq.asyncio.Context()
        self._decode = decode
        self.socket = self._context.socket(kind)
        for option, value in (
            (zmq.LINGER, LINGER_MS),
            (zmq.MAXMSGSIZE, MAX_MESSAGE),
            (zmq.SNDHWM, MAX_UNSENT),
            (zmq.RCVHWM, max_unread),
        ):
            self.socket.setsockopt(option, value)
        self._monitor = self.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)

    def send(self, frames: Iterable[bytes]) -> bool:
        """Send at once; False if that is not possible."""
        sent = self.socket.send_multipart(list(frames), flags=zmq.NOBLOCK)  # done already
        return cast("asyncio.Future[object]", sent).exception() is None

    def receive(self) -> asyncio.Future[list[bytes]]:
        """The frames of the next message."""
        return cast("asyncio.Future[list[bytes]]", self.socket.recv_multipart())

    async def closed_connection(self) -> int:
        """The descriptor of the next connection that is closed."""
        return int((await recv_monitor_message(self._monitor))["value"])

    def decoded(self, data: bytes) -> M | WireError:
        """A message, or why it is none."""
        try:
            return self._decode(data)
        except WireError as error:
            return error

    def close(self) -> None:
        """Close; what was sent last has half a second to leave."""
        self.socket.disable_monitor()
        self._monitor.close(linger=0)
        self._context.destroy(linger=LINGER_MS)


class Quota:
    """Messages and bytes that one connection may send: a rate, and more at once after a pause."""

    def __init__(self, now: float) -> None:
        self._read_at = now
        self._messages, self._bytes = float(MAX_MESSAGES), float(MAX_BYTES)

    def spend(self, num_bytes: int, now: float) -> WireError | None:
        """Count a message; an error if it is beyond the quota."""
        since, self._read_at = now - self._read_at, now
        self._messages = min(MAX_MESSAGES, self._messages + since * MESSAGES_PER_SECOND) - 1
        self._bytes = min(MAX_BYTES, self._bytes + since * BYTES_PER_SECOND) - num_bytes
        if self._messages < 0:
            return WireError(f"more than {MESSAGES_PER_SECOND} messages a second")
        if self._bytes < 0:
            return WireError(f"more than {BYTES_PER_SECOND >> 20} MiB a second")
        return None


class FrontSocket:
    """Listens at an address for replicas. Belongs to one event loop.

    Raises `InvalidRequest` for an address that cannot be used.
    """

    def __init__(
        self, address: str, key: str | None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        check_address(address, key)
        self._link = _Link[FromReplica](zmq.ROUTER, from_replica, MAX_UNREAD)
        self._clock = clock
        self._peers: dict[int, bytes] = {}  # by the descriptor of the connection
        self._quotas: dict[bytes, Quota] = {}  # by peer
        self._parted: set[bytes] = set()  # connected peers that are not heard any more
        self._closed: deque[bytes] = deque()  # peers to be reported as closed
        self._reused: Counter[int] = Counter()  # descriptors whose next news of a close is known
        self._pending: tuple[asyncio.Future[list[zmq.Frame]], asyncio.Future[int]] | None = None
        socket = self._link.socket
        socket.router_mandatory = True
        try:
            if key is not None:
                socket.curve_publickey, socket.curve_secretkey = _front_keys(key)
                socket.curve_server = True
            socket.bind(address)
        except zmq.ZMQError as error:
            self._link.close()
            message = f"cannot listen on {address}: {error.strerror or error}"
            raise InvalidRequest(message, param="front") from None
        self.address: str = socket.getsockopt_string(zmq.LAST_ENDPOINT)

    async def receive(self) -> tuple[bytes, FromReplica | WireError | None]:
        """The next message and its sender; an error if it is none; None: a closed connection.

        All that a replica sent before its connection closed comes first.
        """
        while True:
            await asyncio.sleep(0)  # others have a turn, however much comes in
            if self._closed:
                return self._forget(self._closed.popleft()), None
            frames, descriptor = await self._next()
            if descriptor is not None:
                self._note_closed(descriptor)
            elif (heard := self._heard(frames)) is not None:
                return heard

    async def _next(self) -> tuple[Sequence[zmq.Frame], int | None]:
        """The frames of the next message, or the descriptor of a closed connection."""
        if self._pending is None:
            first = asyncio.ensure_future(self._link.closed_connection())
            self._pending = self._receive(), first
        message, closed = self._pending
        if not message.done():
            await asyncio.wait((message, closed), return_when=asyncio.FIRST_COMPLETED)
        if message.done():
            self._pending = self._receive(), closed
            return message.result(), None
        self._pending = message, asyncio.ensure_future(self._link.closed_connection())
        return (), closed.result()

    def _receive(self) -> asyncio.Future[list[zmq.Frame]]:
        found = self._link.socket.recv_multipart(copy=False)
        return cast("asyncio.Future[list[zmq.Frame]]", found)

    def _heard(
        self, frames: Sequence[zmq.Frame]
    ) -> tuple[bytes, FromReplica | WireError | None] | None:
        """A message and its sender; None if that is not heard any more."""
        peer, *rest = frames
        if not rest:
            return None
        name, descriptor = peer.bytes, rest[-1].get(zmq.SRCFD)
        before = self._peers.get(descriptor, name)
        self._peers[descriptor] = name
        if before != name:  # its connection closed, and the news of it is still to come
            self._closed.append(before)
            self._reused[descriptor] += 1
        if name in self._parted:
            return None
        now = self._clock()
        quota = self._quotas.setdefault(name, Quota(now))
        error = quota.spend(sum(map(len, rest)), now)
        return name, error or self._link.decoded(rest[-1].bytes)

    def _note_closed(self, descriptor: int) -> None:
        if self._reused[descriptor] > 0:
            self._reused[descriptor] -= 1
        elif (name := self._peers.pop(descriptor, None)) is not None:
            self._closed.append(name)

    def _forget(self, peer: bytes) -> bytes:
        self._parted.discard(peer)
        self._quotas.pop(peer, None)
        return peer

    def part(self, peer: bytes, message: Leaving | None = None) -> None:
        """Hear a replica no more, after a last word; its connection is closed in a moment."""
        if message is not None:
            self.send(peer, message)
        self._parted.add(peer)
        asyncio.get_running_loop().call_later(PARTING_SECONDS, self._cut, peer)

    def _cut(self, peer: bytes) -> None:
        """Close the connection of a replica that has not done it. ZMQ has no call for that."""
        for descriptor, name in self._peers.items():
            if name == peer:
                with (
                    contextlib.suppress(OSError),  # it has closed meanwhile
                    sockets.socket(fileno=os.dup(descriptor)) as connection,
                ):
                    connection.shutdown(sockets.SHUT_RDWR)

    def send(self, peer: bytes, message: FromFront) -> bool:
        """Send to a replica; False if it is gone or does not read."""
        return self._link.send((peer, encode(message)))

    def close(self) -> None:
        """Close the connections."""
        self._peers.clear()  # their descriptors will be those of others
        for each in self._pending or ():
            each.cancel()
        self._link.close()


class ReplicaSocket:
    """Dials in to a front. Belongs to one event loop."""

    def __init__(self, address: str, key: str | None) -> None:
        check_address(address, key)
        self._link = _Link[FromFront](zmq.DEALER, from_front, MAX_UNSENT)
        socket = self._link.socket
        if key is not None:
            socket.curve_serverkey = _front_keys(key)[0]
            socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
        socket.connect(address)
        self._pending: tuple[asyncio.Future[list[bytes]], asyncio.Task[int]] | None = None

    async def receive(self) -> FromFront | WireError | None:
        """The next message; an error if it is none; None: the front closed the connection."""
        if self._pending is None:
            closed = asyncio.ensure_future(self._link.closed_connection())
            self._pending = (self._link.receive(), closed)
        message, closed = self._pending
        await asyncio.wait((message, closed), return_when=asyncio.FIRST_COMPLETED)
        if message.done():
            self._pending = (self._link.receive(), closed)
            return self._link.decoded(message.result()[-1])
        self._pending = (message, asyncio.ensure_future(self._link.closed_connection()))
        return None

    def send(self, message: FromReplica) -> bool:
        """Send to the front; False if it is gone or does not read."""
        return self._link.send((encode(message),))

    def close(self) -> None:
        """Close the connection."""
        for each in self._pending or ():
            each.cancel()
        self._link.close()
