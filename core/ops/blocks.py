"""Weights as blocks of a GGUF file, read from the mapped file only when they are packed.

Format: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from .quantize import GROUP, SUPER, QuantizedWeight, UnpackedWeight, WeightKind, check_columns

Octets = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class BlockType:
    """A block format: ggml's `number`, and ``unpack``, which decodes rows of blocks."""

    number: int
    size: int  # values per block
    num_bytes: int  # bytes per block
    kind: WeightKind  # kind of the unpacked weight
    unpack: Callable[[Tensor], UnpackedWeight] = field(compare=False, repr=False)


@dataclass(frozen=True, slots=True, eq=False)
class BlockWeight(QuantizedWeight):
    """A weight ``[out_features, in_features]`` in blocks along its rows.

    ``sources``: byte matrices ``[rows, row bytes]``, stacked; they may be mapped and are never
    written. ``order``: indices of this weight's rows in them; None: all rows.
    """

    type: BlockType
    sources: tuple[Octets, ...]
    order: NDArray[np.int64] | None = None

    @property
    @override
    def kinds(self) -> frozenset[WeightKind]:
        return frozenset((self.type.kind,))

    @property
    @override
    def shape(self) -> tuple[int, int]:
        rows = sum(map(len, self.sources)) if self.order is None else len(self.order)
        return rows, self.sources[0].shape[1] // self.type.num_bytes * self.type.size

    @property
    def addresses(self) -> NDArray[np.int64]:
        """Memory addresses of the rows ``[out_features]``, valid while the sources are alive."""
        starts = [
            each.ctypes.data + np.arange(len(each), dtype=np.int64) * each.strides[0]
            for each in self.sources
        ]
        found = np.concatenate(starts)
        return found if self.order is None else found[self.order]

    def unpacked(self) -> UnpackedWeight:
        """Return the values and scales, each in its own array."""
        return self.type.unpack(self._octets())

    @override
    def dequantize(self) -> Tensor:
        return self.unpacked().dequantize()

    def rows(self, order: Tensor) -> BlockWeight:
        """Select rows; no block is read."""
        chosen = order.numpy().astype(np.int64, copy=False)
        return BlockWeight(
            self.type, self.sources, chosen if self.order is None else self.order[chosen]
        )

    def columns(self, start: int, stop: int) -> BlockWeight:
        """Select columns; no block is read."""
        check_columns(start, stop, self.type.size)
        first, last = (each // self.type.size * self.type.num_bytes for each in (start, stop))
        return BlockWeight(
            self.type, tuple(each[:, first:last] for each in self.sources), self.order
        )

    @override
    def arrays(self) -> Iterator[Tensor]:
        yield self._octets()

    @override
    def above(self, below: QuantizedWeight) -> BlockWeight | None:
        if not isinstance(below, BlockWeight) or below.type != self.type:
            return None
        order = None
        if self.order is not None or below.order is not None:
            num_rows = sum(map(len, self.sources))
            order = np.concatenate((self._order(), num_rows + below._order()))
        return BlockWeight(self.type, (*self.sources, *below.sources), order)

    def _order(self) -> NDArray[np.int64]:
        return np.arange(self.shape[0]) if self.order is None else self.order

    def _octets(self) -> Tensor:
        """Return a copy of the rows, ``[out_features, row bytes]``: torch needs writable memory."""
        found = self.sources[0].copy() if len(self.sources) == 1 else np.concatenate(self.sources)
        return torch.from_numpy(found if self.order is None else found[self.order])


def _blocks(octets: Tensor, num_bytes: int) -> Tensor:
    """View rows of bytes as blocks ``[rows, blocks, num_bytes]``."""
    return octets.view(len(octets), -1, num_bytes)


def _numbers(blocks: Tensor, at: int) -> Tensor:
    """Return the float16 at byte ``at`` of each block, ``[rows, blocks]``."""
    return blocks[:, :, at : at + 2].contiguous().view(torch.float16).squeeze(2)


def _nibbles(blocks: Tensor) -> Tensor:
    """Return the low nibbles of 16 bytes, then the high ones: 0 to 15, ``[rows, 32 * blocks]``."""
    values = blocks.new_empty((*blocks.shape[:2], 2, blocks.shape[2]))
    torch.bitwise_and(blocks, 15, out=values[:, :, 0])
    torch.bitwise_right_shift(blocks, 4, out=values[:, :, 1])
    return values.view(torch.int8).view(len(blocks), -1)


def _fifths(octets: Tensor) -> Tensor:
    """Return each value's fifth bit as 0 or 16, ``[rows, 32 * blocks]``.

    ``octets`` [rows, blocks, 4]: one bit per value.
    """
    bits = octets.unsqueeze(3) >> torch.arange(8, dtype=torch.uint8) & 1
    return (bits << 4).view(torch.int8).view(len(octets), -1)


def _q4_0(octets: Tensor) -> UnpackedWeight:
    blocks = _blocks(octets, 2 + GROUP // 2)
    return UnpackedWeight("int4_group", _nibbles(blocks[:, :, 2:]) - 8, _numbers(blocks, 0))


def _q4_1(octets: Tensor) -> UnpackedWeight:
    blocks = _blocks(octets, 4 + GROUP // 2)
    values = _nibbles(blocks[:, :, 4:])
    return UnpackedWeight("int4_min", values, _numbers(blocks, 0), _numbers(blocks, 2))


def _q5_0(octets: Tensor) -> UnpackedWeight:
    blocks = _blocks(octets, 6 + GROUP // 2)
    values = _nibbles(blocks[:, :, 6:]) + _fifths(blocks[:, :, 2:6]) - 16
    return UnpackedWeight("int5_group", values, _numbers(blocks, 0))


def _q5_1(octets: Tensor) -> UnpackedWeight:
    blocks = _blocks(octets, 8 + GROUP // 2)
    values = _nibbles(blocks[:, :, 8:]) + _fifths(blocks[:, :, 4:8])
    return UnpackedWeight("int5_min", values, _numbers(blocks, 0), _numbers(blocks, 2))


def _q8_0(octets: Tensor) -> UnpackedWeight:
    blocks = _blocks(octets, 2 + GROUP)
    values = blocks[:, :, 2:].contiguous().view(torch.int8).view(len(octets), -1)
    return UnpackedWeight("int8_group", values, _numbers(blocks, 0))


def _k_scales(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Return each block's 8 scales and 8 minima, 6-bit integers, both ``[rows, 8 * blocks]``.

    ``packed``: [rows, blocks, 12] bytes.
    """
    first, second, rest = packed[:, :, :4], packed[:, :, 4:8], packed[:, :, 8:]
    scales = torch.cat((first & 63, rest & 15 | first >> 6 << 4), dim=2)
    minima = torch.cat((second & 63, rest >> 4 | second >> 6 << 4), dim=2)
    return scales.flatten(1), minima.flatten(1)


def _low_and_high(octets: Tensor) -> Tensor:
    """Split each 32 bytes into 32 low, then 32 high nibbles: ``[rows, blocks, groups, 32]``."""
    parts = octets.reshape(*octets.shape[:2], -1, 32)
    return torch.stack((parts & 15, parts >> 4), dim=3).flatten(2, 3)


def _q4_k(octets: Tensor) -> UnpackedWeight:
    blocks = _blocks(octets, 144)
    values = _low_and_high(blocks[:, :, 16:]).flatten(1).view(torch.int8)
    factors = (_numbers(blocks, 0), _numbers(blocks, 2))
    return UnpackedWeight("int4_k", values, *_k_scales(blocks[:, :, 4:16]), factors)


def _q5_k(octets: Tensor) -> UnpackedWeight:
    blocks = _blocks(octets, 176)
    bits = [blocks[:, :, 16:48] >> group & 1 for group in range(8)]  # the fifth bit of each value
    values = _low_and_high(blocks[:, :, 48:]) | torch.stack(bits, dim=2) << 4
    factors = (_numbers(blocks, 0), _numbers(blocks, 2))
    scales = _k_scales(blocks[:, :, 4:16])
    return UnpackedWeight("int5_k", values.flatten(1).view(torch.int8), *scales, factors)


def _q6_k(octets: Tensor) -> UnpackedWeight:
    blocks = _blocks(octets, 210)
    shape = blocks.shape[:2]
    low = blocks[:, :, :128].reshape(*shape, 2, 64)
    high = blocks[:, :, 128:192].reshape(*shape, 2, 1, 32)
    nibbles = torch.cat((low & 15, low >> 4), dim=3).view(*shape, 2, 4, 32)
    twos = torch.cat([high >> at & 3 for at in (0, 2, 4, 6)], dim=3)
    values = (nibbles | twos << 4).flatten(1).view(torch.int8) - 32
    scale = blocks[:, :, 192:208].contiguous().view(torch.int8).flatten(1)
    return UnpackedWeight("int6_k", values, scale, None, (_numbers(blocks, 208),))


def _iq4_nl(octets: Tensor) -> UnpackedWeight:
    blocks = _blocks(octets, 2 + GROUP // 2)
    return UnpackedWeight("iq4_nl", _nibbles(blocks[:, :, 2:]), _numbers(blocks, 0))


def _iq4_xs(octets: Tensor) -> UnpackedWeight:
    """Unpack IQ4_XS: a scale has 6 bits, the low four in a nibble, the high two in a word."""
    blocks = _blocks(octets, 136)
    low = torch.stack((blocks[:, :, 4:8] & 15, blocks[:, :, 4:8] >> 4), dim=3).flatten(2)
    high = torch.stack([blocks[:, :, 2:4] >> at & 3 for at in (0, 2, 4, 6)], dim=3).flatten(2)
    scale = (low | high << 4).view(torch.int8) - 32
    halves = blocks[:, :, 8:].reshape(len(blocks), -1, GROUP // 2)
    return UnpackedWeight(
        "iq4_xs", _nibbles(halves), scale.flatten(1), None, (_numbers(blocks, 0),)
    )


def half_of_power(exponents: Tensor) -> Tensor:
    """Return ``2 ** (n - 128)`` for exponent bytes n, exactly, as bfloat16.

    This is half of E8M0's scale, since the value table has twice the E2M1 values.
    """
    wide = exponents.to(torch.int16)
    return torch.where(wide < 2, 32 << wide, (wide - 1) << 7).view(torch.bfloat16)


def _mxfp4(octets: Tensor) -> UnpackedWeight:
    blocks = _blocks(octets, 1 + GROUP // 2)
    return UnpackedWeight("mxfp4", _nibbles(blocks[:, :, 1:]), half_of_power(blocks[:, :, 0]))


BLOCK_TYPES = {
    each.number: each
    for each in (
        BlockType(2, GROUP, 18, "int4_group", _q4_0),
        BlockType(3, GROUP, 20, "int4_min", _q4_1),
        BlockType(6, GROUP, 22, "int5_group", _q5_0),
        BlockType(7, GROUP, 24, "int5_min", _q5_1),
        BlockType(8, GROUP, 34, "int8_group", _q8_0),
        BlockType(12, SUPER, 144, "int4_k", _q4_k),
        BlockType(13, SUPER, 176, "int5_k", _q5_k),
        BlockType(14, SUPER, 210, "int6_k", _q6_k),
        BlockType(20, GROUP, 18, "iq4_nl", _iq4_nl),
        BlockType(23, SUPER, 136, "iq4_xs", _iq4_xs),
        BlockType(39, GROUP, 17, "mxfp4", _mxfp4),
    )
}
"""Block types whose values and scales are kept unchanged, by ggml's number."""
