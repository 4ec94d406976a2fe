"""TritonLora: an update of a linear; AdapterTables: addresses of all adapters' updates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ...lora import LoraBlock, LoraUpdate, LoraWeights, PackedLora
from ...weights import PackedLinear
from .lora_kernels import BLOCK_WORDS, LINEAR_WORDS, lora_a_kernel, lora_b_kernel
from .tiles import FEW_COLUMNS

TILE_ROWS, TILE_RANKS = 16, 16
TILE_IN = 64  # input features per step of the kernel's loop
LORA_OPTIONS = {"num_warps": 4, "enable_fp_fusion": True}
_MIN_STEPS, _MAX_PIECES = 4, 16  # least steps of a piece of the inputs; most pieces


@dataclass(frozen=True, slots=True, eq=False)
class TritonLora(PackedLora):
    """A and the blocks of B in float32, each contiguous and aligned to 16 bytes."""

    a: Tensor  # [ranks, in_features]
    blocks: tuple[LoraBlock, ...]

    @property
    def num_bytes(self) -> int:
        """Size of all matrices in bytes."""
        return sum(each.nbytes for each in (self.a, *(block.b for block in self.blocks)))


def pack_triton_lora(update: LoraUpdate) -> TritonLora:
    """Lay out an update in float32, aligned."""
    blocks = tuple(block._replace(b=_aligned(block.b)) for block in update.blocks)
    return TritonLora(_aligned(update.a), blocks)


def _aligned(matrix: Tensor) -> Tensor:
    wide = matrix.float().contiguous()
    return wide.clone() if wide.data_ptr() % 16 else wide


class _Target(NamedTuple):
    """A linear that adapters change: its number in the tables, and the largest number of ranks.

    Matrices stacked into the linear each have their own ranks; ``num_ranks`` is their sum.
    """

    number: int
    num_ranks: int


class AdapterTables:
    """A table for each adapter on the device with the addresses of its updates, in one layout.

    ``growth`` counts the extensions of the layout, by a linear that no adapter had changed before
    or by more ranks. A graph is valid for one layout.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._targets: dict[PackedLinear, _Target] = {}
        self._tables: WeakKeyDictionary[LoraWeights, Tensor] = WeakKeyDictionary()
        self.growth = 0

    def take(self, adapters: Sequence[LoraWeights]) -> list[int]:
        """Return the addresses of adapters' tables; extends the layout if necessary."""
        new = [each for each in adapters if each not in self._tables]
        if any([self._grow(each.parts) for each in new]):  # noqa: C419 - every call has an effect
            self.growth += 1
            new = [*self._tables, *new]
        for each in new:
            self._tables[each] = self._table(each.parts)
        return [self._tables[each].data_ptr() for each in adapters]

    def add(
        self, out: Tensor, x: Tensor, linear: PackedLinear, adapted: Tensor, tables: Tensor
    ) -> None:
        """Add a linear's updates for rows ``x`` [T, in_features] to ``out`` [T, out_features].

        ``adapted`` [T] int32: each row's adapter, numbered in ``tables`` from 1; 0: no adapter.
        ``tables`` [n] int64: addresses returned by `take`.
        """
        target = self._targets.get(linear)
        if target is not None:
            _add(out, x.contiguous(), target, adapted, tables)

    def _grow(self, parts: Mapping[object, PackedLora]) -> bool:
        """Extend the layout for an adapter; return whether that was necessary."""
        has_grown = False
        for linear, lora in parts.items():
            assert isinstance(linear, PackedLinear)
            assert isinstance(lora, TritonLora)
            known = self._targets.get(linear, _Target(len(self._targets), 0))
            if known.num_ranks < len(lora.a):
                self._targets[linear] = known._replace(num_ranks=len(lora.a))
                has_grown = True
        return has_grown

    def _table(self, parts: Mapping[object, PackedLora]) -> Tensor:
        """Return an adapter's table: an entry per target (zeros: unchanged), then all blocks."""
        heads: list[int] = []
        blocks: list[int] = []
        first_block = LINEAR_WORDS.value * len(self._targets)
        for linear in self._targets:
            lora = parts.get(linear)
            if lora is None:
                heads += [0] * LINEAR_WORDS.value
                continue
            assert isinstance(lora, TritonLora)
            at = first_block + len(blocks)
            heads += [lora.a.data_ptr(), len(lora.a), at, len(lora.blocks)]
            for first_out, first_rank, b in lora.blocks:
                blocks += [first_out, first_out + len(b), first_rank, b.shape[1], b.data_ptr()]
        assert len(blocks) % BLOCK_WORDS.value == 0
        return torch.tensor(heads + blocks, dtype=torch.int64, device=self._device)


def _add(out: Tensor, x: Tensor, target: _Target, adapted: Tensor, tables: Tensor) -> None:
    (num_rows, in_features), out_features, ranks = x.shape, out.shape[1], target.num_ranks
    pieces = _pieces(in_features)
    hidden = x.new_empty((pieces, num_rows, ranks), dtype=torch.float32)
    row_tiles = -(-num_rows // TILE_ROWS)
    lora_a_kernel[(row_tiles, -(-ranks // TILE_RANKS) * pieces, len(tables))](
        x, adapted, tables, hidden, num_rows, target.number, pieces, in_features, ranks,
        TILE_ROWS=TILE_ROWS, TILE_RANKS=TILE_RANKS, TILE_IN=TILE_IN, **LORA_OPTIONS,
    )  # fmt: skip
    lora_b_kernel[(row_tiles, -(-out_features // FEW_COLUMNS), len(tables))](
        hidden, adapted, tables, out, num_rows, target.number, pieces, ranks, out_features,
        TILE_ROWS=TILE_ROWS, TILE_OUT=FEW_COLUMNS, TILE_RANKS=TILE_RANKS, **LORA_OPTIONS,
    )  # fmt: skip


def _pieces(in_features: int) -> int:
    """Return the number of pieces of a sum, which depends only on the number of inputs."""
    most, pieces = min(_MAX_PIECES, -(-in_features // TILE_IN) // _MIN_STEPS), 1
    while pieces * 2 <= most:
        pieces *= 2
    return pieces


def add_triton_lora(out: Tensor, x: Tensor, rows: Tensor, lora: PackedLora) -> None:
    """Add the update of some rows of ``x`` [T, in_features] to ``out`` [T, out_features].

    ``rows`` [n]: indices of the rows.
    """
    linear = PackedLinear(lora.a, None, packed=False) if isinstance(lora, TritonLora) else None
    assert linear is not None
    only = LoraWeights({linear: lora})
    tables = AdapterTables(x.device)
    addresses = torch.tensor(tables.take([only]), dtype=torch.int64, device=x.device)
    adapted = torch.zeros(len(x), dtype=torch.int32, device=x.device)
    tables.add(out, x, linear, adapted.index_fill_(0, rows, 1), addresses)
