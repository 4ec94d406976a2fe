"""GraphInputs and AsyncCopy: a pass's inputs in one copy to the device, and its results.

Two launches may be on their way at once. On the device they share everything: one stream does what
it is asked for in order, so that what the second writes over, the first has read, and memory that
torch takes back goes to work behind that. The host is not in that order: a copy may not have begun
when the host comes back to the same memory. So each block of host memory has a mark behind its
copy, and there is more than one of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..machine.device import make_event

HostFields: TypeAlias = Mapping[str, NDArray[Any]]
NUM_BUFFERS = 2  # launches on their way at once: the third finds the first one's block free
_ALIGN = 16  # bytes: what a kernel may assume of an argument
_LEAST_WORDS = 512  # of a reply: nearly all are of one size, which torch keeps to be used again


@dataclass(frozen=True, slots=True)
class Field:
    """``count`` numbers of one name."""

    name: str
    count: int
    dtype: torch.dtype = torch.int32


class GraphInputs:
    """Pinned blocks of host memory and a block on the device, with the same fields in all.

    ``device`` has the views that kernels read: their addresses never change, so a graph may keep
    them. The host's blocks are written in turn, ``num_hosts`` of them; each belongs to the copy
    from `upload` until the mark behind it.
    """

    def __init__(
        self, fields: Sequence[Field], device: torch.device, *, num_hosts: int = 1
    ) -> None:
        offsets, size = _offsets(fields)
        self._block = torch.zeros(size, dtype=torch.uint8, device=device)
        self._hosts = [_Host(fields, device) for _ in range(num_hosts)]
        self._turn = 0  # which of them is written next
        self._last = (offsets[-1], fields[-1].dtype.itemsize)
        self.device = _views(self._block, fields)

    def open(self) -> HostFields:
        """The host's fields, to be written: of the pass before the last, or void.

        Waits for a copy of them that is not over yet.
        """
        host = self._hosts[self._turn]
        if host.is_lent:
            host.event.synchronize()
        host.is_lent = False
        return host.fields

    def upload(self, num_last: int | None = None) -> None:
        """Copy to the device, without waiting: of the last field ``num_last`` numbers or all."""
        host, (at, itemsize) = self._hosts[self._turn], self._last
        stop = len(host.block) if num_last is None else at + num_last * itemsize
        self._block[:stop].copy_(host.block[:stop], non_blocking=True)
        host.event.record()
        host.is_lent = True
        self._turn = (self._turn + 1) % len(self._hosts)


class _Host:
    """One of the blocks of host memory."""

    def __init__(self, fields: Sequence[Field], device: torch.device) -> None:
        size = _offsets(fields)[1]
        self.block = _host_memory(size, torch.uint8, device)
        self.fields: HostFields = {n: v.numpy() for n, v in _views(self.block, fields).items()}
        self.event = make_event(device)
        self.is_lent = False  # to a copy that may not be over


class AsyncCopy:
    """Numbers on their way to the host.

    Its block of memory is not reused while it is referenced or its copy is not over. Its event is
    its own, too: `read` waits for this copy, not for later launches.
    """

    def __init__(self, numbers: Tensor) -> None:
        count = len(numbers)
        block = _host_memory(max(count, _LEAST_WORDS), numbers.dtype, numbers.device)
        self._numbers = block[:count]
        self._numbers.copy_(numbers, non_blocking=True)
        self._event = make_event(numbers.device)
        self._event.record()

    def read(self) -> NDArray[Any]:
        """The numbers, when they are there."""
        self._event.synchronize()
        return self._numbers.numpy()


def _host_memory(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros; where the device is a GPU, in memory that it copies by itself."""
    return torch.zeros(count, dtype=dtype, device="cpu", pin_memory=device.type == "cuda")


def _offsets(fields: Sequence[Field]) -> tuple[list[int], int]:
    """Offset of each field, and the size of all, in bytes."""
    sizes = [-(-f.count * f.dtype.itemsize // _ALIGN) * _ALIGN for f in fields]
    ends = np.cumsum(sizes).tolist()
    return [end - size for end, size in zip(ends, sizes, strict=True)], ends[-1]


def _views(block: Tensor, fields: Sequence[Field]) -> dict[str, Tensor]:
    """The fields of a block."""
    offsets, _ = _offsets(fields)
    return {
        field.name: block[at : at + field.count * field.dtype.itemsize].view(field.dtype)
        for field, at in zip(fields, offsets, strict=True)
    }
