"""Controls: all that the kernels of the sampler must know of some places, as arrays of numbers.

What follows from a request alone is a form of its `RowSampling`, made once; a place adds its
position. So a plain batch costs a look-up for each place and some operations on whole arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from ...batch import Draws, IntArray
from ...constraint import ConstraintFailed
from ...noise import stream_keys
from ...sampling import MIN_TEMPERATURE, SampleRow
from ...step import Refusal
from ...verify import Place
from .wishes import (
    CUT,
    DEGREE,
    EDITED,
    KEY,
    KIND,
    NUM_COLUMNS,
    ROW,
    Edits,
    Ints,
    Wishes,
    num_words,
    pack_bits,
    unpacked,
)

_Edited: TypeAlias = tuple[int, SampleRow, Wishes]  # place, and what it wishes


@dataclass(frozen=True, slots=True)
class EditLists:
    """Edits of those places that have any."""

    places: Ints  # [num_edited]
    mask_of: Ints  # [num_edited] index of a mask, or -1
    masks: Ints  # [num_masks, num_words] a bit for each token
    bounds: Ints  # [num_edited, number of steps + 1] where each step's edits begin and end
    ids: Ints  # [num_edits]
    amounts: NDArray[np.float32]  # [num_edits]


@dataclass(frozen=True, slots=True)
class Controls:
    """Numbers for the device, and which places have an error already."""

    columns: NDArray[np.int64]  # [num_places, NUM_COLUMNS]
    cuts: Ints  # [num_cuts] places
    edits: EditLists | None
    refusals: dict[int, str]  # by place


def write_controls(places: Sequence[Place], vocab_size: int, tau: float) -> Controls:
    """What there is to say of ``places`` when the vocabulary has ``vocab_size`` tokens."""
    columns, edited = _unedited(places, vocab_size, tau)
    lists, refusals = _edit_lists(edited, columns) if edited else (None, {})
    return Controls(columns, _cuts(columns), lists, refusals)


def write_plain_controls(draws: Draws, vocab_size: int) -> Controls | None:
    """As `write_controls` of all that is to be drawn, in the order of the logits.

    None where a row is edited or refused; its constraint was not asked then.
    """
    records, positions = list[bytes](), list[int]()
    for row, count in zip(draws.rows, draws.counts, strict=True):
        wishes, first = row.sampling.form(Wishes, vocab_size), row.position
        if wishes.is_edited or first < wishes.min_tokens:
            return None
        records.append(wishes.record * count)
        positions += range(first, first + count)
    columns = _columns(records, positions, np.arange(len(positions)), draws.tau)
    return Controls(columns, _cuts(columns), None, {})


def _unedited(
    places: Sequence[Place], vocab_size: int, tau: float
) -> tuple[NDArray[np.int64], list[_Edited]]:
    """The numbers of all places, as if none was edited, and those that are."""
    records, positions, edited = [], [], []
    for index, (_, row) in enumerate(places):
        wishes = row.sampling.form(Wishes, vocab_size)
        position = row.position
        records.append(wishes.record)
        positions.append(position)
        if wishes.is_edited or position < wishes.min_tokens:
            edited.append((index, row, wishes))
    rows = np.array([at for at, _ in places])
    return _columns(records, positions, rows, tau), edited


def _columns(
    records: Sequence[bytes], positions: Sequence[int], rows: IntArray, tau: float
) -> NDArray[np.int64]:
    """Numbers of places at these output positions, decided by these ``rows`` of the logits."""
    columns = np.frombuffer(bytearray().join(records), np.int64).reshape(-1, NUM_COLUMNS)
    columns[:, KEY] = stream_keys(columns[:, KEY].view(np.uint64), np.array(positions))
    columns[:, ROW] = rows
    degrees = columns[:, DEGREE].view(np.float64)
    degrees[:] = np.maximum(degrees * tau, MIN_TEMPERATURE).astype(np.float32)
    return columns


def _cuts(columns: NDArray[np.int64]) -> Ints:
    """Places under top-k or top-p."""
    return np.flatnonzero(columns[:, KIND] == CUT).astype(np.int32)


def _edit_lists(
    edited: Sequence[_Edited], columns: NDArray[np.int64]
) -> tuple[EditLists | None, dict[int, str]]:
    """The edits, with `EDITED` written; a place that is refused keeps its logits."""
    refusals: dict[int, str] = {}
    asked: list[tuple[int, Ints | None, tuple[Edits, ...]]] = []
    for index, row, wishes in edited:
        if wishes.error is not None:
            refusals[index] = wishes.error
            continue
        try:
            asked.append((index, *_ask(row, wishes)))
        except ConstraintFailed as error:
            refusals[index] = Refusal(error)
        else:
            columns[index, EDITED] = len(asked) - 1
    if not asked:
        return None, refusals
    return _lists(asked, num_words(edited[0][2].vocab_size)), refusals


def _ask(row: SampleRow, wishes: Wishes) -> tuple[Ints | None, tuple[Edits, ...]]:
    """Bits of the tokens that a place may have, None for all, and its edits."""
    mask = None
    if wishes.constraint is not None:
        mask = wishes.constraint.allowed(row.tokens, row.sampling.prompt_len, row.tail)
    if mask is None:
        return wishes.allowed, wishes.edits(row, None)
    allowed = unpacked(mask, wishes.vocab_size)
    bits = pack_bits(allowed)
    if wishes.allowed is not None:
        bits &= wishes.allowed
    return bits, wishes.edits(row, allowed)


def _lists(asked: Sequence[tuple[int, Ints | None, tuple[Edits, ...]]], words: int) -> EditLists:
    masks: dict[int, Ints] = {}  # by identity: places of one request may share theirs
    for _, bits, _ in asked:
        if bits is not None:
            masks.setdefault(id(bits), bits)
    index_of = {key: index for index, key in enumerate(masks)}
    edits = [step for *_, steps in asked for step in steps]
    ends = np.cumsum([len(ids) for ids, _ in edits], dtype=np.int32).reshape(len(asked), -1)
    begins = np.append(0, ends[:-1, -1]).astype(np.int32)
    return EditLists(
        places=np.array([index for index, *_ in asked], np.int32),
        mask_of=np.array([index_of.get(id(bits), -1) for _, bits, _ in asked], np.int32),
        masks=np.stack(list(masks.values())) if masks else np.empty((0, words), np.int32),
        bounds=np.column_stack((begins, ends)),
        ids=np.concatenate([ids for ids, _ in edits]),
        amounts=np.concatenate([amounts for _, amounts in edits]),
    )
