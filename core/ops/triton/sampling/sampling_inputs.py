"""SamplingInputs: the inputs of the sampler's kernels for each place, as arrays of numbers.

A place is a token to choose from one row of the logits. The part of its inputs that depends only on
a request is cached in the request's `SamplingMetadata`; a place adds its position. So a plain batch
costs one look-up per place and some operations on whole arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from ....sampling.drafted_row import DraftedRow
from ....sampling.encoded import CUT, PLACE
from ....sampling.gumbel import stream_keys
from ....sampling.verifier import LogitsRow
from ...batch import IntArray, SamplingPlan
from .row_edits import Edits, Ints, RowEdits, num_words

COLUMNS = PLACE.names or ()
"""Columns of a place's controls, int64; numbers are the bits of a float64. ``noise_start`` contains
the key of the place's noise; a row of -1 means that the place is unused."""
NUM_COLUMNS = len(COLUMNS)
ROW, _EDITED = COLUMNS.index("row"), COLUMNS.index("edited")
_KIND = COLUMNS.index("kind")

_Edited: TypeAlias = tuple[int, DraftedRow]  # place, row


@dataclass(frozen=True, slots=True)
class EditLists:
    """Edits of logits at the places that have any."""

    places: Ints  # [num_edited]
    mask_of: Ints  # [num_edited] index of a mask, or -1
    masks: Ints  # [num_masks, num_words] a bit for each token
    bounds: Ints  # [num_edited, number of steps + 1] start and end of each step's edits
    ids: Ints  # [num_edits]
    amounts: NDArray[np.float32]  # [num_edits]


@dataclass(frozen=True, slots=True)
class SamplingInputs:
    """Inputs of the sampler's kernels, and the requests' errors."""

    columns: NDArray[np.int64]  # [num_places, NUM_COLUMNS]
    cuts: Ints  # [num_cuts] places
    edits: EditLists | None
    refusals: dict[int, str]  # errors by place


def write_controls(places: Sequence[LogitsRow], vocab_size: int) -> SamplingInputs:
    """Encode ``places`` for the kernels; the vocabulary has ``vocab_size`` tokens."""
    columns, edited = _unedited(places, vocab_size)
    lists, refusals = _edit_lists(edited, columns, vocab_size) if edited else (None, {})
    return SamplingInputs(columns, _cuts(columns), lists, refusals)


def write_plain_controls(draws: SamplingPlan, vocab_size: int) -> SamplingInputs | None:
    """Encode all tokens to draw for the kernels, in the order of the logits.

    Returns None if a row is edited or may have an error; no constraint is called.
    """
    records, firsts = list[bytes](), list[int]()
    for row, count in zip(draws.rows, draws.counts, strict=True):
        encoded, first = row.encoded(vocab_size), row.position - count + 1
        if first < encoded.edited_until:
            return None
        records.append(encoded.place * count)
        firsts.append(first)
    counts = np.array(draws.counts, np.int64)
    offsets = np.array(firsts, np.int64) - counts.cumsum() + counts
    rows = np.arange(counts.sum())
    positions = rows + offsets.repeat(counts)
    return plain_inputs(_columns(records, positions, rows))


def plain_inputs(columns: NDArray[np.int64]) -> SamplingInputs:
    """Return the inputs of places without edits, whose controls are ``columns``."""
    return SamplingInputs(columns, _cuts(columns), None, {})


def _unedited(
    places: Sequence[LogitsRow], vocab_size: int
) -> tuple[NDArray[np.int64], list[_Edited]]:
    """Return the controls of all places, without edits, and the places that have edits."""
    records, positions, edited = [], [], []
    for index, (_, row) in enumerate(places):
        encoded, position = row.encoded(vocab_size), row.position
        records.append(encoded.place)
        positions.append(position)
        if position < encoded.edited_until:
            edited.append((index, row))
    rows = np.array([at for at, _ in places])
    return _columns(records, positions, rows), edited


def _columns(
    records: Sequence[bytes], positions: Sequence[int] | IntArray, rows: IntArray
) -> NDArray[np.int64]:
    """Return the places' controls.

    ``positions``: of the tokens in the output. ``rows``: of the logits.
    """
    places = np.frombuffer(bytearray().join(records), PLACE)
    starts = places["noise_start"]
    starts[:] = stream_keys(starts, np.asarray(positions)).view(np.uint64)
    places["row"] = rows
    return places.view(np.int64).reshape(-1, NUM_COLUMNS)


def _cuts(columns: NDArray[np.int64]) -> Ints:
    """Return the places with top-k or top-p."""
    return np.flatnonzero(columns[:, _KIND] == CUT).astype(np.int32)


def _edit_lists(
    edited: Sequence[_Edited], columns: NDArray[np.int64], vocab_size: int
) -> tuple[EditLists | None, dict[int, str]]:
    """Return the edits or None, and errors by place; set the column "edited" of ``columns``.

    The logits of a place with an error stay unedited.
    """
    refusals: dict[int, str] = {}
    asked: list[tuple[int, Ints | None, tuple[Edits, ...]]] = []
    for index, row in edited:
        mask, refusal = row.encoded(vocab_size).ask(row.tokens, row.draft)
        if refusal is not None:
            refusals[index] = refusal
            continue
        columns[index, _EDITED] = len(asked)
        edits = row.sampling.cached(RowEdits, vocab_size)
        asked.append((index, edits.bits(mask), edits.steps(row, mask)))
    return _lists(asked, num_words(vocab_size)) if asked else None, refusals


def _lists(asked: Sequence[tuple[int, Ints | None, tuple[Edits, ...]]], words: int) -> EditLists:
    masks: dict[int, Ints] = {}  # by identity, since places of one request may share a mask
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
        ids=np.concatenate([ids for ids, _ in edits], dtype=np.int32, casting="same_kind"),
        amounts=np.concatenate([amounts for _, amounts in edits]),
    )
