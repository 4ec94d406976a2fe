"""Packer: reads a checkpoint's tensors, casts them and packs them for the kernels."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from ...ops.base import Ops
from ...ops.mixers.mixer import MixerWeights
from ...ops.parallel import Comm
from ...ops.quantize import (
    QuantizedStack,
    QuantizedWeight,
    StackedWeight,
    StoredWeight,
    stack,
)
from ...ops.weights import Norm, PackedLinear, PackedTable
from ..description.config import DecoderConfig
from ..description.fold import scaled
from ..description.page_layout import PageLayout
from ..description.tensors import LayerPart, LinearSpec, NormSpec, TensorSpec
from ..formats.checkpoint import Read

_Spec = TypeVar("_Spec")
_Packed = TypeVar("_Packed")
_MOST_PARTS = 8  # maximum number of parts of a packed matrix: each part costs a kernel call


def in_order(weight: Tensor | QuantizedWeight, order: Tensor) -> Tensor | QuantizedWeight:
    """Return a plain or quantised weight whose row i is row ``order[i]`` of ``weight``."""
    return weight.rows(order) if isinstance(weight, QuantizedWeight) else weight[order]


def norm_of(config: DecoderConfig, name: str) -> NormSpec:
    """Return the declaration of the norm on the residual stream whose weight is ``name``."""
    return NormSpec(name, config.hidden_size, config.layer_norm == "bias")


def optional(pack: Callable[[_Spec], _Packed], spec: _Spec | None) -> _Packed | None:
    """Return ``pack(spec)``, or None if ``spec`` is None, because the model lacks the tensor."""
    return None if spec is None else pack(spec)


class Packer:
    """Reader that packs the tensors of a model by their declarations.

    ``read`` returns a stored tensor by name. ``layout``: page layout of the KV. ``comm``:
    connection to the other ranks of a model, if any. ``keeps_packed``: quantised weights stay as
    they are stored if the backend has kernels for them. ``linear_specs``: the declaration of each
    packed linear.
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
        layout: PageLayout,
        comm: Comm | None,
    ) -> None:
        self.config, self.read, self.ops = config, read, ops
        self.dtype, self.device = dtype, device
        self.layout, self.comm = layout, comm
        self._kept = ops.stored_kinds if keeps_packed else frozenset()
        self.linear_specs: dict[PackedLinear, LinearSpec] = {}

    def linear(self, spec: LinearSpec) -> PackedLinear:
        """Read the matrices of a linear and pack them stacked as one matrix.

        So a single kernel call computes all of them and reads the input once.
        """
        factors, order = spec.factors, spec.order
        stored = [self.read(f"{matrix.name}.weight") for matrix in spec.matrices]
        if spec.is_plain:
            stored = [self.cast(each) for each in stored]
        weight, bias = self.stacked(stored, factors), None
        if spec.bias:
            biases = (self.cast(self.read(f"{matrix.name}.bias")) for matrix in spec.matrices)
            bias = torch.cat([scaled(*each) for each in zip(biases, factors, strict=True)])
        if order is not None:
            weight = self._few_parts(in_order(weight, order))
            bias = None if bias is None else bias[order]
        packed = self.ops.pack_linear(weight, bias, plain=spec.is_plain)
        self.linear_specs[packed] = spec
        return packed

    def norm(self, spec: NormSpec) -> Norm:
        """Read the weight of a norm on the residual stream, and its bias if it has one."""
        config, offset = self.config, self.config.fold.norm_offset
        weight = self.cast(self.read(spec.name))
        if config.layer_norm != "none" or offset:
            weight = weight.float() + offset
        bias = self.cast(self.read(spec.bias)).float() if spec.has_bias else None
        return Norm(weight, config.norm_eps, bias, config.layer_norm != "none")

    def float32(self, tensor: TensorSpec) -> Tensor:
        """Read a tensor and convert it from its stored dtype directly to float32."""
        weight = self.read(tensor.name)
        values = weight if isinstance(weight, Tensor) else weight.dequantize()
        return values.to(self.device).float()

    def vector(self, tensor: TensorSpec) -> Tensor:
        """Read a tensor and convert it to the dtype of the activations."""
        return self.cast(self.read(tensor.name))

    def cast(self, weight: StoredWeight) -> Tensor:
        """Move a weight to the device and convert it to the dtype of the activations."""
        # The weight is moved first and converted on the device. A single `to` would first make a
        # converted copy on the host.
        values = weight if isinstance(weight, Tensor) else weight.dequantize()
        return values.to(self.device).to(self.dtype)

    def keeps(self, weight: QuantizedWeight) -> bool:
        """Whether a quantised weight stays as it is stored, because the backend has kernels."""
        return weight.kinds <= self._kept

    def stacked(
        self, weights: list[StoredWeight], factors: Sequence[float]
    ) -> Tensor | QuantizedWeight:
        """Stack the rows of several weights, each multiplied by its factor.

        The weights stay as they are stored if kernels support all of them and all factors are 1;
        otherwise they are cast. A factor is never multiplied into the 16-bit scales of a quantised
        weight, which would lose more precision.
        """
        if any(factor != 1.0 for factor in factors):
            pairs = zip(map(self.cast, weights), factors, strict=True)
            return torch.cat([scaled(*each) for each in pairs])
        kept = [each for each in weights if isinstance(each, QuantizedWeight) and self.keeps(each)]
        if len(kept) == len(weights):
            return stack(kept)
        return torch.cat([self.cast(each) for each in weights])

    def _few_parts(self, weight: Tensor | QuantizedWeight) -> Tensor | QuantizedWeight:
        """Return ``weight``, cast if it has more than `_MOST_PARTS` quantised parts.

        Each part would be a kernel call of its own.
        """
        is_torn = isinstance(weight, StackedWeight) and len(weight.parts) > _MOST_PARTS
        return self.cast(weight) if is_torn else weight

    def table(
        self, weight: StoredWeight, packed: PackedLinear | None, factor: float
    ) -> Tensor | PackedTable:
        """Return an embedding times ``factor``; a quantised one that `keeps` allows stays packed.

        ``packed``: the packed form of ``weight``, if it exists already.
        """
        if not (isinstance(weight, QuantizedWeight) and self.keeps(weight)):
            return scaled(self.cast(weight), factor)
        packed = packed or self.ops.pack_linear(weight)
        return self.ops.packed_table(packed, self.dtype, factor)

    def stack(
        self, tensor: TensorSpec, count: int, *, is_transposed: bool
    ) -> Iterator[Tensor | QuantizedWeight]:
        """Yield the matrices [out_features, in_features] of a stored stack of ``count`` matrices.

        ``is_transposed``: the matrices of a plain stack are stored transposed.
        """
        found = self.read(tensor.name)
        if isinstance(found, QuantizedStack):
            for each in (found.one(index) for index in range(count)):
                yield each if self.keeps(each) else self.cast(each)
        else:
            plain = self.cast(found)
            yield from ((each.T if is_transposed else each).contiguous() for each in plain)


class Mixer(LayerPart):
    """Declared tensors of a layer's mixer: attention, or a recurrent layer in its place."""

    @abstractmethod
    def pack(self, packer: Packer) -> MixerWeights:
        """Read the tensors of the mixer, and pack them for the kernels."""
