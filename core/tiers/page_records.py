"""PageRecords: the bytes of KV pages, as they are stored outside the pool."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor
from typing_extensions import override

from ..ops.machine.device import make_copier
from ..ops.state_pool import StatePool


class Records(Protocol):
    """Protocol of access to the bytes of pages by page id; a page's bytes are its record.

    All records have the same length.
    """

    num_bytes: int  # length of a record in bytes

    def read(self, page_id: int) -> memoryview:
        """Return the bytes of a page: the pool's own memory if possible, otherwise a copy.

        A copy is valid until the next call of `read` or `target`.
        """

    def target(self, page_id: int) -> memoryview:
        """Return memory for the new bytes of a page; the caller fills it and then calls `write`."""

    def write(self, page_id: int) -> None:
        """Copy the bytes that were put into `target` to the page."""


class PageRecords(Records):
    """`Records` of tensors: a page's record consists of its row in each tensor, in order.

    ``parts``: contiguous tensors ``[num_pages or more, ...]``, whose row p belongs to page p; the
    target's KV comes first. Rows are read as bytes, because a row may hold blocks of several
    shapes. ``targets``: tensors that receive the rows of loaded pages; by default ``parts``.
    """

    def __init__(self, parts: Sequence[Tensor], targets: Sequence[Tensor] | None = None) -> None:
        self._rows = [_bytes_of(part) for part in parts]
        self._targets = [_bytes_of(part) for part in targets or parts]
        self.num_bytes = sum(rows.shape[1] for rows in self._rows)
        device = self._rows[0].device
        self._staged = torch.empty(
            self.num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda"
        )
        self._copier = make_copier(device)
        self._is_direct = len(self._rows) == 1 and device.type == "cpu"

    @override
    def read(self, page_id: int) -> memoryview:
        if self._is_direct:
            return _view(self._rows[0][page_id])
        self._copier.copy(
            (staged, rows[page_id]) for staged, rows in self._staged_parts(self._rows)
        )
        return _view(self._staged)

    @override
    def target(self, page_id: int) -> memoryview:
        return _view(self._rows[0][page_id] if self._is_direct else self._staged)

    @override
    def write(self, page_id: int) -> None:
        if self._is_direct:
            return
        self._copier.copy(
            (rows[page_id], staged) for staged, rows in self._staged_parts(self._targets)
        )

    def _staged_parts(self, parts: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each part, together with its slice of the record in the staging buffer."""
        at = 0
        for rows in parts:
            yield self._staged[at : at + rows.shape[1]], rows
            at += rows.shape[1]


class SlotRecords(Records, Protocol):
    """`Records` of recurrent states, by slot instead of page id."""

    def set_position(self, slot: int, position: int) -> None:
        """Record that the state after ``position`` tokens was written to a slot."""


class StateRecords(PageRecords, SlotRecords):
    """`SlotRecords` of a pool of recurrent states."""

    def __init__(self, pool: StatePool) -> None:
        super().__init__([pool.slots])
        self._at = pool.at

    @override
    def set_position(self, slot: int, position: int) -> None:
        self._at[slot] = position


def _bytes_of(part: Tensor) -> Tensor:
    """Return a view of a tensor as uint8 [num_pages, page_bytes]."""
    return (
        part.flatten(1).view(torch.uint8) if part.dim() > 1 else part.view(-1, 1).view(torch.uint8)
    )


def _view(row: Tensor) -> memoryview:
    return row.numpy().data
