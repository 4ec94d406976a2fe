"""TritonPlan: one pass on the host, and what its kernels read on the device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ...batch import RaggedBatch
from ...kv_pool import KVPool
from ..base import HeadLayout, Rope
from .packet import Packet
from .pass_fields import Windows, fields, fill, words_needed
from .work_list import WorkList, build_work_list

NARROW_TILE, WIDE_TILE = 16, 64  # queries: rows times heads of a group


@dataclass(frozen=True, slots=True, eq=False)
class Geometry:
    """What does not change from pass to pass."""

    pool: KVPool
    heads: HeadLayout
    rope: Rope
    one_tile: bool  # whether chunks are cut into tiles as narrow as those of decoding rows

    @property
    def narrow_tile(self) -> int:
        """Queries of a narrow tile: a group at least."""
        return max(NARROW_TILE, power_of_two(self.heads.group_size))

    @property
    def wide_tile(self) -> int:
        """Queries of a wide tile."""
        return self.narrow_tile if self.one_tile else max(WIDE_TILE, self.narrow_tile)

    @property
    def page_blocks(self) -> int:
        """Blocks of one page."""
        return self.pool.num_layers * 2 * self.pool.num_kv_heads

    def layer_block(self, layer: int) -> int:
        """Index of a layer's first block in page 0."""
        return layer * 2 * self.pool.num_kv_heads


@dataclass(frozen=True, slots=True, eq=False)
class Sums:
    """Room for what narrow items leave of each split, for `merge_kernel`; used layer by layer."""

    sums: Tensor  # [num_places, num_heads, head_dim] float32
    tops: Tensor  # [num_places, num_heads] float32
    totals: Tensor  # [num_places, num_heads] float32

    @classmethod
    def of(cls, num_places: int, heads: HeadLayout, device: torch.device) -> Sums:
        """Void room for so many rows times splits."""
        shape = (max(1, num_places), heads.num_heads)
        tops = torch.empty(shape, dtype=torch.float32, device=device)
        sums = tops.new_empty((*tops.shape, heads.head_dim))
        return cls(sums, tops, torch.empty_like(tops))


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """The work list of the layers with one window. See `WorkList`."""

    counts: Tensor  # [4] where in ``words`` the narrow items begin, and how many; the wide ones
    places: Tensor  # [num_rows] where a row's sums of its first split are; -1: not a narrow row


@dataclass(frozen=True, slots=True, eq=False)
class DevicePlan:
    """What the kernels of a pass read: a packet's fields on the device, and room for sums.

    Rows behind those of the batch have slot -1, place -1 and are in no item: nobody reads or
    writes for them.
    """

    geometry: Geometry
    token_ids: Tensor  # [num_rows] int32
    positions: Tensor  # [num_rows] int32
    slots: Tensor  # [num_rows] int32: page_id * page_size + offset in the page; -1: no row
    logit_rows: Tensor  # [num_rows] int32; only as many as the batch has are set
    words: Tensor  # int32: pages, rows of items, items
    works: Mapping[int | None, Work]
    sums: Sums
    cos: Tensor  # [num_positions, head_dim / 2] float32
    sin: Tensor
    kinds: tuple[bool, bool]  # whether there may be narrow items, and wide ones


class TritonPlan:
    """A pass as the host has it. The device gets it when somebody asks for `on_device`."""

    def __init__(self, batch: RaggedBatch, geometry: Geometry) -> None:
        self.batch = batch
        self.geometry = geometry
        self._work_lists: dict[int | None, WorkList] = {}
        self._device: DevicePlan | None = None

    @property
    def last_stop(self) -> int:
        """First position behind all rows."""
        return int(self.batch.stops.max())

    @property
    def has_wide(self) -> bool:
        """Whether some rows are those of a long chunk."""
        return any(len(work.wide) for work in self._work_lists.values())

    def work_lists(self, windows: Windows) -> list[WorkList]:
        """Made for each window when it is first asked for."""
        for window in windows:
            if window not in self._work_lists:
                self._work_lists[window] = self._work_list(window)
        return [self._work_lists[window] for window in windows]

    def _work_list(self, window: int | None) -> WorkList:
        geometry, group = self.geometry, self.geometry.heads.group_size
        return build_work_list(
            self.batch,
            narrow_rows=geometry.narrow_tile // group,
            wide_rows=geometry.wide_tile // group,
            window=window,
        )

    def on_device(self, windows: Windows = (), num_rows: int = 0) -> DevicePlan:
        """The pass in a packet of its own, with room for ``num_rows`` at least."""
        if self._device is None or not self._device.works.keys() >= set(windows):
            works = self.work_lists(windows)
            num_rows = max(num_rows, self.batch.num_rows)
            device = self.geometry.pool.data.device
            num_words = words_needed(self.batch, works)
            packet = Packet(fields(num_rows, len(windows), num_words), device)
            packet.upload(fill(packet.open(), self.batch, works))
            num_places = max((work.num_places for work in works), default=0)
            sums = Sums.of(num_places, self.geometry.heads, device)
            tables = self.geometry.rope.table(self.last_stop)
            kinds = (num_places > 0, self.has_wide)
            self._device = device_plan(self.geometry, packet, windows, sums, tables, kinds)
        return self._device


def device_plan(
    geometry: Geometry,
    packet: Packet,
    windows: Windows,
    sums: Sums,
    tables: tuple[Tensor, Tensor],
    kinds: tuple[bool, bool],
) -> DevicePlan:
    """The views of a packet with the `fields` of these windows."""
    views = packet.device
    works = {
        window: Work(views[f"counts{index}"], views[f"places{index}"])
        for index, window in enumerate(windows)
    }
    return DevicePlan(
        geometry=geometry,
        token_ids=views["token_ids"],
        positions=views["positions"],
        slots=views["slots"],
        logit_rows=views["logit_rows"],
        words=views["words"],
        works=works,
        sums=sums,
        cos=tables[0],
        sin=tables[1],
        kinds=kinds,
    )


def power_of_two(number: int) -> int:
    """The next one, from ``number`` up."""
    return 1 << (number - 1).bit_length()
