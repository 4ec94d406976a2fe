"""RowExtras: data that only some rows have besides tokens and pages; plain rows have none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..interface.extras.adapter import Adapter
from .state_pool import DRAFT_ROOM, StatePool

_Ints: TypeAlias = NDArray[np.int64]


class SegmentState(msgspec.Struct, frozen=True, gc=False):
    """Indices of a segment's recurrent state and log in the `StatePool`.

    Rows at positions below ``final_stop`` are final. Later rows are draft tokens in a chain, at
    most `DRAFT_ROOM`. ``keeps``: ascending page ends between the segment's start and
    ``final_stop``, each with the slot to which the state at that position is written.
    """

    slot: int
    log: int
    final_stop: int
    keeps: tuple[tuple[int, int], ...] = ()  # position, slot


class RowExtras(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Data of a segment's rows besides tokens and pages.

    ``state``: for models with recurrent layers. ``adapter``: changes the weights of the rows.
    ``rope_positions``: [3, rows] positions for RoPE (time, height, width); None: the positions of
    the rows.

    ``shift``: number of earlier tokens whose KV was dropped. All positions count only the tokens
    that are left; RoPE alone uses a row's true position, which is ``shift`` higher.

    ``reaches``: [rows] first position that each row does not see, in layers whose rows may see
    later rows. A reach is above the row's own position and at most the segment's stop; reaches
    never decrease. None: a row sees no later row.
    """

    state: SegmentState | None = None
    adapter: Adapter | None = None
    rope_positions: _Ints | None = None
    shift: int = 0
    reaches: _Ints | None = None


NO_EXTRAS = RowExtras()


@dataclass(frozen=True, slots=True, eq=False)
class BatchStates:
    """`SegmentState` of every segment of a batch."""

    slots: _Ints  # [num_segments]
    logs: _Ints  # [num_segments]
    final_stops: _Ints  # [num_segments]
    keep_counts: _Ints  # [num_segments]
    keeps: _Ints  # [sum of keep_counts, 2] (position, slot), segment after segment


class BatchExtras(NamedTuple):
    """The extras of all segments; see `RaggedBatch`."""

    positions: _Ints  # [num_rows], or [3, num_rows] if a segment has ``rope_positions``
    rope_until: int
    states: BatchStates | None
    adapters: tuple[tuple[Adapter, _Ints], ...]
    reaches: _Ints | None


def fresh_state(states: StatePool | None, index: int, stop: int) -> RowExtras | None:
    """Reset slot ``index`` and return the extras of final rows from position 0 to ``stop``.

    The log has the same index. Returns None if there are no ``states``.
    """
    if states is None:
        return None
    states.reset(index)
    return RowExtras(state=SegmentState(index, index, stop))


def batch_extras(
    given: Sequence[RowExtras | None],
    starts: _Ints,
    lens: _Ints,
    positions: _Ints,
    *,
    page_size: int,
    num_rows: int,
) -> BatchExtras:
    """Lay out the extras of segments with the given ``starts`` and ``lens`` [num_segments].

    ``positions``: [rows]. ``num_rows``: number of rows, including the copies of the last one.
    Raises ValueError for states that segments share or lack, and for invalid reaches.
    """
    extras = [NO_EXTRAS if each is None else each for each in given]
    shifted, rope_until = _shifted(extras, positions, lens)
    return BatchExtras(
        positions=_rope_positions(extras, shifted, lens),
        rope_until=rope_until,
        states=_states(extras, starts, lens, page_size),
        adapters=_adapters(extras, lens, num_rows),
        reaches=_reaches(extras, starts, lens),
    )


def _shifted(extras: Sequence[RowExtras], positions: _Ints, lens: _Ints) -> tuple[_Ints, int]:
    """Return positions [num_rows] plus the segments' shifts, and the highest position plus 1.

    The second number is 0 if no segment has a shift.
    """
    shifts = np.array([each.shift for each in extras], dtype=np.int64)
    if not shifts.any():
        return positions, 0
    shifted = positions + np.repeat(shifts, lens)
    return shifted, int(shifted.max()) + 1


def _rope_positions(extras: Sequence[RowExtras], positions: _Ints, lens: _Ints) -> _Ints:
    """Return positions for RoPE, [3, num_rows] if a segment has three per row, else [num_rows]."""
    if all(each.rope_positions is None for each in extras):
        return positions
    found, first = np.stack([positions] * 3), 0
    for each, count in zip(extras, lens.tolist(), strict=True):
        if each.rope_positions is not None:
            found[:, first : first + count] = each.rope_positions
        first += count
    return found


def _states(
    extras: Sequence[RowExtras], starts: _Ints, lens: _Ints, page_size: int
) -> BatchStates | None:
    """Return the states of all segments, or None if no segment has one.

    Raises ValueError if only some have one, if a segment has no final row or too many drafts, or if
    two segments would write the same slot or log.
    """
    states = [each.state for each in extras if each.state is not None]
    if not states:
        return None
    if len(states) < len(extras):
        raise ValueError("some segments of the batch have a state and some have none")
    slots = np.array([state.slot for state in states], dtype=np.int64)
    logs = np.array([state.log for state in states], dtype=np.int64)
    final_stops = np.array([state.final_stop for state in states], dtype=np.int64)
    num_drafts = starts + lens - final_stops
    if (final_stops <= starts).any() or num_drafts.min() < 0 or num_drafts.max() > DRAFT_ROOM:
        raise ValueError(
            f"a segment needs at least 1 final row and at most {DRAFT_ROOM} draft rows"
        )
    for start, state in zip(starts.tolist(), states, strict=True):
        _check_keeps(start, state, page_size)
    keeps = [keep for state in states for keep in state.keeps]
    written = [*slots.tolist(), *(slot for _, slot in keeps)]
    if len(set(written)) < len(written) or len(set(logs.tolist())) < len(logs):
        raise ValueError("two segments would write the same state slot or log")
    return BatchStates(
        slots=slots,
        logs=logs,
        final_stops=final_stops,
        keep_counts=np.array([len(state.keeps) for state in states], dtype=np.int64),
        keeps=np.array(keeps, dtype=np.int64).reshape(-1, 2),
    )


def _check_keeps(start: int, state: SegmentState, page_size: int) -> None:
    """Raise ValueError unless the kept positions are ascending page ends of final rows."""
    before = start - 1
    for position, _ in state.keeps:
        if position % page_size or not before < position <= state.final_stop:
            raise ValueError(
                f"cannot keep the state at {position}: it is not a page end from {before + 1} to "
                f"{state.final_stop}"
            )
        before = position


def _adapters(
    extras: Sequence[RowExtras], lens: _Ints, num_rows: int
) -> tuple[tuple[Adapter, _Ints], ...]:
    """Return each adapter with its rows; ``num_rows`` includes the copies of the last row."""
    ends = lens.cumsum()
    stops = [*ends[:-1].tolist(), num_rows]  # the last row's copies must have its adapter
    found: dict[Adapter, list[_Ints]] = {}
    for each, first, stop in zip(extras, (ends - lens).tolist(), stops, strict=True):
        if each.adapter is not None:
            found.setdefault(each.adapter, []).append(np.arange(first, stop))
    return tuple((adapter, np.concatenate(rows)) for adapter, rows in found.items())


def _reaches(extras: Sequence[RowExtras], starts: _Ints, lens: _Ints) -> _Ints | None:
    """Return each row's reach [num_rows], or None if every row sees only up to itself.

    Raises ValueError for reaches that exclude the row itself, exceed the segment or decrease.
    """
    if all(each.reaches is None for each in extras):
        return None
    found = []
    for each, start, count in zip(extras, starts.tolist(), lens.tolist(), strict=True):
        stop = start + count
        ends = np.arange(start + 1, stop + 1)
        given = ends if each.reaches is None else each.reaches
        if len(given) != len(ends) or (given < ends).any() or (given > stop).any():
            raise ValueError("a row must attend to its own position, and to none after its segment")
        if (np.diff(given) < 0).any():
            raise ValueError("a row attends to fewer positions than the row before it")
        found.append(given)
    return np.concatenate(found)
