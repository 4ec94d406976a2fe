"""StatePool: recurrent states at page ends, and logs of the positions after them.

A recurrent layer has a query q, a key k, a value v, a decay and a factor beta at each position t.
From these it computes a state S, an update u and an output o, here by the gated delta rule:

    S_t = decay_t S_(t-1) + k_t u_t^T        u_t = beta_t (v_t - (decay_t S_(t-1))^T k_t)
    o_t = S_t^T q_t

A row reads S at its page's start and the log of the page's earlier positions, in order. So its bits
depend only on its position and on earlier rows, never on the division of rows into passes. A
rejected draft is a log entry that is overwritten later: nothing is rolled back.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .machine.host_memory import map_zeros

DRAFT_ROOM = 32
"""Greatest number of draft rows of a segment: positions of a log besides a page's."""
STATE_PAGE_SIZES = (16, 32, 64)
_ALIGNMENT = 64  # bytes: each field starts at a multiple of it


TensorKind: TypeAlias = tuple[tuple[int, ...], torch.dtype]


class LayerStates(Protocol):
    """The tensors of a layer in a slot and in a log of the `StatePool`.

    ``dtype`` is the activations'.
    """

    def slot_tensors(self, dtype: torch.dtype) -> list[TensorKind]:
        """Return shapes and dtypes of the layer's tensors in a slot."""

    def log_tensors(self, dtype: torch.dtype, ring: int) -> list[TensorKind]:
        """Return shapes and dtypes of the layer's tensors in a log of ``ring`` positions."""


class StateShape(NamedTuple):
    """State of one layer: S ``[num_heads, key_dim, value_dim]``, and inputs of a convolution.

    The state at a position has the inputs of the ``conv_len - 1`` earlier positions. A layer that
    is only a short convolution has ``num_heads`` 0: S and the log's k, u and c are empty. A layer
    without a convolution has ``conv_len`` 1 and keeps no inputs.
    """

    num_heads: int
    key_dim: int
    value_dim: int
    conv_channels: int
    conv_len: int

    def slot_tensors(self, dtype: torch.dtype) -> list[TensorKind]:
        """Return shapes and dtypes of a `SlotLayer`."""
        return [
            ((self.num_heads, self.key_dim, self.value_dim), torch.float32),
            ((self.conv_len - 1, self.conv_channels), dtype),
        ]

    def log_tensors(self, dtype: torch.dtype, ring: int) -> list[TensorKind]:
        """Return shapes and dtypes of a `LogLayer`."""
        return [
            ((self.num_heads, ring, self.key_dim), torch.float32),
            ((self.num_heads, ring, self.value_dim), torch.float32),
            ((self.num_heads, ring), torch.float32),
            ((ring if self.conv_len > 1 else 0, self.conv_channels), dtype),
        ]


class SlotLayer(NamedTuple):
    """One layer's tensors in a slot, as views."""

    state: Tensor  # S [num_heads, key_dim, value_dim] float32
    tail: Tensor  # [conv_len - 1, conv_channels] inputs, oldest first


class LogLayer(NamedTuple):
    """One layer's tensors in a log, as views. Position p is at ``p % StatePool.ring``."""

    k: Tensor  # [num_heads, ring, key_dim] float32
    u: Tensor  # [num_heads, ring, value_dim] float32
    c: Tensor  # [num_heads, ring] float32: sum of the log decays since the page's start
    inputs: Tensor  # [ring, conv_channels], or [0, conv_channels] without a convolution


@dataclass(frozen=True, slots=True)
class _Field:
    """A tensor of a layer in the memory of a slot or a log."""

    at: int  # offset in bytes
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Size of the tensor in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    def view(self, memory: Tensor) -> Tensor:
        """Return a view of the tensor in the memory of one slot or log."""
        part = memory[self.at : self.at + self.num_bytes]
        return part.view(self.dtype).view(self.shape)


class StatePool:
    """States and logs of the recurrent layers; each slot and log is one blob over all layers.

    A slot holds a state at a page's end and belongs to a running request or to that page. A log
    belongs to a running request. The prefix cache knows the owners. ``at`` [num_slots, num_layers]
    int64, on the host: position of a layer's S, a multiple of the page size; a failed pass may have
    advanced some layers.
    """

    def __init__(
        self,
        num_slots: int,
        num_logs: int,
        shapes: Sequence[LayerStates],
        *,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        """Allocate slots and logs; convolution inputs have ``dtype``, the activations'.

        Raises ValueError for a page size that is not in `STATE_PAGE_SIZES`.
        """
        if page_size not in STATE_PAGE_SIZES:
            sizes = ", ".join(map(str, STATE_PAGE_SIZES))
            raise ValueError(
                f"recurrent states need a page size of {sizes} tokens, not {page_size}"
            )
        self.num_slots, self.num_logs = num_slots, num_logs
        self.shapes = tuple(shapes)
        self.page_size = page_size
        self.ring = page_size + DRAFT_ROOM
        self.dtype = dtype
        self._slot_fields, self.bytes_per_slot = _slot_fields(self.shapes, dtype)
        self._log_fields, self.bytes_per_log = _log_fields(self.shapes, self.ring, dtype)
        self.slots = _fresh(num_slots * self.bytes_per_slot, device).view(num_slots, -1)
        self.logs = _fresh(num_logs * self.bytes_per_log, device).view(num_logs, -1)
        self.at = torch.zeros((num_slots, len(self.shapes)), dtype=torch.int64, device="cpu")
        # Byte offsets of each layer's fields, [num_layers, num_fields]. The C kernels read them.
        self.slot_offsets = _offsets(self._slot_fields)
        self.log_offsets = _offsets(self._log_fields)

    @property
    def num_bytes(self) -> int:
        """Size of all slots and logs in bytes."""
        return self.slots.nbytes + self.logs.nbytes

    def slot(self, index: int, layer: int) -> SlotLayer:
        """Return views of a layer's tensors in a slot."""
        return SlotLayer(*self.slot_views(index, layer))

    def log(self, index: int, layer: int) -> LogLayer:
        """Return views of a layer's tensors in a log."""
        return LogLayer(*self.log_views(index, layer))

    def slot_views(self, index: int, layer: int) -> list[Tensor]:
        """Return views of a layer's tensors in a slot, in the order of its shape."""
        return [field.view(self.slots[index]) for field in self._slot_fields[layer]]

    def log_views(self, index: int, layer: int) -> list[Tensor]:
        """Return views of a layer's tensors in a log, in the order of its shape."""
        return [field.view(self.logs[index]) for field in self._log_fields[layer]]

    def copy_slot(self, source: int, target: int) -> None:
        """Copy a state, with its position, to another slot."""
        self.slots[target].copy_(self.slots[source])
        self.at[target] = self.at[source]

    def set_position(self, slot: int, log: int, position: int) -> None:  # noqa: ARG002
        """Set a state's position for a timed pass from ``position``; the state is arbitrary."""
        self.at[slot] = position // self.page_size * self.page_size

    def reset(self, slot: int) -> None:
        """Set a slot to the initial state: zeros at position 0."""
        self.slots[slot].zero_()
        self.at[slot] = 0


def bytes_per_slot(shapes: Sequence[LayerStates], dtype: torch.dtype) -> int:
    """Return the bytes of one slot of a `StatePool`."""
    return _slot_fields(shapes, dtype)[1]


def bytes_per_log(shapes: Sequence[LayerStates], dtype: torch.dtype, *, page_size: int) -> int:
    """Return the bytes of one log of a `StatePool`."""
    return _log_fields(shapes, page_size + DRAFT_ROOM, dtype)[1]


def _offsets(layers: Sequence[Sequence[_Field]]) -> NDArray[np.int64]:
    return np.array([[field.at for field in layer] for layer in layers], dtype=np.int64)


def _fresh(num_bytes: int, device: torch.device | str) -> Tensor:
    """Return zeroed bytes; host memory is mapped on first touch."""
    if torch.device(device).type == "cpu":
        return map_zeros(num_bytes)
    return torch.zeros(num_bytes, dtype=torch.uint8, device=device)


def _slot_fields(
    shapes: Sequence[LayerStates], dtype: torch.dtype
) -> tuple[list[list[_Field]], int]:
    """Return the fields of each layer in a slot, and the slot's size in bytes."""
    return _laid_out([shape.slot_tensors(dtype) for shape in shapes])


def _log_fields(
    shapes: Sequence[LayerStates], ring: int, dtype: torch.dtype
) -> tuple[list[list[_Field]], int]:
    """Return the fields of each layer in a log, and the log's size in bytes."""
    return _laid_out([shape.log_tensors(dtype, ring) for shape in shapes])


def _laid_out(
    layers: Sequence[Sequence[TensorKind]],
) -> tuple[list[list[_Field]], int]:
    """Return consecutive aligned fields for each layer's tensors, and their size in bytes."""
    at, found = 0, []
    for layer in layers:
        fields = []
        for shape, dtype in layer:
            field = _Field(at, shape, dtype)
            fields.append(field)
            at += -(-field.num_bytes // _ALIGNMENT) * _ALIGNMENT
        found.append(fields)
    return found, at
