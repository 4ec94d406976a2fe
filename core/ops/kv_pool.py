"""KVPool: keys and values of every layer, indexed by page."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from ..interface.kv_codec import KV_CODECS, KvCodec, KvDtype
from .machine.host_memory import MapBytes, map_zeros
from .state_pool import StatePool

# Blocks, and offsets in them: what indexes the first two dimensions of vectors.
Places: TypeAlias = tuple[Tensor | slice, Tensor | slice]
_SCALE_BYTES = 4  # of a float32
_LONGER = 1.05  # a block, at most, for pages that end with the layers


class KVPool:
    """``[num_pages, num_layers, num_blocks, num_kv_heads, page_size, head_dim]``, or bytes.

    A page is one contiguous blob over all layers: the unit of ownership, copying and transfer.
    It is made of blocks, for each layer and KV head one of keys and one of values; where values are
    items of the keys (latent attention) there is one block alone. With a scaled `KvCodec` a block
    is bytes: the vectors of its tokens, then a float32 scale for each, and the last two dimensions
    are one. Content is void until written; who owns which page is the prefix cache's business.
    ``states``: of a model with recurrent layers, whose passes get both through this pool.
    ``others``: the parts of other processes, of a model that several of them compute, where their
    memory is shared with this one. Else ``mirror`` is called with every copy of slots before it is
    made.
    """

    mirror: Callable[[Sequence[int], Sequence[int]], None] | None = None
    others: Sequence[KVPool] = ()

    def __init__(
        self,
        num_pages: int,
        *,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
        kv_dtype: KvDtype = "auto",
        states: StatePool | None = None,
        num_blocks: int = 2,
        map_bytes: MapBytes = map_zeros,
    ) -> None:
        """``map_bytes`` gives the memory of a pool on the host."""
        self.num_pages = num_pages
        self.num_layers = num_layers
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.num_blocks = num_blocks
        self.page_size = page_size
        self.dtype = dtype  # of what is read; stored so, too, unless scaled
        self.states = states
        self.block = BlockLayout.of(page_size, head_dim, dtype, kv_dtype)
        self.page_blocks = self.own_blocks  # from a page to the next
        items = (self.block.num_items,) if self.block.codec.is_scaled else (page_size, head_dim)
        shape = (num_pages, num_layers, num_blocks, num_kv_heads, *items)
        self.data: Tensor = _fresh(math.prod(shape), self.block.dtype, device, map_bytes).view(
            shape
        )

    @property
    def stored(self) -> tuple[Tensor, ...]:
        """Tensors whose row p is of page p: this pool's, and those of others."""
        return self.data, *(other.data for other in self.others)

    @property
    def parts(self) -> tuple[KVPool, ...]:
        """Pools of layers that are alike, over the same pages; of a uniform model itself alone."""
        return (self,)

    @property
    def own_blocks(self) -> int:
        """Blocks of a page that are of these layers."""
        return self.num_layers * self.num_blocks * self.num_kv_heads

    @property
    def blocks(self) -> Tensor:
        """All blocks in their order in memory, ``[num_blocks, block.num_items]``."""
        return self.data.view(-1, self.block.num_items)

    def split(self, blocks: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return views of some of the blocks: vectors ``[n, page_size, head_dim]``, their scales.

        Where there are scales ``[n, page_size]`` the vectors are numbers of the codec as int8.
        """
        shape, scales_at = (-1, self.page_size, self.head_dim), self.block.scales_at
        if not self.block.codec.is_scaled:
            return blocks.view(shape), None
        vectors = blocks[:, : self.page_size * self.head_dim].view(shape)
        scales = blocks[:, scales_at : scales_at + self.page_size * _SCALE_BYTES]
        return vectors, scales.view(torch.float32)

    def store(self, blocks: Tensor, at: Places, rows: Tensor) -> None:
        """Write ``rows`` [.., head_dim] float32 to places of some of the blocks."""
        vectors, scales = self.split(blocks)
        if scales is None:
            vectors[at] = rows.to(vectors.dtype)
        else:
            vectors[at], scales[at] = encode(self.block.codec, rows)

    def load(self, blocks: Tensor, at: Places, dtype: torch.dtype) -> Tensor:
        """Return the vectors at places of some of the blocks, ``[.., head_dim]``."""
        vectors, scales = self.split(blocks)
        if scales is None:
            return vectors[at].to(dtype)
        return decode(self.block.codec, vectors[at], scales[at], dtype)

    def load_blocks(self, blocks: Tensor) -> Tensor:
        """Return all vectors of some of the blocks, ``[n, page_size, head_dim]`` in `dtype`.

        They are views where the codec is not scaled.
        """
        return self.load(blocks, (slice(None), slice(None)), self.dtype)

    def copy_slots(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy the content of some slots, over all layers, into as many others.

        A slot is ``page_id * page_size + offset``. Raises ValueError for a target that is another's
        target, or a source: which was first would be undefined on a GPU.
        """
        if not targets:
            return
        if len(set(targets)) < len(targets) or not set(targets).isdisjoint(sources):
            raise ValueError(f"slots {[*sources]} cannot be copied to {[*targets]} at once")
        if self.mirror is not None:
            self.mirror(sources, targets)
        slots = torch.tensor([list(sources), list(targets)], dtype=torch.int64)
        for pool in (self, *self.others):
            pool._copy_slots(slots.to(self.data.device, non_blocking=True))

    def pack(self, page_ids: Sequence[int], kept: Tensor, first: int) -> None:
        """Move tokens of a request forward, over all layers, each KV head's own ones.

        Places count through ``page_ids``. ``kept`` [num_layers, num_kv_heads, n]: those that are
        kept, rising; they move to the places ``first``, ``first + 1``, ... A dimension of 1 means
        that all layers, or heads, keep the same ones.
        """
        pages = torch.tensor(list(page_ids), dtype=torch.int64, device=self.data.device)
        kept = kept.to(pages.device)
        targets = torch.arange(first, first + kept.shape[2], device=pages.device)
        vectors, scales = self.split(self.blocks)
        shape = (self.num_blocks, self.num_kv_heads, kept.shape[2])
        for layer in range(self.num_layers):  # each is gathered whole before it is written
            own = layer * self.num_blocks * self.num_kv_heads
            block = torch.arange(own, own + shape[0] * shape[1], device=pages.device).view(
                *shape[:2], 1
            )
            places = (kept[layer if len(kept) > 1 else 0].expand(shape), targets.expand(shape))
            (from_block, from_offset), (to_block, to_offset) = (
                (pages[each // self.page_size] * self.page_blocks + block, each % self.page_size)
                for each in places
            )
            for part in (vectors,) if scales is None else (vectors, scales):
                part[to_block, to_offset] = part[from_block, from_offset]

    def _copy_slots(self, slots: Tensor) -> None:
        """``slots`` [2, n]: from, to."""
        each = torch.arange(self.own_blocks, device=slots.device)
        firsts = (slots // self.page_size).mul_(self.page_blocks)
        blocks, offsets = firsts.unsqueeze(-1) + each, (slots % self.page_size).unsqueeze(-1)
        vectors, scales = self.split(self.blocks)
        for kept in (vectors,) if scales is None else (vectors, scales):
            kept[blocks[1], offsets[1]] = kept[blocks[0], offsets[0]]

    @property
    def num_bytes(self) -> int:
        """Size of the pool in bytes."""
        return self.data.nbytes


def _fresh(
    num_items: int, dtype: torch.dtype, device: torch.device | str, map_bytes: MapBytes
) -> Tensor:
    """Zeros; on the host mapped on first touch, so that pages never written cost nothing."""
    if torch.device(device).type == "cpu":
        return map_bytes(num_items * dtype.itemsize).view(dtype)
    return torch.zeros(num_items, dtype=dtype, device=device)


class KvShape(NamedTuple):
    """Layers whose keys and values are alike.

    ``num_blocks`` of a page, layer and KV head: keys and values, or 1 where values are items of the
    keys.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    num_blocks: int = 2


class KvPlace(NamedTuple):
    """Place of a layer's keys and values: index in `KVPool.parts`, and layer of that part."""

    part: int
    layer: int


class _PartPool(KVPool):
    """The layers of one shape of a `MixedKVPool`, over the memory of all."""

    def __init__(self, whole: KVPool, shape: KvShape, block: BlockLayout, memory: Tensor) -> None:
        """``memory``: as much as the whole pool has, from where the shape's first layer lies."""
        self.num_pages, self.page_size, self.dtype = whole.num_pages, whole.page_size, whole.dtype
        self.num_layers, self.num_kv_heads, self.head_dim, self.num_blocks = shape
        self.states = whole.states
        self.block = block
        self.page_blocks = len(memory) // self.num_pages // block.num_items
        self.data = memory.view(self.num_pages, self.page_blocks, block.num_items)


class MixedKVPool(KVPool):
    """`KVPool` of layers of several shapes; a page is still one contiguous blob over all of them.

    Each of ``parts`` is a uniform pool over the memory of all: what lies behind its own layers in
    a page is not its own. So a kernel that reads uniform pools reads a part. For this a page is a
    whole number of every part's blocks long: `page_items`.
    """

    def __init__(
        self,
        num_pages: int,
        shapes: Sequence[KvShape],
        *,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
        kv_dtype: KvDtype = "auto",
        states: StatePool | None = None,
        map_bytes: MapBytes = map_zeros,
    ) -> None:
        """``map_bytes``: as in `KVPool`."""
        self.num_pages, self.page_size, self.dtype = num_pages, page_size, dtype
        self.states = states
        self.num_layers = sum(shape.num_layers for shape in shapes)
        blocks = _blocks(shapes, page_size, dtype, kv_dtype)
        items = page_items(shapes, blocks)
        size = num_pages * items
        # The last page of a part that begins later ends behind the last page of the first one.
        memory = _fresh(size + items, blocks[0].dtype, device, map_bytes)
        self.data = memory[:size].view(num_pages, items)
        starts = accumulate(map(_layers_items, shapes, blocks), initial=0)
        self._parts = tuple(
            _PartPool(self, shape, block, memory[start : start + size])
            for shape, block, start in zip(shapes, blocks, starts, strict=False)
        )

    @property
    def parts(self) -> tuple[KVPool, ...]:
        """One for each shape, in the order of the shapes."""
        return self._parts

    def _copy_slots(self, slots: Tensor) -> None:
        for part in self._parts:
            part._copy_slots(slots)


def make_pool(
    num_pages: int,
    shapes: Sequence[KvShape],
    *,
    page_size: int,
    dtype: torch.dtype,
    device: torch.device | str,
    kv_dtype: KvDtype = "auto",
    states: StatePool | None = None,
    map_bytes: MapBytes = map_zeros,
) -> KVPool:
    """A pool of layers of these shapes: uniform where there is one."""
    if len(shapes) > 1:
        return MixedKVPool(
            num_pages,
            shapes,
            page_size=page_size,
            dtype=dtype,
            device=device,
            kv_dtype=kv_dtype,
            states=states,
            map_bytes=map_bytes,
        )
    (shape,) = shapes
    return KVPool(
        num_pages,
        **shape._asdict(),
        page_size=page_size,
        dtype=dtype,
        device=device,
        kv_dtype=kv_dtype,
        states=states,
        map_bytes=map_bytes,
    )


def page_items(shapes: Sequence[KvShape], blocks: Sequence[BlockLayout]) -> int:
    """Items of a page of layers of these shapes."""
    step = math.lcm(*(block.num_items for block in blocks))
    return -(-sum(map(_layers_items, shapes, blocks)) // step) * step


def _layers_items(shape: KvShape, block: BlockLayout) -> int:
    return shape.num_blocks * shape.num_layers * shape.num_kv_heads * block.num_items


def _blocks(
    shapes: Sequence[KvShape], page_size: int, dtype: torch.dtype, kv_dtype: KvDtype
) -> list[BlockLayout]:
    """The blocks of layers of these shapes.

    Beside smaller ones a block with scales may be longer than it needs to be: a whole number of
    the smallest of them long, where that adds little, so that a page is not much longer than its
    layers.
    """
    found = [BlockLayout.of(page_size, s.head_dim, dtype, kv_dtype) for s in shapes]
    least = min(block.num_items for block in found)
    whole = [-(-block.num_items // least) * least for block in found]
    return [
        replace(block, num_items=items)
        if block.scales_at and items < _LONGER * block.num_items
        else block
        for block, items in zip(found, whole, strict=True)
    ]


def bytes_per_mixed_page(
    shapes: Sequence[KvShape], *, page_size: int, dtype: torch.dtype, kv_dtype: KvDtype = "auto"
) -> int:
    """Bytes of a page of a `MixedKVPool`, and of a uniform one where there is one shape."""
    blocks = _blocks(shapes, page_size, dtype, kv_dtype)
    return page_items(shapes, blocks) * blocks[0].dtype.itemsize


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """A page's keys or values of one layer and KV head: ``num_items`` of ``dtype``."""

    codec: KvCodec
    dtype: torch.dtype  # int8 for bytes: not every torch that computes on a GPU indexes float8
    num_items: int
    scales_at: int  # bytes before the scales, a multiple of 4; 0: there are none

    @classmethod
    def of(
        cls, page_size: int, head_dim: int, dtype: torch.dtype, kv_dtype: KvDtype
    ) -> BlockLayout:
        """The layout of a pool's blocks; ``dtype`` is the model's."""
        codec = KV_CODECS[kv_dtype]
        if not codec.is_scaled:
            return cls(codec, dtype, page_size * head_dim, 0)
        scales_at = -(-page_size * head_dim // _SCALE_BYTES) * _SCALE_BYTES
        return cls(codec, torch.int8, scales_at + page_size * _SCALE_BYTES, scales_at)

    @property
    def num_bytes(self) -> int:
        """Bytes of a block."""
        return self.num_items * self.dtype.itemsize


def bytes_per_page(
    *,
    num_layers: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    dtype: torch.dtype,
    kv_dtype: KvDtype = "auto",
    num_blocks: int = 2,
) -> int:
    """Bytes of one page over all layers, keys and values."""
    block = BlockLayout.of(page_size, head_dim, dtype, kv_dtype)
    return num_blocks * num_layers * num_kv_heads * block.num_bytes


def encode(codec: KvCodec, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``rows`` [.., head_dim] float32 as a scaled codec's numbers, and float32 scales [..].

    The numbers are the bytes of their dtype, as int8. The largest of a row becomes the codec's
    ``top``, what lies between two numbers goes to the nearest, ties to even; a row of zeros has the
    scale 0. The scale of a row that is not finite is not finite either, and its numbers are 0: so
    all of it is NaN when it is read.
    """
    largest = rows.abs().amax(dim=-1)
    # Divided by a tensor: of a division by a number a GPU makes a product with the reciprocal.
    scales = largest / torch.full_like(largest, codec.top)
    items = (rows / scales.unsqueeze(-1)).nan_to_num_(0.0, 0.0, 0.0)
    # The scale of numbers near the smallest there are is itself rounded.
    items.clamp_(-codec.top, codec.top)
    if codec.number == "int8":  # to which torch truncates
        items.round_()
    return items.to(getattr(torch, codec.number)).view(torch.int8), scales


def decode(codec: KvCodec, numbers: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Undo `encode`: return ``[.., head_dim]`` in ``dtype``."""
    wide = numbers.view(getattr(torch, codec.number)).float()
    return wide.mul_(scales.unsqueeze(-1)).to(dtype)
