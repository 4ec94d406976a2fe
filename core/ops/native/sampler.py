"""NativeSampler: chooses the tokens of a step in C, drafts followed there too; the GIL is free.

core/sampling/verifier.py is the oracle: what this chooses differs from it only where two scores, or
a token's mass and the edge of top-p, are as near as the last bit of a logarithm. A row's token
depends on that row alone, bit for bit.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ...interface.sampling import SamplingMetadata, TokenSamplingParams
from ...sampling.encoded import EncodedSampling, Mask
from ...sampling.gumbel import vocabulary_hashes
from ...sampling.logits_processors import SampleRow
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

MOST_BEST = 8  # as in sample.c
_ERRORS = {-1: NOT_FINITE, -2: ALL_BANNED}  # as in sample.h
_GREEDY = SamplingMetadata(params=TokenSamplingParams(temperature=0.0), seed=0, prompt_len=0)
_REFUSED = EncodedSampling(_GREEDY, 1)  # for rows that must fail: are their logits finite?


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

    def sample(self, logits: Tensor, rows: Sequence[SampleRow]) -> list[SampledToken]:
        """Draw one token per row; see `core.sampling.verifier.sample`."""
        if len(rows) != len(logits):
            raise ValueError(f"{len(logits)} rows of logits for {len(rows)} tokens to draw")
        call = _Call(self._library, logits)
        for i, row in enumerate(rows):
            call.add(row.encoded(call.vocab_size), row.tokens, row.tail, i)
        return [SampledToken(ids[0] if ids else -1, error) for ids, error in call.run()]

    def best(
        self,
        logits: Tensor,
        rows: Sequence[SampleRow],
        num_best: int,
        *,
        draft_vocab: DraftVocab | None = None,
    ) -> list[Best]:
        """The tokens nearest to being drawn, at most `MOST_BEST`; see `verifier.best`.

        Of a part of the vocabulary no more is looked at, unless a row may be edited.
        """
        if len(rows) != len(logits) or not 0 < num_best <= MOST_BEST:
            raise ValueError(f"{len(logits)} rows of logits for the {num_best} best of {len(rows)}")
        vocab_size = logits.shape[-1] if draft_vocab is None else draft_vocab.vocab_size
        if draft_vocab is not None and not draft_vocab.serves(rows):
            logits, draft_vocab = draft_vocab.widened(logits), None
        call = _Call(self._library, logits)
        for i, row in enumerate(rows):
            call.add(row.encoded(vocab_size), row.tokens, row.tail, i)
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

    def __init__(self, library: NativeLibrary, logits: Tensor) -> None:
        self._library = library
        self._logits = logits.to(torch.float32).contiguous()
        self._walks: list[int] = []  # ``ft_walk`` of sample.c, number by number
        self._firsts: list[int] = []  # row of the logits where each walk begins
        self._drafts = array("q")
        self._refusals: dict[int, str] = {}  # by walk
        self._masks: list[Mask] = []  # lent until the call is over

    @property
    def vocab_size(self) -> int:
        return self._logits.shape[-1]

    def add_walk(self, request: VerifyRequest, node: int, start: int) -> None:
        """Decide the place behind a node of a draft, whose logits begin at row ``start``.

        Then those below it, while the draft is right; but a constraint must be asked before every
        place, so there the walk ends at once.
        """
        encoded = request.sampling.cached(EncodedSampling, self.vocab_size)
        if encoded.is_asked:
            self.add(encoded, request.tokens, request.tail(node), start + 1 + node)
        else:
            self.add(encoded, request.tokens, (), start, request.draft, request.parents)

    def add(
        self,
        encoded: EncodedSampling,
        tokens: array[int],
        tail: Sequence[int],
        first: int,
        draft: Sequence[int] = (),
        parents: Sequence[int] = (),
    ) -> None:
        """Decide the place behind ``tail`` by row ``first`` of the logits.

        Then, where there is no tail, those behind the nodes of a draft on the way down.
        """
        address, mask_at = encoded.address, 0
        if encoded.is_asked:
            mask, refusal = encoded.ask(tokens, tail)
            if refusal is not None:
                self._refusals[len(self._firsts)] = refusal
                address = _REFUSED.address
            elif mask is not None:
                self._masks.append(mask)
                mask_at = mask.ctypes.data
        at, num_tokens = tokens.buffer_info()
        drafts = self._drafts
        drafts_at, parents_at = len(drafts), len(drafts) + len(draft) if parents else -1
        self._firsts.append(first)
        self._walks += (
            address, first, len(draft), at, num_tokens, drafts_at, parents_at, len(tail), mask_at,
        )  # fmt: skip
        drafts.extend(draft or tail)
        drafts.extend(parents)

    def run(self) -> list[tuple[list[int], str | None]]:
        """Choose along every walk; returns its tokens, and the error that ended it, in order."""
        num_rows, vocab_size = self._logits.shape
        hashes = vocabulary_hashes(vocab_size, self._logits.device)
        walks, tokens = array("q", self._walks), array("q", bytes(8 * num_rows))
        counts = array("q", bytes(8 * len(self._firsts)))
        failed = self._library.c.ft_choose(
            self._logits.data_ptr(), vocab_size, hashes.data_ptr(), _at(walks), len(counts),
            _at(self._drafts), _at(tokens), _at(counts),
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
            _at(self._drafts), num_best, _at(tokens),
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
