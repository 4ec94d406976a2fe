"""Operations that add what the adapters of a pass change: `Ops.linear` alone differs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor

from .base import Ops
from .lora import AdaptedRows
from .weights import PackedLinear

# Adds to outputs [T, out_features] of a linear what adapters change, of its inputs [T, in_features]
AddUpdates: TypeAlias = Callable[[Tensor, Tensor, PackedLinear], None]


def adapted_ops(ops: Ops, adapted: Sequence[AdaptedRows], device: torch.device) -> Ops:
    """Operations for one pass, whose linears add the updates of adapters to their rows."""
    if not adapted:
        return ops
    parts = [(each.weights.parts, torch.from_numpy(each.rows).to(device)) for each in adapted]

    def add(out: Tensor, x: Tensor, linear: PackedLinear) -> None:
        for updates, rows in parts:
            if (lora := updates.get(linear)) is not None:
                ops.add_lora(out, x, rows, lora)

    return adding_ops(ops, add)


def adding_ops(ops: Ops, add: AddUpdates) -> Ops:
    """Operations whose linears end with ``add``."""
    return cast("Ops", _AddingOps(ops, add))


class _AddingOps:
    """All operations of the backend but `linear`, which is another one."""

    def __init__(self, ops: Ops, add: AddUpdates) -> None:
        self._ops, self._add = ops, add

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - an operation of the backend
        return getattr(self._ops, name)

    def linear(self, x: Tensor, weight: PackedLinear) -> Tensor:
        """``[T, in_features] -> [T, out_features]``, with the updates of all adapters."""
        out = self._ops.linear(x, weight)
        self._add(out, x, weight)
        return out
