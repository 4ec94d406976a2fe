"""TemperatureTuner: how much to sharpen a draft's distribution, learnt from acceptances.

The verifier never sees what a draft was drawn from, so dividing its logits by tau is free to tune.
Once the target's token is known, the token that each tau of a grid would have drawn there is
computed, with the noise of that position: no tau has to be used to be judged. Two taus are compared
by the tokens that just one of them got right (McNemar's test).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from torch import Tensor

from ...core.interface.plan import ScheduledRequest
from ...core.sampling.logits_processors import SampleRow
from ...core.sampling.sampler import Sampler, TorchSampler

GRID = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.2, 1.5)
_SIGMAS = 3.0  # by which another tau must win to replace the current one
_DECAY = 0.999  # of what was seen, per answer
_NUM_EAGER = 256  # answers until the sampling becomes rare
_EAGER, _RARE = 8, 64  # one draft in so many: an answer costs several draws


class TemperatureTuner:
    """Chooses among `GRID`. Deterministic: the same drafts and answers give the same tau.

    ``sampler``: the one that draws the drafts.
    """

    def __init__(self, sampler: Sampler | None = None) -> None:
        self._sampler = sampler or TorchSampler()
        self._current = GRID.index(1.0)
        # [a, b]: how often tau a was right and tau b was not, decayed
        self._wins = np.zeros((len(GRID), len(GRID)))
        self._num_drafts = 0
        self._num_answers = 0
        self._kept: dict[str, tuple[int, Tensor]] = {}  # by request: position, logits [vocab]

    @property
    def temperature_scale(self) -> float:
        """The best so far, 1.0 at first."""
        return GRID[self._current]

    def keep(self, scheduled: ScheduledRequest, logits: Tensor) -> None:
        """Keep the ``logits`` [vocab] of one draft in some, for the token after ``tokens``.

        Drafts of greedy requests are skipped: their best token is the same for every tau.
        """
        if scheduled.sampling.params.temperature == 0.0:
            return
        self._num_drafts += 1
        if self._num_drafts % (_EAGER if self._num_answers < _NUM_EAGER else _RARE) == 0:
            self._kept[scheduled.request_id] = len(scheduled.tokens), logits.clone()

    def settle(self, scheduled: ScheduledRequest) -> None:
        """Judge the kept logits of this request, if the target's token is known by now."""
        at, logits = self._kept.pop(scheduled.request_id, (len(scheduled.tokens), None))
        if logits is None or at >= len(scheduled.tokens):
            return
        sample_rows = [SampleRow(scheduled.tokens[:at], scheduled.sampling)]

        def draw(temperature_scale: float) -> int:
            return self._sampler.sample(
                logits[None], sample_rows, temperature_scale=temperature_scale
            )[0].token_id

        drawn = _all_drawn(draw)
        self.judge([token_id == scheduled.tokens[at] for token_id in drawn])

    def forget(self, request_ids: Sequence[str]) -> None:
        """Drop the kept logits of requests that ended."""
        for request_id in request_ids:
            self._kept.pop(request_id, None)

    def judge(self, hits: Sequence[bool]) -> None:
        """Learn which tau of `GRID` would have drawn the target's token, [len(GRID)]."""
        self._num_answers += 1
        right = np.array(hits, dtype=bool)
        self._wins = self._wins * _DECAY + np.outer(right, ~right)
        won, lost = self._wins[:, self._current], self._wins[self._current]
        clear = won - lost > _SIGMAS * np.sqrt(won + lost)
        if clear.any():
            self._current = int(np.argmax(np.where(clear, won - lost, -np.inf)))


def _all_drawn(draw: Callable[[float], int]) -> list[int]:
    """The token that each tau of `GRID` draws; those between two that agree are not computed.

    A token's score is linear in 1 / tau, so the best score is convex: a token that wins at both
    ends of a span wins inside it. (top-p may cut otherwise there; that is rare and harmless.)
    """
    drawn: dict[int, int] = {index: draw(GRID[index]) for index in (0, len(GRID) - 1)}
    spans = [(0, len(GRID) - 1)]
    while spans:
        low, high = spans.pop()
        if drawn[low] == drawn[high]:
            drawn.update(dict.fromkeys(range(low, high), drawn[low]))
        elif high - low > 1:
            middle = (low + high) // 2
            drawn[middle] = draw(GRID[middle])
            spans += [(low, middle), (middle, high)]
    return [drawn[index] for index in range(len(GRID))]
