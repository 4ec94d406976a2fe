"""The comparison in phases: what a phase is charged with, and what comes of a known price."""

from __future__ import annotations

import math
import random
from array import array
from itertools import count

import numpy as np
import pytest

from foretoken.bench.speculation_rest import (
    SETTLE,
    TIMED,
    WARM_UP,
    Alternating,
    Estimate,
    level,
    texts,
)
from foretoken.core.params import SamplingParams
from foretoken.core.speculation import NoSpeculation
from foretoken.core.step import PlanRow, RowOutput, RowSampling, StepOutput, StepPlan

ROW = PlanRow(
    request_id="a",
    tokens=array("q", [1, 2]),
    start=1,
    stop=2,
    page_ids=array("q", [0]),
    sampling=RowSampling(params=SamplingParams(), seed=0, prompt_len=1),
)
SAID = RowOutput(request_id="a", token_ids=[3])


class Asked(NoSpeculation):
    """Counts what it is asked and told."""

    def __init__(self) -> None:
        super().__init__()
        self.num_asked = self.num_told = self.num_works = 0

    def rests(self) -> bool:
        self.num_asked += 1
        return True

    def observe_step(self, *_: object) -> None:
        self.num_told += 1

    def has_work(self) -> bool:
        return True

    def work(self) -> None:
        self.num_works += 1


def run(alternating: Alternating, asked: Asked, num_steps: int, price: float, noise: float) -> None:
    """Steps of a second, and ``price`` more where the speculator was asked."""
    rng, numbers = random.Random(3), count(1)
    for _ in range(num_steps):
        before = asked.num_asked
        assert alternating.rests()
        if alternating.has_work():
            alternating.work()
        seconds = 1.0 + price * (asked.num_asked - before) + noise * rng.random()
        num_rows = 2 if next(numbers) % 40 else 3
        plan = StepPlan(rows=[ROW] * num_rows, fresh_pages=array("q"), is_plain=True)
        output = StepOutput(rows=[SAID] * num_rows, num_rows=num_rows)
        alternating.observe_step(plan, output, seconds)


@pytest.mark.parametrize("price", [0.0, 0.02])
def test_a_known_price_is_found_through_noise_that_is_much_larger(price) -> None:
    asked = Asked()
    alternating = Alternating(asked, cpu_clock=lambda: 0.0)
    run(alternating, asked, WARM_UP + 400 * (SETTLE + TIMED), price, noise=0.3)
    pairs = alternating.pairs()
    estimate = Estimate.of([off.seconds / on.seconds for on, off in pairs])
    assert len(pairs) > 150
    assert estimate.low < estimate.mean < estimate.high
    assert estimate.mean == pytest.approx(1.0 - price / 1.15, abs=0.005)


def test_what_is_off_is_neither_asked_nor_told_nor_given_time() -> None:
    asked = Asked()
    alternating = Alternating(asked, cpu_clock=lambda: 0.0)
    run(alternating, asked, WARM_UP, 0.0, 0.0)
    assert (asked.num_asked, asked.num_told, asked.num_works) == (WARM_UP,) * 3
    run(alternating, asked, 20 * (SETTLE + TIMED), 0.0, 0.0)
    phases = alternating.phases[:20]
    pairs = zip(phases[::2], phases[1::2], strict=True)
    assert all(first.is_on != second.is_on for first, second in pairs)
    num_on = WARM_UP + 10 * (SETTLE + TIMED)
    assert (asked.num_asked, asked.num_told, asked.num_works) == (num_on,) * 3
    assert {phase.seconds for phase in phases} == {float(TIMED)}, "the steps before are not timed"


def test_what_one_phase_had_to_do_beyond_the_other_is_levelled() -> None:
    """Prompts in a fifth of the phases, dearer than what is looked for, and a few stalls."""
    rng = np.random.default_rng(0)
    more = np.zeros((200, 2))
    more[:, 0] = rng.choice([-32, 0, 0, 0, 32, 64], 200)
    stalls = rng.choice([0.0, 0.0, 0.0, 0.7], 200) * rng.choice([-1, 1], 200)
    quotients = np.exp(-0.02 - 0.004 * more[:, 0] + stalls + rng.normal(0.0, 0.01, 200))
    plain, levelled = Estimate.of(quotients.tolist()), Estimate.of(level(quotients.tolist(), more))
    assert levelled.mean == pytest.approx(math.exp(-0.02), abs=0.004)
    assert abs(plain.mean - math.exp(-0.02)) > 0.01
    assert levelled.high - levelled.low < 0.3 * (plain.high - plain.low)


def test_pairs_that_served_unlike_batches_are_left_out() -> None:
    asked = Asked()
    alternating = Alternating(asked, cpu_clock=lambda: 0.0)
    run(alternating, asked, WARM_UP + 20 * (SETTLE + TIMED), 0.0, 0.0)
    before = len(alternating.pairs())
    alternating.phases[0].num_rows *= 2
    assert len(alternating.pairs()) == before - 1


def test_texts_are_the_same_in_each_run_and_never_repeat_one_another() -> None:
    fresh = [(list(range(100)), [1])]
    (adversarial, own), (again, _) = (
        texts(fresh, 1000, prompt_len=32, output_len=96) for _ in range(2)
    )
    made = [adversarial.make(number) for number in range(20)]
    assert made == [again.make(number) for number in range(20)]
    assert len({tuple(prompt) for prompt, _ in made}) == 20
    assert {token for prompt, answer in made for token in (*prompt, *answer)} <= set(range(1000))
    assert all(48 <= len(answer) <= 144 for _, answer in made)
    assert own.make(5)[0] == list(range(68, 100))
