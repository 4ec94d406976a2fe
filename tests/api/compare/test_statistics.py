"""The confidence sequence: coverage at every look, power, and its ends."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from foretoken.api.compare.statistics import BETS, ConfidenceSequence, log_capital

RUNS = 2_000
TASKS = 500


def first_refusals(rng: np.random.Generator, draw, mean: float, level: float = 0.95) -> float:
    """The share of runs in which a look before the end excludes ``mean``.

    The capital is computed as `log_capital` defines it, for all runs and looks at once;
    `test_capital_by_look_is_that_of_the_sequence` compares the two.
    """
    differences = draw(rng, (RUNS, TASKS))
    return float((capitals(differences, mean) >= -math.log(1 - level)).any(axis=1).mean())


def capitals(differences: np.ndarray, mean: float) -> np.ndarray:
    """The log capital of each run after each task: [runs, tasks]."""
    total = np.full(differences.shape, -math.inf)
    for bet in BETS:
        for sign, room in ((1, 1 + mean), (-1, 1 - mean)):
            log = np.log1p(bet * sign * (differences - mean) / room).cumsum(axis=1)
            total = np.logaddexp(total, log)
    return total - math.log(2 * len(BETS))


def paired(share: float, gain: float = 0.0):
    """Differences of scores 0 and 1: ``share`` of the tasks differ, B gains ``gain`` on average."""

    def draw(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
        sign = np.where(rng.random(shape) < 0.5 + gain / share / 2, 1.0, -1.0)
        return np.where(rng.random(shape) < share, sign, 0.0)

    return draw


def graded(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    return rng.beta(0.3, 0.6, shape) - rng.beta(0.3, 0.6, shape)


def skewed(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    """Rarely a great loss, else a small gain; the mean is 0."""
    return np.where(rng.random(shape) < 0.02, -0.98, 0.02)


A_A = {
    "few differ": paired(0.05), "half differ": paired(0.5), "all differ": paired(1.0),
    "graded": graded, "skewed": skewed,
}  # fmt: skip


@pytest.mark.parametrize("name", A_A)
def test_equal_variants_are_called_different_in_at_most_5_percent_of_runs(name: str) -> None:
    rng = np.random.default_rng(1)
    assert first_refusals(rng, A_A[name], 0.0) <= 0.05


def test_all_intervals_of_a_run_contain_the_true_mean_in_95_percent_of_runs() -> None:
    rng = np.random.default_rng(2)
    assert first_refusals(rng, paired(0.3, gain=0.1), 0.1) <= 0.05


def test_stopping_when_a_fixed_interval_excludes_0_would_be_wrong_far_more_often() -> None:
    """What the sequence is for: a t interval that is looked at after each task errs often."""
    rng = np.random.default_rng(1)
    drawn = paired(0.5)(rng, (RUNS, TASKS))
    num = np.arange(1, TASKS + 1)
    mean = drawn.cumsum(axis=1) / num
    deviation = np.sqrt((drawn**2).cumsum(axis=1) / num - mean**2)
    wrong = (np.abs(mean) > 1.96 * deviation / np.sqrt(num))[:, 20:].any(axis=1).mean()
    assert wrong > 0.2


def test_a_difference_is_found_with_less_than_twice_the_tasks_of_a_test_at_a_fixed_number() -> None:
    share, gain = 0.2, 0.08
    fixed = (1.96 + 0.84) ** 2 * (share - gain**2) / gain**2  # power 80%, one look
    rng = np.random.default_rng(3)
    drawn = paired(share, gain)(rng, (400, int(3 * fixed)))
    crossed = capitals(drawn, 0.0) >= math.log(20)
    found = np.where(crossed.any(axis=1), crossed.argmax(axis=1), drawn.shape[1])
    assert np.quantile(found, 0.8) < 2 * fixed
    assert np.median(found) < 1.2 * fixed


def test_capital_by_look_is_that_of_the_sequence() -> None:
    drawn = paired(0.4, 0.2)(np.random.default_rng(4), (1, 60))
    expected = capitals(drawn, 0.1)[0]
    sequence = ConfidenceSequence()
    for at, each in enumerate(drawn[0]):
        sequence.add(float(each))
        values = np.array([*sequence._counts])
        counts = np.array([*sequence._counts.values()], float)
        assert log_capital(values, counts, 0.1) == pytest.approx(expected[at])


def test_an_interval_ends_where_the_capital_reaches_its_limit() -> None:
    sequence = ConfidenceSequence(0.9)
    for each in [1.0] * 12 + [0.0] * 30 + [-1.0] * 3 + [0.25] * 5:
        sequence.add(each)
    low, high = sequence.interval
    assert -1 < low < sequence.mean < high < 1
    for end, inside in ((low, 1e-6), (high, -1e-6)):
        assert sequence.refutes(end)
        assert not sequence.refutes(end + inside)


def test_an_interval_mirrors_the_variants() -> None:
    ours, theirs = ConfidenceSequence(), ConfidenceSequence()
    for each in random.Random(5).choices([1.0, 0.0, -1.0, 0.3], [3, 6, 1, 1], k=80):
        ours.add(each)
        theirs.add(-each)
    assert ours.interval.low == pytest.approx(-theirs.interval.high)
    assert ours.interval.high == pytest.approx(-theirs.interval.low)


def test_the_first_interval_has_every_mean_and_equal_answers_narrow_it_around_0() -> None:
    sequence = ConfidenceSequence()
    assert sequence.interval == (-1.0, 1.0)
    assert sequence.mean == 0.0
    widths = []
    for _ in range(3):
        for _ in range(200):
            sequence.add(0.0)
        low, high = sequence.interval
        assert low == pytest.approx(-high)
        assert not sequence.refutes(0.0)
        widths.append(high)
    assert widths[0] > widths[1] > widths[2]
    assert sequence.is_within(high + 1e-6)
    assert not sequence.is_within(high - 1e-6)
    assert high < 0.02


@pytest.mark.parametrize("extreme", [1.0, -1.0])
def test_extreme_differences_have_intervals(extreme: float) -> None:
    sequence = ConfidenceSequence()
    for _ in range(40):
        sequence.add(extreme)
    assert sequence.refutes(0.0)
    far = sequence.interval.low if extreme < 0 else sequence.interval.high
    assert far == extreme
