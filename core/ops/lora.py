"""LoRA (arXiv 2106.09685): low-rank updates of a decoder's linears for some rows of a pass."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from ..interface.extras.adapter import Adapter
from .batch import IntArray, RaggedBatch


class LoraBlock(NamedTuple):
    """Update of ``len(b)`` outputs, the first at ``first_out``: ``b`` times some of A's outputs.

    An output of a layer is in at most one block.
    """

    first_out: int
    first_rank: int  # first output of A that ``b`` reads
    b: Tensor  # [num_outputs, num_ranks], scaled


class LoraUpdate(NamedTuple):
    """An adapter's update of one packed linear: A, and the blocks of B that read A's outputs.

    Matrices stacked into one linear, such as Q, K and V, have an A and a B each. ``a`` has the rows
    of all As, and a block reads only the outputs of its own A.
    """

    a: Tensor  # [ranks, in_features]
    blocks: tuple[LoraBlock, ...]
    out_features: int


class PackedLora:
    """A `LoraUpdate` in a backend's own layout."""

    __slots__ = ("__weakref__",)

    @property
    def num_bytes(self) -> int:
        """Size in memory in bytes."""
        raise NotImplementedError


class LoraWeights(Adapter):
    """A LoRA adapter for one decoder. ``parts``: the update of each changed `PackedLinear`."""

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
    rows: IntArray  # [n], ascending


def adapted_rows(batch: RaggedBatch) -> list[AdaptedRows]:
    """Return each adapter of a batch with its rows. Raises TypeError for one that is not LoRA."""
    found = []
    for adapter, rows in batch.adapters:
        if not isinstance(adapter, LoraWeights):
            raise TypeError(f"{type(adapter).__name__} is not a LoRA adapter")
        found.append(AdaptedRows(adapter, rows))
    return found
