"""EncodedSampling: one request's sampling parameters, as torch, C and Triton read them.

Each parameter is encoded here once, as a field of a record. The torch sampler reads the fields by
name. The C kernels read the record in place (``ft_sampling`` of row.h has the same fields in the
same order). Triton's kernels read a copy of the record's first fields in each `PLACE`.
"""

from __future__ import annotations

import math
import struct
from array import array
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from itertools import chain
from operator import attrgetter
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..interface.output import Refusal
from ..interface.sampling import (
    ConstraintFailed,
    SamplingMetadata,
    TokenSamplingParams,
    beyond_vocabulary,
)
from .gumbel import stream_start

GREEDY, SAMPLED, MIN_P, CUT = range(4)
"""Kinds of requests, which decide the steps after the edits: take the best token, or draw from all
tokens, from the tokens that min-p keeps, or from the tokens that top-k, top-p and min-p keep."""

_LEAST_TEMPERATURE = 1e-30  # A smaller temperature would be 0 in float32.

Fields: TypeAlias = Mapping[str, Any]  # the numbers of a record by the names of its fields
Mask: TypeAlias = NDArray[np.bool_]  # [vocab], true for each allowed token

_DRAW = [  # name and format of a field, and the attribute of `EncodedSampling` with its value
    ("noise_start", "u8", "_noise_start"),  # `stream_start` of the seed
    ("kind", "i8", "kind"),
    ("temperature", "f8", "_temperature"),  # not used by greedy requests
    ("min_p_logit", "f8", "_min_p_logit"),  # minimum, if the best scaled logit is 0; -inf: off
    ("top_k", "i8", "_top_k"),  # 0: off
    ("top_p", "f8", "_params.top_p"),  # 1: off
]
_EDITS = [
    ("prompt_len", "i8", "prompt_len"),
    ("edited_until", "i8", "edited_until"),
    ("min_tokens", "i8", "min_tokens"),
    ("repetition_penalty", "f4", "_params.repetition_penalty"),  # 1: off
    ("frequency_penalty", "f4", "_params.frequency_penalty"),
    ("presence_penalty", "f4", "_params.presence_penalty"),
]
_LISTS = [  # Each list has two fields: its address and its number of items; see `_lent`.
    field
    for name in ("biased", "allowed", "stops", "word_ids", "word_lens")
    for field in ((name, "u8", f"_{name}_at"), (f"num_{name}", "i8", f"{name}.size"))
]
_FIELDS = [*_DRAW, *_EDITS, *_LISTS, ("bias", "u8", "_bias_at")]

PLACE = np.dtype([*(field[:2] for field in _DRAW), ("row", "i8"), ("edited", "i8")])
"""One token to draw: the first fields of its request, its row of logits, and its row of edited
values or -1. Both rows are written for each token."""

_NAMES = tuple(field[0] for field in _FIELDS)
_values = attrgetter(*(field[2] for field in _FIELDS))
_pack = struct.Struct("".join(np.dtype(field[1]).char for field in _FIELDS)).pack
_DRAW_BYTES = 8 * len(_DRAW)
_NO_ROW = struct.pack("qq", -1, -1)
_ALWAYS = 2**62  # a position beyond the end of any output
_EMPTY = {code: np.empty(0, code) for code in "qf"}


class EncodedSampling:
    """One request's parameters for a vocabulary size, cached by its `SamplingMetadata`.

    If ``error`` is not None, the request cannot be served, and its other parameters are not read.
    All token ids are in the vocabulary, except some ids of bad words, which are only compared with
    generated tokens. Logits of output positions below ``edited_until`` are edited before the
    temperature applies.
    """

    def __init__(self, sampling: SamplingMetadata, vocab_size: int) -> None:
        params, bias = sampling.params, sampling.params.logit_bias or {}
        self._params, self._noise_start = params, stream_start(sampling.seed)
        self.vocab_size, self.prompt_len = vocab_size, sampling.prompt_len
        self.constraint, self.min_tokens = sampling.constraint, params.min_tokens
        self.error = _error(sampling, vocab_size)
        # whether `ask` may return a mask or an error
        self.is_asked = self.error is not None or self.constraint is not None
        is_edited = self.is_asked or sampling.has_processors
        self.edited_until = _ALWAYS if is_edited else self.min_tokens
        self.biased, self._biased_at = _lent("q", bias)
        self.bias, self._bias_at = _lent("f", bias.values())
        self.allowed, self._allowed_at = _lent("q", sorted(set(params.allowed_token_ids or ())))
        # Stop tokens are banned until the answer has min_tokens tokens.
        stops = sampling.stop_ids if self.min_tokens else ()
        self.stops, self._stops_at = _lent("q", sorted(i for i in stops if 0 <= i < vocab_size))
        self.words = [word for word in sampling.bad_words_ids if word]
        self.word_ids, self._word_ids_at = _lent("q", list(chain.from_iterable(self.words)))
        self.word_lens, self._word_lens_at = _lent("q", list(map(len, self.words)))
        self._temperature = max(params.temperature, _LEAST_TEMPERATURE)
        self._top_k = params.top_k if 0 < params.top_k < vocab_size else 0
        self._min_p_logit = math.log(params.min_p) if params.min_p else -math.inf
        self.kind = _kind(params, self._top_k)
        record = _pack(*_values(self))
        self.place = record[:_DRAW_BYTES] + _NO_ROW  # the bytes of a `PLACE` with both rows -1
        self._record = array("B", record)
        self.address, _ = self._record.buffer_info()

    @cached_property
    def fields(self) -> Fields:
        """Values of the record's fields by name."""
        return dict(zip(_NAMES, _values(self), strict=True))

    def bans_stops(self, position: int, mask: Mask | None) -> bool:
        """Whether stop tokens must be banned at ``position``; a ``mask`` bans them already."""
        return mask is None and position < self.min_tokens

    def ask(self, tokens: array[int], tail: Sequence[int]) -> tuple[Mask | None, str | None]:
        """Return a mask of the tokens that may follow ``tokens`` plus ``tail``, and an error.

        Either may be None; without a mask all tokens are allowed. Until the answer has min_tokens
        tokens, the mask excludes stop tokens, unless no other token is allowed. Raises ValueError
        if the constraint's mask has another size than the vocabulary.
        """
        if self.error is not None or self.constraint is None:
            return None, self.error
        try:
            allowed = self.constraint.allowed(tokens, self.prompt_len, tail)
        except ConstraintFailed as error:
            return None, Refusal(error)
        if allowed is None:
            return None, None
        if len(allowed) != self.vocab_size:
            raise ValueError(
                f"the mask has {len(allowed)} tokens, but the vocabulary has {self.vocab_size}"
            )
        mask: Mask = np.frombuffer(allowed, np.bool_)
        if len(tokens) + len(tail) - self.prompt_len < self.min_tokens:
            going_on = mask.copy()
            going_on[self.stops] = False
            mask = going_on if going_on.any() else mask
        return mask, None


def _error(sampling: SamplingMetadata, vocab_size: int) -> str | None:
    """Return an error that names the first parameter with an unknown token id, or None."""
    for name, ids in sampling.token_id_fields().items():
        if message := beyond_vocabulary(name, ids, vocab_size):
            return message
    return None


def _kind(params: TokenSamplingParams, top_k: int) -> int:
    if params.temperature == 0.0:
        return GREEDY
    if top_k or params.top_p < 1.0:
        return CUT
    return MIN_P if params.min_p > 0.0 else SAMPLED


def _lent(code: str, numbers: Collection[float]) -> tuple[NDArray[Any], int]:
    """Return an array of int64 ("q") or float32 ("f") numbers, and its address in memory.

    The address of an empty array is 0. The address is valid while the array exists.
    """
    if not numbers:
        return _EMPTY[code], 0
    memory: array[Any] = array(code, numbers)
    return np.frombuffer(memory, code), memory.buffer_info()[0]
