"""Cost tables and what they learn."""

from __future__ import annotations

import numpy as np
import pytest

from foretoken.draft.cost_curve import CostCurve, CostLine
from foretoken.draft.costs import CostModel, LookBack, StepProfile

TABLE = {1: 0.010, 2: 0.011, 4: 0.012, 8: 0.020, 16: 0.030}


def test_a_curve_runs_through_its_table_and_on_beyond_it() -> None:
    curve = CostCurve(TABLE)
    assert curve.at(np.array([1, 3, 8, 16])) == pytest.approx([0.010, 0.0115, 0.020, 0.030])
    assert curve.at(32) > curve.at(24) > curve.at(16)
    assert curve.at(1 << 16) > 1.0


def test_a_curve_never_falls() -> None:
    curve = CostCurve({1: 0.010, 2: 0.008, 4: 0.012, 8: 0.011})
    rng = np.random.default_rng(0)
    for _ in range(200):
        curve.observe(int(rng.integers(1, 40)), float(rng.uniform(0.005, 0.05)))
        assert (np.diff(curve.at(np.arange(1, 64))) >= 0.0).all()


def test_a_curve_learns_one_bucket_and_what_all_share() -> None:
    curve = CostCurve(TABLE)
    for _ in range(200):
        curve.observe(8, 0.030)
    assert curve.at(8) == pytest.approx(0.030, rel=0.02)
    assert 0.010 < curve.at(1) < 0.015
    for _ in range(100):
        for num_rows, seconds in TABLE.items():
            curve.observe(num_rows, 2.0 * seconds)
    for num_rows, seconds in TABLE.items():
        assert curve.at(num_rows) == pytest.approx(2.0 * seconds, rel=0.05)


def test_a_curve_without_a_table_takes_shape_by_watching() -> None:
    rng, curve = np.random.default_rng(0), CostCurve({})
    for _ in range(600):
        num_rows = int(rng.integers(1, 65))
        curve.observe(num_rows, (5.0 + 0.16 * num_rows) * float(rng.lognormal(0.0, 0.1)))
    for num_rows in (1, 4, 16, 48, 64):
        assert curve.at(num_rows) == pytest.approx(5.0 + 0.16 * num_rows, rel=0.12)


def test_stalls_hardly_move_a_curve() -> None:
    rng, curve = np.random.default_rng(0), CostCurve(TABLE)
    for _ in range(2000):
        curve.observe(
            4, 0.012 * float(rng.lognormal(0.0, 0.1)) * rng.choice([1.0, 10.0], p=[0.98, 0.02])
        )
    assert curve.at(4) == pytest.approx(0.012, rel=0.08)
    assert curve.num_alarms == 0


def test_a_machine_ten_times_slower_sounds_the_alarm_and_is_learnt_fast() -> None:
    curve = CostCurve(TABLE)
    for _ in range(100):
        curve.observe(1, 0.010)
    for _ in range(40):
        curve.observe(1, 0.100)
    assert curve.num_alarms >= 1
    assert curve.at(1) == pytest.approx(0.100, rel=0.05)


def test_age_counts_passes_since_about_so_many_rows_were_seen() -> None:
    curve = CostCurve(TABLE)
    for num_rows in (1, 8, 8, 9):
        curve.observe(num_rows, 0.010)
    assert curve.age(1) == 3
    assert curve.age(8) == 0


def test_a_line_tells_what_a_step_costs_from_what_a_token_costs() -> None:
    rng, line = np.random.default_rng(0), CostLine()
    for _ in range(300):
        num_tokens = int(rng.integers(1, 7))
        line.observe(num_tokens, 0.0010 + 0.0002 * num_tokens)
    assert line.base == pytest.approx(0.0010, rel=0.1)
    assert line.slope == pytest.approx(0.0002, rel=0.15)


def test_a_line_puts_the_cost_down_to_the_tokens_where_their_number_never_varies() -> None:
    line = CostLine()
    for _ in range(100):
        line.observe(4, 0.0008)
    assert line.slope == pytest.approx(0.0002, rel=0.05)
    assert line.base == pytest.approx(0.0, abs=1e-5)


def observe(costs: CostModel, rng: np.random.Generator) -> None:
    depth = int(rng.integers(0, 5))
    noise = float(rng.lognormal(0.0, 0.1))
    costs.observe(
        num_rows=1 + depth,
        forward_s=noise * (5.2e-3 + 0.16e-3 * (1 + depth)),
        verify_s=noise * 0.15e-3 * (1 + depth),
        num_tokens=1 + depth,
        draft_s=noise * depth * (2.5e-3 + 0.15e-3),
        draft_passes=depth,
        draft_rows=depth,
        num_drafted=depth,
        host_s=noise * 0.4e-3,
    )


@pytest.mark.parametrize(
    "profile", [None, StepProfile({1: 0.004, 8: 0.01, 64: 0.02}, {1: 0.001, 64: 0.01})]
)
def test_the_model_learns_every_part_of_a_step(profile: StepProfile | None) -> None:
    rng, costs = np.random.default_rng(0), CostModel(profile)
    for _ in range(500):
        observe(costs, rng)
    for num_rows in (1, 3, 5):
        assert costs.forward(num_rows) == pytest.approx(5.2e-3 + 0.16e-3 * num_rows, rel=0.12)
    assert costs.draft(np.array([1, 1, 1, 0])) == pytest.approx(7.5e-3, rel=0.1)
    assert costs.per_token == pytest.approx(0.15e-3, rel=0.3)
    assert costs.per_step(1) == pytest.approx(0.4e-3, rel=0.4)


def test_what_prompts_cost_a_step_is_not_put_down_to_plain_decoding() -> None:
    rng, costs = np.random.default_rng(0), CostModel()
    for _ in range(200):
        observe(costs, rng)
    before = costs.per_step(1), costs.per_token
    for _ in range(50):
        costs.observe(
            num_rows=90, forward_s=0.05, verify_s=0.02, num_tokens=1, host_s=0.03, with_prompts=True
        )
    assert (costs.per_step(1), costs.per_token) == before


def test_the_host_has_a_price_with_drafts_and_one_without() -> None:
    costs = CostModel()
    for num_drafts, host_s in ((4, 0.005), (0, 0.001)) * 20:
        costs.observe(
            num_rows=1 + num_drafts,
            forward_s=0.01,
            verify_s=0.0,
            num_tokens=1,
            host_s=host_s,
            num_drafts=num_drafts,
        )
    assert costs.per_step(1) == pytest.approx(0.001)
    assert costs.per_step(1, drafts=True) == pytest.approx(0.005)


def test_what_the_host_takes_of_many_requests_is_no_price_for_a_few() -> None:
    """A load falls from 16 requests to 2: plain steps of those are not known to be so dear."""
    costs = CostModel()

    def step(num_requests: int, host_s: float, num_drafts: int = 0) -> None:
        costs.observe(
            num_rows=num_requests + num_drafts,
            forward_s=0.01,
            verify_s=0.0,
            num_tokens=num_requests,
            host_s=host_s,
            num_requests=num_requests,
            num_drafts=num_drafts,
        )

    for _ in range(20):
        step(16, 0.008)
    assert costs.per_step(2) == pytest.approx(0.008), "nothing nearer is known"
    assert not costs.lacks_plain(2), "nor has anything been drafted"
    for _ in range(8):
        step(2, 0.002, num_drafts=4)
    assert costs.per_step(2) == pytest.approx(0.002), "of about as many, though with drafts"
    assert costs.lacks_plain(2)
    assert costs.lacks_plain(3)
    assert not costs.lacks_plain(4)
    step(2, 0.003)
    step(2, 0.001)
    assert costs.per_step(2) == pytest.approx(0.001), "the first ran on cold caches"
    assert not costs.lacks_plain(2)
    assert costs.per_step(2, drafts=True) == pytest.approx(0.002)
    assert costs.per_step(16) == costs.per_step(31) == costs.per_step(64) == pytest.approx(0.008)


def test_an_unmeasured_model_is_ready_after_a_few_steps() -> None:
    rng, costs = np.random.default_rng(0), CostModel()
    assert not costs.is_ready
    for _ in range(8):
        observe(costs, rng)
    assert costs.is_ready
    assert CostModel(StepProfile(TABLE)).is_ready


@pytest.mark.parametrize(("said", "true"), [(100e-6, 2e-6), (2e-6, 2e-6), (0.0, 2e-6)])
def test_a_wrong_price_of_looking_back_is_corrected(said: float, true: float) -> None:
    """As a stall of the machine leaves it at start-up; a right one stays."""
    rng = np.random.default_rng(0)
    costs = CostModel(StepProfile({1: 1e-3, 64: 4e-3}, look_back=LookBack(per_token=said)))
    for number in range(600):
        length = 32 + number % 400
        costs.observe(
            num_rows=1,
            forward_s=(1e-3 + true * length) * rng.uniform(0.95, 1.05),
            verify_s=0.0,
            num_tokens=1,
            context_s=costs.look_back(1, length, length),
            num_requests=1,
        )
    errors = [
        costs.forward(1)
        + costs.levels(1, with_prompts=False)[0]
        + costs.look_back(1, length, length)
        - (1e-3 + true * length)
        for length in (50, 250, 430)
    ]
    assert np.abs(errors).max() < 0.6e-3
    if said == true:
        assert costs.look_back(1, 400, 400) == pytest.approx(400 * true, rel=0.3)


def test_plain_steps_are_asked_for_until_a_few_were_seen() -> None:
    costs, asked = CostModel(), []
    for number in range(200):
        num_drafts = 0 if costs.lacks_plain(1) else 3
        if not num_drafts:
            asked.append(number)
        costs.observe(
            num_rows=1 + num_drafts,
            forward_s=0.01,
            verify_s=0.0,
            num_tokens=1,
            host_s=0.001,
            num_requests=1,
            num_drafts=num_drafts,
        )
    assert asked == [8, 17, 26, 35, 44, 53, 62, 71]


def test_one_outlier_keeps_nobody_from_drafting() -> None:
    """The first step of eight requests with drafts was stalled: the plain price stands for it."""
    costs = CostModel()

    def step(host_s: float, num_drafts: int) -> None:
        costs.observe(
            num_rows=8 + num_drafts,
            forward_s=0.01,
            verify_s=0.0,
            num_tokens=8,
            host_s=host_s,
            num_requests=8,
            num_drafts=num_drafts,
        )

    for _ in range(20):
        step(0.001, 0)
    step(0.05, 4)
    assert costs.per_step(8, drafts=True) == pytest.approx(0.001)
    step(0.002, 4)
    assert costs.per_step(8, drafts=True) == pytest.approx(0.002)
    step(0.05, 4)
    assert costs.per_step(8, drafts=True) < 0.005
    for _ in range(301):
        step(0.001, 0)
    assert costs.per_step(8, drafts=True) == pytest.approx(0.001), "forgotten: it may be tried"


def test_a_pass_of_no_time_teaches_nothing() -> None:
    costs = CostModel(StepProfile({1: 1e-3, 64: 4e-3}, look_back=LookBack(per_token=1e-6)))
    costs.observe(num_rows=1, forward_s=0.0, verify_s=0.0, num_tokens=1, num_requests=1)
    assert costs.look_back(1, 100, 100) == pytest.approx(1e-4)
