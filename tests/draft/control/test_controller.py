"""Controller around an allocation: when drafting may begin, trials, the log."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import ArrayLike

from foretoken.draft.control.controller import (
    FIRST_PROBE,
    LAST_PROBE,
    PROBE_SHARE,
    Allocation,
    Controller,
    ProbeScheduler,
    StepCandidates,
)
from foretoken.draft.control.cost_model import CostModel, StepProfile

ROWS = (1, 2, 4, 8, 16, 64)
STEP_S, PASS_S = 0.0101, 0.001  # of a plain step of one request, of a pass of the draft model
CHEAP = StepProfile({n: 0.010 + 0.0001 * n for n in ROWS}, {1: PASS_S, 64: 2 * PASS_S})


def candidates(
    lookup: ArrayLike, lm: ArrayLike = (), *, budget: int = 99, num_uncached_draft_tokens: int = 0
) -> StepCandidates:
    table = np.array(lookup, dtype=float)
    return StepCandidates(
        lookup_survival=table,
        expected_accepted=np.array(lm, dtype=float).reshape(len(table), -1),
        num_uncached_draft_tokens=np.full(len(table), num_uncached_draft_tokens),
        budget=budget,
    )


WEAK = candidates(np.zeros((4, 0)), [[0.02]] * 4)  # a draft model that does not pay


def trials(
    num_steps: int, *, hits: bool = False, given: StepCandidates = WEAK, step_s: float = STEP_S
) -> list[int]:
    """The steps in which a draft model is tried that hits or fails in every trial."""
    controller, tried = Controller(CostModel(CHEAP)), []
    for number in range(num_steps):
        num_drafted = int(controller.allocate(given).num_proposer.sum())
        tried += [number] * num_drafted
        controller.observe(step_s, num_drafted=num_drafted, num_hits=num_drafted if hits else 0)
    return tried


# -- trials -------------------------------------------------------------------------------------


def test_a_trial_is_one_token_of_the_request_that_lacks_least() -> None:
    controller = Controller(CostModel(CHEAP))
    given = StepCandidates(
        lookup_survival=np.zeros((4, 0)),
        expected_accepted=np.array([[0.02, 0.01], [0.0, 0.0], [0.02, 0.01], [0.02, 0.01]]),
        num_uncached_draft_tokens=np.array([30, 1, 5, 20]),  # the second may not be drafted for
        budget=9,
    )
    for _ in range(FIRST_PROBE):
        assert controller.allocate(given).num_rows == 0
        controller.observe(STEP_S, num_drafted=0, num_hits=0)
    found = controller.allocate(given)
    assert found.num_proposer.tolist() == [0, 0, 1, 0]
    assert found.num_lookup.tolist() == [0] * 4


def test_trials_that_fail_are_made_ever_more_rarely() -> None:
    gaps = np.diff(trials(3 * LAST_PROBE)) - 1
    assert gaps.tolist() == [64, 128, 256, 512, LAST_PROBE, LAST_PROBE]


def test_trials_that_come_true_are_made_as_often_as_at_first() -> None:
    tried = trials(1000, hits=True)
    assert set(np.diff(tried)) == {FIRST_PROBE + 1}


def test_a_hit_makes_up_for_two_failures() -> None:
    probes = ProbeScheduler()

    def num_idle() -> int:
        count = 0
        while not probes.is_due(0.0):
            probes.note_idle(STEP_S)
            count += 1
        return count

    gaps = []
    for num_hits in (0, 0, 0, 1, 0):
        gaps.append(num_idle())
        probes.note_use(0.0, num_hits, is_probe=True)
    assert [*gaps, num_idle()] == [FIRST_PROBE * factor for factor in (1, 2, 4, 8, 2, 4)]
    probes.note_use(0.0, 0, is_probe=False)
    assert num_idle() == FIRST_PROBE, "it was in use: that is known to be worth it"


def test_trials_take_no_more_than_their_share_of_the_time() -> None:
    num_uncached_draft_tokens, num_steps = 2000, 3000  # dear: each takes as long as three steps
    given = candidates(
        np.zeros((1, 0)), [[0.02]], num_uncached_draft_tokens=num_uncached_draft_tokens
    )
    spent_s = len(trials(num_steps, hits=True, given=given)) * float(
        CostModel(CHEAP).draft_pass(1 + num_uncached_draft_tokens)
    )
    assert 0.8 < spent_s / (PROBE_SHARE * STEP_S * num_steps) <= 1.0


def test_a_trial_stays_within_the_budget() -> None:
    controller = Controller(CostModel(CHEAP))
    for _ in range(2 * LAST_PROBE):
        controller.observe(STEP_S, num_drafted=0, num_hits=0)
    for budget, depths in ((0, [0, 0, 0]), (2, [0, 0, 0]), (3, [0, 0, 1])):
        given = candidates([[0.99], [0.99], [0.0]], [[0.0], [0.0], [0.01]], budget=budget)
        found = controller.allocate(given)
        assert found.num_proposer.tolist() == depths
        assert found.num_rows <= budget


def test_a_draft_model_that_comes_right_is_put_to_use_without_a_trial() -> None:
    controller = Controller(CostModel(CHEAP))
    assert controller.allocate(
        candidates(np.zeros((1, 0)), [[0.9, 0.8]])
    ).num_proposer.tolist() == [2]


# -- before anything is measured ----------------------------------------------------------------


def test_without_measurements_the_first_steps_are_plain() -> None:
    controller = Controller(costs := CostModel())
    given = candidates([[0.99] * 3], [[0.9]])
    found: Allocation = controller.allocate(given)
    assert (found.num_lookup.tolist(), found.num_proposer.tolist()) == ([0], [0])
    costs.observe(
        num_rows=1, num_requests=1, num_tokens=1, forward_s=0.01, draft_s=0.0, seconds=0.01,
        with_prompts=False,
    )  # fmt: skip
    assert controller.allocate(given).num_lookup.tolist() == [3]


# -- the log ------------------------------------------------------------------------------------


def test_the_log_shows_shares_and_prices_and_starts_anew() -> None:
    controller = Controller(CostModel(CHEAP))
    for free, lm in (([[0.9, 0.8]], [[0.0]]), ([[0.0, 0.0]], [[0.0]]), ([[0.0]], [[0.9]])):
        controller.allocate(candidates(free, lm))
        controller.observe(STEP_S, num_drafted=0, num_hits=0)
    lines = controller.describe()
    assert (
        lines["share_lookup"]
        == lines["share_plain"]
        == lines["share_proposer"]
        == pytest.approx(1 / 3, abs=1e-4)
    )
    assert lines["share_probe"] == 0.0
    assert lines["mean_drafted"] == 1.0
    assert lines["row_price"] == pytest.approx(0.0001 / 0.0101, abs=1e-4)
    assert controller.describe()["share_lookup"] == 0.0


def test_a_trial_is_shown_as_such() -> None:
    controller = Controller(CostModel(CHEAP))
    for _ in range(FIRST_PROBE + 1):
        controller.allocate(WEAK)
        controller.observe(STEP_S, num_drafted=0, num_hits=0)
    lines = controller.describe()
    assert lines["share_probe"] == pytest.approx(1 / (FIRST_PROBE + 1), abs=1e-4)
    assert lines["share_proposer"] == 0.0
