"""Transport: the ZMQ sockets between a front and its replicas.

The front listens, replicas dial in. A message that cannot be sent at once is not sent: the other
side is gone, or does not read. With a cluster key all bytes are encrypted (CURVE), and a process
without the key is not heard; beyond loopback a key is required.
"""

from __future__ import annotations

import asyncio
import hashlib
import ipaddress
import os
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar, cast

import zmq
import zmq.asyncio
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from ....core.errors import InvalidRequest
from .forms import WireError
from .messages import FromFront, FromReplica, encode, from_front, from_replica

CLUSTER_KEY = "FORETOKEN_CLUSTER_KEY"
MAX_MESSAGE = 2**28  # bytes; a prompt of a million tokens has 8 MiB
MAX_UNSENT = 10_000  # messages to one process; it reads more in a second
LINGER_MS = 500  # for what was sent last
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

    def __init__(self, kind: int, decode: Callable[[bytes], M]) -> None:
        self._context = zmq.asyncio.Context()
        self._decode = decode
        self.socket = self._context.socket(kind)
        for option, value in (
            (zmq.LINGER, LINGER_MS),
            (zmq.MAXMSGSIZE, MAX_MESSAGE),
            (zmq.SNDHWM, MAX_UNSENT),
            (zmq.RCVHWM, MAX_UNSENT),
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


class FrontSocket:
    """Listens at an address for replicas. Belongs to one event loop.

    Raises `InvalidRequest` for an address that cannot be used.
    """

    def __init__(self, address: str, key: str | None) -> None:
        check_address(address, key)
        self._link = _Link[FromReplica](zmq.ROUTER, from_replica)
        self._peers: dict[int, bytes] = {}  # by the descriptor of the connection
        self._events: asyncio.Queue[tuple[bytes, FromReplica | WireError | None]] = asyncio.Queue(1)
        self._tasks: list[asyncio.Task[None]] = []
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
        """The next message and its sender; an error if it is none; None: a closed connection."""
        if not self._tasks:
            self._tasks = [asyncio.create_task(each) for each in (self._read(), self._watch())]
        return await self._events.get()

    async def _read(self) -> None:
        while True:
            peer, *rest = await self._link.socket.recv_multipart(copy=False)
            name = peer.bytes
            if not rest:
                continue
            self._peers[rest[-1].get(zmq.SRCFD)] = name
            await self._events.put((name, self._link.decoded(rest[-1].bytes)))

    async def _watch(self) -> None:
        while True:
            name = self._peers.pop(await self._link.closed_connection(), None)
            if name is not None:
                await self._events.put((name, None))

    def send(self, peer: bytes, message: FromFront) -> bool:
        """Send to a replica; False if it is gone or does not read."""
        return self._link.send((peer, encode(message)))

    def close(self) -> None:
        """Close the connections."""
        for task in self._tasks:
            task.cancel()
        self._link.close()


class ReplicaSocket:
    """Dials in to a front. Belongs to one event loop."""

    def __init__(self, address: str, key: str | None) -> None:
        check_address(address, key)
        self._link = _Link[FromFront](zmq.DEALER, from_front)
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
