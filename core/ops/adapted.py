"""Operations of a pass with adapters: only `linear` differs from the backend's operations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor

from .base import Ops
from .lora import AdaptedRows
from .weights import PackedLinear

# (outputs [T, out_features], inputs [T, in_features], linear): adds the updates to the outputs.
AddUpdates: TypeAlias = Callable[[Tensor, Tensor, PackedLinear], None]


def adapted_ops(ops: Ops, adapted: Sequence[AdaptedRows], device: torch.device) -> Ops:
    """Return operations like ``ops``, whose `linear` adds each adapter's update to its rows."""
    if not adapted:
        return ops
    parts = [(each.weights.parts, torch.from_numpy(each.rows).to(device)) for each in adapted]

    def add(out: Tensor, x: Tensor, linear: PackedLinear) -> None:
        for updates, rows in parts:
            if (lora := updates.get(linear)) is not None:
                ops.add_lora(out, x, rows, lora)

    return adding_ops(ops, add)


def adding_ops(ops: Ops, add: AddUpdates) -> Ops:
    """Return operations like ``ops``, whose `linear` calls ``add`` on its result."""
    return cast("Ops", _AddingOps(ops, add))


class _AddingOps:
    """A backend's operations; `linear` calls ``add`` on its result."""

    def __init__(self, ops: Ops, add: AddUpdates) -> None:
        self._ops, self._add = ops, add

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - an operation of the backend
        return getattr(self._ops, name)

    def linear(self, x: Tensor, weight: PackedLinear) -> Tensor:
        """Compute ``[T, in_features] -> [T, out_features]`` with the updates of all adapters."""
        out = self._ops.linear(x, weight)
        self._add(out, x, weight)
        return out
