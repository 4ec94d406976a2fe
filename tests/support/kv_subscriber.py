"""A reader of KV events as routers are: it follows the batches, and asks for those it missed."""

from __future__ import annotations

import socket
import time
from typing import Any

import msgspec
import zmq

SECONDS = 30.0  # for what is waited for to come


class KVSubscriber:
    """Keeps what a publisher says that it has, by medium and hash, with all tokens up to there.

    Use it in a ``with`` block.
    """

    def __init__(
        self, address: str, replay_address: str, *, topic: str = "", max_waiting: int = 1000
    ) -> None:
        """``max_waiting``: messages that are received before they are read."""
        self._context = zmq.Context()
        self._sub = self._context.socket(zmq.SUB)
        self._sub.setsockopt(zmq.RCVHWM, max_waiting)
        self._sub.setsockopt(zmq.SUBSCRIBE, topic.encode())
        self._sub.connect(address)
        self._replay = self._context.socket(zmq.DEALER)
        self._replay.setsockopt(zmq.RCVHWM, max_waiting)
        self._losses = self._replay.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._replay.connect(replay_address)
        self.last = -1  # sequence number of the last batch
        self.kept: dict[tuple[str, int], tuple[int, ...]] = {}
        self.num_replayed = 0
        self.topics: set[bytes] = set()  # of all batches
        self.events: list[dict[str, Any]] = []

    def __enter__(self) -> KVSubscriber:
        return self

    def __exit__(self, *error: object) -> None:
        self._context.destroy(linger=0)

    def receive(self) -> int:
        """Wait for a message, catch up with what is missing before it; its sequence number."""
        topic, number, batch = _received(self._sub)
        self.topics.add(topic)
        seq = int.from_bytes(number, "big")
        if seq > self.last + 1:
            for missed, payload in self.replay(self.last + 1):
                self.num_replayed += 1
                self._apply(missed, payload)
        self._apply(seq, batch)
        return seq

    def next_number(self) -> int:
        """Wait for a message and forget it; its sequence number."""
        return int.from_bytes(_received(self._sub)[1], "big")

    def replay(self, start: int) -> list[tuple[int, bytes]]:
        """The batches that the publisher has kept from a sequence number on."""
        self.ask(b"", start.to_bytes(8, "big"))
        return self.answer()

    def ask(self, *request: bytes) -> None:
        """Send a request for a replay."""
        self._replay.send_multipart(request)

    def is_answered(self) -> bool:
        """Wait for the beginning of an answer."""
        return bool(self._replay.poll(SECONDS * 1000))

    def is_disconnected(self) -> bool:
        """Wait until the publisher ends the connection for replays."""
        return bool(self._losses.poll(SECONDS * 1000))

    def answer(self) -> list[tuple[int, bytes]]:
        """The batches of one answer."""
        found = []
        while (message := _received(self._replay))[3]:
            delimiter, topic, number, batch = message
            assert delimiter == b""
            self.topics.add(topic)
            found.append((int.from_bytes(number, "big"), batch))
        assert message == [b"", b"", b"\xff" * 8, b""]
        return found

    def wait_until_kept(self, medium: str, tokens: tuple[int, ...]) -> None:
        """Receive until a page ends with these tokens."""
        deadline = time.monotonic() + SECONDS
        while not any(each == medium and kept == tokens for (each, _), kept in self.kept.items()):
            assert time.monotonic() < deadline, "the page was not published"
            self.receive()

    def wait_for_pages(self, num_pages: int) -> None:
        """Receive until the GPU keeps at least so many."""
        deadline = time.monotonic() + SECONDS
        while len(self.texts()) < num_pages:
            assert time.monotonic() < deadline, "the pages were not published"
            self.receive()

    def texts(self, medium: str = "GPU") -> list[tuple[int, ...]]:
        """The beginnings that a medium keeps, one for each page."""
        return sorted(tokens for (each, _), tokens in self.kept.items() if each == medium)

    def _apply(self, seq: int, batch: bytes) -> None:
        if seq <= self.last:
            return
        assert seq == self.last + 1, f"batch {self.last + 1} is missing"
        self.last = seq
        _, events, rank = msgspec.msgpack.decode(batch)
        assert rank == 0
        self.events += events
        for event in events:
            self._apply_event(event)

    def _apply_event(self, event: dict[str, Any]) -> None:
        match event["type"]:
            case "AllBlocksCleared":
                self.kept.clear()
            case "BlockRemoved":
                for each in event["block_hashes"]:
                    del self.kept[event["medium"], each]
            case "BlockStored":
                medium, size, tokens = (event[k] for k in ("medium", "block_size", "token_ids"))
                parent = event["parent_block_hash"]
                before = () if parent is None else self.kept[medium, parent]
                for index, each in enumerate(event["block_hashes"]):
                    before += tuple(tokens[index * size : (index + 1) * size])
                    assert (medium, each) not in self.kept
                    self.kept[medium, each] = before


def _received(ready: zmq.Socket[bytes]) -> list[bytes]:
    assert ready.poll(SECONDS * 1000), "nothing came"
    return ready.recv_multipart()


def free_address() -> str:
    """An address of the loopback interface on which nothing listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"
