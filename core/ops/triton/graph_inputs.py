"""GraphInputs and AsyncCopy: a pass's inputs in one copy to the device, and copies of results.

Two launches may be under way at once. On the device they share all memory: one stream works in
order, so the first launch has read a buffer before the second overwrites it, and torch reuses freed
memory only for later work. The host is not part of this order: a copy may not have begun when the
host writes the same memory again. So there are several host blocks, each with an event after its
copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..machine.device import make_event
from ..native.declarations import address_of

NUM_BUFFERS = 2  # launches under way at once; the third reuses the first one's block
_ALIGN = 16  # bytes; kernels assume this alignment of arguments
_LEAST_WORDS = 512  # least size of a host copy, so that torch can reuse blocks of one size


class HostFields(dict[str, NDArray[Any]]):
    """The fields of a host block by name.

    ``narrow_target``: `NarrowTarget` of the block, once it is made (graph/input_fields.py).
    """

    narrow_target: tuple[Any, Any] | None = None

    @cached_property
    def addresses(self) -> dict[str, int]:
        """Address of each field, which never changes."""
        return {name: address_of(field) for name, field in self.items()}


@dataclass(frozen=True, slots=True)
class Field:
    """A named array of ``count`` numbers."""

    name: str
    count: int
    dtype: torch.dtype = torch.int32


class GraphInputs:
    """Pinned blocks of host memory and one block on the device, all with the same fields.

    ``device`` has the views that kernels read: their addresses never change, so a graph may keep
    them. The ``num_hosts`` host blocks are written in turn; each belongs to its copy from `upload`
    until the event after the copy.
    """

    def __init__(
        self, fields: Sequence[Field], device: torch.device, *, num_hosts: int = 1
    ) -> None:
        offsets, size = _offsets(fields)
        self._block = torch.zeros(size, dtype=torch.uint8, device=device)
        self._hosts = [_Host(fields, device) for _ in range(num_hosts)]
        self._next = 0  # index of the host block that is written next
        self._last = (offsets[-1], fields[-1].dtype.itemsize)
        self.device = _views(self._block, fields)

    def open(self) -> HostFields:
        """Return the next host block's fields for writing; they have an earlier pass's content.

        Waits until an earlier copy of the block has ended.
        """
        host = self._hosts[self._next]
        if host.is_copying:
            host.event.synchronize()
        host.is_copying = False
        return host.fields

    def upload(self, num_last: int | None = None) -> None:
        """Copy to the device without waiting.

        ``num_last``: how many numbers of the last field to copy; None: all.
        """
        host, (at, itemsize) = self._hosts[self._next], self._last
        stop = len(host.block) if num_last is None else at + num_last * itemsize
        self._block[:stop].copy_(host.block[:stop], non_blocking=True)
        host.event.record()
        host.is_copying = True
        self._next = (self._next + 1) % len(self._hosts)


class _Host:
    """A block of host memory."""

    def __init__(self, fields: Sequence[Field], device: torch.device) -> None:
        size = _offsets(fields)[1]
        self.block = _host_memory(size, torch.uint8, device)
        views = _views(self.block, fields)
        self.fields = HostFields({name: view.numpy() for name, view in views.items()})
        self.event = make_event(device)
        self.is_copying = False  # whether a copy of the block may still run


class AsyncCopy:
    """A copy of numbers from the device to the host.

    The host memory is not reused while it is referenced or the copy has not ended. `read` waits for
    an event of this copy alone, not for later launches.
    """

    def __init__(self, numbers: Tensor) -> None:
        count = len(numbers)
        block = _host_memory(max(count, _LEAST_WORDS), numbers.dtype, numbers.device)
        self._numbers = block[:count]
        self._numbers.copy_(numbers, non_blocking=True)
        self._event = make_event(numbers.device)
        self._event.record()

    def read(self) -> NDArray[Any]:
        """Wait for the copy and return the numbers."""
        self._event.synchronize()
        return self._numbers.numpy()


class JoinedCopy:
    """Copies of several arrays from the device to one array on the host, one after another.

    ``count``: maximum number of all numbers. ``like``: an array with their dtype and device.
    """

    def __init__(self, count: int, like: Tensor) -> None:
        self._block = _host_memory(max(count, _LEAST_WORDS), like.dtype, like.device)
        self._event = make_event(like.device)
        self._stop = 0

    def add(self, numbers: Tensor) -> None:
        """Begin the copy of a flat array, which later launches may overwrite."""
        start, self._stop = self._stop, self._stop + len(numbers)
        self._block[start : self._stop].copy_(numbers, non_blocking=True)

    def end(self) -> None:
        """Declare that no more arrays follow."""
        self._event.record()

    def read(self) -> NDArray[Any]:
        """Wait for the copies and return the numbers."""
        self._event.synchronize()
        return self._block[: self._stop].numpy()


def _host_memory(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros on the host, in pinned memory if the device is a GPU."""
    return torch.zeros(count, dtype=dtype, device="cpu", pin_memory=device.type == "cuda")


def _offsets(fields: Sequence[Field]) -> tuple[list[int], int]:
    """Return each field's offset, and the size of all fields, in bytes."""
    sizes = [-(-f.count * f.dtype.itemsize // _ALIGN) * _ALIGN for f in fields]
    ends = np.cumsum(sizes).tolist()
    return [end - size for end, size in zip(ends, sizes, strict=True)], ends[-1]


def _views(block: Tensor, fields: Sequence[Field]) -> dict[str, Tensor]:
    """Return views of a block's fields by name."""
    offsets, _ = _offsets(fields)
    return {
        field.name: block[at : at + field.count * field.dtype.itemsize].view(field.dtype)
        for field, at in zip(fields, offsets, strict=True)
    }
