"""ScoredRows: limit of the rows of prompts whose logits one step computes.

A chunk of a usual prompt needs the logits of its last row alone. If given tokens are scored, many
rows need logits: for the log-probabilities of a prompt, for a recorded answer that is compared, and
for branches. These logits [num_rows, vocab] could take more memory than the step.
"""

from __future__ import annotations

from ..interface.request import Request
from .chunk_budget import LEAST_CHUNK

SCORED_LOGITS = 2**26  # logits of all scored rows of a step: 256 MiB in float32


class ScoredRows:
    """The scored rows of one step, at most `SCORED_LOGITS` divided by the size of the vocabulary.

    Branches of one request may exceed the limit alone, because they cannot be divided.
    """

    def __init__(self, vocab_size: int) -> None:
        self._most = self._room = max(LEAST_CHUNK, SCORED_LOGITS // vocab_size)

    def cut(self, request: Request, stop: int) -> int:
        """Return ``stop``, or an earlier end of the request's chunk if its scored rows do not fit.

        The chunk is empty if it may not begin in this step.
        """
        first = _first_scored(request)
        if first is None or stop <= first:
            return stop
        start = max(request.num_computed, first)
        if request.extras.branches is None:
            return min(stop, start + self._room)
        is_first = self._room == self._most
        return stop if is_first or stop - first <= self._room else start

    def take(self, request: Request, stop: int) -> None:
        """Count the rows of a chunk that is computed up to ``stop``."""
        first = _first_scored(request)
        if first is not None:
            num_rows = max(0, stop - max(request.num_computed, first))
            self._room = max(0, self._room - num_rows)


def _first_scored(request: Request) -> int | None:
    """Return the index of the first token whose row scores given tokens; None if none does."""
    sampling, branches = request.sampling, request.extras.branches
    if sampling.params.prompt_logprobs is not None:
        return 0 if request.num_computed + 1 < sampling.prompt_len else None
    if branches is not None:
        return branches.first - 1
    pooling = sampling.pooling
    if pooling is None or pooling.compare_from is None:
        return None
    return sampling.prompt_len - 1 + pooling.compare_from
