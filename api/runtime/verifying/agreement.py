"""Agreement of an answer with the model if its engine may have rounded differently.

A binomial test of the tokens whose margin is large. Margins of scores with equal noise tell models
apart: Token-DiFR, arXiv 2511.20621.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ...types.verdict import Agreement

TOLERANCE = 0.5  # margin, in units of scores, that rounding rarely exceeds
RATE = 0.002  # most tokens per token whose margin exceeds it because of rounding; docs/verify.md
LEAST_P = 0.001  # error rate of the verdict: answers of the same model that are rejected
NEGLIGIBLE = 1e-18  # a term that changes no sum of probabilities


def agreement_of(margins: Sequence[float], num_tokens: int) -> Agreement:
    """Return the agreement of ``num_tokens`` tokens, of which some have these ``margins``."""
    count = sum(margin > TOLERANCE for margin in margins)
    p_value = tail(num_tokens, count, RATE)
    return Agreement(
        large_margins=count,
        tolerance=TOLERANCE,
        p_value=p_value,
        same_model=p_value >= LEAST_P,
    )


def tail(trials: int, least: int, rate: float) -> float:
    """Return the probability of at least ``least`` successes in ``trials`` of this ``rate``."""
    if least > trials:
        return 0.0
    log_rate, log_rest = math.log(rate), math.log1p(-rate)
    below = 0.0
    for count in range(least):
        term = math.exp(_log_choose(trials, count) + count * log_rate + (trials - count) * log_rest)
        below += term
        if count > trials * rate and term < NEGLIGIBLE:
            break  # the terms after the mean only fall
    return max(0.0, 1.0 - below)


def _log_choose(trials: int, count: int) -> float:
    return math.lgamma(trials + 1) - math.lgamma(count + 1) - math.lgamma(trials - count + 1)
