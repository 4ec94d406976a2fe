"""Operations that add what the adapters of a pass change: `Ops.linear` alone differs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from .base import Ops, PackedLinear
from .lora import AdaptedRows, PackedLora


def adapted_ops(ops: Ops, adapted: Sequence[AdaptedRows], device: torch.device) -> Ops:
    """Operations for one pass, whose linears add the updates of adapters to their rows."""
    if not adapted:
        return ops
    rows = [(each.weights.parts, torch.from_numpy(each.rows).to(device)) for each in adapted]
    return cast("Ops", _AdaptedOps(ops, rows))


def masked_ops(ops: Ops, parts: Mapping[object, PackedLora], mask: Tensor) -> Ops:
    """Operations of one adapter and its rows in a mask [T] bool that may change; see `adapted_ops`.

    The backend's `Ops.add_lora` must take masks.
    """
    return cast("Ops", _AdaptedOps(ops, [(parts, mask)]))


class _AdaptedOps:
    """All operations of the backend but `linear`, which is another one."""

    def __init__(
        self, ops: Ops, rows: Sequence[tuple[Mapping[object, PackedLora], Tensor]]
    ) -> None:
        self._ops, self._rows = ops, rows

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - an operation of the backend
        return getattr(self._ops, name)

    def linear(self, x: Tensor, weight: PackedLinear) -> Tensor:
        """``[T, in_features] -> [T, out_features]``, with the updates of all adapters."""
        out = self._ops.linear(x, weight)
        for parts, rows in self._rows:
            if (lora := parts.get(weight)) is not None:
                self._ops.add_lora(out, x, rows, lora)
        return out
