"""NativeSampler: chooses the tokens of a step in C, drafts followed there too; the GIL is free.

core/sampling/verifier.py is the oracle: what this chooses differs from it only where two scores, or
a token's mass and the edge of top-p, are as near as the last bit of a logarithm. A row's token
depends on that row alone, bit for bit.
"""

from __future__ import annotations

import ctypes
import math
from array import array
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...interface.constraint import ConstraintFailed, Mask
from ...interface.step import Refusal, SamplingMetadata
from ...sampling.gumbel import vocabulary_hashes
from ...sampling.logits_processors import SampleRow, out_of_vocabulary
from ...sampling.verifier import (
    ALL_BANNED,
    NOT_FINITE,
    Choice,
    Verified,
    VerifyRow,
    first_rows,
    verified,
)
from .library import NativeLibrary

_I64, _PTR, _F32, _F64 = ctypes.c_int64, ctypes.c_void_p, ctypes.c_float, ctypes.c_double
_ERRORS = {-1: NOT_FINITE, -2: ALL_BANNED}  # as in sample.h


class IdsStruct(ctypes.Structure):
    """``ft_ids`` of sample.h."""

    _fields_ = (("at", _PTR), ("count", _I64))


class SamplingStruct(ctypes.Structure):
    """``ft_wishes`` of sample.h."""

    _fields_ = (
        ("seed", ctypes.c_uint64),
        ("prompt_len", _I64),
        ("temperature", _F64),
        ("top_p", _F64),
        ("top_k", _I64),
        ("floor", _F32),
        ("is_edited", ctypes.c_int32),
        ("repetition", _F32),
        ("frequency", _F32),
        ("presence", _F32),
        ("min_tokens", _I64),
        ("biased", IdsStruct),
        ("bias", _PTR),
        ("allowed", IdsStruct),
        ("stops", IdsStruct),
        ("words", IdsStruct),
        ("word_lens", IdsStruct),
    )


class _SamplingForm:
    """One request's parameters as the kernel reads them: a form of its `SamplingMetadata`."""

    def __init__(self, sampling: SamplingMetadata, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.error = out_of_vocabulary(sampling, vocab_size)
        self.constraint = sampling.constraint
        self.prompt_len = sampling.prompt_len
        self.is_special = self.error is not None or self.constraint is not None
        self._lent: list[array[int] | array[float]] = []  # what the struct points into
        self._struct = self._plain(sampling)
        if self.error is None:
            self._add_edits(sampling)
        self.address = ctypes.addressof(self._struct)

    @staticmethod
    def _plain(sampling: SamplingMetadata) -> SamplingStruct:
        params = sampling.params
        return SamplingStruct(
            seed=sampling.seed & (2**64 - 1),
            prompt_len=sampling.prompt_len,
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=max(params.top_k, 0),
            floor=math.log(params.min_p) if params.min_p > 0.0 else -math.inf,
            repetition=1.0,
        )

    def _add_edits(self, sampling: SamplingMetadata) -> None:
        params, struct = sampling.params, self._struct
        struct.is_edited = sampling.has_processors
        struct.repetition = params.repetition_penalty
        struct.frequency, struct.presence = params.frequency_penalty, params.presence_penalty
        struct.min_tokens = params.min_tokens
        bias = params.logit_bias or {}
        struct.biased = self._ids(bias)
        struct.bias = self._lend(array("f", bias.values()))
        struct.allowed = self._ids(sorted(set(params.allowed_token_ids or ())))
        struct.stops = self._ids(i for i in sampling.stop_ids if 0 <= i < self.vocab_size)
        words = [word for word in sampling.bad_words_ids if word]
        struct.words = self._ids(chain.from_iterable(words))
        struct.word_lens = self._ids(map(len, words))

    def _ids(self, ids: Iterable[int]) -> IdsStruct:
        numbers = array("q", ids)
        return IdsStruct(self._lend(numbers), len(numbers))

    def _lend(self, numbers: array[int] | array[float]) -> int | None:
        if not numbers:
            return None
        self._lent.append(numbers)
        return numbers.buffer_info()[0]


_JUDGED = SamplingStruct(top_p=1.0, floor=-math.inf, repetition=1.0)  # greedy, and no more
_JUDGED_ADDRESS = ctypes.addressof(_JUDGED)


class NativeSampler:
    """`Sampler` by the kernels of sample.c, for logits on the CPU."""

    def __init__(self, library: NativeLibrary) -> None:
        self._library = library

    def verify(self, logits: Tensor, rows: Sequence[VerifyRow]) -> list[Verified]:
        """Compare drafts with the target's own tokens; see `core.sampling.verifier.verify`."""
        starts = first_rows(logits, rows)
        runs: list[list[int]] = [[] for _ in rows]
        errors: list[str | None] = [None] * len(rows)
        live: Sequence[int] = range(len(rows))
        while live:
            call = _Call(self._library, logits)
            for i in live:
                row, depth = rows[i], len(runs[i])
                form = row.sampling.form(_SamplingForm, call.vocab_size)
                call.add(form, row.tokens, row.draft, depth, starts[i] + depth)
            for i, (token_ids, errors[i]) in zip(live, call.run(), strict=True):
                runs[i] += token_ids
            live = [i for i in live if errors[i] is None and _goes_on(rows[i], runs[i])]
        return [
            verified(logits, row, start, run, error)
            for row, start, run, error in zip(rows, starts, runs, errors, strict=True)
        ]

    def sample(
        self, logits: Tensor, rows: Sequence[SampleRow], *, temperature_scale: float = 1.0
    ) -> list[Choice]:
        """Draw one token per row; see `core.sampling.verifier.sample`."""
        if len(rows) != len(logits):
            raise ValueError(f"{len(logits)} rows of logits for {len(rows)} tokens to draw")
        call = _Call(self._library, logits, temperature_scale)
        for i, row in enumerate(rows):
            form = row.sampling.form(_SamplingForm, call.vocab_size)
            call.add(form, row.tokens, row.tail, len(row.tail), i)
        return [Choice(ids[0] if ids else -1, error) for ids, error in call.run()]


def _goes_on(row: VerifyRow, run: Sequence[int]) -> bool:
    """Whether a constraint must be asked about the place behind a run that the draft foresaw."""
    if row.sampling.constraint is None:
        return False
    return len(run) <= len(row.draft) and run[-1] == row.draft[len(run) - 1]


class _Call:
    """One call of the kernel: walks along drafts, each of one or more places."""

    def __init__(
        self, library: NativeLibrary, logits: Tensor, temperature_scale: float = 1.0
    ) -> None:
        self._library = library
        self._logits = logits.to(torch.float32).contiguous()
        self._temperature_scale = temperature_scale
        self._walks: list[int] = []  # ``ft_walk`` of sample.c, number by number
        self._firsts: list[int] = []  # row of the logits where each walk begins
        self._drafts = array("q")
        self._refusals: dict[int, str] = {}  # by walk
        self._masks: list[np.ndarray[Any, np.dtype[np.uint8]]] = []  # lent until the call is over

    @property
    def vocab_size(self) -> int:
        return self._logits.shape[-1]

    def add(
        self, form: _SamplingForm, tokens: array[int], draft: Sequence[int], depth: int, first: int
    ) -> None:
        """Decide the place behind ``depth`` tokens of a draft by row ``first`` of the logits.

        Then those after it, one row each, while the draft is right; but a constraint must be
        asked before every place, so there the walk ends at once.
        """
        address, mask, num_places = form.address, 0, len(draft) - depth + 1
        if form.is_special:
            mask, refusal = self._ask(form, tokens, draft[:depth])
            num_places = 1
            if refusal is not None:
                self._refusals[len(self._firsts)] = refusal
                address = _JUDGED_ADDRESS
        at, num_tokens = tokens.buffer_info()
        self._firsts.append(first)
        self._walks += (
            address, first, num_places, at, num_tokens, len(self._drafts), depth, mask,
        )  # fmt: skip
        self._drafts.extend(draft)

    def _ask(
        self, form: _SamplingForm, tokens: array[int], tail: Sequence[int]
    ) -> tuple[int, str | None]:
        """Address of what the constraint allows, 0 for everything; or why the row must fail."""
        if form.error is not None or form.constraint is None:
            return 0, form.error
        try:
            mask = form.constraint.allowed(tokens, form.prompt_len, tail)
        except ConstraintFailed as error:
            return 0, Refusal(error)
        return self._lend(mask), None

    def _lend(self, mask: Mask | None) -> int:
        if mask is None:
            return 0
        if len(mask) != self.vocab_size:
            raise ValueError(f"a mask of {len(mask)} tokens for a vocabulary of {self.vocab_size}")
        lent = np.frombuffer(mask, dtype=np.uint8)
        self._masks.append(lent)
        return int(lent.__array_interface__["data"][0])

    def run(self) -> list[tuple[list[int], str | None]]:
        """Of every walk, in their order: its tokens, and the error that ended it."""
        num_rows, vocab_size = self._logits.shape
        hashes = vocabulary_hashes(vocab_size, self._logits.device)
        walks, tokens = array("q", self._walks), array("q", bytes(8 * num_rows))
        counts = array("q", bytes(8 * len(self._firsts)))
        failed = self._library.c.ft_choose(
            self._logits.data_ptr(),
            vocab_size,
            hashes.data_ptr(),
            _at(walks),
            len(counts),
            _at(self._drafts),
            self._temperature_scale,
            _at(tokens),
            _at(counts),
        )
        if failed:
            raise MemoryError("no memory to choose tokens in")
        chosen = tokens.tolist()
        spans = zip(self._firsts, counts, strict=True)
        return [
            self._outcome(index, chosen[first : first + count])
            for index, (first, count) in enumerate(spans)
        ]

    def _outcome(self, index: int, token_ids: list[int]) -> tuple[list[int], str | None]:
        error = _ERRORS.get(token_ids[-1]) or self._refusals.get(index)
        return (token_ids, None) if error is None else (token_ids[:-1], error)


def _at(numbers: array[int]) -> int:
    return numbers.buffer_info()[0]
