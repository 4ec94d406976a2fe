"""A layer's fields in slots and logs for kernels, and the inputs that all layers keep."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...state_pool import StatePool
from .inputs_kernels import keep_inputs_kernel
from .pass_states import PassStates

CHANNELS_TILE = 256  # channels of a program
_FLOAT = torch.float32


@dataclass(frozen=True, slots=True, eq=False)
class LayerMemory:
    """Flat views of each field in slot 0 or log 0; other slots and logs follow at a stride."""

    pool: StatePool
    state: Tensor
    tail: Tensor
    k: Tensor
    u: Tensor
    c: Tensor
    inputs: Tensor

    @classmethod
    def of(cls, pool: StatePool, layer: int) -> LayerMemory:
        """Return views of the pool's memory that begin at each field of a layer."""
        state, tail = map(int, pool.slot_offsets[layer])
        k, u, c, inputs = map(int, pool.log_offsets[layer])
        slots, logs = pool.slots.view(-1), pool.logs.view(-1)
        return cls(
            pool,
            state=slots[state:].view(_FLOAT),
            tail=slots[tail:].view(pool.dtype),
            k=logs[k:].view(_FLOAT),
            u=logs[u:].view(_FLOAT),
            c=logs[c:].view(_FLOAT),
            inputs=logs[inputs:].view(pool.dtype),
        )

    @property
    def input_strides(self) -> dict[str, int]:
        """Distance in items between slots and between logs, and positions of a log."""
        pool, size = self.pool, self.pool.dtype.itemsize
        return {
            "SLOT": pool.bytes_per_slot // size,
            "LOG": pool.bytes_per_log // size,
            "RING": pool.ring,
        }


def keep_inputs(
    inputs: Tensor,
    num_channels: int,
    taps: int,
    memory: LayerMemory,
    states: PassStates,
    at: Tensor,
) -> None:
    """Write a pass's inputs to logs, and the inputs before states to slots.

    ``inputs`` [T, num_channels or more]. Must be a layer's last operation in a pass, because it
    overwrites memory that the rows read.
    """
    keep_inputs_kernel[(-(-num_channels // CHANNELS_TILE), len(states.segments))](
        inputs, memory.tail, memory.inputs, states.segments, states.keeps, at,
        **memory.input_strides, STRIDE=inputs.shape[1], CHANNELS=num_channels, TAPS=taps,
        TILE=CHANNELS_TILE,
    )  # fmt: skip
