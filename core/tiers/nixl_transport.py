"""Reads of other processes' memory by NIXL, over shared memory, RDMA or TCP, as UCX chooses.

Needs the extra pd. NIXL asks for no secret: every process that has an agent's description, and
reaches its ports, can read the memory that the agent registered.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from ..errors import InvalidRequest
from ..interface.extras.transfers import (
    MemoryKind,
    PageOffer,
    PageReader,
    PageServer,
    PoolMemory,
    Region,
)

READ_SECONDS = 0.3  # time limit of a read; all tiers wait while a read runs
MAX_LATE = 8  # maximum number of late reads, each from another peer into its own buffer
SPINS, NAP_SECONDS = 200, 0.0002  # checks of a transfer before the first pause; length of a pause
FLUSHES = 8  # number of checks after a message is sent, which make NIXL transmit it
WORD_BYTES = 8


def make_agent(role: str) -> Any:  # noqa: ANN401 - the package has no types
    """Make an agent with a unique name.

    It has no progress thread, which would take a fifth of a core while nothing is transferred.
    Raises `InvalidRequest` if the extra pd is not installed or NIXL does not start.
    """
    # UCX logs to stdout, and both libraries log errors that callers get anyway.
    os.environ.setdefault("UCX_LOG_LEVEL", "fatal")
    os.environ.setdefault("NIXL_LOG_LEVEL", "FATAL")
    try:
        from nixl import nixl_agent, nixl_agent_config
    except ImportError as error:
        message = f"kv_transfer needs the extra pd: pip install 'foretoken[pd]' ({error})"
        raise InvalidRequest(message, param="kv_transfer") from None
    name = f"foretoken-{role}-{secrets.token_hex(8)}"
    try:
        return nixl_agent(name, nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))
    except Exception as error:
        message = f"kv_transfer: cannot start NIXL: {_text(error)}"
        raise InvalidRequest(message, param="kv_transfer") from None


class NixlServer(PageServer):
    """`PageServer` of tensors whose row p belongs to page p, and of `TransferLocks.words`."""

    def __init__(self, parts: Sequence[Tensor], words: array[int]) -> None:
        self._parts, self._words = parts, words  # they must stay alive at their addresses
        self._agent = make_agent("p")
        for part in parts:
            self._agent.register_memory(part)
        address, count = words.buffer_info()
        self._agent.register_memory([(address, count * WORD_BYTES, 0, "words")], "DRAM")
        kind: MemoryKind = "VRAM" if parts[0].device.type == "cuda" else "DRAM"
        rows = tuple(Region(part.data_ptr(), part[0].nbytes) for part in parts)
        self.memory = PoolMemory(self._agent.get_agent_metadata(), kind, rows, address)

    @override
    def notes(self) -> Sequence[bytes]:
        # The call also makes progress for peers that connect.
        try:
            found = self._agent.get_new_notifs()
        except Exception as error:
            raise OSError(_text(error)) from None
        return [note for notes in found.values() for note in notes]

    @override
    def close(self) -> None:
        self._agent = _ENDED


@dataclass(frozen=True, slots=True)
class _LateRead:
    """A read that took too long; the peer may still write to its buffer."""

    peer: bytes
    handle: Any
    buffer: Tensor


class NixlReader(PageReader):
    """`PageReader` that reads into a buffer of its own, of ``capacity`` bytes."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._agent = make_agent("d")
        self._names: dict[bytes, str] = {}  # names of the connected agents
        self._late: list[_LateRead] = []  # at most one of each peer, and `MAX_LATE`
        self._buffer = self._make_buffer()

    def _make_buffer(self) -> Tensor:
        buffer = torch.empty(self.capacity + WORD_BYTES, dtype=torch.uint8)
        self._agent.register_memory(buffer)
        return buffer

    @override
    def read(self, memory: PoolMemory, regions: Sequence[Region]) -> memoryview:
        return self._read(memory, regions, memory.kind, 0)

    @override
    def read_word(self, offer: PageOffer) -> int:
        region = Region(offer.word, WORD_BYTES)
        data = self._read(offer.memory, [region], "DRAM", self.capacity)
        return int.from_bytes(data, "little")

    def _read(
        self, memory: PoolMemory, regions: Sequence[Region], kind: MemoryKind, at: int
    ) -> memoryview:
        """Read regions into the buffer from byte ``at`` on. Raises OSError if the peer fails."""
        start, own = self._buffer.data_ptr() + at, []
        for region in regions:
            own.append((start, region.num_bytes, 0))
            start += region.num_bytes
        theirs = [(region.address, region.num_bytes, 0) for region in regions]
        agent = self._agent
        self._end_late_reads(memory.agent)
        try:
            name = self._connect(memory.agent)
            descriptions = agent.get_xfer_descs(own, "DRAM"), agent.get_xfer_descs(theirs, kind)
            handle = agent.initialize_xfer("READ", *descriptions, name)
            self._finish(handle, memory.agent)
        except TimeoutError:  # the peer stays connected: otherwise the read's end could not be seen
            raise
        except Exception as error:
            self._forget(memory.agent)
            raise OSError(_text(error)) from None
        num_bytes = sum(region.num_bytes for region in regions)
        found: memoryview = self._buffer[at : at + num_bytes].numpy().data
        return found

    def _finish(self, handle: Any, peer: bytes) -> None:  # noqa: ANN401 - the package has no types
        """Wait until a transfer has ended; raises OSError if it is late or fails."""
        state = self._wait(handle, self._agent.transfer(handle), READ_SECONDS)
        if state == "PROC":
            # The handle is not released, because UCX cannot be relied on to cancel it.
            self._late.append(_LateRead(peer, handle, self._buffer))
            self._buffer = self._make_buffer()
            raise TimeoutError(f"a peer did not answer in {READ_SECONDS:g} s")
        self._agent.release_xfer_handle(handle)
        if state != "DONE":
            raise OSError("the transfer from a peer failed")

    def _wait(self, handle: Any, state: str, seconds: float) -> str:  # noqa: ANN401
        """Wait for the end of a transfer, at most ``seconds``; return its last state."""
        ends, num_looks = time.monotonic() + seconds, 0
        while state == "PROC" and time.monotonic() < ends:
            state, num_looks = self._look(handle), num_looks + 1
            if num_looks > SPINS:
                time.sleep(NAP_SECONDS)
        return state

    def _look(self, handle: Any) -> str:  # noqa: ANN401
        try:
            state: str = self._agent.check_xfer_state(handle)
        except Exception:  # the connection is lost, and all reads over it have ended
            return "ERR"
        return state

    def _end_late_reads(self, peer: bytes) -> None:
        """Release the buffers of late reads that have ended.

        Raises OSError if the late read of this peer has not ended, or if there are too many.
        """
        for late in list(self._late):
            patience = READ_SECONDS if late.peer == peer else 0.0
            state = self._wait(late.handle, self._look(late.handle), patience)
            if state == "PROC":
                continue
            self._late.remove(late)
            self._agent.release_xfer_handle(late.handle)
            self._agent.deregister_memory(self._agent.get_reg_descs(late.buffer))
            if state != "DONE":
                self._forget(late.peer)
        if any(late.peer == peer for late in self._late):
            raise TimeoutError("a peer has still not answered an earlier read")
        if len(self._late) >= MAX_LATE:
            raise TimeoutError(f"{MAX_LATE} peers have still not answered earlier reads")

    @override
    def send(self, memory: PoolMemory, note: bytes) -> None:
        try:
            self._agent.send_notif(self._connect(memory.agent), note)
            for _ in range(FLUSHES):
                self._agent.get_new_notifs()
        except Exception as error:
            self._forget(memory.agent)
            raise OSError(_text(error)) from None

    def _connect(self, description: bytes) -> str:
        if description not in self._names:
            name = self._agent.add_remote_agent(description)
            self._names[description] = name.decode() if isinstance(name, bytes) else name
        return self._names[description]

    def _forget(self, description: bytes) -> None:
        """Disconnect from an agent, so that a later read connects to it again."""
        name = self._names.pop(description, None)
        if name is not None:
            with contextlib.suppress(Exception):  # the agent is gone either way
                self._agent.remove_remote_agent(name)

    @override
    def close(self) -> None:
        buffers = [late.buffer for late in self._late]  # kept until the agent has ended
        self._late.clear()
        for description in list(self._names):
            self._forget(description)
        self._agent = _ENDED
        del buffers


_ENDED: Any = None  # replaces an agent: dropping the last reference ends it


def _text(error: BaseException) -> str:
    return str(error) or type(error).__name__
