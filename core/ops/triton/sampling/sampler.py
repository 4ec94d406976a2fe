"""TritonSampler: chooses the tokens of a step on the device.

The host writes one block of numbers and reads one word for each draw, without waiting in between;
`begin` leaves the reading for later. A plain batch takes two kernels for any mix of greedy and
sampled rows: greatest values by tiles, then the Gumbel argmax. Rows with top-k or top-p take one
more kernel, rows with logits processors two, and several best tokens of a draw one to merge the
tiles. Tokens of rows without processors may be chosen in a pass's graph (lm_head.py).

core/sampling/verifier.py is the reference: choices differ only if two scores, or a cumulative
probability and the limit of top-p, differ by no more than the last bits of a logarithm. A row's
token depends on that row alone, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from ....sampling.drafted_row import DraftedRow
from ....sampling.gumbel import vocabulary_hashes
from ....sampling.sampler import DeviceSampler, DraftVocab
from ....sampling.verifier import (
    ALL_BANNED,
    NOT_FINITE,
    Best,
    Choices,
    LogitsRow,
    SampledToken,
    Verified,
    walk_drafts,
)
from ...batch import SamplingPlan
from ..graph_inputs import NUM_BUFFERS, AsyncCopy, Field, GraphInputs
from . import gumbel_argmax_kernels
from .gumbel_argmax import TILE, GumbelArgmax, SentEdits
from .sampling_inputs import (
    EditLists,
    SamplingInputs,
    plain_inputs,
    write_controls,
    write_plain_controls,
)

BLOCK = 2**26  # logits processed at once, to limit the working space
_ALIGN = 4  # numbers, 16 bytes
_DTYPES = {"int64": torch.int64, "int32": torch.int32, "float32": torch.float32}
_LAST_ID = 2**31 - 1
_NEVER_RANK = -gumbel_argmax_kernels.INF_RANK.value - 1  # rank of -inf
_ERRORS = {
    gumbel_argmax_kernels.NOT_FINITE.value: NOT_FINITE,
    gumbel_argmax_kernels.ALL_BANNED.value: ALL_BANNED,
}


class TritonSampler(DeviceSampler):
    """`DeviceSampler` by the kernels of gumbel_argmax.py, top_k_top_p.py and logits_processors.py.

    ``tile``: tokens of the vocabulary per program, a power of two.
    """

    def __init__(self, *, tile: int = TILE) -> None:
        self._tile = tile
        self._post = _Post()

    @override
    def verify(self, logits: Tensor, requests: Sequence[DraftedRow]) -> list[Verified]:
        return walk_drafts(logits, requests, lambda draws: self._choose(logits, draws))

    @override
    def sample(self, logits: Tensor, rows: Sequence[DraftedRow]) -> list[SampledToken]:
        _check(len(logits), len(rows))
        return self._choose(logits, list(enumerate(rows)))

    def best(
        self,
        logits: Tensor,
        rows: Sequence[DraftedRow],
        num_best: int,
        *,
        draft_vocab: DraftVocab | None = None,
    ) -> list[Best]:
        """Return the ``num_best`` tokens of each row with the highest scores.

        `core.sampling.verifier.best` defines them; the first of each row is the token that `sample`
        draws. Waits for the device. With a ``draft_vocab`` only its tokens are scored, unless a row
        may be edited. Raises ValueError.
        """
        _check(len(logits), len(rows))
        if num_best < 1:
            raise ValueError(f"num_best must be at least 1, not {num_best}")
        if draft_vocab is not None and not draft_vocab.serves(rows):
            logits, draft_vocab = draft_vocab.widened(logits), None
        if not rows:
            return []
        vocab_size = logits.shape[-1] if draft_vocab is None else draft_vocab.vocab_size
        blocks = self._blocks(logits, list(enumerate(rows)), vocab_size)
        words, refusals = self._gumbel_argmax(logits, blocks, num_best, draft_vocab)
        return TritonPendingBest(words.view(-1, num_best), refusals, draft_vocab).bests()

    @override
    def begin(self, logits: Tensor, rows: Sequence[DraftedRow]) -> TritonPendingTokens:
        if not rows:
            raise ValueError("there is no row to draw a token for")
        _check(len(logits), len(rows))
        return self._begin(logits, list(enumerate(rows)))

    @override
    def begin_runs(
        self, logits: Tensor, rows: Sequence[DraftedRow], counts: Sequence[int]
    ) -> TritonPendingTokens | None:
        controls = self.plain_controls(SamplingPlan(rows, counts), len(logits), logits.shape[-1])
        if controls is None:
            return None
        step = _block_rows(logits)
        starts = range(0, len(controls.columns), step)
        self._post.reserve(len(starts))
        blocks = (plain_inputs(controls.columns[start : start + step]) for start in starts)
        return TritonPendingTokens(*self._gumbel_argmax(logits, blocks))

    def plain_controls(
        self, draws: SamplingPlan, num_logits: int, vocab_size: int
    ) -> SamplingInputs | None:
        """Return the inputs of `gumbel_argmax` for ``draws``, or None if a row is edited."""
        _check(num_logits, sum(draws.counts))
        return write_plain_controls(draws, vocab_size)

    def gumbel_argmax(
        self, logits: Tensor, controls: Tensor, cuts: Tensor, hashes: Tensor, num_best: int = 1
    ) -> Tensor:
        """Return the words of draws without edits, from `GumbelArgmax.run`, for a graph."""
        race = GumbelArgmax(logits, controls, cuts, hashes, tile=self._tile, num_best=num_best)
        return race.run()

    def _choose(self, logits: Tensor, draws: Sequence[LogitsRow]) -> list[SampledToken]:
        return self._begin(logits, draws).choices().by_row() if draws else []

    def _begin(self, logits: Tensor, draws: Sequence[LogitsRow]) -> TritonPendingTokens:
        blocks = self._blocks(logits, draws, logits.shape[-1])
        return TritonPendingTokens(*self._gumbel_argmax(logits, blocks))

    def _blocks(
        self, logits: Tensor, draws: Sequence[LogitsRow], vocab_size: int
    ) -> Iterator[SamplingInputs]:
        """Yield the inputs of the draws, one block of at most `BLOCK` logits after another."""
        step = _block_rows(logits)
        starts = range(0, len(draws), step)
        self._post.reserve(len(starts))
        for start in starts:
            yield write_controls(draws[start : start + step], vocab_size)

    @torch.inference_mode()
    def _gumbel_argmax(
        self,
        logits: Tensor,
        blocks: Iterable[SamplingInputs],
        num_best: int = 1,
        draft_vocab: DraftVocab | None = None,
    ) -> tuple[Tensor, dict[int, str]]:
        """Return the words of `GumbelArgmax.run` for each draw, and requests' errors by draw.

        Errors of the logits are among the words.
        """
        if draft_vocab is None:
            hashes = vocabulary_hashes(logits.shape[-1], logits.device)
        else:
            hashes = draft_vocab.hashes
        logits = logits if logits.stride(-1) == 1 else logits.contiguous()
        winners, refusals, start = list[Tensor](), dict[int, str](), 0
        for controls in blocks:
            refusals |= {start + index: why for index, why in controls.refusals.items()}
            winners.append(self._winners(logits, controls, hashes, num_best))
            start += len(controls.columns)
        return winners[0] if len(winners) == 1 else torch.cat(winners), refusals

    def _winners(
        self, logits: Tensor, controls: SamplingInputs, hashes: Tensor, num_best: int
    ) -> Tensor:
        sent_columns, cuts, *edits = self._post.send(_arrays(controls), logits.device)
        sent = SentEdits(*edits) if edits else None
        argmax = GumbelArgmax(
            logits, sent_columns, cuts, hashes, sent, tile=self._tile, num_best=num_best
        )
        return argmax.run()


def _block_rows(logits: Tensor) -> int:
    """Return how many rows of ``logits`` are processed at once."""
    return max(1, BLOCK // logits.shape[-1])


def _check(num_logits: int, num_tokens: int) -> None:
    if num_tokens != num_logits:
        raise ValueError(f"{num_logits} rows of logits for {num_tokens} tokens to draw")


class TritonPendingTokens:
    """`PendingTokens`: the winners' words on the device, and their copy to the host."""

    def __init__(self, words: Tensor, refusals: dict[int, str]) -> None:
        self.words = words
        self._reply, self._refusals = AsyncCopy(words), refusals

    def choices(self) -> Choices:
        """Wait for the words and return their tokens."""
        return _choices(self._reply.read(), self._refusals)


class TritonPendingBest:
    """`PendingBest`: the words of each draw's best tokens, on their way to the host."""

    def __init__(
        self, words: Tensor, refusals: dict[int, str], draft_vocab: DraftVocab | None = None
    ) -> None:
        """Start the copy of ``words`` [num_draws, num_best] from `GumbelArgmax.run`."""
        self.words = words.flatten()
        self._shape, self._reply = words.shape, AsyncCopy(self.words)
        self._refusals, self._draft_vocab = refusals, draft_vocab

    def bests(self) -> list[Best]:
        """Wait for the words and return their tokens and scores."""
        names = None if self._draft_vocab is None else self._draft_vocab.names
        return bests_of_words(self._reply.read().reshape(self._shape), self._refusals, names)


def _choices(words: NDArray[np.int64], refusals: dict[int, str]) -> Choices:
    """Return the tokens of the winners' words, or errors.

    An error of the logits takes precedence over ``refusals``, the requests' errors by draw.
    """
    token_ids = (_LAST_ID - (words & _LAST_ID)).tolist()
    failed = np.flatnonzero(words >= gumbel_argmax_kernels.NOT_FINITE.value).tolist()
    errors = refusals | {index: _ERRORS[int(words[index])] for index in failed}
    for index in errors:
        token_ids[index] = -1
    return Choices(token_ids, errors)


def bests_of_words(
    words: NDArray[np.int64], refusals: dict[int, str], names: Sequence[int] | None
) -> list[Best]:
    """Return tokens and scores of words [num_draws, num_best], or errors.

    An error of the logits takes precedence over ``refusals``, the requests' errors by draw.
    ``names``: token ids of the logits' columns.
    """
    ranks = (words >> 32).astype(np.int32)
    scores = (ranks ^ ((ranks >> 31) & 0x7FFFFFFF)).view(np.float32)
    counts = np.count_nonzero(ranks > _NEVER_RANK, axis=1).tolist()  # -inf is never drawn
    firsts, errors = words[:, 0].tolist(), dict[int, str]()
    if refusals or not _ERRORS.keys().isdisjoint(firsts):
        errors = refusals | {at: _ERRORS[each] for at, each in enumerate(firsts) if each in _ERRORS}
    columns = (_LAST_ID - (words & _LAST_ID)).tolist()
    for at in errors:
        counts[at] = 0
    found = [
        Best(tuple(ids[:count]), tuple(mine[:count]))
        for count, ids, mine in zip(counts, columns, scores.tolist(), strict=True)
    ]
    if names is not None:
        found = [
            best._replace(token_ids=tuple([names[at] for at in best.token_ids])) for best in found
        ]
    for at, error in errors.items():
        found[at] = Best((), (), error)
    return found


class _Post:
    """Sends arrays to the device, all of them in one copy."""

    def __init__(self) -> None:
        self._graph_inputs: GraphInputs | None = None
        self._capacity = 0  # size in numbers
        self._num_hosts = NUM_BUFFERS

    def reserve(self, num_sends: int) -> None:
        """Prepare for launches that call `send` up to ``num_sends`` times each.

        Otherwise a launch on the event loop would write to a host block of the launch before it,
        and would wait until the device has computed that launch's pass.
        """
        if num_sends * NUM_BUFFERS > self._num_hosts:
            self._num_hosts, self._graph_inputs = num_sends * NUM_BUFFERS, None

    def send(self, arrays: Sequence[NDArray[Any]], device: torch.device) -> list[Tensor]:
        """Return the arrays on the device, flat, each with its own dtype.

        They are valid until the next call, whose copy comes after the kernels that read them.
        """
        stops = np.cumsum([-(-array.nbytes // (4 * _ALIGN)) * _ALIGN for array in arrays]).tolist()
        graph_inputs = self._inputs_of(stops[-1], device)
        host, there = graph_inputs.open()["numbers"], graph_inputs.device["numbers"]
        sent = []
        for array, start in zip(arrays, [0, *stops], strict=False):
            stop = start + array.nbytes // 4
            host[start:stop] = array.reshape(-1).view(np.int32)
            sent.append(there[start:stop].view(_DTYPES[array.dtype.name]))
        graph_inputs.upload(stops[-1])
        return sent

    def _inputs_of(self, size: int, device: torch.device) -> GraphInputs:
        if self._graph_inputs is None or size > self._capacity:
            self._capacity = max(self._capacity, 2**12, 1 << (size - 1).bit_length())
            field = Field("numbers", self._capacity)
            self._graph_inputs = GraphInputs([field], device, num_hosts=self._num_hosts)
        return self._graph_inputs


def _arrays(controls: SamplingInputs) -> list[NDArray[Any]]:
    lists = controls.edits
    arrays: list[NDArray[Any]] = [controls.columns, controls.cuts]
    if lists is not None:
        arrays += _edit_arrays(lists)
    return arrays


def _edit_arrays(lists: EditLists) -> list[NDArray[Any]]:
    return [lists.draws, lists.mask_of, lists.masks, lists.bounds, lists.ids, lists.amounts]
