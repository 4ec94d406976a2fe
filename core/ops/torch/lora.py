"""LoRA by a backend's own linears in float32, the reference for other backends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from ..base import Ops
from ..layers import linear_of_few
from ..lora import LoraUpdate, PackedLora
from ..weights import PackedLinear


class _Block(NamedTuple):
    outs: slice
    ranks: slice
    b: PackedLinear


@dataclass(frozen=True, slots=True, eq=False)
class LinearLora(PackedLora):
    """A and the blocks of B as float32 linears."""

    a: PackedLinear
    blocks: tuple[_Block, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of all matrices."""
        return sum(each.weight.nbytes for each in (self.a, *(block.b for block in self.blocks)))


def pack_linear_lora(ops: Ops, update: LoraUpdate) -> LinearLora:
    """Pack each matrix of an update in float32 for ``ops.linear``."""
    blocks = tuple(
        _Block(
            slice(block.first_out, block.first_out + len(block.b)),
            slice(block.first_rank, block.first_rank + block.b.shape[1]),
            ops.pack_linear(block.b.float().contiguous(), plain=True),
        )
        for block in update.blocks
    )
    return LinearLora(ops.pack_linear(update.a.float().contiguous(), plain=True), blocks)


def add_linear_lora(ops: Ops, out: Tensor, x: Tensor, rows: Tensor, lora: PackedLora) -> None:
    """Add the update of some rows of ``x`` [T, in_features] to ``out`` [T, out_features].

    ``rows``: indices of the rows. Sums are float32 and rounded once, when they are added.
    """
    assert isinstance(lora, LinearLora)
    hidden = linear_of_few(ops, x.index_select(0, rows).float(), lora.a)
    for block in lora.blocks:
        added = linear_of_few(ops, hidden[:, block.ranks].contiguous(), block.b)
        before = out[:, block.outs].index_select(0, rows)
        out[rows, block.outs] = added.add_(before.float()).to(out.dtype)
