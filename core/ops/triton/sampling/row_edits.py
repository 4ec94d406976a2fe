"""RowEdits: the edits of a request's rows for the kernels of logits_processors.py."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ....interface.sampling import SamplingMetadata
from ....sampling.drafted_row import DraftedRow
from ....sampling.encoded import EncodedSampling, Mask
from .history import History

STEPS = range(4)  # steps of the edits, in order: bias, repetition, penalties, bans
_, REPEAT, _, BAN = STEPS

Ints: TypeAlias = NDArray[np.int32]
Edits: TypeAlias = tuple[NDArray[Any], NDArray[np.float32]]  # token ids, amounts
_NOTHING: Edits = (np.empty(0, np.int32), np.empty(0, np.float32))


class RowEdits:
    """One request's edits for one vocabulary, kept by its `SamplingMetadata`."""

    def __init__(self, sampling: SamplingMetadata, vocab_size: int) -> None:
        self._encoded = encoded = sampling.cached(EncodedSampling, vocab_size)
        self._bias: Edits = encoded.biased.astype(np.int32), encoded.bias
        self._path = History(0, vocab_size)
        self._output = History(sampling.prompt_len, vocab_size)
        self._allowed: Ints | None = None  # a bit for each token
        if len(encoded.allowed):
            members = np.zeros(vocab_size, np.bool_)
            members[encoded.allowed] = True
            self._allowed = pack_bits(members)

    def bits(self, mask: Mask | None) -> Ints | None:
        """Return a bit mask of the allowed tokens, or None if all are allowed.

        ``mask``: mask of the row's constraint.
        """
        if mask is None:
            return self._allowed
        return pack_bits(mask) if self._allowed is None else pack_bits(mask) & self._allowed

    def steps(self, row: DraftedRow, mask: Mask | None) -> tuple[Edits, ...]:
        """Return the edits of a row's single tokens, in the order of `STEPS`."""
        return self._bias, self._repeats(row), self._penalties(row), self._bans(row, mask)

    def _repeats(self, row: DraftedRow) -> Edits:
        """Return the edits of the repetition penalty (CTRL, arXiv 1909.05858)."""
        factor = self._encoded.fields["repetition_penalty"]
        if factor == 1.0:
            return _NOTHING
        ids, _ = self._path.counts(row.tokens, row.draft)
        return ids, np.full(len(ids), factor, np.float32)

    def _penalties(self, row: DraftedRow) -> Edits:
        """Return the edits of the frequency and presence penalties of OpenAI's API."""
        fields = self._encoded.fields
        frequency, presence = fields["frequency_penalty"], fields["presence_penalty"]
        if frequency == presence == 0.0:
            return _NOTHING
        ids, counts = self._output.counts(row.tokens, row.draft)
        return ids, -(counts.astype(np.float32) * np.float32(frequency) + np.float32(presence))

    def _bans(self, row: DraftedRow, mask: Mask | None) -> Edits:
        encoded = self._encoded
        ids = encoded.stops if encoded.bans_stops(row.position, mask) else _NOTHING[0]
        if encoded.words:
            ids = np.append(ids, np.array(row.banned_by_words(encoded.words), np.int64))
        return ids, np.zeros(len(ids), np.float32)


def num_words(vocab_size: int) -> int:
    """Return the number of 32-bit words with a bit for each token."""
    return -(-vocab_size // 32)


def pack_bits(members: Mask) -> Ints:
    """Return a bit for each token, set where ``members`` [vocab] is true: int32 [num_words]."""
    bits = np.zeros(4 * num_words(len(members)), np.uint8)
    packed = np.packbits(members, bitorder="little")
    bits[: len(packed)] = packed
    return bits.view(np.int32)
