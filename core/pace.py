"""Pace: how much of a prompt a step may compute beside requests that wait for their next token.

A step's time is the gap between two tokens of everybody who decodes in it. What a chunk of so many
tokens takes is measured, so the gap is bounded in time on any machine: a fixed chunk is a short
pause on one and a long one on another.
"""

from __future__ import annotations

import math

from .step import LEAST_CHUNK, StepOutput, StepPlan, num_chunk_tokens

MEAN_RATE, STALE_RATE = 0.2, 0.5  # of a new value in a running mean; where the mean is old
REGROWTH = 1 / 64  # of the room for prompts, by each step that fills it, once memory ran out
REMEASURE, MEASURE = 32, 2  # steps with chunks until one without is due; where none was seen yet


class Pace:
    """``slowdown``: how many times longer a step may take for its chunks than without them.

    While prompts keep coming no step is without chunks. So one in a while is left to the decoding
    requests alone: what they take by themselves would be guessed ever lower otherwise, their
    neighbours' chunks ever dearer.
    """

    def __init__(self, slowdown: float) -> None:
        self._slowdown = slowdown
        self._chunk_s = self._chunk_tokens = 0.0  # of the chunks of late, faded alike
        self._plain_s: dict[int, float] = {}  # of a step without chunks, by bits of its requests
        self._num_chunked: dict[int, int] = {}  # steps with chunks since one without, likewise
        self._room = math.inf  # tokens of prompts that fit into memory beside the rest

    def limit(self, num_decodes: int, budget: int) -> int:
        """Tokens of prompts for a step in which so many requests decode; at most ``budget``."""
        return int(min(self._room, self._limit(num_decodes, budget)))

    def ease(self, plan: StepPlan) -> None:
        """Memory ran out in this step: from now on half as much of prompts, and slowly more."""
        num_tokens = num_chunk_tokens(plan.rows)
        if num_tokens:
            self._room = max(LEAST_CHUNK, num_tokens / 2)

    def _limit(self, num_decodes: int, budget: int) -> int:
        if not num_decodes or self._slowdown == math.inf:
            return budget
        if self._is_plain_due(num_decodes.bit_length()):
            return 0
        plain_s = self._plain(num_decodes)
        if not plain_s or not self._chunk_s:
            return budget
        tokens = (self._slowdown - 1.0) * plain_s * self._chunk_tokens / self._chunk_s
        return min(budget, max(LEAST_CHUNK, int(min(tokens, budget))))

    def observe(self, plan: StepPlan, output: StepOutput) -> None:
        """A step was computed; runners that tell no times teach nothing."""
        chunks = [row.stop - row.start for row in plan.rows if row.stop - row.start > 1]
        num_decodes = len(plan.rows) - len(chunks)
        if sum(chunks) + 1 > self._room:  # so much does fit
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
        """Seconds of a step without chunks for about so many requests, else of those most like it.

        0 where none was seen.
        """
        size = num_decodes.bit_length()
        nearest = min(self._plain_s, key=lambda known: (abs(known - size), known), default=None)
        return 0.0 if nearest is None else self._plain_s[nearest]
