"""NativeLora: an update of a linear in the layout of lora.h."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ...lora import AdaptedRows, LoraBlock, LoraUpdate, LoraWeights, PackedLora
from ...weights import PackedLinear
from ..library import DTYPES, NativeLibrary

_I64, _PTR = ctypes.c_int64, ctypes.c_void_p
Addresses: TypeAlias = ctypes.Array[ctypes.c_void_p]
CHUNK = 64  # outputs that lie together, as in lora.h


class BlockStruct(ctypes.Structure):
    """``ft_lora_block``; lends its B."""

    _fields_ = (
        ("first_out", _I64),
        ("num_outs", _I64),
        ("first_rank", _I64),
        ("num_ranks", _I64),
        ("b", _PTR),
    )


class LoraStruct(ctypes.Structure):
    """``ft_lora``; lends its A and its blocks."""

    _fields_ = (
        ("in_features", _I64),
        ("out_features", _I64),
        ("ranks", _I64),
        ("a", _PTR),
        ("blocks", _PTR),
        ("num_blocks", _I64),
    )


class LoraRowsStruct(ctypes.Structure):
    """``ft_lora_rows``; lends an update and row numbers."""

    _fields_ = (("lora", _PTR), ("rows", _PTR), ("num_rows", _I64))


class AdaptedStruct(ctypes.Structure):
    """``ft_adapted`` of step.c: the updates of all layers, and the rows that get them."""

    _fields_ = (("updates", _PTR), ("rows", _PTR), ("num_rows", _I64))


class NativeLora(PackedLora):
    """A and B in the activations' dtype."""

    __slots__ = ("_lent", "_num_bytes", "struct")

    def __init__(self, update: LoraUpdate, dtype: torch.dtype) -> None:
        a = update.a.to(dtype).contiguous()
        packed = [_chunks(block.b.to(dtype)) for block in update.blocks]
        blocks = (BlockStruct * len(packed))(*map(_block, update.blocks, packed))
        self._lent = (a, packed, blocks)  # alive as long as the struct points into them
        self._num_bytes = sum(each.nbytes for each in (a, *packed))
        ranks, in_features = a.shape
        self.struct = LoraStruct(
            in_features,
            update.out_features,
            ranks,
            a.data_ptr(),
            ctypes.addressof(blocks),
            len(packed),
        )

    @property
    def num_bytes(self) -> int:
        """Bytes of A and B."""
        return self._num_bytes

    @property
    def address(self) -> int:
        """Address of the struct; it must outlive what reads it."""
        return ctypes.addressof(self.struct)


class AdaptedStructs:
    """The adapters of a pass as step.c reads them; alive as long as the pass."""

    def __init__(
        self, adapted: Sequence[AdaptedRows], updates: Callable[[LoraWeights], Addresses]
    ) -> None:
        """``updates``: of an adapter, as `updates_of` makes them."""
        self._updates = [updates(each.weights) for each in adapted]
        self._rows = [np.ascontiguousarray(each.rows, dtype=np.int64) for each in adapted]
        pairs = zip(self._updates, self._rows, strict=True)
        self.structs = (AdaptedStruct * len(adapted))(
            *(AdaptedStruct(ctypes.addressof(u), r.ctypes.data, len(r)) for u, r in pairs)
        )


def updates_of(weights: LoraWeights, places: Sequence[PackedLinear | None]) -> Addresses:
    """The updates of the linears at ``places``, four of each layer; null where there is none."""
    return (_PTR * len(places))(*(_address(weights.parts.get(place)) for place in places))


def add_lora(
    library: NativeLibrary, out: Tensor, x: Tensor, rows: Tensor, lora: PackedLora
) -> None:
    """Add an update of some rows of ``x`` to ``out``, which is dense. Raises MemoryError."""
    assert isinstance(lora, NativeLora)
    x, rows = x.contiguous(), rows.contiguous()
    struct = LoraRowsStruct(lora.address, rows.data_ptr(), len(rows))
    if library.c.ft_add_lora(
        ctypes.byref(struct), 1, x.data_ptr(), out.data_ptr(), DTYPES[out.dtype]
    ):
        raise MemoryError("no memory for the rows of an adapter")


def _address(lora: PackedLora | None) -> int | None:
    if lora is None:
        return None
    assert isinstance(lora, NativeLora)
    return lora.address


def _chunks(b: Tensor) -> Tensor:
    """``[num_outputs, num_ranks]`` to ``[chunks, num_ranks, CHUNK]``."""
    padded = F.pad(b, (0, 0, 0, -len(b) % CHUNK))
    return padded.view(-1, CHUNK, b.shape[1]).transpose(1, 2).contiguous()


def _block(block: LoraBlock, packed: Tensor) -> BlockStruct:
    num_outs, num_ranks = block.b.shape
    return BlockStruct(block.first_out, num_outs, block.first_rank, num_ranks, packed.data_ptr())
