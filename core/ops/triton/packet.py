"""Packet: all that the host tells the device before a pass, in one copy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

HostFields: TypeAlias = dict[str, NDArray[Any]]
_ALIGN = 16  # bytes: what a kernel may assume of an argument


@dataclass(frozen=True, slots=True)
class Field:
    """``count`` numbers of one name."""

    name: str
    count: int
    dtype: torch.dtype = torch.int32


class Event(Protocol):
    """A mark in the device's queue of work, as `torch.cuda.Event` is one."""

    def record(self) -> None:
        """Set the mark behind all that was asked for so far."""

    def synchronize(self) -> None:
        """Wait until the device has come to the mark."""


class Packet:
    """A pinned block of host memory and a block on the device, with the same fields in both.

    ``device`` has the views that kernels read: their addresses never change, so a graph may keep
    them. The host's block belongs to the copy from `upload` until the event behind it.
    """

    def __init__(
        self, fields: Sequence[Field], device: torch.device, *, event: Event | None = None
    ) -> None:
        on_gpu = device.type == "cuda"
        offsets, size = _offsets(fields)
        self._host = torch.zeros(size, dtype=torch.uint8, device="cpu", pin_memory=on_gpu)
        self._block = torch.zeros(size, dtype=torch.uint8, device=device)
        self._event = event or (torch.cuda.Event() if on_gpu else None)  # type: ignore[no-untyped-call]
        self._is_lent = False  # to a copy that may not be over
        self._last = (offsets[-1], fields[-1].dtype.itemsize)
        self._fields: HostFields = {
            field.name: _view(self._host, field, at).numpy()
            for field, at in zip(fields, offsets, strict=True)
        }
        self.device: dict[str, Tensor] = {
            field.name: _view(self._block, field, at)
            for field, at in zip(fields, offsets, strict=True)
        }

    def open(self) -> HostFields:
        """The host's fields, to be written; waits for a copy of them that is not over yet."""
        if self._is_lent and self._event is not None:
            self._event.synchronize()
        self._is_lent = False
        return self._fields

    def upload(self, num_last: int | None = None) -> None:
        """Copy to the device, without waiting: of the last field ``num_last`` numbers or all."""
        at, itemsize = self._last
        stop = len(self._host) if num_last is None else at + num_last * itemsize
        self._block[:stop].copy_(self._host[:stop], non_blocking=True)
        if self._event is not None:
            self._event.record()
        self._is_lent = True


def _offsets(fields: Sequence[Field]) -> tuple[list[int], int]:
    """Where each field begins, and the size of all, in bytes."""
    sizes = [-(-f.count * f.dtype.itemsize // _ALIGN) * _ALIGN for f in fields]
    ends = np.cumsum(sizes).tolist()
    return [end - size for end, size in zip(ends, sizes, strict=True)], ends[-1]


def _view(block: Tensor, field: Field, at: int) -> Tensor:
    return block[at : at + field.count * field.dtype.itemsize].view(field.dtype)
