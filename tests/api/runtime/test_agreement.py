"""The statistical verdict: a binomial test of large margins."""

from __future__ import annotations

import math
import time
from fractions import Fraction

import pytest

from foretoken.api.runtime.verifying.agreement import LEAST_P, RATE, TOLERANCE, agreement_of, tail


@pytest.mark.parametrize(("trials", "least"), [(1, 1), (10, 0), (10, 1), (40, 3), (500, 7)])
def test_the_tail_is_that_of_the_binomial_distribution(trials: int, least: int) -> None:
    rate = Fraction(1, 50)
    exact = sum(
        math.comb(trials, count) * rate**count * (1 - rate) ** (trials - count)
        for count in range(least, trials + 1)
    )
    assert tail(trials, least, float(rate)) == pytest.approx(float(exact), rel=1e-9)
    assert tail(trials, trials + 1, float(rate)) == 0


def test_the_tail_of_a_long_answer_is_computed_quickly() -> None:
    began = time.perf_counter()
    assert tail(2**16, 2**16, RATE) < 1e-9
    assert time.perf_counter() - began < 0.02


def test_small_margins_are_no_evidence() -> None:
    found = agreement_of([TOLERANCE] * 50, 100)
    assert (found.large_margins, found.p_value, found.same_model) == (0, 1.0, True)
    assert agreement_of([], 0).same_model


def test_large_margins_and_excluded_tokens_reject_the_model() -> None:
    count = next(each for each in range(100) if tail(128, each, RATE) < LEAST_P)
    margins = [TOLERANCE + 0.01] * (count - 2) + [math.inf]
    assert agreement_of(margins, 128).same_model
    assert not agreement_of([*margins, 1.0], 128).same_model
    assert agreement_of([*margins, 1.0], 128).large_margins == count
