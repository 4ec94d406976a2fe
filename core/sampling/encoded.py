"""EncodedSampling: one request's sampling parameters as torch, C and Triton read them.

Each parameter is encoded here once. The torch oracle reads the fields of a `RECORD`, the C kernels
read it where it lies (``ft_sampling`` of sample.h has the same fields in the same order), and
Triton's kernels have a copy of its first fields, `DRAW`, for each place.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Collection, Iterable, Sequence
from itertools import chain
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
"""Kinds of requests: the best token; drawn from all; from what min-p leaves; from what top-k or
top-p leaves, with min-p or without. What to do after the edits follows from the kind."""

MIN_TEMPERATURE = 1e-30  # smaller ones would be 0 in float32

Records: TypeAlias = NDArray[Any]  # of `DRAW`, or of a `RECORD`
Ids: TypeAlias = NDArray[np.int64]
Mask: TypeAlias = NDArray[np.bool_]  # [vocab] true where a token is allowed

_DRAW = [
    ("noise_start", "u8"),  # `stream_start` of the seed
    ("kind", "i8"),
    ("temperature", "f8"),
    ("min_p_logit", "f8"),  # least value of scaled logits, whose best is 0; -inf: off
    ("top_k", "i8"),  # 0: off
    ("top_p", "f8"),  # 1: off
]
_EDITS = [
    ("prompt_len", "i8"),
    ("min_tokens", "i8"),
    ("repetition_penalty", "f4"),  # 1: off
    ("frequency_penalty", "f4"),
    ("presence_penalty", "f4"),
    ("is_edited", "i4"),  # at every position; below min_tokens in any case
]
_LIST = np.dtype([("at", "u8"), ("count", "i8")])  # address, 0 where there is none
_LISTS = [(name, _LIST) for name in ("biased", "allowed", "stops", "words", "word_lens")]

DRAW = np.dtype(_DRAW)
DRAW_FIELDS = tuple(name for name, _ in _DRAW)
RECORD = np.dtype([*_DRAW, *_EDITS, *_LISTS, ("bias", "u8")])
_NO_IDS: Ids = np.empty(0, np.int64)


class EncodedSampling:
    """One request's parameters for logits of one width, kept by its `SamplingMetadata`.

    With an ``error`` they cannot be served, and nothing else is read. Token ids are inside the
    vocabulary, but for those that bad words only compare.
    """

    def __init__(self, sampling: SamplingMetadata, vocab_size: int) -> None:
        params, bias = sampling.params, sampling.params.logit_bias or {}
        self.vocab_size, self.prompt_len = vocab_size, sampling.prompt_len
        self.constraint, self.min_tokens = sampling.constraint, params.min_tokens
        self.error = _error(sampling, vocab_size)
        self.is_edited = self.error is not None or sampling.has_processors  # at every position
        self.is_ever_edited = self.is_edited or self.min_tokens > 0
        self.is_asked = self.error is not None or self.constraint is not None  # see `ask`
        self.biased, self.bias = _ids(bias), np.fromiter(bias.values(), np.float32)
        self.allowed = _ids(sorted(set(params.allowed_token_ids or ())))  # none: all are
        stops = (i for i in sampling.stop_ids if 0 <= i < vocab_size)
        self.stops = _ids(sorted(stops)) if self.min_tokens else _NO_IDS  # banned below min_tokens
        self.words = [word for word in sampling.bad_words_ids if word]
        self._flat_words = _ids(list(chain.from_iterable(self.words)))
        self._word_lens = _ids(list(map(len, self.words)))
        top_k = params.top_k if 0 < params.top_k < vocab_size else 0
        self.kind = _kind(params, top_k)
        self.record = _record(
            params,
            noise_start=stream_start(sampling.seed),
            kind=self.kind,
            min_p_logit=np.float32(math.log(params.min_p)) if params.min_p > 0.0 else -math.inf,
            top_k=top_k,
            prompt_len=self.prompt_len,
            is_edited=self.is_edited,
            biased=_span(self.biased),
            allowed=_span(self.allowed),
            stops=_span(self.stops),
            words=_span(self._flat_words),
            word_lens=_span(self._word_lens),
            bias=_address(self.bias),
        )
        self.draw = self.record.tobytes()[: DRAW.itemsize]  # its first fields
        self._lent = array("q", self.record.tobytes())
        self.address, _ = self._lent.buffer_info()

    def is_edited_at(self, position: int) -> bool:
        """Whether the logits of this output position are edited before the temperature."""
        return self.is_edited or position < self.min_tokens

    def ask(self, tokens: array[int], tail: Sequence[int]) -> tuple[Mask | None, str | None]:
        """Return which tokens may follow a path, None for all; and why its row must fail.

        Stop tokens that come before min_tokens are left out, but for those of an answer that can
        only end: then min_tokens gives way. Without a mask the edits ban stop tokens.
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
                f"a mask of {len(allowed)} tokens for a vocabulary of {self.vocab_size}"
            )
        mask: Mask = np.frombuffer(allowed, np.bool_)
        if len(tokens) + len(tail) - self.prompt_len < self.min_tokens:
            going_on = mask.copy()
            going_on[self.stops] = False
            mask = going_on if going_on.any() else mask
        return mask, None


def draw_fields(requests: Iterable[EncodedSampling]) -> Records:
    """Copies of the first fields of several requests, `DRAW` [num_requests]."""
    return np.frombuffer(bytearray().join([each.draw for each in requests]), DRAW)


def scaled_temperatures(temperatures: NDArray[np.float64], scale: float) -> NDArray[np.float32]:
    """The divisors of logits: temperature times ``scale``, never 0."""
    return np.maximum(temperatures * scale, MIN_TEMPERATURE).astype(np.float32)


def _error(sampling: SamplingMetadata, vocab_size: int) -> str | None:
    """The complaint about the first field with a token id that the vocabulary lacks, or None."""
    fields = sampling.token_id_fields().items()
    found = (beyond_vocabulary(name, ids, vocab_size) for name, ids in fields)
    return next((message for message in found if message), None)


def _kind(params: TokenSamplingParams, top_k: int) -> int:
    if params.temperature == 0.0:
        return GREEDY
    if top_k or params.top_p < 1.0:
        return CUT
    return MIN_P if params.min_p > 0.0 else SAMPLED


def _record(params: TokenSamplingParams, **derived: object) -> Records:
    """Make the `RECORD`, []: what is not ``derived`` is the parameter of the field's name."""
    names = RECORD.names or ()
    values = (derived[name] if name in derived else getattr(params, name) for name in names)
    return np.array(tuple(values), RECORD)


def _ids(ids: Collection[int]) -> Ids:
    return np.frombuffer(array("q", ids), np.int64) if ids else _NO_IDS


def _span(ids: Ids) -> tuple[int, int]:
    return _address(ids), len(ids)


def _address(numbers: NDArray[Any]) -> int:
    return numbers.ctypes.data if len(numbers) else 0
