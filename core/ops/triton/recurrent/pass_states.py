"""The states of a pass on the device: fields of its `GraphInputs`, and their advance."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from ...batch import RaggedBatch
from ...row_extras import BatchStates
from ...state_pool import StatePool
from ..graph_inputs import Field, HostFields
from .inputs_kernels import SEGMENT_WORDS

_WORDS = int(SEGMENT_WORDS.value)
_ROUND = 4  # the number of segments is rounded up to it for the fields' alignment
NAMES = ("state_rows", "state_segments", "state_keeps", "state_at")


@dataclass(frozen=True, slots=True, eq=False)
class PassStates:
    """The states of a pass on the device."""

    rows: Tensor  # [num_rows] int32 segment; -1: no row
    segments: Tensor  # [num_segments, SEGMENT_WORDS] int32
    keeps: Tensor  # [num_keeps, 2] int32 position, slot
    at: Tensor  # [num_layers, num_segments] int32 position of the state

    @classmethod
    def of(cls, views: Mapping[str, Tensor], num_layers: int) -> PassStates:
        """Return the states from the views of a `GraphInputs` with `state_fields`."""
        rows, segments, keeps, at = (views[name] for name in NAMES)
        return cls(rows, segments.view(-1, _WORDS), keeps.view(-1, 2), at.view(num_layers, -1))


def state_fields(num_layers: int, num_rows: int, num_segments: int, num_keeps: int) -> list[Field]:
    """Return fields with the given capacities of rows, segments and kept states."""
    room = -(-num_segments // _ROUND) * _ROUND
    counts = (num_rows, room * _WORDS, num_keeps * 2, num_layers * room)
    return [Field(name, count) for name, count in zip(NAMES, counts, strict=True)]


def fill_states(to: HostFields, batch: RaggedBatch, pool: StatePool) -> None:
    """Write the states of a pass; unused segments have no rows."""
    states = batch.states
    assert states is not None
    count, rows = len(states.slots), to["state_rows"]
    num_rows = int(batch.lens.sum())
    rows[:num_rows] = np.repeat(np.arange(count), batch.lens)
    rows[num_rows:] = -1
    segments = to["state_segments"].reshape(-1, _WORDS)
    segments[count:] = 0
    columns = (
        batch.starts, batch.stops, batch.first_rows, states.slots, states.logs,
        _moved(states, pool), np.cumsum(states.keep_counts) - states.keep_counts,
        states.keep_counts,
    )  # fmt: skip
    for index, column in enumerate(columns):
        segments[:count, index] = column
    to["state_keeps"][: states.keeps.size] = states.keeps.ravel()
    at = to["state_at"].reshape(len(pool.shapes), -1)
    at[:, :count] = pool.at.numpy()[states.slots].T


def record_positions(batch: RaggedBatch, pool: StatePool, layer: int | None = None) -> None:
    """Record on the host the positions of a layer's states, or all layers', after a pass."""
    states = batch.states
    assert states is not None
    at, layers = pool.at.numpy(), slice(None) if layer is None else slice(layer, layer + 1)
    at[states.slots, layers] = _moved(states, pool)[:, None]
    at[states.keeps[:, 1], layers] = states.keeps[:, :1]


def _moved(states: BatchStates, pool: StatePool) -> np.ndarray:
    """Return the positions of own states after a pass: page starts of the last final rows."""
    return (states.final_stops - 1) // pool.page_size * pool.page_size
