"""SamplingInputs: what the sampler's kernels need of each place, as arrays of numbers.

What follows from a request alone is a form of its `SamplingMetadata`, made once; a place adds its
position. So a plain batch costs a look-up for each place and some operations on whole arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from ....interface.output import Refusal
from ....interface.sampling import ConstraintFailed
from ....sampling.gumbel import stream_keys
from ....sampling.logits_processors import MIN_TEMPERATURE, SampleRow
from ....sampling.verifier import LogitsRow
from ...batch import IntArray, SamplingPlan
from .encoded_sampling import (
    CUT,
    EDITED,
    KEY,
    KIND,
    NUM_COLUMNS,
    ROW,
    TEMPERATURE,
    Edits,
    EncodedSampling,
    Ints,
    num_words,
    pack_bits,
    unpacked,
)

_Edited: TypeAlias = tuple[int, SampleRow, EncodedSampling]  # place, its row, and its parameters


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
class SamplingInputs:
    """Numbers for the device, and which places have an error already."""

    columns: NDArray[np.int64]  # [num_places, NUM_COLUMNS]
    cuts: Ints  # [num_cuts] places
    edits: EditLists | None
    refusals: dict[int, str]  # by place


def write_controls(
    places: Sequence[LogitsRow], vocab_size: int, temperature_scale: float
) -> SamplingInputs:
    """Encode ``places`` for the kernels; the vocabulary has ``vocab_size`` tokens."""
    columns, edited = _unedited(places, vocab_size, temperature_scale)
    lists, refusals = _edit_lists(edited, columns) if edited else (None, {})
    return SamplingInputs(columns, _cuts(columns), lists, refusals)


def write_plain_controls(draws: SamplingPlan, vocab_size: int) -> SamplingInputs | None:
    """Encode all tokens to draw, in the order of the logits; see `write_controls`.

    None where a row is edited or refused; its constraint was not asked then.
    """
    records, positions = list[bytes](), list[int]()
    for row, count in zip(draws.rows, draws.counts, strict=True):
        form, first = row.sampling.cached(EncodedSampling, vocab_size), row.position
        if form.is_edited or first < form.min_tokens:
            return None
        records.append(form.record * count)
        positions += range(first, first + count)
    columns = _columns(records, positions, np.arange(len(positions)), draws.temperature_scale)
    return SamplingInputs(columns, _cuts(columns), None, {})


def _unedited(
    places: Sequence[LogitsRow], vocab_size: int, temperature_scale: float
) -> tuple[NDArray[np.int64], list[_Edited]]:
    """The numbers of all places, as if none was edited, and those that are."""
    records, positions, edited = [], [], []
    for index, (_, row) in enumerate(places):
        form = row.sampling.cached(EncodedSampling, vocab_size)
        position = row.position
        records.append(form.record)
        positions.append(position)
        if form.is_edited or position < form.min_tokens:
            edited.append((index, row, form))
    rows = np.array([at for at, _ in places])
    return _columns(records, positions, rows, temperature_scale), edited


def _columns(
    records: Sequence[bytes], positions: Sequence[int], rows: IntArray, temperature_scale: float
) -> NDArray[np.int64]:
    """Numbers of places at these output positions, decided by these ``rows`` of the logits."""
    columns = np.frombuffer(bytearray().join(records), np.int64).reshape(-1, NUM_COLUMNS)
    columns[:, KEY] = stream_keys(columns[:, KEY].view(np.uint64), np.array(positions))
    columns[:, ROW] = rows
    temperatures = columns[:, TEMPERATURE].view(np.float64)
    temperatures[:] = np.maximum(temperatures * temperature_scale, MIN_TEMPERATURE).astype(
        np.float32
    )
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
    for index, row, form in edited:
        if form.error is not None:
            refusals[index] = form.error
            continue
        try:
            asked.append((index, *_ask(row, form)))
        except ConstraintFailed as error:
            refusals[index] = Refusal(error)
        else:
            columns[index, EDITED] = len(asked) - 1
    if not asked:
        return None, refusals
    return _lists(asked, num_words(edited[0][2].vocab_size)), refusals


def _ask(row: SampleRow, form: EncodedSampling) -> tuple[Ints | None, tuple[Edits, ...]]:
    """Bits of the tokens that a place may have, None for all, and its edits."""
    mask = None
    if form.constraint is not None:
        mask = form.constraint.allowed(row.tokens, row.sampling.prompt_len, row.tail)
    if mask is None:
        return form.allowed, form.edits(row, None)
    allowed = unpacked(mask, form.vocab_size)
    bits = pack_bits(allowed)
    if form.allowed is not None:
        bits &= form.allowed
    return bits, form.edits(row, allowed)


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
