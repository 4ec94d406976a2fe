"""Comparison of a recorded answer with the model's own tokens, within a chunk of a prefill.

The recorded answer follows the prompt in the request's tokens. So every row of the chunk has the
recorded tokens before it, and the comparison continues after a difference.
"""

from __future__ import annotations

import dataclasses
import math
from array import array
from collections.abc import Sequence

from torch import Tensor

from ..interface.extras.token_comparison import EXCLUDERS, TokenComparison, comparison_numbers
from ..interface.plan import ScheduledRequest
from ..interface.sampling import SamplingMetadata
from ..sampling.drafted_row import DraftedRow
from ..sampling.explanation import excluded_by
from ..sampling.logprobs import token_logprobs
from ..sampling.sampler import Sampler
from ..sampling.verifier import SampledToken, margins

BLOCK = 32  # rows that are sampled at once; a slow grammar has time for as many


class ComparedSampling:
    """The parameters with which the answer of one request is compared, block after block.

    They have a constraint of their own, which follows the answer. A constraint cannot go back, so
    an earlier block, such as after a preemption, gets a new one.
    """

    def __init__(self, _sampling: SamplingMetadata) -> None:
        self._own: SamplingMetadata | None = None
        self._first = 0  # index of the latest block's first token
        self._last = math.inf  # after the block with this index nothing is compared

    def at(self, sampling: SamplingMetadata, first: int) -> SamplingMetadata | None:
        """Return the parameters of the block whose rows begin at ``first``; None: do not compare.

        ``sampling``: the request's own parameters.
        """
        if self._own is None or first < self._first:
            self._own, self._last = _forked(sampling), math.inf
        self._first = first
        return self._own if first <= self._last else None

    def end(self) -> None:
        """Compare nothing after the latest block."""
        self._last = self._first


def compare_answer(scheduled: ScheduledRequest, logits: Tensor, sampler: Sampler) -> array[float]:
    """Return the `TokenComparison` of each row of ``logits`` [num_pooled, vocab], as numbers.

    The last one is of the end of the answer if the chunk reaches it. After a token that a
    constraint excludes, and after a failed choice, nothing is compared: what may follow is unknown.
    Only the first difference of the chunk has log-probabilities and the reason of an exclusion.
    """
    begin = scheduled.stop - len(logits)  # index of the token whose row is the first one
    state = scheduled.sampling.cached(ComparedSampling)
    compared: list[TokenComparison] = []
    for start in range(0, len(logits), BLOCK):
        sampling = state.at(scheduled.sampling, begin + start)
        if sampling is None:
            break
        values = logits[start : start + BLOCK]
        rows = _Rows(scheduled, sampling, begin + start, values, sampler)
        explains = not any(each.own >= 0 and each.margin for each in compared)
        compared += rows.comparisons(explains_difference=explains)
        if rows.is_over:
            state.end()
            break
    return comparison_numbers(compared)


class _Rows:
    """A block of rows; ``first`` is the index of its first row's token.

    ``is_over``: whether nothing is compared after the block.
    """

    def __init__(
        self,
        scheduled: ScheduledRequest,
        sampling: SamplingMetadata,
        first: int,
        logits: Tensor,
        sampler: Sampler,
    ) -> None:
        tokens, stop = scheduled.tokens, first + len(logits)
        whole = DraftedRow(tokens[: first + 1], sampling, tokens[first + 1 : stop])
        self._logits = logits
        self._rows = [whole.at(node) for node in range(-1, len(whole.draft))]
        self._own = sampler.sample(logits, self._rows)
        self._given = tokens[first + 1 : stop + 1]
        self._start = first + 1 - sampling.prompt_len  # index in the answer
        pooling = sampling.pooling
        self._begins = pooling is not None and pooling.compare_from == self._start
        ends = (i for i, chosen in enumerate(self._own) if self._ends(i, chosen))
        end = next(ends, None)
        self.is_over = end is not None
        self._count = len(self._rows) if end is None else end + 1

    def comparisons(self, *, explains_difference: bool) -> list[TokenComparison]:
        """Return the comparison of each row, up to the last one that is compared.

        ``explains_difference``: whether the first difference gets its log-probabilities and the
        reason of an exclusion.
        """
        differing = [i for i in range(self._count) if self._differs(i)]
        explained = {*differing[:explains_difference]}
        if self._begins and self._given:
            explained.add(0)
        found = self._details(sorted({*differing, *explained}), explained)
        if self._count == len(self._own) > len(self._given) and self._own[-1].error is None:
            own_id = self._own[-1].token_id
            (last,) = token_logprobs(self._logits[-1:], [own_id], 0)
            found[self._count - 1] = TokenComparison(0, own_id, own_logprob=last.logprob)
        plain = (TokenComparison(0, each.token_id) for each in self._own[: self._count])
        return [
            found.get(i, each)._replace(position=self._start + i) for i, each in enumerate(plain)
        ]

    def _differs(self, i: int) -> bool:
        own = self._own[i]
        return i < len(self._given) and own.error is None and own.token_id != self._given[i]

    def _ends(self, i: int, own: SampledToken) -> bool:
        """Whether nothing can be compared after a row."""
        if own.error is not None:
            return True
        row = self._rows[i]
        if row.sampling.constraint is None or not self._differs(i):
            return False
        mask, _ = row.encoded(self._logits.shape[-1]).ask(row.tokens, row.draft)
        return mask is not None and not mask[self._given[i]]

    def _details(self, wanted: Sequence[int], explained: set[int]) -> dict[int, TokenComparison]:
        """Return the comparisons of the rows ``wanted``, with margins, by row."""
        if not wanted:
            return {}
        given = [self._given[i] for i in wanted]
        gaps = margins(self._logits[wanted], [self._rows[i] for i in wanted], given)
        return {
            i: self._explained(i, gap)
            if i in explained
            else TokenComparison(0, self._own[i].token_id, max(0.0, gap))
            for i, gap in zip(wanted, gaps, strict=True)
        }

    def _explained(self, i: int, gap: float) -> TokenComparison:
        own, given, values = self._own[i].token_id, self._given[i], self._logits[i : i + 1]
        name = None
        if math.isinf(gap):
            name = excluded_by(values.float(), self._rows[i], given)
        # After a failed choice there is no own token.
        pair = [given, own if own >= 0 else given]
        first, second = token_logprobs(values.expand(2, -1), pair, 0)
        excluder = -1 if name is None else EXCLUDERS.index(name)
        return TokenComparison(0, own, max(0.0, gap), first.logprob, second.logprob, excluder)


def _forked(sampling: SamplingMetadata) -> SamplingMetadata:
    """Return parameters whose constraint reads the answer from its beginning."""
    if sampling.constraint is None:
        return dataclasses.replace(sampling)
    return dataclasses.replace(sampling, constraint=sampling.constraint.fork())
