"""NativeLora: an update of a linear in the layout of lora.h."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from ctypes import POINTER, Structure
from typing import TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ...lora import AdaptedRows, LoraBlock, LoraUpdate, LoraWeights, PackedLora
from ...weights import PackedLinear
from ..declarations import STRUCTS
from ..library import DTYPES, NativeLibrary

Updates: TypeAlias = "ctypes.Array[ctypes._Pointer[Structure]]"
CHUNK = 64  # outputs of a chunk; must be equal to FT_LORA_CHUNK of lora.h


class NativeLora(PackedLora):
    """A LoRA update with A and B in the activations' dtype."""

    __slots__ = ("_kept_alive", "_num_bytes", "struct")

    def __init__(self, update: LoraUpdate, dtype: torch.dtype) -> None:
        a = update.a.to(dtype).contiguous()
        packed = [_chunks(block.b.to(dtype)) for block in update.blocks]
        blocks = (STRUCTS.ft_lora_block * len(packed))(*map(_block, update.blocks, packed))
        self._kept_alive = (a, packed)  # the struct points into them
        self._num_bytes = sum(each.nbytes for each in (a, *packed))
        ranks, in_features = a.shape
        self.struct = STRUCTS.ft_lora(
            in_features=in_features,
            out_features=update.out_features,
            ranks=ranks,
            a=a.data_ptr(),
            blocks=blocks,
            num_blocks=len(packed),
        )

    @property
    def num_bytes(self) -> int:
        """Size of A and B in bytes."""
        return self._num_bytes


class AdaptedStructs:
    """The adapters of a pass as step.c reads them; it must live as long as the pass."""

    def __init__(
        self, adapted: Sequence[AdaptedRows], updates: Callable[[LoraWeights], Updates]
    ) -> None:
        """Make the structs; ``updates`` returns the result of `updates_of` for an adapter."""
        self._updates = [updates(each.weights) for each in adapted]
        self._rows = [np.ascontiguousarray(each.rows, dtype=np.int64) for each in adapted]
        pairs = zip(self._updates, self._rows, strict=True)
        self.structs = (STRUCTS.ft_adapted * len(adapted))(
            *(
                STRUCTS.ft_adapted(updates=updates, rows=rows.ctypes.data, num_rows=len(rows))
                for updates, rows in pairs
            )
        )


def updates_of(weights: LoraWeights, linears: Sequence[PackedLinear | None]) -> Updates:
    """Return an adapter's update of each of ``linears``, four per layer; NULL for no update."""
    updates = (POINTER(STRUCTS.ft_lora) * len(linears))()
    for index, linear in enumerate(linears):
        if (lora := weights.parts.get(linear)) is not None:
            assert isinstance(lora, NativeLora)
            updates[index] = ctypes.pointer(lora.struct)
    return updates


def add_lora(
    library: NativeLibrary, out: Tensor, x: Tensor, rows: Tensor, lora: PackedLora
) -> None:
    """Add an adapter's update of ``rows`` of ``x`` to the dense ``out``. Raises MemoryError."""
    assert isinstance(lora, NativeLora)
    x, rows = x.contiguous(), rows.contiguous()
    struct = STRUCTS.ft_lora_rows(
        lora=ctypes.pointer(lora.struct), rows=rows.data_ptr(), num_rows=len(rows)
    )
    if library.c.ft_add_lora(
        ctypes.byref(struct), 1, x.data_ptr(), out.data_ptr(), DTYPES[out.dtype]
    ):
        raise MemoryError("no memory for the rows of an adapter")


def _chunks(b: Tensor) -> Tensor:
    """Lay out ``[num_outputs, num_ranks]`` as ``[chunks, num_ranks, CHUNK]``."""
    padded = F.pad(b, (0, 0, 0, -len(b) % CHUNK))
    return padded.view(-1, CHUNK, b.shape[1]).transpose(1, 2).contiguous()


def _block(block: LoraBlock, packed: Tensor) -> Structure:
    num_outs, num_ranks = block.b.shape
    return STRUCTS.ft_lora_block(
        first_out=block.first_out,
        num_outs=num_outs,
        first_rank=block.first_rank,
        num_ranks=num_ranks,
        b=packed.data_ptr(),
    )
