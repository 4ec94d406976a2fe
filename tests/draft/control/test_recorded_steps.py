"""The controller on recorded texts and prices, without a clock: how much it gives away."""

from __future__ import annotations

from collections.abc import Iterator
from math import log
from statistics import fmean

import numpy as np
import pytest

from foretoken.bench.lab.recorded_steps import Prices, Text, load
from foretoken.draft.control.cost_model import StepProfile
from foretoken.draft.control.profiler import MOST_GUESSED
from support.recorded_replay import TruePrices, auto, compared, fixed

RECORDING = load()
MACHINES = pytest.mark.parametrize("prices", RECORDING.prices, ids=lambda prices: prices.name)
LOADS = (4, 16)
pytestmark = pytest.mark.slow


def cells(prices: Prices) -> Iterator[tuple[Text, int]]:
    """Texts and loads for a machine: a greedy text alone, and in turn at one of `LOADS`.

    Sampled answers differ less: every other one, alone. The machines' turns are opposite.
    """
    turn = RECORDING.prices.index(prices)
    for index, kind in enumerate(dict.fromkeys(text.kind for text in RECORDING.texts)):
        for text in (each for each in RECORDING.texts if each.kind == kind):
            if text.temperature == 0.0:
                yield text, 1
                yield text, LOADS[(index + turn) % len(LOADS)]
            elif (index + turn) % 2:
                yield text, 1


@MACHINES
def test_auto_is_near_an_oracle_and_as_good_as_the_best_fixed_depth(prices: Prices) -> None:
    lines = {
        (text.kind, text.temperature, load): compared(text, TruePrices(prices), load)
        for text, load in cells(prices)
    }
    regrets = {cell: float(line["regret"]) for cell, line in lines.items()}
    ratios = {cell: float(line["auto / best"]) for cell, line in lines.items()}
    assert fmean(regrets.values()) < 0.03
    assert fmean(ratios.values()) > 1.0
    assert {cell: ratio for cell, ratio in ratios.items() if ratio < 0.93} == {}


# Of a guess's largest width, on each machine; that of one row is right.
ERRORS = pytest.mark.parametrize(
    ("prices", "error"),
    list(zip(RECORDING.prices, (0.85, 1.25), strict=True)),
    ids=[prices.name for prices in RECORDING.prices],
)


def guessed(prices: TruePrices, error: float) -> StepProfile:
    """The costs that an engine guesses at its first start: fewer widths, each of them wrong."""
    knots = [rows for rows in prices.recorded.knots if rows <= MOST_GUESSED]
    errors = np.interp(np.log(knots), [0.0, log(MOST_GUESSED)], [1.0, error]).tolist()
    pairs = zip(knots, errors, strict=True)
    forward = {rows: each * float(prices.forward(rows)) for rows, each in pairs}
    return StepProfile(forward, {}, 1.5 * prices.recorded.key_s)


@ERRORS
def test_guessed_costs_lose_little_of_what_measured_ones_reach(
    prices: Prices, error: float
) -> None:
    ratios = {}
    true = TruePrices(prices)
    for text, num_seats in cells(prices):
        by_guess = auto(text, true, num_seats, guessed(true, error))[0].rate
        by_measure = auto(text, true, num_seats)[0].rate
        ratios[text.kind, text.temperature, num_seats] = by_guess / by_measure
    assert fmean(ratios.values()) > 0.97
    assert {cell: ratio for cell, ratio in ratios.items() if ratio < 0.88} == {}


@MACHINES
def test_a_recording_is_the_same_every_time_and_drafts_pay_on_it(prices: Prices) -> None:
    """Else the figures above would say nothing."""
    edit = next(text for text in RECORDING.texts if (text.kind, text.temperature) == ("edit", 0.0))
    first, second = (auto(edit, TruePrices(prices), 1)[0] for _ in range(2))
    assert first == second
    assert first.num_tokens == sum(len(answer) - 1 for _, answer in edit.requests())
    assert first.rate > 1.5 * fixed(edit, TruePrices(prices), 1, 0).rate
