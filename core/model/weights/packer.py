"""Packer: reads tensors of a checkpoint, casts them and packs them for the kernels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ...ops.base import Ops
from ...ops.quantize import (
    QuantizedStack,
    QuantizedWeight,
    StackedWeight,
    StoredWeight,
    stack,
)
from ...ops.weights import Norm, PackedLinear, PackedTable
from ..description.config import DecoderConfig
from ..description.fold import Recipe, scaled
from ..formats.checkpoint import Read

_MOST_PARTS = 8  # of a packed matrix, each a kernel's call of its own


def in_order(weight: Tensor | QuantizedWeight, order: Tensor) -> Tensor | QuantizedWeight:
    """Put rows of a weight, plain or quantised, into the given order."""
    return weight.rows(order) if isinstance(weight, QuantizedWeight) else weight[order]


def _shape(weight: StoredWeight) -> tuple[int, int]:
    """Rows and columns of a stored matrix."""
    assert not isinstance(weight, QuantizedStack)
    rows, columns = weight.shape
    return rows, columns


class Packer:
    """Packs tensors by name.

    ``keeps_packed``: quantised weights stay as they are stored where the ops have kernels for them.
    ``recipes``: of what every packed matrix is made.
    """

    def __init__(
        self,
        config: DecoderConfig,
        read: Read,
        ops: Ops,
        dtype: torch.dtype,
        device: torch.device,
        *,
        keeps_packed: bool,
    ) -> None:
        self.config, self.read, self.ops = config, read, ops
        self.dtype, self.device = dtype, device
        self._kept = ops.stored_kinds if keeps_packed else frozenset()
        self.recipes: dict[PackedLinear, Recipe] = {}

    def linear(
        self,
        names: list[str],
        *,
        bias: bool,
        order: Tensor | None = None,
        factors: Sequence[float] = (),
    ) -> PackedLinear:
        """Pack matrices stacked into one, so that one call reads the input once.

        ``order``: of the rows, where the family has another one than the kernels. ``factors``: of
        each matrix with its bias.
        """
        factors = factors or [1.0] * len(names)
        stored = [self.read(f"{name}.weight") for name in names]
        shapes = [_shape(each) for each in stored]
        weight = self.stacked(stored, factors)
        stacked = None
        if bias:
            biases = (self.vector(f"{name}.bias") for name in names)
            stacked = torch.cat([scaled(*each) for each in zip(biases, factors, strict=True)])
        if order is not None:
            weight = self._few_parts(in_order(weight, order))
            stacked = None if stacked is None else stacked[order]
        packed = self.ops.pack_linear(weight, stacked)
        counts = tuple(rows for rows, _ in shapes)
        self.recipes[packed] = Recipe(tuple(names), counts, shapes[0][1], tuple(factors), order)
        return packed

    def plain(self, name: str, *, bias: bool) -> PackedLinear:
        """Pack a matrix that is never quantised: of a router."""
        row = self.vector(f"{name}.bias") if bias else None
        return self.ops.pack_linear(self.vector(f"{name}.weight"), row, plain=True)

    def norm(self, name: str) -> Norm:
        """Read a norm's factors, and its bias where the model's norms have one."""
        config, offset = self.config, self.config.fold.norm_offset
        weight = self.vector(name)
        if config.layer_norm != "none" or offset:
            weight = weight.float() + offset
        bias = None
        if config.layer_norm == "bias":
            bias = self.vector(f"{name.removesuffix('weight')}bias").float()
        return Norm(weight, config.norm_eps, bias, config.layer_norm != "none")

    def layer_norm(self, prefix: str, name: str | None) -> Norm | None:
        """Read a norm of a layer; None where the layer has none there."""
        return None if name is None else self.norm(f"{prefix}{name}.weight")

    def float32(self, name: str) -> Tensor:
        """Read a vector in float32, as it is stored."""
        weight = self.read(name)
        values = weight if isinstance(weight, Tensor) else weight.dequantize()
        return values.to(self.device).float()

    def vector(self, name: str) -> Tensor:
        """Read a tensor in the dtype of the activations, whatever it is stored in."""
        return self.cast(self.read(name))

    def cast(self, weight: StoredWeight) -> Tensor:
        """Move a weight to the device, in the dtype of the activations."""
        # The bytes as they are stored go to the device and are cast there: in one call the host
        # would make a copy in the other dtype first.
        values = weight if isinstance(weight, Tensor) else weight.dequantize()
        return values.to(self.device).to(self.dtype)

    def keeps(self, weight: QuantizedWeight) -> bool:
        """Whether a weight stays as it is stored."""
        return weight.kinds <= self._kept

    def stacked(
        self, weights: list[StoredWeight], factors: Sequence[float]
    ) -> Tensor | QuantizedWeight:
        """Stack weights: as stored if all are of kinds that are kept, else cast.

        A factor is rounded into plain weights alone: scales of 16 bits would lose more.
        """
        if any(factor != 1.0 for factor in factors):
            pairs = zip(map(self.cast, weights), factors, strict=True)
            return torch.cat([scaled(*each) for each in pairs])
        kept = [each for each in weights if isinstance(each, QuantizedWeight) and self.keeps(each)]
        if len(kept) == len(weights):
            return stack(kept)
        return torch.cat([self.cast(each) for each in weights])

    def _few_parts(self, weight: Tensor | QuantizedWeight) -> Tensor | QuantizedWeight:
        """Cast a weight whose rows of several kinds alternate."""
        is_torn = isinstance(weight, StackedWeight) and len(weight.parts) > _MOST_PARTS
        return self.cast(weight) if is_torn else weight

    def table(
        self, weight: StoredWeight, packed: PackedLinear | None, factor: float
    ) -> Tensor | PackedTable:
        """An embedding, times ``factor``: packed where the weight is kept as it is stored.

        ``packed``: the weight, where it is packed already.
        """
        if not (isinstance(weight, QuantizedWeight) and self.keeps(weight)):
            return scaled(self.cast(weight), factor)
        packed = packed or self.ops.pack_linear(weight)
        return self.ops.packed_table(packed, self.dtype, factor)

    def stack(
        self, name: str, count: int, *, is_turned: bool
    ) -> Iterator[Tensor | QuantizedWeight]:
        """Yield the matrices ``[out_features, in_features]`` of a stack, one by one."""
        found = self.read(name)
        if isinstance(found, QuantizedStack):
            for each in (found.one(index) for index in range(count)):
                yield each if self.keeps(each) else self.cast(each)
        else:
            plain = self.cast(found)
            yield from ((each.T if is_turned else each).contiguous() for each in plain)
