"""Recurrent states without numbers: a `StatePool` whose states and logs are hashes of prefixes.

It keeps the law of real ones. A state stands at a page's end; a row reads it and the log of the
positions behind it, in their order; a pass folds the log into the state first, a chunk of final
rows folds on the way, and drafts fold into a copy. So a state of another prefix, one that moved
too far or a log of another request changes what comes out, and is reported besides.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from foretoken.core.ops.batch import Segment
from foretoken.core.ops.row_extras import SegmentState
from foretoken.core.ops.state_pool import DRAFT_ROOM

Value: TypeAlias = tuple[int, int, int]  # of a prefix: a hash and its last two tokens
Entry: TypeAlias = tuple[int, int]  # of a log: the token, and the hash of what stands before it
Advance: TypeAlias = Callable[[Value, int], Value]


def state_of(segment: Segment) -> SegmentState | None:
    return None if segment.extras is None else segment.extras.state


@dataclass
class _Walk:
    """One layer's way through a segment: a state, and where it stands."""

    value: Value
    at: int


class ToyStates:
    """Slots and logs of ``num_layers`` layers, with the face of a `StatePool`.

    ``violation`` hears of what must not be. ``between_layers`` is called with each layer before it
    is computed, and may raise. Slots and logs begin with garbage.
    """

    def __init__(
        self,
        num_slots: int,
        num_logs: int,
        *,
        page_size: int,
        violation: Callable[[str], None],
        num_layers: int = 2,
        between_layers: Callable[[int], None] = lambda _: None,
    ) -> None:
        self.num_slots, self.num_logs, self.num_layers = num_slots, num_logs, num_layers
        self.page_size, self.ring = page_size, page_size + DRAFT_ROOM
        self.at = [[-1] * num_layers for _ in range(num_slots)]
        self.slots: list[list[Value | None]] = [[(-1, -1, -1)] * num_layers for _ in self.at]
        self.logs = [
            [[(-1, -1)] * self.ring for _ in range(num_layers)] for _ in range(num_logs)
        ]  # [num_logs][num_layers][ring]
        self.between_layers = between_layers
        self._violation = violation

    def copy_slot(self, source: int, target: int) -> None:
        self.slots[target], self.at[target] = self.slots[source][:], self.at[source][:]

    def reset(self, slot: int) -> None:
        """Nothing stands before position 0: what does is the first state of the request's salt."""
        self.slots[slot], self.at[slot] = [None] * self.num_layers, [0] * self.num_layers

    def check_batch(self, segments: Sequence[Segment]) -> None:
        """No two requests have a slot or a log together, and what is kept goes to its own slots."""
        states = [state for segment in segments if (state := state_of(segment)) is not None]
        if len(states) < len(segments):
            self._violation("a segment has no state")
        slots = [slot for each in states for slot in (each.slot, *(slot for _, slot in each.keeps))]
        if len({*slots}) < len(slots) or len({each.log for each in states}) < len(states):
            self._violation("two segments of a step write one state or log")

    def spoil(self, segment: Segment, value: Value) -> None:
        """Put a value into each state that has rows of a segment: these came out as that."""
        state = state_of(segment)
        assert state is not None
        stands = (state.final_stop - 1) // self.page_size * self.page_size
        for position, slot in ((stands, state.slot), *state.keeps):
            if position > segment.start:
                self.slots[slot] = [value] * self.num_layers
        for log in self.logs[state.log]:
            for position in range(segment.start, segment.stop):
                log[position % self.ring] = -1, value[0]

    def compute(self, name: str, segment: Segment, first: Value, advance: Advance) -> list[Value]:
        """Compute the value behind each row of a segment; ``first``: that before position 0."""
        layers = []
        for layer in range(self.num_layers):
            self.between_layers(layer)
            layers.append(self._compute_layer(name, segment, layer, first, advance))
        if any(values != layers[0] for values in layers):
            self._violation(f"the layers of {name} are not in the same state")
        return layers[0]

    def _compute_layer(
        self, name: str, segment: Segment, layer: int, first: Value, advance: Advance
    ) -> list[Value]:
        state = state_of(segment)
        assert state is not None
        log = self.logs[state.log][layer]
        own = _Walk(self.slots[state.slot][layer] or first, self.at[state.slot][layer])
        if not 0 <= own.at <= segment.start:
            self._violation(f"{name} begins at {segment.start}, its state stands at {own.at}")
        while own.at + self.page_size <= segment.start:
            self._fold(name, own, log, own.at + self.page_size, advance)
        self._store(state.slot, layer, own)
        final = walk = own
        values = []
        keeps = dict(state.keeps)
        for position, token in enumerate(segment.token_ids, segment.start):
            if position == walk.at + self.page_size:
                walk = _Walk(walk.value, walk.at)
                self._fold(name, walk, log, position, advance)
                final = walk if position < state.final_stop else final
                self._keep(keeps, position, layer, walk)
            before = self._read(name, walk, log, position, advance)
            log[position % self.ring] = token, before[0]
            values.append(advance(before, token))
        self._store(state.slot, layer, final)
        if state.final_stop in keeps:
            end = _Walk(final.value, final.at)
            self._fold(name, end, log, state.final_stop, advance)
            self._keep(keeps, state.final_stop, layer, end)
        if keeps:
            self._violation(f"{name} is to keep {keeps}, which are no page ends of its step")
        return values

    def _store(self, slot: int, layer: int, walk: _Walk) -> None:
        self.slots[slot][layer], self.at[slot][layer] = walk.value, walk.at

    def _keep(self, keeps: dict[int, int], position: int, layer: int, walk: _Walk) -> None:
        if (slot := keeps.pop(position, None)) is not None:
            self._store(slot, layer, walk)

    def _fold(
        self, name: str, walk: _Walk, log: list[Entry], position: int, advance: Advance
    ) -> None:
        if position != walk.at + self.page_size:
            self._violation(f"the state of {name} at {walk.at} is folded to {position}")
        walk.value = self._read(name, walk, log, position, advance)
        walk.at = position

    def _read(self, name: str, walk: _Walk, log: list[Entry], stop: int, advance: Advance) -> Value:
        """The state and the log up to a position, in their order."""
        value = walk.value
        for position in range(walk.at, stop):
            token, digest = log[position % self.ring]
            if digest != value[0]:
                self._violation(f"the log of {name} holds another prefix at {position}")
                value = (hash((digest, value)), 0, 0)
            value = advance(value, token)
        return value


class ToySlotRecords:
    """`SlotRecords` of `ToyStates`."""

    def __init__(self, states: ToyStates, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._states = states
        self._staged = bytearray(num_bytes)

    def record(self, value: Value) -> bytes:
        """Return the bytes of a state in all layers."""
        return self._packed([value] * self._states.num_layers)

    def _packed(self, values: Sequence[Value | None]) -> bytes:
        return pickle.dumps(list(values)).ljust(self.num_bytes, b"\0")

    def read(self, slot: int) -> memoryview:
        return memoryview(self._packed(self._states.slots[slot]))

    def target(self, slot: int) -> memoryview:
        del slot
        return memoryview(self._staged)

    def write(self, slot: int) -> None:
        self._states.slots[slot] = pickle.loads(self._staged)

    def set_position(self, slot: int, position: int) -> None:
        self._states.at[slot] = [position] * self._states.num_layers
