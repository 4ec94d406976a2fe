"""The controller on recorded texts and prices, without a clock: how much it gives away.

`python -m foretoken.bench.lab.regret` prints the table of all cells.
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean

import pytest

from foretoken.bench.lab.recorded_steps import Prices, Text, load
from foretoken.bench.lab.regret import TruePrices, auto, compared, fixed

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


@MACHINES
def test_a_recording_is_the_same_every_time_and_drafts_pay_on_it(prices: Prices) -> None:
    """Else the figures above would say nothing."""
    edit = next(text for text in RECORDING.texts if (text.kind, text.temperature) == ("edit", 0.0))
    first, second = (auto(edit, TruePrices(prices), 1)[0] for _ in range(2))
    assert first == second
    assert first.num_tokens == sum(len(answer) - 1 for _, answer in edit.requests())
    assert first.rate > 1.5 * fixed(edit, TruePrices(prices), 1, 0).rate
