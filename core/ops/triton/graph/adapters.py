"""StepAdapters: adapters of passes, for kernels inside and outside of graphs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...adapted import adding_ops
from ...base import Ops
from ...batch import IntArray
from ...lora import AdaptedRows
from ...weights import PackedLinear
from ..graph_inputs import Field, GraphInputs, HostFields
from ..linear.lora import AdapterTables
from .plan import DevicePlan

_SPREAD = 4  # room for adapters in a graph grows by this factor


class PassAdapters(NamedTuple):
    """The adapters of a pass: the address of each one's table, and its rows."""

    addresses: Sequence[int]
    rows: Sequence[IntArray]

    def fill(self, to: HostFields) -> None:
        """Write addresses and rows to the inputs of a pass."""
        to["adapters"][: len(self.addresses)] = self.addresses
        to["adapted"][:] = 0
        for number, rows in enumerate(self.rows, 1):
            to["adapted"][rows] = number


class StepAdapters:
    """Operations of a decoder's passes with adapters."""

    def __init__(self, ops: Ops, device: torch.device) -> None:
        self._ops = ops
        self._tables = AdapterTables(device)

    @property
    def growth(self) -> int:
        """`AdapterTables.growth`; graphs captured when it had another value are outdated."""
        return self._tables.growth

    def of_pass(self, adapted: Sequence[AdaptedRows]) -> PassAdapters | None:
        """Return the adapters of a pass, or None if it has none."""
        if not adapted:
            return None
        addresses = self._tables.take([each.weights for each in adapted])
        return PassAdapters(addresses, [each.rows for each in adapted])

    def ops(self, inputs: GraphInputs, num_adapters: int) -> Ops:
        """Return operations that read at most ``num_adapters`` adapters from the inputs."""
        adapted, tables = inputs.device["adapted"], inputs.device["adapters"][:num_adapters]

        def add(out: Tensor, x: Tensor, linear: PackedLinear) -> None:
            self._tables.add(out, x, linear, adapted, tables)

        return adding_ops(self._ops, add)

    def ops_of_pass(self, adapters: PassAdapters | None, plan: DevicePlan) -> Ops:
        """Return the operations of one pass outside of graphs."""
        if adapters is None:
            return self._ops
        count = len(adapters.addresses)
        room = [Field("adapters", count, torch.int64), Field("adapted", len(plan.token_ids))]
        inputs = GraphInputs(room, plan.token_ids.device)
        adapters.fill(inputs.open())
        inputs.upload()
        return self.ops(inputs, count)


def room_for(num_adapters: int, num_rows: int) -> int:
    """Return the adapter capacity of a graph of ``num_rows`` rows, at least ``num_adapters``."""
    room = 1
    while room < num_adapters:
        room *= _SPREAD
    return min(room, num_rows)
