"""ChunkBudget: limit of the prompt tokens that a step computes together with decoding requests.

The time of a step is the gap between two tokens of each decoding request. The time of chunks is
measured, so the gap is bounded in seconds on any machine; a chunk of fixed size would be a short
pause on one machine and a long one on another.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from ..interface.output import StepOutput
from ..interface.plan import ScheduledRequest, StepPlan

LEAST_CHUNK = 16  # minimum number of prompt tokens in a step with chunks

# Weight of a new value in a running mean; the second one applies if the mean is old.
MEAN_RATE, STALE_RATE = 0.2, 0.5
# After memory ran out, each step that uses all allowed prompt tokens raises their number by this
# fraction.
REGROWTH = 1 / 64
STEP_SECONDS = 0.25  # time limit for the prompts of a step in which no request decodes

# Prompt tokens that a step without decodes may always compute: fewer rows cost more per row.
WIDE_CHUNK = 64
SHORT_PROMPT_DIVISOR = 5  # one fifth of a step's prompt tokens goes to the shortest prompts

# Number of steps with chunks after which a step without chunks is due. `MEASURE` applies until the
# time of a step without chunks was measured.
REMEASURE, MEASURE = 32, 2


def short_prompt_share(budget: int) -> int:
    """Return how many of a step's prompt tokens go to the prompts with the least left to compute.

    This is a fifth of ``budget``, so the first prompt in order takes at most 1.25 times as long as
    with the whole budget. For a small budget it is `LEAST_CHUNK`, but at most half of the budget.
    """
    return min(budget // 2, max(LEAST_CHUNK, budget // SHORT_PROMPT_DIVISOR))


class ChunkBudget:
    """Limit of the prompt tokens of a step by their computing time.

    ``slowdown``: how many times longer a step with chunks may take than a step without chunks. If
    no request decodes, the chunks of a step may take `STEP_SECONDS`, because a request that arrives
    waits for the end of the step. Both limits are off if ``slowdown`` is infinite. While prompts
    keep arriving, a step without chunks follows every `REMEASURE` steps with chunks, so that the
    time of decoding alone is measured again. An outdated value would distort the time of chunks.
    """

    def __init__(self, slowdown: float) -> None:
        self._slowdown = slowdown
        # Decayed sums of the seconds and of the tokens of recent chunks.
        self._chunk_s = self._chunk_tokens = 0.0
        # Seconds of a step without chunks, by the bit_length of its number of requests.
        self._plain_s: dict[int, float] = {}
        # Steps with chunks since the last step without, by the bit_length of the number of decodes.
        self._num_chunked: dict[int, int] = {}
        self._room = math.inf  # number of prompt tokens that fit into memory in one step

    def limit(self, num_decodes: int, budget: int) -> int:
        """Return the maximum number of prompt tokens for a step with ``num_decodes`` decodes.

        It is at most ``budget``, and at most the number of tokens that fit into memory.
        """
        return int(min(self._room, self._limit(num_decodes, budget)))

    @property
    def token_seconds(self) -> float:
        """Mean seconds per recent prompt token; 0 before any prompt token was computed."""
        return self._chunk_s / self._chunk_tokens if self._chunk_tokens else 0.0

    def shrink_chunks(self, plan: StepPlan) -> None:
        """Halve the prompt tokens of later steps after memory ran out; they grow again slowly."""
        num_tokens = num_chunk_tokens(plan.requests)
        if num_tokens:
            self._room = max(LEAST_CHUNK, num_tokens / 2)

    def _limit(self, num_decodes: int, budget: int) -> int:
        if self._slowdown == math.inf:
            return budget
        if not num_decodes:
            return self._tokens_in(STEP_SECONDS, WIDE_CHUNK, budget)
        if self._is_plain_due(num_decodes.bit_length()):
            return 0
        plain_s = self._plain(num_decodes)
        if not plain_s:
            return budget
        return self._tokens_in((self._slowdown - 1.0) * plain_s, LEAST_CHUNK, budget)

    def _tokens_in(self, seconds: float, least: int, most: int) -> int:
        """Return how many prompt tokens can be computed in ``seconds``, within [least, most].

        Returns ``most`` until a chunk was measured.
        """
        if not self._chunk_s:
            return most
        tokens = seconds * self._chunk_tokens / self._chunk_s
        return min(most, max(least, int(min(tokens, most))))

    def observe(self, plan: StepPlan, output: StepOutput) -> None:
        """Update the estimates with the times of a step, if the runner reported any."""
        chunks = [
            scheduled.stop - scheduled.start
            for scheduled in plan.requests
            if scheduled.stop - scheduled.start > 1
        ]
        num_decodes = len(plan.requests) - len(chunks)
        if sum(chunks) + 1 > self._room:  # the maximum number of tokens did fit into memory
            self._room *= 1 + REGROWTH
        size, seconds = num_decodes.bit_length(), sum(output.times.values())
        is_stale = not chunks and self._num_chunked.pop(size, 0) > 0
        if not 0.0 < seconds < math.inf:
            return
        if not chunks:
            before, rate = self._plain_s.get(size, seconds), STALE_RATE if is_stale else MEAN_RATE
            self._plain_s[size] = before + rate * (seconds - before)
            return
        if num_decodes:
            self._num_chunked[size] = self._num_chunked.get(size, 0) + 1
        own_s = max(0.0, seconds - self._plain(max(1, num_decodes)))
        self._chunk_s += own_s - MEAN_RATE * self._chunk_s
        self._chunk_tokens += sum(chunks) - MEAN_RATE * self._chunk_tokens

    def _is_plain_due(self, size: int) -> bool:
        every = REMEASURE if size in self._plain_s else MEASURE
        return self._num_chunked.get(size, 0) >= every

    def _plain(self, num_decodes: int) -> float:
        """Return the measured seconds of a step that only decodes ``num_decodes`` requests.

        The nearest measured number of requests is used; 0 if no such step was measured.
        """
        size = num_decodes.bit_length()
        nearest = min(self._plain_s, key=lambda known: (abs(known - size), known), default=None)
        return 0.0 if nearest is None else self._plain_s[nearest]


def num_step_tokens(requests: Iterable[ScheduledRequest]) -> int:
    """Return the number of tokens that a step computes for ``requests``, drafts excluded."""
    return sum([scheduled.stop - scheduled.start for scheduled in requests])


def num_chunk_tokens(requests: Iterable[ScheduledRequest]) -> int:
    """Return the number of prompt tokens that a step computes for ``requests``."""
    return sum(
        scheduled.stop - scheduled.start
        for scheduled in requests
        if scheduled.stop - scheduled.start > 1
    )
