"""TritonPlan: the index tensors of one pass, on the device."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ...batch import IntArray, RaggedBatch
from ...kv_pool import KVPool
from ..base import HeadLayout
from .work_list import Items, WorkList, build_work_list

NARROW_TILE, WIDE_TILE = 16, 64  # queries: rows times heads of a group


@dataclass(frozen=True, slots=True, eq=False)
class DeviceItems:
    """`Items` as int32 on the device."""

    rows: Tensor
    first_rows: Tensor
    num_rows: Tensor
    tables: Tensor
    first_splits: Tensor
    last_splits: Tensor

    @classmethod
    def of(cls, items: Items, device: torch.device) -> DeviceItems:
        """A copy of host arrays."""
        return cls(*(_to(getattr(items, name), device) for name in cls.__slots__))

    def __len__(self) -> int:
        return len(self.tables)


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """A `WorkList` on the device, and room for what its narrow items leave."""

    narrow: DeviceItems
    wide: DeviceItems
    merged_rows: Tensor
    bases: Tensor
    first_splits: Tensor
    last_splits: Tensor
    sums: Tensor  # [num_places, num_heads, head_dim] float32
    tops: Tensor  # [num_places, num_heads] float32
    totals: Tensor  # [num_places, num_heads] float32


class TritonPlan:
    """Indices of one forward pass; work lists are made at the first layer that has a window."""

    def __init__(
        self, batch: RaggedBatch, pool: KVPool, heads: HeadLayout, cos: Tensor, sin: Tensor
    ) -> None:
        device = pool.data.device
        self.pool = pool
        self.heads = heads
        self.cos, self.sin = cos.contiguous(), sin.contiguous()
        self.positions = batch.positions.to(torch.int32)
        # Copies of the last row must not write where it does: who is last would be undefined.
        is_copy = torch.arange(batch.num_rows, device=device) >= int(batch.lens.sum())
        self.slots = batch.slots.masked_fill(is_copy, -1)
        self.tables = _to(batch.page_table, device)
        self.page_blocks = pool.num_layers * 2 * pool.num_kv_heads
        self._batch = batch
        self._works: dict[int | None, Work] = {}

    @property
    def narrow_tile(self) -> int:
        """Queries of a narrow tile: a group at least."""
        return max(NARROW_TILE, _power_of_two(self.heads.group_size))

    @property
    def wide_tile(self) -> int:
        """Queries of a wide tile."""
        return max(WIDE_TILE, _power_of_two(self.heads.group_size))

    def layer_block(self, layer: int) -> int:
        """Index of a layer's first block in page 0."""
        return layer * 2 * self.pool.num_kv_heads

    def work(self, window: int | None) -> Work:
        """The work list of the layers with this window."""
        if window not in self._works:
            group = self.heads.group_size
            work_list = build_work_list(
                self._batch,
                narrow_rows=self.narrow_tile // group,
                wide_rows=self.wide_tile // group,
                window=window,
            )
            self._works[window] = self._on_device(work_list)
        return self._works[window]

    def _on_device(self, work: WorkList) -> Work:
        device, heads = self.pool.data.device, self.heads
        places = (max(1, work.num_places), heads.num_heads)
        return Work(
            narrow=DeviceItems.of(work.narrow, device),
            wide=DeviceItems.of(work.wide, device),
            merged_rows=_to(work.merged_rows, device),
            bases=_to(work.bases, device),
            first_splits=_to(work.first_splits, device),
            last_splits=_to(work.last_splits, device),
            sums=torch.empty((*places, heads.head_dim), dtype=torch.float32, device=device),
            tops=torch.empty(places, dtype=torch.float32, device=device),
            totals=torch.empty(places, dtype=torch.float32, device=device),
        )


def _to(values: IntArray, device: torch.device) -> Tensor:
    return torch.from_numpy(values.astype(np.int32)).to(device)


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
