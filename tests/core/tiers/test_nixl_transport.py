"""Memory that one agent reads from another, over what NIXL finds on this machine."""

from __future__ import annotations

import importlib.util
import threading
from array import array
from collections.abc import Iterator

import pytest
import torch

from foretoken.core.interface.transfers import PageOffer, Region
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


def test_a_peer_that_does_not_answer_is_given_up_and_its_buffer_is_not_used_again(
    reader: NixlReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nixl_transport, "READ_SECONDS", 0.05)
    server = NixlServer([torch.ones(4, 8)], array("Q", [3]))
    offer = PageOffer("x", server.memory, b"", [], 0, 3)
    before = reader._buffer.data_ptr()
    with pytest.raises(OSError, match="did not answer"):
        reader.read_word(offer)  # nobody polls there
    assert reader._buffer.data_ptr() != before
    monkeypatch.undo()
    with Polled(server):
        assert reader.read_word(offer) == 3


def test_what_is_no_agent_is_an_error_of_the_peer(reader: NixlReader) -> None:
    server = NixlServer([torch.ones(4, 8)], array("Q", [3]))
    gone = server.memory
    broken = type(gone)(b"no agent", gone.kind, gone.parts, gone.words)
    with pytest.raises(OSError, match="NIXL_ERR"):
        reader.send(broken, b"done x")
    server.close()
    with pytest.raises(OSError, match="NoneType"):
        server.notes()
