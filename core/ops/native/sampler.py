"""NativeSampler: chooses the tokens of a step in C, drafts followed there too; the GIL is free.

core/sampling/verifier.py is the oracle: what this chooses differs from it only where two scores, or
a token's mass and the edge of top-p, are as near as the last bit of a logarithm. A row's token
depends on that row alone, bit for bit.
"""

from __future__ import annotations

import ctypes
import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...interface.output import Refusal
from ...interface.sampling import ConstraintFailed, Mask, SamplingMetadata
from ...sampling.gumbel import vocabulary_hashes
from ...sampling.logits_processors import SampleRow, out_of_vocabulary
from ...sampling.sampler import DraftVocab
from ...sampling.verifier import (
    ALL_BANNED,
    NOT_FINITE,
    Best,
    SampledToken,
    Verified,
    VerifyRequest,
    first_rows,
    verified,
)
from .library import NativeLibrary

_I64, _PTR, _F32, _F64 = ctypes.c_int64, ctypes.c_void_p, ctypes.c_float, ctypes.c_double
MOST_BEST = 8  # as in sample.c
_ERRORS = {-1: NOT_FINITE, -2: ALL_BANNED}  # as in sample.h


class IdsStruct(ctypes.Structure):
    """``ft_ids`` of sample.h."""

    _fields_ = (("at", _PTR), ("count", _I64))


class SamplingStruct(ctypes.Structure):
    """``ft_sampling`` of sample.h."""

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


class _EncodedSampling:
    """One request's parameters as the kernel reads them: a form of its `SamplingMetadata`."""

    def __init__(self, sampling: SamplingMetadata, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.error = out_of_vocabulary(sampling, vocab_size)
        self.constraint = sampling.constraint
        self.prompt_len = sampling.prompt_len
        self.is_special = self.error is not None or self.constraint is not None
        # whether ids matter to nothing but the noise
        self.races_alone = not (
            self.is_special or sampling.has_processors or sampling.params.min_tokens
        )
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

    def verify(self, logits: Tensor, requests: Sequence[VerifyRequest]) -> list[Verified]:
        """Compare drafts with the target's own tokens; see `core.sampling.verifier.verify`."""
        starts = first_rows(logits, requests)
        runs: list[list[int]] = [[] for _ in requests]
        errors: list[str | None] = [None] * len(requests)
        nodes = dict.fromkeys(
            range(len(requests)), -1
        )  # of live rows: behind which one to decide next
        while nodes:
            call = _Call(self._library, logits)
            for i, node in nodes.items():
                call.add_walk(requests[i], node, starts[i])
            for i, (token_ids, errors[i]) in zip(nodes, call.run(), strict=True):
                runs[i] += token_ids
            nodes = _next_nodes(requests, runs, errors, nodes)
        return [
            verified(logits, request, start, run, error)
            for request, start, run, error in zip(requests, starts, runs, errors, strict=True)
        ]

    def sample(
        self, logits: Tensor, rows: Sequence[SampleRow], *, temperature_scale: float = 1.0
    ) -> list[SampledToken]:
        """Draw one token per row; see `core.sampling.verifier.sample`."""
        if len(rows) != len(logits):
            raise ValueError(f"{len(logits)} rows of logits for {len(rows)} tokens to draw")
        call = _Call(self._library, logits, temperature_scale)
        for i, row in enumerate(rows):
            form = row.sampling.cached(_EncodedSampling, call.vocab_size)
            call.add(form, row.tokens, row.tail, i)
        return [SampledToken(ids[0] if ids else -1, error) for ids, error in call.run()]

    def best(
        self,
        logits: Tensor,
        rows: Sequence[SampleRow],
        num_best: int,
        *,
        temperature_scale: float = 1.0,
        draft_vocab: DraftVocab | None = None,
    ) -> list[Best]:
        """The tokens nearest to being drawn, at most `MOST_BEST`; see `verifier.best`.

        Of a part of the vocabulary no more is looked at, unless a row wants more than the race.
        """
        if len(rows) != len(logits) or not 0 < num_best <= MOST_BEST:
            raise ValueError(f"{len(logits)} rows of logits for the {num_best} best of {len(rows)}")
        vocab_size = logits.shape[-1] if draft_vocab is None else draft_vocab.vocab_size
        forms = [row.sampling.cached(_EncodedSampling, vocab_size) for row in rows]
        if draft_vocab is not None and not all(form.races_alone for form in forms):
            logits, draft_vocab = draft_vocab.widened(logits), None
        call = _Call(self._library, logits, temperature_scale)
        for i, (row, form) in enumerate(zip(rows, forms, strict=True)):
            call.add(form, row.tokens, row.tail, i)
        return call.run_best(num_best, draft_vocab)


def _next_nodes(
    requests: Sequence[VerifyRequest],
    runs: Sequence[Sequence[int]],
    errors: Sequence[str | None],
    nodes: Mapping[int, int],
) -> dict[int, int]:
    """The nodes that walks have reached and that need a constraint's mask to go on."""
    found = {}
    for i, node in nodes.items():
        if errors[i] is None and requests[i].sampling.constraint is not None:
            child = requests[i].child(node, runs[i][-1])
            if child is not None:
                found[i] = child
    return found


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

    def add_walk(self, request: VerifyRequest, node: int, start: int) -> None:
        """Decide the place behind a node of a draft, whose logits begin at row ``start``.

        Then those below it, while the draft is right; but a constraint must be asked before every
        place, so there the walk ends at once.
        """
        form = request.sampling.cached(_EncodedSampling, self.vocab_size)
        if form.is_special:
            self.add(form, request.tokens, request.tail(node), start + 1 + node)
        else:
            self.add(form, request.tokens, (), start, request.draft, request.parents)

    def add(
        self,
        form: _EncodedSampling,
        tokens: array[int],
        tail: Sequence[int],
        first: int,
        draft: Sequence[int] = (),
        parents: Sequence[int] = (),
    ) -> None:
        """Decide the place behind ``tail`` by row ``first`` of the logits.

        Then, where there is no tail, those behind the nodes of a draft on the way down.
        """
        address, mask = form.address, 0
        if form.is_special:
            mask, refusal = self._ask(form, tokens, tail)
            if refusal is not None:
                self._refusals[len(self._firsts)] = refusal
                address = _JUDGED_ADDRESS
        at, num_tokens = tokens.buffer_info()
        drafts = self._drafts
        drafts_at, parents_at = len(drafts), len(drafts) + len(draft) if parents else -1
        self._firsts.append(first)
        self._walks += (
            address, first, len(draft), at, num_tokens, drafts_at, parents_at, len(tail), mask,
        )  # fmt: skip
        drafts.extend(draft or tail)
        drafts.extend(parents)

    def _ask(
        self, form: _EncodedSampling, tokens: array[int], tail: Sequence[int]
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
        """Choose along every walk; returns its tokens, and the error that ended it, in order."""
        num_rows, vocab_size = self._logits.shape
        hashes = vocabulary_hashes(vocab_size, self._logits.device)
        walks, tokens = array("q", self._walks), array("q", bytes(8 * num_rows))
        counts = array("q", bytes(8 * len(self._firsts)))
        failed = self._library.c.ft_choose(
            self._logits.data_ptr(), vocab_size, hashes.data_ptr(), _at(walks), len(counts),
            _at(self._drafts), self._temperature_scale, _at(tokens), _at(counts),
        )  # fmt: skip
        if failed:
            raise MemoryError("no memory to choose tokens in")
        chosen = tokens.tolist()
        spans = zip(self._firsts, counts, strict=True)
        return [
            self._outcome(index, chosen[first : first + count])
            for index, (first, count) in enumerate(spans)
        ]

    def run_best(self, num_best: int, draft_vocab: DraftVocab | None = None) -> list[Best]:
        """Find the best tokens of every walk and their scores; a walk is a single row here."""
        num_rows, vocab_size = self._logits.shape
        if draft_vocab is None:
            hashes = vocabulary_hashes(vocab_size, self._logits.device)
        else:
            hashes = draft_vocab.hashes
        walks, counts = array("q", self._walks), array("q", bytes(8 * num_rows))
        tokens = array("q", bytes(8 * num_rows * num_best))
        scores = array("f", bytes(4 * num_rows * num_best))
        failed = self._library.c.ft_best(
            self._logits.data_ptr(), vocab_size, hashes.data_ptr(), _at(walks), num_rows,
            _at(self._drafts), self._temperature_scale, num_best, _at(tokens),
            scores.buffer_info()[0], _at(counts),
        )  # fmt: skip
        if failed:
            raise MemoryError("no memory to choose tokens in")
        found = []
        for index, count in enumerate(counts):
            span = slice(index * num_best, index * num_best + count)
            ids, error = self._outcome(index, tokens[span].tolist())
            if draft_vocab is not None:
                ids = [draft_vocab.names[each] for each in ids]
            best = Best(tuple(ids), tuple(scores[span]))
            found.append(best if error is None else Best((), (), error))
        return found

    def _outcome(self, index: int, token_ids: list[int]) -> tuple[list[int], str | None]:
        error = _ERRORS.get(token_ids[-1]) or self._refusals.get(index)
        return (token_ids, None) if error is None else (token_ids[:-1], error)


def _at(numbers: array[int]) -> int:
    return numbers.buffer_info()[0]
