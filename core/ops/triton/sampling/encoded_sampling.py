"""EncodedSampling: one request's sampling parameters as the kernels of the sampler read them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from ....interface.sampling import Mask, SamplingMetadata
from ....sampling.gumbel import stream_start
from ....sampling.logits_processors import SampleRow, out_of_vocabulary
from .history import History

# Columns of a place's controls, int64; of a number, the bits of a float64.
KEY = 0  # of the noise
ROW = 1  # of the logits; -1: there is nobody
EDITED = 2  # row of the edited values, or -1: the logits as they are
KIND = 3
TEMPERATURE = 4  # temperature times tau
MIN_P_LOGIT = 5  # least scaled value, for min-p; -inf: off
TOP_K = 6  # 0: off
TOP_P = 7  # 1: off
NUM_COLUMNS = 8

GREEDY, SAMPLED, CUT = 0, 1, 2  # kinds; min-p alone needs no CUT
STEPS = range(4)  # of the edits, in their order: bias, repetition, penalties, bans
_, REPEAT, _, BAN = STEPS

Ints: TypeAlias = NDArray[np.int32]
Edits: TypeAlias = tuple[Ints, NDArray[np.float32]]  # tokens, and by how much

_RECORD = np.dtype([
    ("key", "u8"), ("row", "i8"), ("edited", "i8"), ("kind", "i8"),
    ("degree", "f8"), ("floor", "f8"), ("top_k", "i8"), ("top_p", "f8"),
])  # fmt: skip
_NOTHING: Edits = (np.empty(0, np.int32), np.empty(0, np.float32))


class EncodedSampling:
    """Encoding of a request's `SamplingMetadata` that holds for all of its rows.

    ``record``: bytes of its columns, with the start of its noise in `KEY`.
    """

    def __init__(self, sampling: SamplingMetadata, vocab_size: int) -> None:
        params = sampling.params
        self.vocab_size = vocab_size
        self.error = out_of_vocabulary(sampling, vocab_size)
        self.record = _record(sampling, vocab_size)
        self.min_tokens = params.min_tokens
        self.constraint = sampling.constraint
        self._words = [word for word in sampling.bad_words_ids if word]
        self._bias = _edits(params.logit_bias or {})
        self._repetition = params.repetition_penalty
        self._output = (params.frequency_penalty, params.presence_penalty)
        self._stops = _ids(i for i in sampling.stop_ids if 0 <= i < vocab_size)
        self._path = History(0, vocab_size)
        self._answer = History(sampling.prompt_len, vocab_size)
        self.allowed: Ints | None = None  # bits
        if params.allowed_token_ids is not None and self.error is None:
            self.allowed = pack_bits(_members(params.allowed_token_ids, vocab_size))
        self.is_edited = self.error is not None or sampling.has_processors
        # whether ids matter to nothing but the noise
        self.races_alone = not (self.is_edited or self.min_tokens)

    def edits(self, row: SampleRow, allowed: NDArray[np.uint8] | None) -> tuple[Edits, ...]:
        """Single edits of a place, step by step; ``allowed`` is what its constraint allows."""
        return self._bias, self._repeats(row), self._penalties(row), self._bans(row, allowed)

    def _repeats(self, row: SampleRow) -> Edits:
        """Repetition as in CTRL (arXiv 1909.05858)."""
        if self._repetition == 1.0:
            return _NOTHING
        ids, _ = self._path.counts(row.tokens, row.tail)
        return ids, np.full(len(ids), self._repetition, np.float32)

    def _penalties(self, row: SampleRow) -> Edits:
        """Frequency and presence as in OpenAI's API."""
        if self._output == (0.0, 0.0):
            return _NOTHING
        ids, counts = self._answer.counts(row.tokens, row.tail)
        frequency, presence = np.float32(self._output[0]), np.float32(self._output[1])
        return ids, -(counts.astype(np.float32) * frequency + presence)

    def _bans(self, row: SampleRow, allowed: NDArray[np.uint8] | None) -> Edits:
        ids = _ids(w[-1] for w in self._words if row.ending(len(w) - 1) == tuple(w[:-1]))
        if row.position < self.min_tokens and not self._must_stop(allowed):
            ids = np.append(ids, self._stops)
        return ids, np.zeros(len(ids), np.float32)

    def _must_stop(self, allowed: NDArray[np.uint8] | None) -> bool:
        """Whether the constraint leaves nothing but stop tokens."""
        if allowed is None:
            return False
        return bool(np.count_nonzero(allowed) == np.count_nonzero(allowed[self._stops]))


def num_words(vocab_size: int) -> int:
    """Words of 32 bits that hold a bit for each token."""
    return -(-vocab_size // 32)


def pack_bits(members: NDArray[np.uint8]) -> Ints:
    """A bit for each token, set where ``members`` [vocab] is not 0: int32 [num_words]."""
    bits = np.zeros(4 * num_words(len(members)), np.uint8)
    packed = np.packbits(members, bitorder="little")
    bits[: len(packed)] = packed
    return bits.view(np.int32)


def unpacked(mask: Mask, vocab_size: int) -> NDArray[np.uint8]:
    """A constraint's mask as an array. Raises ValueError where it is not the vocabulary's."""
    if len(mask) != vocab_size:
        raise ValueError(f"a mask of {len(mask)} tokens for a vocabulary of {vocab_size}")
    return np.frombuffer(mask, np.uint8)


def _record(sampling: SamplingMetadata, vocab_size: int) -> bytes:
    params, top_k = sampling.params, sampling.params.top_k
    top_k = top_k if 0 < top_k < vocab_size else 0
    kind = CUT if top_k or params.top_p < 1.0 else SAMPLED
    floor = np.float32(math.log(params.min_p)) if params.min_p > 0.0 else -math.inf
    if params.temperature == 0.0:
        kind = GREEDY
    record = np.array(
        (stream_start(sampling.seed), 0, -1, kind, params.temperature, floor, top_k, params.top_p),
        _RECORD,
    )
    return record.tobytes()


def _ids(token_ids: Iterator[int]) -> Ints:
    return np.fromiter(token_ids, np.int32)


def _edits(amounts: Mapping[int, float]) -> Edits:
    return np.fromiter(amounts, np.int32), np.fromiter(amounts.values(), np.float32)


def _members(token_ids: Sequence[int], vocab_size: int) -> NDArray[np.uint8]:
    members = np.zeros(vocab_size, np.uint8)
    members[list(token_ids)] = 1
    return members
