"""Transport: the ZMQ sockets between a front and its replicas.

The front listens, and replicas connect. A message that cannot be sent at once is dropped, because
the other side is gone or does not read. With a cluster key all bytes are encrypted (CURVE), and
messages of processes without the key are dropped. Only loopback addresses work without a key.

The front limits the messages and bytes of each connection before it decodes them, so that a replica
that sends too much does not slow down the others.
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
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from ....core.errors import InvalidRequest
from .forms import WireError
from .messages import FromFront, FromReplica, Leaving, encode, from_front, from_replica

CLUSTER_KEY = "FORETOKEN_CLUSTER_KEY"
MAX_MESSAGE = 2**25  # bytes; a prompt of a million tokens has 8 MiB
MAX_UNSENT = 10_000  # unsent messages to one process, which reads more in a second
MAX_UNREAD = 32  # one replica's unread messages in the front; others wait in the replica
MESSAGES_PER_SECOND = 4000  # per replica, more than an engine's steps
MAX_FORGOTTEN = 1000  # closed connections whose late messages are recognised
MAX_MESSAGES = 16_000  # messages in a burst, received while the front was busy
BYTES_PER_SECOND = 2**25  # per replica, the size of a million deltas
MAX_BYTES = 2**27  # bytes in a burst
LINGER_MS = 500  # time for sending the last messages
PARTING_SECONDS = 0.5  # time for a replica to read the reason for its loss, and to close
M = TypeVar("M")


def cluster_key() -> str | None:
    """Return the secret that a front and its replicas share, from the environment."""
    return os.environ.get(CLUSTER_KEY) or None


def check_address(address: str, key: str | None, *, param: str = "front") -> None:
    """Raise `InvalidRequest` unless replicas can connect to ``address``.

    It must have the form tcp://HOST:PORT, and a key is required unless HOST is a loopback address.
    """
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
    """Return the front's public and secret CURVE key in Z85, derived from the cluster key.

    The first message of a connection needs the public key, which no message contains, so only
    processes with the cluster key can connect.
    """
    secret = z85.encode(
        hashlib.scrypt(key.encode(), salt=b"foretoken", n=2**14, r=8, p=1, dklen=32)
    )
    return zmq.curve_public(secret), secret


class _Link(Generic[M]):
    """A socket's messages and closed connections as one stream. Belongs to one event loop."""

    def __init__(self, kind: int, decode: Callable[[bytes], M], max_unread: int) -> None:
        self._context = zmq.Context()
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
        self._closed: int | None = None  # descriptor of a connection that may have messages left
        self._loop, self._news = asyncio.get_running_loop(), asyncio.Event()
        for each in (self.socket, self._monitor):
            self._loop.add_reader(each.fileno(), self._news.set)

    def send(self, frames: Sequence[bytes]) -> bool:
        """Send the frames at once; return False if that is impossible."""
        try:
            self.socket.send_multipart(frames, flags=zmq.NOBLOCK)
        except zmq.ZMQError:
            return False
        finally:
            if int(self.socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                self._news.set()  # sending may reset the socket's signal
        return True

    def read(self) -> list[zmq.Frame] | int | None:
        """Return the next message's frames, else the descriptor of a closed connection, or None.

        The event of a closed connection is read first but returned last, after all its messages.
        """
        if self._closed is None:
            with contextlib.suppress(zmq.Again):
                self._closed = recv_monitor_message(self._monitor, flags=zmq.NOBLOCK)["value"]
        with contextlib.suppress(zmq.Again):
            return self.socket.recv_multipart(flags=zmq.NOBLOCK, copy=False)
        closed, self._closed = self._closed, None
        return closed

    async def when_readable(self) -> None:
        """Wait after `read` has returned None. The next `read` may still return None."""
        await self._news.wait()
        self._news.clear()

    def decoded(self, data: bytes) -> M | WireError:
        """Return a message, or a `WireError` for invalid bytes."""
        try:
            return self._decode(data)
        except WireError as error:
            return error

    def close(self) -> None:
        """Close the socket; unsent messages have `LINGER_MS` to be sent."""
        for each in (self.socket, self._monitor):
            self._loop.remove_reader(each.fileno())
        self.socket.disable_monitor()
        self._monitor.close(linger=0)
        self._context.destroy(linger=LINGER_MS)


class Quota:
    """Messages and bytes that one connection may send: a rate with bursts (token bucket)."""

    def __init__(self, now: float) -> None:
        self._read_at = now
        self._messages, self._bytes = float(MAX_MESSAGES), float(MAX_BYTES)

    def spend(self, num_bytes: int, now: float) -> WireError | None:
        """Count a message; return an error if it exceeds the quota, else None."""
        since, self._read_at = now - self._read_at, now
        self._messages = min(MAX_MESSAGES, self._messages + since * MESSAGES_PER_SECOND) - 1
        self._bytes = min(MAX_BYTES, self._bytes + since * BYTES_PER_SECOND) - num_bytes
        if self._messages < 0:
            return WireError(f"more than {MESSAGES_PER_SECOND} messages per second")
        if self._bytes < 0:
            return WireError(f"more than {BYTES_PER_SECOND >> 20} MiB per second")
        return None


class FrontSocket:
    """Listens at an address for replicas. Belongs to one event loop.

    Raises `InvalidRequest` for an unusable address.
    """

    def __init__(
        self, address: str, key: str | None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        check_address(address, key)
        self._link = _Link[FromReplica](zmq.ROUTER, from_replica, MAX_UNREAD)
        self._clock = clock
        self._peers: dict[int, bytes] = {}  # by the connection's descriptor
        self._quotas: dict[bytes, Quota] = {}  # by peer
        self._parted: set[bytes] = set()  # connected peers whose messages are dropped
        self._closed: deque[bytes] = deque()  # peers to be reported as closed
        self._reused: Counter[int] = Counter()  # close events to skip, by descriptor
        self._forgotten: deque[bytes] = deque(maxlen=MAX_FORGOTTEN)  # peers reported as closed
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
        """Return a peer with its next message, a `WireError`, or None for a closed connection.

        All messages that a replica sent before its connection closed come first.
        """
        while True:
            await asyncio.sleep(0)  # lets other tasks run between messages
            if self._closed:
                return self._forget(self._closed.popleft()), None
            match self._link.read():
                case None:
                    await self._link.when_readable()
                case int(descriptor):
                    self._note_closed(descriptor)
                case frames:
                    if (heard := self._heard(frames)) is not None:
                        return heard

    def _heard(
        self, frames: Sequence[zmq.Frame]
    ) -> tuple[bytes, FromReplica | WireError | None] | None:
        """Return the sender and the message in frames, or None if the message is dropped."""
        peer, *rest = frames
        if not rest:
            return None
        name, descriptor = peer.bytes, rest[-1].get(zmq.SRCFD)
        before = self._peers.get(descriptor)
        if before != name and name in self._forgotten:
            return None  # its descriptor is closed or belongs to another connection
        self._peers[descriptor] = name
        if before is not None and before != name:  # the close event of `before` is not read yet
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
        self._forgotten.append(peer)
        return peer

    def part(self, peer: bytes, message: Leaving | None = None) -> None:
        """Drop a replica's further messages, send a last message, and soon close its connection."""
        if message is not None:
            self.send(peer, message)
        self._parted.add(peer)
        asyncio.get_running_loop().call_later(PARTING_SECONDS, self._cut, peer)

    def _cut(self, peer: bytes) -> None:
        """Shut down the connection of a replica that has not closed it, which ZMQ cannot do."""
        for descriptor, name in self._peers.items():
            if name == peer:
                with (
                    contextlib.suppress(OSError),  # the replica has closed the connection
                    sockets.socket(fileno=os.dup(descriptor)) as connection,
                ):
                    connection.shutdown(sockets.SHUT_RDWR)

    def send(self, peer: bytes, message: FromFront) -> bool:
        """Send to a replica; return False if it is gone or does not read."""
        return self._link.send((peer, encode(message)))

    def close(self) -> None:
        """Close all connections."""
        self._peers.clear()  # their descriptors may be reused by other files
        self._link.close()


class ReplicaSocket:
    """Connects to a front. Belongs to one event loop."""

    def __init__(self, address: str, key: str | None) -> None:
        check_address(address, key)
        self._link = _Link[FromFront](zmq.DEALER, from_front, MAX_UNSENT)
        socket = self._link.socket
        if key is not None:
            socket.curve_serverkey = _front_keys(key)[0]
            socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
        socket.connect(address)

    async def receive(self) -> FromFront | WireError | None:
        """Return the next message, a `WireError` for an invalid one, or None at the end.

        The end means that the front has closed the connection.
        """
        await asyncio.sleep(0)  # lets other tasks run between messages
        while (found := self._link.read()) is None:
            await self._link.when_readable()
        return None if isinstance(found, int) else self._link.decoded(found[-1].bytes)

    def send(self, message: FromReplica) -> bool:
        """Send to the front; return False if it is gone or does not read."""
        return self._link.send((encode(message),))

    def close(self) -> None:
        """Close the connection."""
        self._link.close()
