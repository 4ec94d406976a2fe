"""SamplingInputs: the inputs of the sampler's kernels for each draw, as arrays of numbers.

A draw is a token to choose from one row of the logits. The part of its inputs that depends only on
a request is cached in the request's `SamplingMetadata`; a draw adds its position. So a plain batch
costs one look-up per draw and some operations on whole arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from ....interface.sampling import SamplingMetadata
from ....sampling.drafted_row import DraftedRow, positions_of
from ....sampling.encoded import CUT, PLACE, EncodedSampling
from ....sampling.gumbel import stream_keys
from ....sampling.verifier import LogitsRow
from ...batch import IntArray, SamplingPlan
from .row_edits import Edits, Ints, RowEdits, num_words

COLUMNS = PLACE.names or ()
"""Columns of a draw's controls, int64; numbers are the bits of a float64. ``noise_start`` contains
the key of the draw's noise; a row of -1 means that the draw is unused."""
NUM_COLUMNS = len(COLUMNS)
ROW, _EDITED = COLUMNS.index("row"), COLUMNS.index("edited")
_KIND = COLUMNS.index("kind")

_Edited: TypeAlias = tuple[int, DraftedRow]  # draw, row


@dataclass(frozen=True, slots=True)
class EditLists:
    """Edits of the logits of draws that have any."""

    draws: Ints  # [num_edited] indices of the draws
    mask_of: Ints  # [num_edited] index of a mask, or -1
    masks: Ints  # [num_masks, num_words] a bit for each token
    bounds: Ints  # [num_edited, number of steps + 1] start and end of each step's edits
    ids: Ints  # [num_edits]
    amounts: NDArray[np.float32]  # [num_edits] summand or factor of each edit


@dataclass(frozen=True, slots=True)
class SamplingInputs:
    """Inputs of the sampler's kernels, and the requests' errors."""

    columns: NDArray[np.int64]  # [num_draws, NUM_COLUMNS]
    cuts: Ints  # [num_cuts] indices of draws with top-k, min-p or top-p
    edits: EditLists | None
    refusals: dict[int, str]  # errors of requests, by index of the draw


def write_controls(draws: Sequence[LogitsRow], vocab_size: int) -> SamplingInputs:
    """Encode ``draws`` for the kernels; the vocabulary has ``vocab_size`` tokens."""
    columns, edited = _unedited(draws, vocab_size)
    lists, refusals = _edit_lists(edited, columns, vocab_size) if edited else (None, {})
    return SamplingInputs(columns, _cuts(columns), lists, refusals)


def write_plain_controls(draws: SamplingPlan, vocab_size: int) -> SamplingInputs | None:
    """Encode all tokens to draw for the kernels, in the order of the logits.

    Returns None if a row is edited or may have an error; no constraint is called.
    """
    firsts = [
        position - count + 1
        for position, count in zip(positions_of(draws.rows), draws.counts, strict=True)
    ]
    encoded = [row.sampling.cached(EncodedSampling, vocab_size) for row in draws.rows]
    if [1 for own, first in zip(encoded, firsts, strict=True) if first < own.edited_until]:
        return None  # the list above is faster than `any`
    records = [own.place * count for own, count in zip(encoded, draws.counts, strict=True)]
    counts = np.array(draws.counts, np.int64)
    offsets = np.array(firsts, np.int64) - counts.cumsum() + counts
    rows = np.arange(counts.sum())
    positions = rows + offsets.repeat(counts)
    return plain_inputs(_columns(records, positions, rows))


def chained_controls(
    samplings: Sequence[SamplingMetadata],
    requests: IntArray,
    positions: IntArray,
    vocab_size: int,
) -> NDArray[np.int64] | None:
    """Return the controls of draws [num_draws, NUM_COLUMNS], with any row of logits.

    ``samplings``: parameters of each request. ``requests``: index of each draw's request.
    ``positions``: output position of each draw. Returns None if a draw is edited or may have an
    error.
    """
    encoded = [each.cached(EncodedSampling, vocab_size) for each in samplings]
    if any([each.edited_until for each in encoded]):  # noqa: C419 - a list is faster
        edited_until = np.array([each.edited_until for each in encoded])
        if (positions < edited_until[requests]).any():
            return None
    places = np.frombuffer(b"".join([each.place for each in encoded]), PLACE)
    draws = places[requests]
    draws["noise_start"] = stream_keys(draws["noise_start"], positions).view(np.uint64)
    return draws.view(np.int64).reshape(-1, NUM_COLUMNS)


def plain_inputs(columns: NDArray[np.int64]) -> SamplingInputs:
    """Return the inputs of draws without edits, whose controls are ``columns``."""
    return SamplingInputs(columns, _cuts(columns), None, {})


def _unedited(
    draws: Sequence[LogitsRow], vocab_size: int
) -> tuple[NDArray[np.int64], list[_Edited]]:
    """Return the controls of all draws, without edits, and the draws that have edits."""
    records, positions, edited = [], [], []
    for index, (_, row) in enumerate(draws):
        encoded, position = row.encoded(vocab_size), row.position
        records.append(encoded.place)
        positions.append(position)
        if position < encoded.edited_until:
            edited.append((index, row))
    rows = np.array([at for at, _ in draws])
    return _columns(records, positions, rows), edited


def _columns(
    records: Sequence[bytes], positions: Sequence[int] | IntArray, rows: IntArray
) -> NDArray[np.int64]:
    """Return the draws' controls.

    ``positions``: positions of the tokens in the output. ``rows``: rows of the logits.
    """
    draws = np.frombuffer(bytearray().join(records), PLACE)
    starts = draws["noise_start"]
    starts[:] = stream_keys(starts, np.asarray(positions)).view(np.uint64)
    draws["row"] = rows
    return draws.view(np.int64).reshape(-1, NUM_COLUMNS)


def _cuts(columns: NDArray[np.int64]) -> Ints:
    """Return the draws with top-k or top-p."""
    return np.flatnonzero(columns[:, _KIND] == CUT).astype(np.int32)


def _edit_lists(
    edited: Sequence[_Edited], columns: NDArray[np.int64], vocab_size: int
) -> tuple[EditLists | None, dict[int, str]]:
    """Return the edits or None, and errors by draw; set the column "edited" of ``columns``.

    The logits of a draw with an error stay unedited.
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
    masks: dict[int, Ints] = {}  # by identity, since draws of one request may share a mask
    for _, bits, _ in asked:
        if bits is not None:
            masks.setdefault(id(bits), bits)
    index_of = {key: index for index, key in enumerate(masks)}
    edits = [step for *_, steps in asked for step in steps]
    ends = np.cumsum([len(ids) for ids, _ in edits], dtype=np.int32).reshape(len(asked), -1)
    begins = np.append(0, ends[:-1, -1]).astype(np.int32)
    return EditLists(
        draws=np.array([index for index, *_ in asked], np.int32),
        mask_of=np.array([index_of.get(id(bits), -1) for _, bits, _ in asked], np.int32),
        masks=np.stack(list(masks.values())) if masks else np.empty((0, words), np.int32),
        bounds=np.column_stack((begins, ends)),
        ids=np.concatenate([ids for ids, _ in edits], dtype=np.int32, casting="same_kind"),
        amounts=np.concatenate([amounts for _, amounts in edits]),
    )
