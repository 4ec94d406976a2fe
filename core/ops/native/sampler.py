"""NativeSampler: chooses the tokens of a step in C and verifies drafts there, without the GIL.

core/sampling/verifier.py is the reference: choices differ only if two scores, or a cumulative
probability and the limit of top-p, differ by no more than the last bit of a logarithm. A row's
token depends on that row alone, bit for bit.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from typing_extensions import override

from ...interface.sampling import SamplingMetadata, TokenSamplingParams
from ...sampling.drafted_row import DraftedRow
from ...sampling.encoded import EncodedSampling, Mask
from ...sampling.gumbel import vocabulary_hashes
from ...sampling.sampler import DraftVocab, Sampler
from ...sampling.verifier import (
    ALL_BANNED,
    NOT_FINITE,
    Best,
    SampledToken,
    Verified,
    first_rows,
    verified,
)
from .declarations import STRUCTS
from .library import NativeLibrary

HOST = torch.device("cpu")
MOST_BEST = 8  # must be equal to FT_MOST of sample.c
_ERRORS = {-1: NOT_FINITE, -2: ALL_BANNED}  # must have the codes of sample.h
_GREEDY = SamplingMetadata(params=TokenSamplingParams(temperature=0.0), seed=0, prompt_len=0)
_REFUSED = EncodedSampling(_GREEDY, 1)  # for refused rows: only checks that logits are finite


class NativeSampler(Sampler):
    """`Sampler` by the kernels of sample.c, for logits on the CPU."""

    def __init__(self, library: NativeLibrary) -> None:
        self._library = library

    @override
    def verify(self, logits: Tensor, requests: Sequence[DraftedRow]) -> list[Verified]:
        starts = first_rows(logits, requests)
        runs: list[list[int]] = [[] for _ in requests]
        errors: list[str | None] = [None] * len(requests)
        nodes = dict.fromkeys(
            range(len(requests)), -1
        )  # for each unfinished request the node after which the next token is decided
        while nodes:
            walks = Walks(logits.shape[-1])
            for i, node in nodes.items():
                walks.add_walk(requests[i], node, starts[i])
            chosen = walks.choose(self._library, logits)
            for i, (token_ids, errors[i]) in zip(nodes, chosen, strict=True):
                runs[i] += token_ids
            nodes = _next_nodes(requests, runs, errors, nodes)
        return [
            verified(logits, request, start, run, error)
            for request, start, run, error in zip(requests, starts, runs, errors, strict=True)
        ]

    @override
    def sample(self, logits: Tensor, rows: Sequence[DraftedRow]) -> list[SampledToken]:
        if len(rows) != len(logits):
            raise ValueError(f"{len(logits)} rows of logits for {len(rows)} tokens to draw")
        walks = Walks.of(rows, logits.shape[-1])
        chosen = walks.choose(self._library, logits)
        return [SampledToken(ids[0] if ids else -1, error) for ids, error in chosen]

    def best(
        self,
        logits: Tensor,
        rows: Sequence[DraftedRow],
        num_best: int,
        *,
        draft_vocab: DraftVocab | None = None,
    ) -> list[Best]:
        """Return the ``num_best`` tokens of each row with the highest scores.

        `verifier.best` defines them; there are at most `MOST_BEST`. With a ``draft_vocab`` only
        its tokens are scored, unless a row may be edited. Raises ValueError, MemoryError.
        """
        if len(rows) != len(logits) or not 0 < num_best <= MOST_BEST:
            raise ValueError(
                f"{len(logits)} rows of logits for {len(rows)} rows, with num_best {num_best}"
            )
        vocab_size = logits.shape[-1] if draft_vocab is None else draft_vocab.vocab_size
        if draft_vocab is not None and not draft_vocab.serves(rows):
            logits, draft_vocab = draft_vocab.widened(logits), None
        logits, width = _dense(logits), logits.shape[-1]
        hashes = vocabulary_hashes(width, HOST) if draft_vocab is None else draft_vocab.hashes
        first = (logits.data_ptr(), width, hashes.data_ptr())
        found = Walks.of(rows, vocab_size).best(
            num_best, lambda *arguments: int(self._library.c.ft_best(*first, *arguments))
        )
        if draft_vocab is None:
            return found
        names = draft_vocab.names
        return [each._replace(token_ids=tuple(names[i] for i in each.token_ids)) for each in found]


def _next_nodes(
    requests: Sequence[DraftedRow],
    runs: Sequence[Sequence[int]],
    errors: Sequence[str | None],
    nodes: Mapping[int, int],
) -> dict[int, int]:
    """Return the nodes that walks have reached and that need a constraint's mask to continue."""
    found = {}
    for i, node in nodes.items():
        if errors[i] is None and requests[i].sampling.constraint is not None:
            child = requests[i].child(node, runs[i][-1])
            if child is not None:
                found[i] = child
    return found


class Walks:
    """Walks through the requests' drafts, for one call of a kernel; a walk chooses tokens.

    ``vocab_size``: size of the vocabulary that the requests' parameters refer to.
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._walks = array("q")  # the fields of sample.c's ``ft_walk``, walk after walk
        self._firsts: list[int] = []  # first row of each walk's logits
        self._drafts = array("q")
        self._refusals: dict[int, str] = {}  # errors by the walk's index
        self._masks: list[Mask] = []  # kept alive until the call is over

    @classmethod
    def of(cls, rows: Sequence[DraftedRow], vocab_size: int) -> Walks:
        """Return one walk per row, each for one token; row i of the logits decides walk i."""
        walks = cls(vocab_size)
        for index, row in enumerate(rows):
            walks.add(row.encoded(vocab_size), row.tokens, row.draft, index)
        return walks

    def add_walk(self, request: DraftedRow, node: int, start: int) -> None:
        """Add a walk that decides the token after a node of a draft.

        The draft's logits begin at row ``start``. While a decided token is in the draft, the walk
        continues with the token after its node. A constraint must give its mask before every token,
        so a walk with a constraint decides only one.
        """
        encoded = request.sampling.cached(EncodedSampling, self._vocab_size)
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
        """Add a walk that decides the token after ``tail``, with row ``first`` of the logits.

        With a ``draft`` (and no tail) the walk also decides the tokens after the draft's accepted
        nodes.
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
        self._walks.extend(
            (address, first, len(draft), at, num_tokens, drafts_at, parents_at, len(tail), mask_at)
        )
        drafts.extend(draft or tail)
        drafts.extend(parents)

    def choose(self, library: NativeLibrary, logits: Tensor) -> list[tuple[list[int], str | None]]:
        """Return the tokens of every walk, and the error that ended it or None, in order.

        Raises MemoryError.
        """
        logits = _dense(logits)
        num_rows, width = logits.shape
        tokens, counts = _zeros("q", num_rows), _zeros("q", len(self._firsts))
        failed = library.c.ft_choose(
            logits.data_ptr(), width, vocabulary_hashes(width, HOST).data_ptr(),
            STRUCTS.ft_walk.from_address(_at(self._walks)), len(counts), _at(self._drafts),
            _at(tokens), _at(counts),
        )  # fmt: skip
        if failed:
            raise MemoryError("no memory for choosing tokens")
        chosen = tokens.tolist()
        spans = zip(self._firsts, counts, strict=True)
        return [
            self._outcome(index, chosen[first : first + count])
            for index, (first, count) in enumerate(spans)
        ]

    def best(self, num_best: int, find: Callable[..., int]) -> list[Best]:
        """Return the best tokens and their scores of every walk; each walk must be for one token.

        ``find``: takes the last seven arguments of `ft_best` and returns 0 if it succeeds. Raises
        MemoryError.
        """
        num_walks = len(self._firsts)
        tokens, counts = _zeros("q", num_walks * num_best), _zeros("q", num_walks)
        scores = _zeros("f", num_walks * num_best)
        failed = find(
            STRUCTS.ft_walk.from_address(_at(self._walks)), num_walks, _at(self._drafts), num_best,
            _at(tokens), _at(scores), _at(counts),
        )  # fmt: skip
        if failed:
            raise MemoryError("no memory for choosing tokens")
        found = []
        for index, count in enumerate(counts):
            span = slice(index * num_best, index * num_best + count)
            ids, error = self._outcome(index, tokens[span].tolist())
            best = Best(tuple(ids), tuple(scores[span]))
            found.append(best if error is None else Best((), (), error))
        return found

    def _outcome(self, index: int, token_ids: list[int]) -> tuple[list[int], str | None]:
        error = _ERRORS.get(token_ids[-1]) or self._refusals.get(index)
        return (token_ids, None) if error is None else (token_ids[:-1], error)


def _dense(logits: Tensor) -> Tensor:
    return logits.to(torch.float32).contiguous()


def _zeros(code: Literal["q", "f"], count: int) -> array[Any]:
    return array(code, bytes(count * (8 if code == "q" else 4)))


def _at(numbers: array[Any]) -> int:
    return numbers.buffer_info()[0]
