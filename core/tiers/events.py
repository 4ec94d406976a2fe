"""KV events: reports of cached pages for routers that are not part of this project.

The format is vLLM's: three frames, which are a topic, a sequence number and a batch in msgpack. A
reader that has missed batches asks for them at a second address. Pages of salted namespaces and of
adapters are not published: some readers take them for the model's own.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from itertools import islice
from typing import Literal

import msgspec
import zmq

from ...radix_cache.node import Cause
from ..errors import InvalidRequest
from .keys import StoredPages

logger = logging.getLogger(__name__)
EventMedium = Literal["GPU", "CPU", "DISK"]
"""Place of a page: the pool, on any device ("GPU"), host memory, or a disk."""
KEPT_BATCHES = 10_000  # maximum number of batches kept for replays

# most bytes of the kept batches: a long prompt's batch has some hundred thousand bytes
KEPT_BYTES = 2**28
MAX_EVENTS = 4096  # maximum number of events in a batch; vllm-router refuses larger batches
HASH_BYTES = 8  # bytes of a key that identify a page, because readers expect 64-bit integers
LINGER_MS = 500  # time for readers to take the last batches
LARGEST_REQUEST = 1024  # bytes; the request for a replay has 8, a subscription the topic's length
END_OF_REPLAY = (2**64 - 1).to_bytes(8, "big")  # sent in place of a sequence number


class BlockStored(msgspec.Struct, tag=True, frozen=True, kw_only=True, gc=False):
    """Event: a medium keeps these consecutive pages from now on."""

    block_hashes: list[int]
    parent_block_hash: int | None  # hash of the page before them; None at a text's beginning
    token_ids: list[int]
    block_size: int  # number of tokens in a page
    lora_id: None = None
    medium: EventMedium
    lora_name: None = None
    extra_keys: None = None
    group_idx: None = None


class BlockRemoved(msgspec.Struct, tag=True, frozen=True, kw_only=True, gc=False):
    """Event: a medium no longer keeps these pages."""

    block_hashes: list[int]
    medium: EventMedium
    group_idx: None = None


class AllBlocksCleared(msgspec.Struct, tag=True, frozen=True, gc=False):
    """Event: no page is kept. It is the first event of a process."""


Event = BlockStored | BlockRemoved | AllBlocksCleared
_encode = msgspec.msgpack.Encoder().encode


def encode_batch(seconds: float, events: list[Event]) -> bytes:
    """Encode a batch of events in vLLM's format, with rank 0. ``seconds``: time since 1970."""
    return _encode((seconds, events, 0))


def block_hash(key: bytes) -> int:
    """Return the number by which the events identify a page: the first 8 bytes of its key."""
    return int.from_bytes(key[:HASH_BYTES], "big")


class KVEventPublisher:
    """Publisher of the pages that join and leave the tree; a `KeyObserver`.

    Its methods are called on the event loop's thread. The events of one iteration of the loop are
    one batch, which a thread sends: a slow reader loses batches and never delays the engine.
    Readers filter by topic. Raises `InvalidRequest` naming the option whose address cannot be used.
    """

    def __init__(
        self,
        address: str,
        replay_address: str,
        topic: str = "",
        *,
        heartbeat_seconds: float = 1.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        context = zmq.Context()
        try:
            outlet = _Outlet(context, (address, replay_address), topic, heartbeat_seconds, clock)
        except BaseException:
            context.destroy(linger=0)
            raise
        # with the bound ports
        self.address, self.replay_address = outlet.address, outlet.replay_address
        self._clock = clock
        self._batch: list[Event] = []
        inlet, self._handover = _inner_pair(context)
        thread = threading.Thread(
            target=outlet.run, args=(inlet,), name="foretoken-events", daemon=True
        )
        thread.start()
        self._end = weakref.finalize(self, _end, self._handover, thread, context)
        self._add(AllBlocksCleared())
        self.flush()
        logger.info(
            "publishing KV events on %s and replays on %s", self.address, self.replay_address
        )

    def stored(self, pages: StoredPages) -> None:
        """Publish pages that have just joined the tree."""
        self.stored_in("GPU", pages)

    def dropped(self, namespace: str | None, keys: list[bytes], cause: Cause) -> None:
        """Publish that pages leave the tree."""
        del cause
        if namespace is None:
            self.dropped_from("GPU", keys)

    def stored_in(self, medium: EventMedium, pages: StoredPages) -> None:
        """Publish that a medium keeps these pages, unless they are salted."""
        if pages.namespace is None:
            self._add(
                BlockStored(
                    block_hashes=[block_hash(key) for key in pages.keys],
                    parent_block_hash=None if pages.before is None else block_hash(pages.before),
                    token_ids=pages.tokens.tolist(),
                    block_size=len(pages.tokens) // len(pages.keys),
                    medium=medium,
                )
            )

    def dropped_from(self, medium: EventMedium, keys: list[bytes]) -> None:
        """Publish that a medium no longer keeps these pages of the default namespace."""
        self._add(BlockRemoved(block_hashes=[block_hash(key) for key in keys], medium=medium))

    def flush(self) -> None:
        """Send the events since the last batch as one batch; send nothing without events."""
        events, self._batch = self._batch, []
        for start in range(0, len(events) if self._end.alive else 0, MAX_EVENTS):
            batch = encode_batch(self._clock(), events[start : start + MAX_EVENTS])
            _hand_over(self._handover, batch)

    def close(self) -> None:
        """Send the remaining events and free the addresses; blocks for at most `LINGER_MS`."""
        self.flush()
        self._end()

    def _add(self, event: Event) -> None:
        self._batch.append(event)
        if len(self._batch) > 1:
            return
        try:
            asyncio.get_running_loop().call_soon(self.flush)
        except (
            RuntimeError
        ):  # the event loop has ended: the program exits without closing the engine
            self.flush()


class _Outlet:
    """The sockets that publish and replay batches of events; `run` is the body of their thread."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        addresses: tuple[str, str],
        topic: str,
        heartbeat_seconds: float,
        clock: Callable[[], float],
    ) -> None:
        self._pub, self.address = _bound(context, zmq.PUB, addresses[0], "kv_events")
        self._replay, self.replay_address = _bound(
            context, zmq.ROUTER, addresses[1], "kv_events_replay"
        )
        self._topic = topic.encode()
        self._heartbeat_seconds = heartbeat_seconds
        self._beats_at = time.monotonic() + heartbeat_seconds
        self._clock = clock
        self._kept: deque[bytes] = deque()
        self._kept_bytes = 0
        self._num_batches = 0  # sequence number of the next batch
        self._is_silent = False  # whether the last batch is empty

    def run(self, inlet: zmq.Socket[bytes]) -> None:
        """Publish batches and answer requests for replays until an empty message arrives."""
        try:
            self._serve(inlet)
        except Exception:
            logger.exception(
                "publishing KV events failed; no further events are published until a restart"
            )
        finally:
            for socket in (inlet, self._pub, self._replay):
                socket.close(linger=LINGER_MS)

    def _serve(self, inlet: zmq.Socket[bytes]) -> None:
        poller = zmq.Poller()
        poller.register(inlet, zmq.POLLIN)
        poller.register(self._replay, zmq.POLLIN)
        while True:
            seconds = max(0.0, self._beats_at - time.monotonic())
            ready = dict(poller.poll(math.ceil(seconds * 1000)))
            if inlet in ready:
                batch = inlet.recv()
                if not batch:
                    return
                self._publish(batch)
            elif time.monotonic() >= self._beats_at:
                self._beat()
            if self._replay in ready:
                self._answer(self._replay.recv_multipart())

    def _publish(self, batch: bytes) -> None:
        self._kept.append(batch)
        self._kept_bytes += len(batch)
        self._num_batches += 1
        self._is_silent = False
        self._send_last()
        while len(self._kept) > KEPT_BATCHES or self._kept_bytes > KEPT_BYTES:
            self._kept_bytes -= len(self._kept.popleft())

    def _beat(self) -> None:
        """Send an empty batch, by whose number a reader notices that it missed batches.

        Consecutive empty batches share one number: otherwise, after a long silence, only empty
        batches would be kept for replays.
        """
        if self._is_silent:
            self._send_last()
        else:
            self._publish(encode_batch(self._clock(), []))
            self._is_silent = True

    def _send_last(self) -> None:
        number = (self._num_batches - 1).to_bytes(8, "big")
        self._pub.send_multipart((self._topic, number, self._kept[-1]))
        self._beats_at = time.monotonic() + self._heartbeat_seconds

    def _answer(self, request: list[bytes]) -> None:
        """Answer a request: send the kept batches from a sequence number on, then an end marker."""
        if len(request) != 3 or len(request[2]) != 8:
            logger.debug("ignoring a replay request without a sequence number")
            return
        client = request[0]
        first = self._num_batches - len(self._kept)
        start = min(max(first, int.from_bytes(request[2], "big")), self._num_batches)
        for number, batch in enumerate(islice(self._kept, start - first, None), start):
            self._replay.send_multipart(
                (client, b"", self._topic, number.to_bytes(8, "big"), batch)
            )
        self._replay.send_multipart((client, b"", b"", END_OF_REPLAY, b""))


def _bound(
    context: zmq.Context[zmq.Socket[bytes]], kind: int, address: str, option: str
) -> tuple[zmq.Socket[bytes], str]:
    """Return a listening socket and its address, with the real port in place of port 0."""
    socket = context.socket(kind)
    socket.setsockopt(zmq.IPV6, "[" in address)
    socket.setsockopt(zmq.MAXMSGSIZE, LARGEST_REQUEST)
    # A whole replay must fit: messages beyond the limit are dropped, and the reader would wait for
    # the end.
    socket.setsockopt(zmq.SNDHWM, KEPT_BATCHES + 1)
    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        reason = zmq.strerror(error.errno or 0).lower()
        message = f"{option}: cannot listen on {address}: {reason}"
        raise InvalidRequest(message, param=option) from None
    return socket, socket.getsockopt_string(zmq.LAST_ENDPOINT)


def _inner_pair(
    context: zmq.Context[zmq.Socket[bytes]],
) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
    """Return both ends of an unlimited queue of messages; each end is for one thread."""
    inlet, handover = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    inlet.setsockopt(zmq.RCVHWM, 0)
    handover.setsockopt(zmq.SNDHWM, 0)
    inlet.bind("inproc://batches")
    handover.connect("inproc://batches")
    return inlet, handover


def _hand_over(handover: zmq.Socket[bytes], message: bytes) -> None:
    with contextlib.suppress(zmq.Again):  # the thread failed, and has logged why
        handover.send(message, zmq.NOBLOCK)


def _end(
    handover: zmq.Socket[bytes],
    thread: threading.Thread,
    context: zmq.Context[zmq.Socket[bytes]],
) -> None:
    _hand_over(handover, b"")
    handover.close()
    thread.join()
    context.term()
