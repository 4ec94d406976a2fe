"""Confidence: how likely a drafted token is the target's, by the draft's own probability of it.

That probability is far from the chance itself: drawn with the verifier's noise, tokens of which the
draft thought little are accepted more often than not. So the chance is measured, by level.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence

import torch
from torch import Tensor

from ..core.sampling import SampleRow

_EDGES = (0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.97)  # of the levels of probability
_PRIOR_WEIGHT = 8.0  # outcomes that the first guess counts for
_DECAY = 0.998  # of a level's outcomes, per outcome


class Confidence:
    """Chance of acceptance by level of probability, for greedy and for random drafts apart."""

    def __init__(self) -> None:
        middles = [(a + b) / 2 for a, b in zip((0.0, *_EDGES), (*_EDGES, 1.0), strict=True)]
        # [greedy or random][level]: outcomes seen, accepted ones among them
        self._seen = [[_PRIOR_WEIGHT] * len(middles) for _ in range(2)]
        self._accepted = [[_PRIOR_WEIGHT * (1 + p) / 2 for p in middles] for _ in range(2)]

    def chance(self, prob: float, *, greedy: bool) -> float:
        """Chance that a token drafted with this probability is accepted, after accepted ones."""
        level = bisect(_EDGES, prob)
        return self._accepted[greedy][level] / self._seen[greedy][level]

    def observe(self, probs: Sequence[float], num_accepted: int, *, greedy: bool) -> None:
        """A draft whose tokens had these probabilities was accepted up to its ``num_accepted``-th.

        The token behind those was refused; what follows it says nothing.
        """
        for index, prob in enumerate(probs[: num_accepted + 1]):
            level = bisect(_EDGES, prob)
            self._seen[greedy][level] = self._seen[greedy][level] * _DECAY + 1.0
            hit = float(index < num_accepted)
            self._accepted[greedy][level] = self._accepted[greedy][level] * _DECAY + hit


def own_probs(logits: Tensor, rows: Sequence[SampleRow], token_ids: Sequence[int]) -> list[float]:
    """The draft's probabilities of its ``token_ids`` [num_rows] under ``logits`` [num_rows, vocab].

    With the temperature (1 for greedy rows), without penalties and cuts: the levels are measured,
    so they need not be exact.
    """
    degrees = [row.sampling.params.temperature or 1.0 for row in rows]
    divisor = torch.tensor(degrees, dtype=torch.float32).clamp_(min=1e-3).to(logits.device)
    values = logits.to(torch.float32) / divisor[:, None]
    ids = torch.tensor(token_ids, dtype=torch.int64).to(logits.device)
    found = values.gather(-1, ids[:, None])[:, 0] - values.logsumexp(-1)
    probs: list[float] = found.exp().tolist()
    return probs
