"""TritonPlan: one pass on the host, and the inputs of its kernels on the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from ...base import Rope
from ...batch import RaggedBatch, pass_states
from ...kv_pool import KVPool
from ...state_pool import StatePool
from ...weights import HeadLayout
from ..attention.tile_schedule import (
    KV_SPLIT_GROUP,
    NARROW_LEN,
    TileSchedule,
    build_tile_schedule,
)
from ..graph_inputs import Field, GraphInputs
from ..recurrent.pass_states import PassStates, state_fields
from ..sampling.gumbel_argmax_kernels import take_kernel
from .input_fields import Windows, fields, fill, words_needed

NARROW_TILE, WIDE_TILE = 16, 128  # queries of a tile: rows times heads of a group
MAX_PARTIAL_SUMS = 2**28  # bytes

# cos and sin of each table, [num_positions, head_dim / 2] float32
CosSin: TypeAlias = tuple[tuple[Tensor, Tensor], ...]


@dataclass(frozen=True, slots=True, eq=False)
class Geometry:
    """Pool, head layout and RoPE tables, which are the same in every pass of a decoder."""

    pool: KVPool
    heads: HeadLayout
    ropes: tuple[Rope, ...]
    one_tile: bool  # whether chunks have narrow tiles, like decoding rows

    @property
    def narrow_tile(self) -> int:
        """Number of queries of a narrow tile: at least one row's queries of a KV head."""
        return max(NARROW_TILE, power_of_two(self.heads.group_size))

    @property
    def wide_tile(self) -> int:
        """Number of queries of a wide tile."""
        return self.narrow_tile if self.one_tile else max(WIDE_TILE, self.narrow_tile)

    @property
    def kv_split_group(self) -> int:
        """Number of splits of a stretch (tile_schedule.py)."""
        return KV_SPLIT_GROUP

    def cos_sin(self, stop: int) -> CosSin:
        """Return cos and sin of positions below ``stop`` for each table."""
        return tuple(rope.table(stop) for rope in self.ropes)

    @property
    def page_blocks(self) -> int:
        """Number of blocks of a page."""
        return self.pool.page_blocks

    def state_fields(self, num_rows: int, num_segments: int, num_keeps: int) -> list[Field]:
        """Return fields of recurrent states with the given capacities; [] without states."""
        states = self.pool.states
        if states is None:
            return []
        return state_fields(len(states.shapes), num_rows, num_segments, num_keeps)

    def layer_block(self, layer: int) -> int:
        """Return the index of a layer's first block in page 0."""
        return layer * 2 * self.pool.num_kv_heads


@dataclass(frozen=True, slots=True, eq=False)
class PartialSums:
    """Buffers of partial sums for `merge_kernel`, used by one layer or part after another.

    attention.py defines the states that they contain.
    """

    acc: Tensor  # [num_partials, num_heads, head_dim] float32
    max_score: Tensor  # [num_partials, num_heads] float32
    exp_sum: Tensor  # [num_partials, num_heads] float32

    @classmethod
    def of(cls, num_partials: int, heads: HeadLayout, device: torch.device) -> PartialSums:
        """Allocate memory for ``num_partials`` partials, uninitialised."""
        shape = (max(1, num_partials), heads.num_heads)
        max_score = torch.empty(shape, dtype=torch.float32, device=device)
        acc = max_score.new_empty((*shape, heads.head_dim))
        return cls(acc, max_score, torch.empty_like(max_score))

    @property
    def num_partials(self) -> int:
        """Number of partials that fit."""
        return len(self.max_score)


def max_partials(heads: HeadLayout) -> int:
    """Return the number of partials that take `MAX_PARTIAL_SUMS` bytes."""
    return MAX_PARTIAL_SUMS // (4 * heads.num_heads * (heads.head_dim + 2))


class Kinds(NamedTuple):
    """Kernels that a work list needs: for narrow and wide items, and to merge partial sums."""

    narrow: bool
    wide: bool
    partial_sums: bool

    @classmethod
    def of(cls, work: TileSchedule) -> Kinds:
        """Return the kernels that a schedule needs."""
        return cls(len(work.narrow) > 0, len(work.wide) > 0, work.num_partials > 0)


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """A work list for the layers with one window, made from a `TileSchedule`."""

    counts: Tensor  # [4] (index in ``words``, number) of the narrow items, then of the wide ones
    partials: Tensor  # [num_rows] index of a row's first partial; -1: none
    kinds: Kinds


@dataclass(frozen=True, slots=True, eq=False)
class DevicePlan:
    """Inputs of the kernels of a pass on the device, and buffers for partial sums.

    Unused rows at the end have -1 in ``slots`` and ``partials`` and are in no item, so kernels skip
    them.
    """

    geometry: Geometry
    token_ids: Tensor  # [num_rows] int32
    positions: Tensor  # [num_rows] int32
    slots: Tensor  # [num_rows] int32: page_id * page_size + offset in the page; -1: no row
    logit_rows: Tensor  # [num_rows] int32; only the batch's number of them is set
    rows_in_tile: Tensor  # [num_rows] int32: index of a row in its wide tile; -1: a narrow row
    last_seen: Tensor  # [num_rows] int32: last position of its pages and tail that a row sees
    words: Tensor  # int32: page ids, tail slots, the row of each work item, the work items
    works: Mapping[int | None, Sequence[Work]]  # by window: parts of the pass, computed one by one
    partial_sums: PartialSums
    cos_sin: CosSin
    states: PassStates | None = None  # for models with recurrent layers
    batch: RaggedBatch | None = None  # only for a pass outside of graphs

    def needed_states(self) -> tuple[PassStates, StatePool]:
        """Return the states of a pass and their pool, for models with recurrent layers."""
        pool = self.geometry.pool.states
        assert self.states is not None
        assert pool is not None
        return self.states, pool


class TritonPlan:
    """A pass on the host. `on_device` copies it to the device.

    Raises ValueError for states that do not match the batch's segments (`pass_states`).
    """

    def __init__(self, batch: RaggedBatch, geometry: Geometry) -> None:
        pass_states(batch, geometry.pool.states)
        self.batch = batch
        self.geometry = geometry
        self._work_lists: dict[int | None, TileSchedule] = {}
        self._device: DevicePlan | None = None

    @property
    def last_stop(self) -> int:
        """First position after all rows."""
        return self.batch.rope_stop

    @property
    def has_wide(self) -> bool:
        """Whether some rows belong to a long chunk."""
        return int(self.batch.lens.max()) > NARROW_LEN

    def work_lists(self, windows: Windows) -> list[TileSchedule]:
        """Return the schedule of each window, computed at its first use."""
        for window in windows:
            if window not in self._work_lists:
                self._work_lists[window] = self._work_list(window)
        return [self._work_lists[window] for window in windows]

    def _parts(self, window: int | None, max_partials: int) -> list[TileSchedule]:
        """Divide a window's work into lists of at most ``max_partials`` partials.

        A list of one row or tile may have more.
        """
        (work,) = self.work_lists([window])
        if work.num_partials <= max_partials:
            return [work]
        return [self._work_list(window, part) for part in work.parts(max_partials)]

    def _work_list(self, window: int | None, part: range | None = None) -> TileSchedule:
        geometry, group = self.geometry, self.geometry.heads.group_size
        return build_tile_schedule(
            self.batch,
            narrow_rows=geometry.narrow_tile // group,
            wide_rows=geometry.wide_tile // group,
            wide_partials=-(-geometry.wide_tile // group),
            kv_split_group=geometry.kv_split_group,
            window=window,
            part=part,
        )

    def on_device(
        self, windows: Windows = (), num_rows: int = 0, partial_sums: PartialSums | None = None
    ) -> DevicePlan:
        """Copy the pass to new inputs with a capacity of at least ``num_rows``.

        ``partial_sums``: existing buffers; a pass that needs more partials is computed in parts.
        """
        if self._device is None or not self._device.works.keys() >= set(windows):
            num_rows = max(num_rows, self.batch.num_rows)
            self._device = self._copied(windows, num_rows, partial_sums)
        return self._device

    def _copied(
        self, windows: Windows, num_rows: int, partial_sums: PartialSums | None
    ) -> DevicePlan:
        heads, device = self.geometry.heads, self.geometry.pool.data.device
        room = partial_sums.num_partials if partial_sums else max_partials(heads)
        parts = {window: self._parts(window, room) for window in windows}
        works = [work for each in parts.values() for work in each]
        needed = max((work.num_partials for work in works), default=0)
        if partial_sums is None or partial_sums.num_partials < needed:
            partial_sums = PartialSums.of(needed, heads, device)
        num_words = words_needed(self.batch, works)
        keeps = 0 if self.batch.states is None else len(self.batch.states.keeps)
        states = self.geometry.state_fields(num_rows, len(self.batch.lens), keeps)
        graph_inputs = GraphInputs(fields(num_rows, len(works), num_words, states=states), device)
        pool = self.geometry.pool
        graph_inputs.upload(fill(graph_inputs.open(), self.batch, works, pool.states))
        take_device_tokens(self.batch, graph_inputs.device)
        kinds = {window: [Kinds.of(work) for work in each] for window, each in parts.items()}
        cos_sin = self.geometry.cos_sin(self.last_stop)
        plan = device_plan(self.geometry, graph_inputs, kinds, partial_sums, cos_sin)
        return replace(plan, batch=self.batch)


def device_plan(
    geometry: Geometry,
    graph_inputs: GraphInputs,
    kinds: Mapping[int | None, Sequence[Kinds]],
    partial_sums: PartialSums,
    cos_sin: CosSin,
) -> DevicePlan:
    """Return a plan of views of ``graph_inputs``, which has the fields of all work lists in order.

    ``kinds``: the kernels of each window's work lists.
    """
    views, numbers = graph_inputs.device, count()
    works = {
        window: [_work(views, next(numbers), needed) for needed in each]
        for window, each in kinds.items()
    }
    states = geometry.pool.states
    return DevicePlan(
        geometry=geometry,
        states=None if states is None else PassStates.of(views, len(states.shapes)),
        token_ids=views["token_ids"],
        positions=views["positions"],
        slots=views["slots"],
        logit_rows=views["logit_rows"],
        rows_in_tile=views["rows_in_tile"],
        last_seen=views["last_seen"],
        words=views["words"],
        works=works,
        partial_sums=partial_sums,
        cos_sin=cos_sin,
    )


def _work(views: Mapping[str, Tensor], number: int, kinds: Kinds) -> Work:
    return Work(views[f"counts{number}"], views[f"partials{number}"], kinds)


def take_device_tokens(batch: RaggedBatch, fields: Mapping[str, Tensor]) -> None:
    """Complete a pass's inputs on the device, after their copy and before the kernels.

    Tokens that only the device knows are taken from the sampler's output.
    """
    device_tokens = batch.device_tokens
    if device_tokens is not None:
        words, vocab_size, names = (
            device_tokens.words, device_tokens.vocab_size, device_tokens.names,
        )  # fmt: skip
        take_tokens(words, vocab_size, len(device_tokens.sources), fields, names)


def take_tokens(
    words: Tensor,
    vocab_size: int,
    num_rows: int,
    fields: Mapping[str, Tensor],
    names: Tensor | None = None,
) -> None:
    """Write the tokens of ``words`` to the rows whose ``sources`` name a word.

    ``names``: `DeviceTokens.names`.
    """
    last = (vocab_size if names is None else len(names)) - 1
    sources, token_ids = fields["sources"], fields["token_ids"]
    kernel = take_kernel[(num_rows,)]
    kernel(words, sources, token_ids, last, names, HAS_NAMES=names is not None, num_warps=1)


def warm_up_device_tokens(vocab_size: int, device: torch.device) -> None:
    """Compile the kernel of `take_device_tokens`."""
    row = torch.full((1,), -1, dtype=torch.int32, device=device)
    for names in (None, row.long()):
        take_tokens(row.long(), vocab_size, 1, {"sources": row, "token_ids": row}, names)


def power_of_two(number: int) -> int:
    """Return the least power of two that is not below ``number``."""
    return 1 << (number - 1).bit_length()
