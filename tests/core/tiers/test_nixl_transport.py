"""Memory that one agent reads from another, over what NIXL finds on this machine."""

from __future__ import annotations

import contextlib
import importlib.util
import threading
from array import array
from collections.abc import Iterator

import pytest
import torch

from foretoken.core.interface.extras.transfers import PageOffer, Region
from foretoken.core.scheduling.page_loads import MEETING_SECONDS
from foretoken.core.tiers import nixl_transport
from foretoken.core.tiers.nixl_transport import NixlReader, NixlServer

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("nixl") is None, reason="nixl is not installed"
)


class Polled:
    """A server whose notes are looked for all the time, as an engine does while pages are held."""

    def __init__(self, server: NixlServer) -> None:
        self.server = server
        self.found: list[bytes] = []
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._poll)

    def __enter__(self) -> Polled:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()

    def _poll(self) -> None:
        while not self._ends.wait(0.001):
            self.found += self.server.notes()

    def wait_for(self, count: int) -> list[bytes]:
        for _ in range(5000):
            if len(self.found) >= count or self._ends.wait(0.001):
                break
        return self.found


@pytest.fixture
def reader() -> Iterator[NixlReader]:
    made = NixlReader(4096)
    yield made
    made.close()


def test_regions_words_and_notes_go_from_one_to_the_other(reader: NixlReader) -> None:
    pages = torch.arange(64 * 96, dtype=torch.int32).view(64, 96)
    heads = torch.randn(64, 2, 3)
    words = array("Q", [0, 7, 2**64 - 1])
    server = NixlServer([pages, heads], words)
    memory = server.memory
    assert [part.num_bytes for part in memory.parts] == [384, 24]
    assert len(memory.agent) < 2000, "it travels with every answer"
    with Polled(server) as polled:
        rows = [
            Region(part.address + index * part.num_bytes, part.num_bytes)
            for index in (5, 63, 0)
            for part in memory.parts
        ]
        wanted = b"".join(
            part[index].numpy().tobytes() for index in (5, 63, 0) for part in (pages, heads)
        )
        assert bytes(reader.read(memory, rows)) == wanted
        for slot, word in enumerate(words):
            offer = PageOffer("x", memory, b"", [], slot, 1)
            assert reader.read_word(offer) == word
        words[1] = 9
        assert reader.read_word(PageOffer("x", memory, b"", [], 1, 1)) == 9
        for note in (b"renew x", b"done x"):
            reader.send(memory, note)
        assert polled.wait_for(2) == [b"renew x", b"done x"]


def test_memory_that_was_not_registered_is_not_read_and_the_rest_still_is(
    reader: NixlReader,
) -> None:
    pages, words = torch.ones(4, 8), array("Q", [3])
    server = NixlServer([pages], words)
    secret = torch.zeros(1 << 16)
    with Polled(server):
        with pytest.raises(OSError, match="NOT_FOUND"):
            reader.read(server.memory, [Region(secret.data_ptr(), 64)])
        assert reader.read_word(PageOffer("x", server.memory, b"", [], 0, 3)) == 3


def late_read(reader: NixlReader, server: NixlServer) -> PageOffer:
    """Give up a read of a server that nobody polls."""
    offer = PageOffer("x", server.memory, b"", [], 0, 3)
    with pytest.raises(OSError, match="did not answer"):
        reader.read_word(offer)
    return offer


def test_a_buffer_is_kept_until_the_read_that_was_given_up_has_ended(
    reader: NixlReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A buffer was freed while a transfer could still write to it, and stayed registered."""
    monkeypatch.setattr(nixl_transport, "READ_SECONDS", 0.05)
    server = NixlServer([torch.ones(4, 8)], array("Q", [3]))
    buffer = reader._buffer
    buffer.zero_()
    offer = late_read(reader, server)
    assert reader._buffer is not buffer
    assert [late.buffer for late in reader._late] == [buffer]
    with pytest.raises(OSError, match="an earlier read"):
        reader.read_word(offer)
    assert len(reader._late) == 1, "a peer keeps one buffer, however often it is tried"
    monkeypatch.undo()
    with Polled(server):
        assert reader.read_word(offer) == 3
    assert reader._late == []
    assert buffer[-8] == 3, "it was written to behind its end"
    with pytest.raises(Exception, match="NOT_FOUND"):
        reader._agent.deregister_memory(reader._agent.get_reg_descs(buffer))


def test_peers_that_never_answer_keep_a_bounded_number_of_buffers(
    reader: NixlReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nixl_transport, "READ_SECONDS", 0.05)
    monkeypatch.setattr(nixl_transport, "MAX_LATE", 1)
    hung, alive = (NixlServer([torch.ones(4, 8)], array("Q", [3])) for _ in range(2))
    late_read(reader, hung)
    offer = PageOffer("x", alive.memory, b"", [], 0, 3)
    with Polled(alive), pytest.raises(OSError, match="1 peers have still not answered"):
        reader.read_word(offer)
    hung.close()
    monkeypatch.undo()
    with Polled(alive):
        for _ in range(100):  # until the lost connection is seen
            with contextlib.suppress(OSError):
                assert reader.read_word(offer) == 3
                break
        assert reader.read_word(offer) == 3


def test_a_hung_peer_costs_less_than_requests_wait_for_a_meeting() -> None:
    """The thread of all tiers waits for as long: it was 2 s, once for each try."""
    assert nixl_transport.READ_SECONDS < MEETING_SECONDS


def test_what_is_no_agent_is_an_error_of_the_peer(reader: NixlReader) -> None:
    server = NixlServer([torch.ones(4, 8)], array("Q", [3]))
    gone = server.memory
    broken = type(gone)(b"no agent", gone.kind, gone.parts, gone.words)
    with pytest.raises(OSError, match="NIXL_ERR"):
        reader.send(broken, b"done x")
    server.close()
    with pytest.raises(OSError, match="NoneType"):
        server.notes()
