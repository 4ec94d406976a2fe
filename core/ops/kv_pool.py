"""KVPool: keys and values of all layers, indexed by page."""

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

# Blocks and offsets in them: the indices of the first two dimensions of vectors.
VectorIndices: TypeAlias = tuple[Tensor | slice, Tensor | slice]
_SCALE_BYTES = 4  # bytes of a float32 scale
_MAX_PADDED = 1.05  # a block may grow by this factor when it is padded


class KVPool:
    """The keys and values of all layers, in pages.

    ``data``: ``[num_pages, num_layers, num_blocks, num_kv_heads, page_size, head_dim]``. A page is
    one contiguous blob over all layers: the unit of ownership, copying and transfer. For each layer
    and KV head it has a block of keys and a block of values, or only one block if values are items
    of the keys (latent attention). With a scaled `KvCodec` a block is bytes: the vectors of its
    tokens, then a float32 scale for each; one dimension takes the place of the last two. Content is
    undefined until written. The prefix cache knows the owner of each page.

    ``states``: recurrent states, if the model has recurrent layers; passes get both through this
    pool. ``others``: with tensor parallelism, the other processes' pools if their memory is shared
    with this process. Otherwise ``mirror`` is called with every copy of slots before it is made.
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
        """Allocate the pool; ``map_bytes`` allocates it if ``device`` is the CPU."""
        self.num_pages = num_pages
        self.num_layers = num_layers
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.num_blocks = num_blocks
        self.page_size = page_size
        self.dtype = dtype  # dtype of loaded vectors, and of stored ones unless they are scaled
        self.states = states
        self.block = BlockLayout.of(page_size, head_dim, dtype, kv_dtype)
        self.page_blocks = self.own_blocks  # distance between pages, in blocks
        items = (self.block.num_items,) if self.block.codec.is_scaled else (page_size, head_dim)
        shape = (num_pages, num_layers, num_blocks, num_kv_heads, *items)
        self.data: Tensor = _fresh(math.prod(shape), self.block.dtype, device, map_bytes).view(
            shape
        )

    @property
    def stored(self) -> tuple[Tensor, ...]:
        """Tensors whose row p is page p: this pool's and the other processes'."""
        return self.data, *(other.data for other in self.others)

    @property
    def parts(self) -> tuple[KVPool, ...]:
        """Pools over the same pages, one for each KV shape; the pool itself if there is one."""
        return (self,)

    @property
    def own_blocks(self) -> int:
        """Number of a page's blocks that belong to this pool's layers."""
        return self.num_layers * self.num_blocks * self.num_kv_heads

    @property
    def blocks(self) -> Tensor:
        """All blocks in memory order, ``[num_blocks, block.num_items]``."""
        return self.data.view(-1, self.block.num_items)

    def split(self, blocks: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return views of ``blocks``: vectors ``[n, page_size, head_dim]`` and their scales.

        With a scaled codec vectors are its numbers as int8, and scales are float32 ``[n,
        page_size]``. Without one, scales are None.
        """
        shape, scales_at = (-1, self.page_size, self.head_dim), self.block.scales_at
        if not self.block.codec.is_scaled:
            return blocks.view(shape), None
        vectors = blocks[:, : self.page_size * self.head_dim].view(shape)
        scales = blocks[:, scales_at : scales_at + self.page_size * _SCALE_BYTES]
        return vectors, scales.view(torch.float32)

    def store(self, blocks: Tensor, at: VectorIndices, rows: Tensor) -> None:
        """Write ``rows`` [.., head_dim] float32 to the vectors ``at`` of ``blocks``."""
        vectors, scales = self.split(blocks)
        if scales is None:
            vectors[at] = rows.to(vectors.dtype)
        else:
            vectors[at], scales[at] = encode(self.block.codec, rows)

    def load(self, blocks: Tensor, at: VectorIndices, dtype: torch.dtype) -> Tensor:
        """Return the vectors ``at`` of ``blocks``, ``[.., head_dim]``."""
        vectors, scales = self.split(blocks)
        if scales is None:
            return vectors[at].to(dtype)
        return decode(self.block.codec, vectors[at], scales[at], dtype)

    def load_blocks(self, blocks: Tensor) -> Tensor:
        """Return all vectors of ``blocks``, ``[n, page_size, head_dim]`` in `dtype`.

        They are views if the codec is not scaled.
        """
        return self.load(blocks, (slice(None), slice(None)), self.dtype)

    def copy_slots(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy the content of slots, over all layers, to other slots.

        A slot is ``page_id * page_size + offset``. Raises ValueError for a target that occurs twice
        or is a source: the order of copies is undefined on a GPU.
        """
        if not targets:
            return
        if len(set(targets)) < len(targets) or not set(targets).isdisjoint(sources):
            raise ValueError(
                f"cannot copy slots {[*sources]} to {[*targets]}: targets must be distinct and no "
                "sources"
            )
        if self.mirror is not None:
            self.mirror(sources, targets)
        slots = torch.tensor([list(sources), list(targets)], dtype=torch.int64)
        for pool in (self, *self.others):
            pool._copy_slots(slots.to(self.data.device, non_blocking=True))

    def pack(self, page_ids: Sequence[int], kept: Tensor, first: int) -> None:
        """Move a request's kept KV to the positions ``first``, ``first + 1``, ..., in all layers.

        Position p is in page ``page_ids[p // page_size]``. ``kept`` [num_layers, num_kv_heads, n]:
        positions to keep, ascending. A dimension of 1 means that all layers, or all heads, keep the
        same positions.
        """
        pages = torch.tensor(list(page_ids), dtype=torch.int64, device=self.data.device)
        kept = kept.to(pages.device)
        targets = torch.arange(first, first + kept.shape[2], device=pages.device)
        vectors, scales = self.split(self.blocks)
        shape = (self.num_blocks, self.num_kv_heads, kept.shape[2])
        # A layer's kept KV is gathered as a whole before any of it is written.
        for layer in range(self.num_layers):
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
        """Copy ``slots[0]`` to ``slots[1]``; ``slots`` is [2, n]."""
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
    """Return zeros. Host memory is mapped on first touch: pages never written cost nothing."""
    if torch.device(device).type == "cpu":
        return map_bytes(num_items * dtype.itemsize).view(dtype)
    return torch.zeros(num_items, dtype=dtype, device=device)


class KvShape(NamedTuple):
    """Number of layers whose keys and values have the same shape, and that shape.

    ``num_blocks`` per page, layer and KV head: 2 for keys and values, or 1 if values are items of
    the keys.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    num_blocks: int = 2


class KvLayer(NamedTuple):
    """Location of a layer's keys and values: index in `KVPool.parts`, layer in that part."""

    part: int
    layer: int


class _PartPool(KVPool):
    """The layers of one shape in a `MixedKVPool`; ``data`` spans the blocks of all shapes."""

    def __init__(self, whole: KVPool, shape: KvShape, block: BlockLayout, memory: Tensor) -> None:
        """View ``memory``, which is as large as the pool and begins at this part's first layer."""
        self.num_pages, self.page_size, self.dtype = whole.num_pages, whole.page_size, whole.dtype
        self.num_layers, self.num_kv_heads, self.head_dim, self.num_blocks = shape
        self.states = whole.states
        self.block = block
        self.page_blocks = len(memory) // self.num_pages // block.num_items
        self.data = memory.view(self.num_pages, self.page_blocks, block.num_items)


class MixedKVPool(KVPool):
    """`KVPool` of layers of several shapes; a page is still one contiguous blob over all of them.

    Each of ``parts`` is a uniform pool over the whole memory, so that kernels for uniform pools can
    read it; it uses only the blocks of its own layers. To make this possible, a page's length is a
    multiple of every part's block length: `page_items`.
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
        """Allocate the pool; ``map_bytes`` allocates it if ``device`` is the CPU."""
        self.num_pages, self.page_size, self.dtype = num_pages, page_size, dtype
        self.states = states
        self.num_layers = sum(shape.num_layers for shape in shapes)
        blocks = _blocks(shapes, page_size, dtype, kv_dtype)
        items = page_items(shapes, blocks)
        size = num_pages * items
        # A part's view is as long as the pool and begins later, so it ends after the last page.
        memory = _fresh(size + items, blocks[0].dtype, device, map_bytes)
        self.data = memory[:size].view(num_pages, items)
        starts = accumulate(map(_layers_items, shapes, blocks), initial=0)
        self._parts = tuple(
            _PartPool(self, shape, block, memory[start : start + size])
            for shape, block, start in zip(shapes, blocks, starts, strict=False)
        )

    @property
    def parts(self) -> tuple[KVPool, ...]:
        """One pool for each shape, in the order of the shapes."""
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
    """Return a pool for layers with the given shapes: a uniform one if there is one shape."""
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
    """Return the number of items of a page over layers with the given shapes."""
    step = math.lcm(*(block.num_items for block in blocks))
    return -(-sum(map(_layers_items, shapes, blocks)) // step) * step


def _layers_items(shape: KvShape, block: BlockLayout) -> int:
    return shape.num_blocks * shape.num_layers * shape.num_kv_heads * block.num_items


def _blocks(
    shapes: Sequence[KvShape], page_size: int, dtype: torch.dtype, kv_dtype: KvDtype
) -> list[BlockLayout]:
    """Return the block layout of each shape.

    A page's length is a multiple of all block lengths. To keep pages short, a block with scales is
    padded to a multiple of the smallest block if that adds less than 5 %.
    """
    found = [BlockLayout.of(page_size, s.head_dim, dtype, kv_dtype) for s in shapes]
    least = min(block.num_items for block in found)
    whole = [-(-block.num_items // least) * least for block in found]
    return [
        replace(block, num_items=items)
        if block.scales_at and items < _MAX_PADDED * block.num_items
        else block
        for block, items in zip(found, whole, strict=True)
    ]


def bytes_per_mixed_page(
    shapes: Sequence[KvShape], *, page_size: int, dtype: torch.dtype, kv_dtype: KvDtype = "auto"
) -> int:
    """Return the bytes of a page of the pool that `make_pool` makes for ``shapes``."""
    blocks = _blocks(shapes, page_size, dtype, kv_dtype)
    return page_items(shapes, blocks) * blocks[0].dtype.itemsize


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """A page's keys or values of one layer and KV head: ``num_items`` of ``dtype``."""

    codec: KvCodec
    dtype: torch.dtype  # int8 for bytes: not every torch version indexes float8 on a GPU
    num_items: int
    scales_at: int  # bytes before the scales, a multiple of 4; 0: the block has no scales

    @classmethod
    def of(
        cls, page_size: int, head_dim: int, dtype: torch.dtype, kv_dtype: KvDtype
    ) -> BlockLayout:
        """Return the layout of a pool's blocks; ``dtype`` is the model's."""
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
    """Return the bytes of one page over all layers, keys and values."""
    block = BlockLayout.of(page_size, head_dim, dtype, kv_dtype)
    return num_blocks * num_layers * num_kv_heads * block.num_bytes


def encode(codec: KvCodec, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``rows`` [.., head_dim] float32 as a scaled codec's numbers, and float32 scales [..].

    The numbers are the bytes of their dtype, as int8. The largest magnitude of a row becomes the
    codec's ``top``; values are rounded to the nearest number, ties to even. A row of zeros has the
    scale 0. A row with a value that is not finite has a scale that is not finite and numbers that
    are 0, so it is read as NaN.
    """
    largest = rows.abs().amax(dim=-1)
    # A GPU replaces a division by a number with a product with its reciprocal, but not by a tensor.
    scales = largest / torch.full_like(largest, codec.top)
    items = (rows / scales.unsqueeze(-1)).nan_to_num_(0.0, 0.0, 0.0)
    # A scale near float32's smallest number is itself rounded: quotients may exceed ``top``.
    items.clamp_(-codec.top, codec.top)
    if codec.number == "int8":  # torch truncates when it converts to int8
        items.round_()
    return items.to(getattr(torch, codec.number)).view(torch.int8), scales


def decode(codec: KvCodec, numbers: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Undo `encode`: return ``[.., head_dim]`` in ``dtype``."""
    wide = numbers.view(getattr(torch, codec.number)).float()
    return wide.mul_(scales.unsqueeze(-1)).to(dtype)
