"""Meter: how long a verdict against drafts holds, and which steps are learnt from."""

from __future__ import annotations

from array import array

import pytest
from msgspec.structs import replace

from foretoken.core.params import SamplingParams
from foretoken.core.step import PlanRow, RowOutput, RowSampling, StepOutput, StepPlan
from foretoken.draft.controller import Controller
from foretoken.draft.costs import CostModel
from foretoken.draft.meter import (
    BRIEF_REST,
    CUT_EVERY,
    FIRST_PEEK,
    MAX_PATIENCE,
    MAX_REST,
    OBSERVE_EVERY,
    OBSERVE_LEAST,
    PEEK_SHARE,
    RUN,
    Meter,
)

SAMPLING = RowSampling(params=SamplingParams(), seed=0, prompt_len=1)
ROW = PlanRow(
    request_id="a",
    tokens=array("q", [1, 2]),
    start=1,
    stop=2,
    page_ids=array("q", [0]),
    sampling=SAMPLING,
)
PLAN = StepPlan(rows=[ROW], fresh_pages=array("q"))
OUTPUT = StepOutput(rows=[RowOutput(request_id="a", token_ids=[3])], num_rows=1)


class Watched(Meter):
    """Counts the steps that it learns from, each of which takes ``learn_s``."""

    def __init__(self, learn_s: float = 0.0) -> None:
        self.now, self.learn_s, self.num_learnt = 0.0, learn_s, 0
        super().__init__(Controller(CostModel()), lambda: self.now)

    def _observe_costs(self, *_: object) -> None:
        self.num_learnt += 1
        self.now += self.learn_s

    def steps(self, count: int, seconds: float) -> int:
        """So many plain steps; returns how many of them rested."""
        rested = 0
        for _ in range(count):
            rested += self.rests()
            self.end(PLAN, OUTPUT, seconds)
        return rested


def decided(step_s: float, decide_s: float) -> Watched:
    meter = Watched()
    meter.steps(200, step_s)
    meter.decide_s = decide_s
    meter.rest()
    return meter


@pytest.mark.parametrize(
    ("step_s", "decide_s", "steps"),
    [(0.050, 0.0002, 2), (0.010, 0.0004, 20), (0.010, 0.1, MAX_REST), (0.0005, 0.0002, 200)],
)
def test_a_verdict_holds_longer_the_dearer_it_was(step_s, decide_s, steps) -> None:
    assert decided(step_s, decide_s).steps(1000, step_s) == pytest.approx(steps, abs=1)


def test_a_verdict_does_not_outlive_the_steps_that_it_was_made_for() -> None:
    meter = decided(0.0005, 0.0002)
    assert meter.steps(1000, 0.050) <= 5, "a tenth of a second was meant, twice that at most"


@pytest.mark.parametrize(
    ("learn_s", "every"), [(0.0, OBSERVE_EVERY), (0.0002, 20), (1.0, OBSERVE_LEAST)]
)
def test_plain_steps_are_learnt_from_as_often_as_that_is_cheap(learn_s, every) -> None:
    meter = Watched(learn_s)
    meter.steps(400, 0.010)
    meter.num_learnt = 0
    meter.steps(10 * every, 0.010)
    assert meter.num_learnt == pytest.approx(10, abs=2)


def test_a_step_that_paid_for_a_verdict_does_not_tell_what_plain_decoding_costs() -> None:
    meter = decided(0.010, 0.0004)
    meter.num_learnt = 0
    meter.decided(0.0004)
    meter.end(PLAN, OUTPUT, 0.010)
    assert not meter.num_learnt


def verdicts(step_s: float, decide_s: float, verdict_s: float, *, num_rows: int = 1) -> Watched:
    """After many verdicts, each in a step that took so much longer than those of the rest.

    ``num_rows`` of that step: more than one are a prompt's.
    """
    meter = decided(step_s, decide_s)
    for _ in range(100):
        meter.steps(200, step_s)
        meter.begin()
        meter.rest()
        meter.decided(decide_s)
        meter.end(PLAN, replace(OUTPUT, num_rows=num_rows), step_s + verdict_s)
        meter.begin()
    meter.steps(200, step_s)
    return meter


@pytest.mark.parametrize(("verdict_s", "steps"), [(0.0, 20), (0.0008, 40), (1.0, 60)])
def test_a_verdict_holds_by_what_its_step_took_but_for_a_stall(verdict_s, steps) -> None:
    meter = verdicts(0.010, 0.0004, verdict_s)
    meter.rest()
    assert meter.steps(1000, 0.010) == pytest.approx(steps, abs=5)


def test_a_prompt_beside_a_verdict_makes_it_no_dearer() -> None:
    meter = verdicts(0.010, 0.0004, 1.0, num_rows=256)
    meter.rest()
    assert meter.steps(1000, 0.010) == pytest.approx(20, abs=5)


def test_every_step_of_a_brief_rest_is_learnt_from() -> None:
    meter = decided(0.010, 0.0004)
    meter.rest(briefly=True)
    meter.num_learnt = 0
    assert meter.steps(BRIEF_REST, 0.010) == BRIEF_REST
    assert meter.num_learnt == BRIEF_REST
    assert not meter.is_resting


def test_a_prompt_does_not_make_a_verdict_short() -> None:
    meter = Watched()
    meter.steps(200, 0.0005)
    meter.end(PLAN, replace(OUTPUT, num_rows=256), 0.030)
    meter.decide_s = 0.0002
    meter.rest()
    assert meter.steps(1000, 0.0005) == pytest.approx(200, abs=1)


def test_a_verdict_that_grows_old_is_told_of_while_it_still_holds() -> None:
    meter = decided(0.010, 0.0004)
    assert meter.run() == RUN
    ending = [meter.is_ending for _ in range(20) if meter.rests()]
    assert ending == [False] * 15 + [True] * 5


def test_a_verdict_that_is_made_again_holds_anew_by_what_that_took() -> None:
    meter = decided(0.010, 0.0)
    for _ in range(200):
        meter.reconsidered(0.0008)
    assert meter.steps(1000, 0.010) == pytest.approx(40, abs=1)


def test_what_is_told_late_counts_in_full() -> None:
    meter = decided(0.010, 0.1)
    meter.passed(3, 1000.0)
    assert not meter.is_resting, "steps have become longer than was meant"
    assert meter.steps(OBSERVE_EVERY - 4, 0.010) == 0
    before = meter.num_learnt
    meter.steps(1, 0.010)
    assert meter.num_learnt == before + 1


def test_a_clock_that_stands_still_is_borne() -> None:
    meter = Watched()
    meter.steps(100, 0.0)
    meter.rest()
    assert meter.steps(100, 0.0) == 0


def steps_until_peek(meter: Meter) -> int:
    for step in range(1, 1000):
        meter.passed(1, 0.0)
        if meter.may_peek:
            return step
    raise AssertionError("nobody looks")


def test_a_rest_is_looked_into_as_often_as_that_is_cheap() -> None:
    meter = decided(0.010, 0.1)
    assert steps_until_peek(meter) == 1
    meter.peeked(10 * PEEK_SHARE * 0.010, found=False)
    assert steps_until_peek(meter) == 10
    meter.peeked(1.0, found=False)
    assert steps_until_peek(meter) == MAX_REST
    meter.peeked(1.0, found=False)
    meter.end(PLAN, replace(OUTPUT, num_rows=5), 0.010)  # with drafts: what they repeat may end
    assert steps_until_peek(meter) == FIRST_PEEK + 1


def test_who_ends_rests_in_vain_looks_more_seldom_until_a_draft_is_made() -> None:
    meter = decided(0.010, 0.1)
    assert steps_until_peek(meter) == 1
    waits = []
    for _ in range(6):
        meter.peeked(PEEK_SHARE * 0.010, found=True)
        assert not meter.is_resting
        meter.rest()  # the verdict is the same
        waits.append(steps_until_peek(meter))
    assert waits == [1, 2, 4, 8, MAX_PATIENCE, MAX_PATIENCE]
    meter.decided(0.0)
    meter.end(PLAN, replace(OUTPUT, num_rows=5), 0.010)
    meter.peeked(PEEK_SHARE * 0.010, found=False)
    assert steps_until_peek(meter) == 1


def test_one_rest_in_a_few_is_cut_for_who_comes() -> None:
    meter = decided(0.010, 0.1)
    was_cut = []
    for _ in range(3 * CUT_EVERY):
        assert meter.rests()
        meter.cut_rest()
        was_cut.append(meter.is_ending)
        meter.rest()
    assert was_cut == ([False] * (CUT_EVERY - 1) + [True]) * 3


def test_who_is_alone_is_weighed_at_once_and_the_next_rests_go_on() -> None:
    meter = decided(0.010, 0.1)
    assert meter.rests()
    meter.cut_rest(anyway=True)
    assert meter.is_ending
    meter.rest()
    meter.cut_rest()
    assert not meter.is_ending


PLAIN = replace(PLAN, is_plain=True)


class Told(Watched):
    """Keeps what the controller is told: rested steps, and the seconds of those it allocated."""

    def __init__(self) -> None:
        super().__init__()
        self.num_rested, self.allocated = 0, []
        self.controller.rested = self._rested  # type: ignore[method-assign]

    def _rested(self, num_steps: int) -> None:
        self.num_rested += num_steps

    def _observe_outcome(self, *args: object) -> None:
        self.allocated.append(args[-1])


@pytest.mark.parametrize("is_ahead", [False, True])
def test_a_rest_is_told_of_alike_where_steps_are_planned_ahead(is_ahead) -> None:
    meter = Told()
    meter.steps(200, 0.010)
    meter.decide_s = 0.0004
    meter.begin()
    meter.rest()
    meter.decided(0.0004)
    meter.end(PLAN, OUTPUT, 0.5)
    num_rested = num_under_way = 0
    while meter.rests():
        num_rested += 1
        num_under_way += 1
        if num_under_way > is_ahead:
            meter.end(PLAIN, OUTPUT, 0.010)
            num_under_way -= 1
    for _ in range(num_under_way):
        meter.end(PLAIN, OUTPUT, 0.010)
    assert num_rested == pytest.approx(20, abs=1)
    assert (meter.num_rested, meter.allocated) == (num_rested, [0.5])


def test_a_step_that_failed_is_not_told_of_in_place_of_the_next() -> None:
    meter = Told()
    meter.begin()
    meter.decided(0.001)
    meter.end(PLAIN, OUTPUT, 0.010)  # that one failed: it never ends
    meter.begin()
    meter.end(PLAN, OUTPUT, 0.010)
    assert not meter.allocated
