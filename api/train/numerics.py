"""Differences between the log-probabilities of sampling and of training.

Both estimates are defined as in tinker-cookbook 0.6 (`compute_kl_sample_train`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple


class SampleTrainKL(NamedTuple):
    """Estimates of the KL divergence between sampler and trainer, over all answer tokens.

    ``v1``: mean of sampled minus trained log-probability. ``v2``: half the mean squared difference.
    ``num_different``: tokens whose two log-probabilities are not equal in every bit.
    """

    v1: float
    v2: float
    num_tokens: int
    num_different: int


def kl_sample_train(
    sampled: Iterable[Sequence[float]], trained: Iterable[Sequence[float]]
) -> SampleTrainKL:
    """Compare log-probabilities of the same answers, one sequence [len(answer)] each.

    Raises ValueError for sequences of different lengths, and without tokens.
    """
    pairs = [
        pair
        for one, other in zip(sampled, trained, strict=True)
        for pair in zip(one, other, strict=True)
    ]
    if not pairs:
        raise ValueError("there are no tokens to compare")
    diffs = [one - other for one, other in pairs]
    return SampleTrainKL(
        v1=math.fsum(diffs) / len(diffs),
        v2=math.fsum(diff * diff for diff in diffs) / (2 * len(diffs)),
        num_tokens=len(diffs),
        num_different=sum(one != other for one, other in pairs),
    )
