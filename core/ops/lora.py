"""LoRA (arXiv 2106.09685): low-rank updates of a decoder's linears, for some rows of a pass."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from ..interface.extras.adapter import Adapter
from .batch import IntArray, RaggedBatch


class LoraBlock(NamedTuple):
    """An update of ``len(b)`` outputs from ``first_out`` on: ``b`` times some of A's outputs.

    No output of a layer is in two blocks.
    """

    first_out: int
    first_rank: int  # of the outputs of A
    b: Tensor  # [num_outputs, num_ranks], scaled


class LoraUpdate(NamedTuple):
    """An adapter's update of one packed linear: A, and for its outputs the blocks of B.

    Matrices that are stacked into one, as Q, K and V are, have an A and a B each: the rows of all A
    stand together, and a block reads those of its own.
    """

    a: Tensor  # [ranks, in_features]
    blocks: tuple[LoraBlock, ...]
    out_features: int


class PackedLora:
    """A `LoraUpdate` in a backend's own layout."""

    __slots__ = ("__weakref__",)

    @property
    def num_bytes(self) -> int:
        """Bytes of memory that it takes."""
        raise NotImplementedError


class LoraWeights(Adapter):
    """A LoRA adapter for one decoder. ``parts``: its update of each `PackedLinear` it changes."""

    __slots__ = ("parts",)

    def __init__(self, parts: Mapping[object, PackedLora]) -> None:
        self.parts = parts

    @property
    def num_bytes(self) -> int:
        """Bytes of memory of all updates."""
        return sum(part.num_bytes for part in self.parts.values())


class AdaptedRows(NamedTuple):
    """Rows of a pass that an adapter changes."""

    weights: LoraWeights
    rows: IntArray  # [n], rising


def adapted_rows(batch: RaggedBatch) -> list[AdaptedRows]:
    """The rows of each adapter of a batch. Raises TypeError for one that is not of LoRA."""
    found = []
    for adapter, rows in batch.adapters:
        if not isinstance(adapter, LoraWeights):
            raise TypeError(f"{type(adapter).__name__} is no adapter of this decoder")
        found.append(AdaptedRows(adapter, rows))
    return found
