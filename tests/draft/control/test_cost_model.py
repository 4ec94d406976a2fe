"""Cost model of steps: curves that learn, and the tokens that are made of a second."""

from __future__ import annotations

import numpy as np
import pytest

from foretoken.draft.control.cost_model import (
    CostCurve,
    CostModel,
    Mean,
    StepProfile,
    best_chain_speedup,
)

TABLE = {1: 0.010, 2: 0.011, 4: 0.012, 8: 0.020, 16: 0.030}
PROFILE = StepProfile(TABLE, {1: 0.001, 8: 0.002})
MACHINE = CostCurve(TABLE)  # what passes take in truth


def step(
    costs: CostModel,
    num_requests: int,
    *,
    num_drafts: int = 0,
    num_tokens: int | None = None,
    forward_s: float | None = None,
    draft_s: float = 0.0,
    host_s: float = 0.001,
    with_prompts: bool = False,
    with_proposer: bool = False,
    num_keys: int = 0,
    times: int = 1,
) -> None:
    """Note some steps, as they were measured where nothing else is said."""
    num_rows = num_requests + num_drafts
    for _ in range(times):
        pass_s = float(MACHINE.at(num_rows)) if forward_s is None else forward_s
        costs.observe(
            num_rows=num_rows,
            num_requests=num_requests,
            num_tokens=num_requests if num_tokens is None else num_tokens,
            forward_s=pass_s,
            draft_s=draft_s,
            seconds=pass_s + draft_s + host_s,
            with_prompts=with_prompts,
            with_proposer=with_proposer,
            num_keys=num_keys,
        )


# -- curves -------------------------------------------------------------------------------------


def test_a_curve_runs_through_what_was_measured_straight_between_and_on_beyond() -> None:
    curve = CostCurve(TABLE)
    assert curve.at(np.array([1, 3, 8, 12, 16])) == pytest.approx(
        [0.010, 0.0115, 0.020, 0.025, 0.030]
    )
    assert curve.at(32) > curve.at(24) > curve.at(16)
    assert curve.at(32) == pytest.approx(0.030 + 16 * (0.030 - 0.012) / 12), (
        "as its upper half goes on"
    )
    assert curve.at(1 << 16) > 1.0


def test_a_disturbed_pass_is_no_dearer_than_one_of_more_rows() -> None:
    curve = CostCurve({1: 0.167, 2: 0.061, 4: 0.089})
    assert curve.at(np.array([1, 2, 4])).tolist() == [0.061, 0.061, 0.089]


def test_a_curve_never_falls_whatever_was_measured_or_seen() -> None:
    curve = CostCurve({1: 0.010, 2: 0.008, 4: 0.012, 8: 0.011})
    rng = np.random.default_rng(0)
    for _ in range(100):
        assert (np.diff(curve.at(np.arange(1, 64))) >= 0.0).all()
        curve.observe(int(rng.integers(1, 40)), float(rng.uniform(0.005, 0.05)))


def test_a_curve_learns_what_one_size_takes_and_others_share_a_little_of_it() -> None:
    curve = CostCurve(TABLE)
    for _ in range(100):
        curve.observe(8, 0.030)
    assert curve.at(8) == pytest.approx(0.030, rel=0.02)
    assert 0.010 < float(curve.at(1)) < 0.014


def test_a_curve_follows_a_machine_that_slows_down() -> None:
    curve = CostCurve(TABLE)
    for _ in range(60):
        for num_rows in TABLE:
            curve.observe(num_rows, 2.0 * TABLE[num_rows])
    for num_rows in (1, 2, 3, 8, 12, 16):
        assert curve.at(num_rows) == pytest.approx(
            2.0 * float(CostCurve(TABLE).at(num_rows)), rel=0.05
        )
    assert curve.at(64) > 1.5 * CostCurve(TABLE).at(64), (
        "nor is it left behind where nothing was seen"
    )


def test_one_stall_hardly_moves_a_curve() -> None:
    curve = CostCurve(TABLE)
    curve.observe(4, 100.0 * 0.012)
    assert float(curve.at(4)) < 1.05 * 0.012
    curve.observe(4, 0.0)
    curve.observe(0, 1.0)
    assert float(curve.at(4)) < 1.05 * 0.012


def test_a_curve_without_measurements_takes_its_scale_from_the_first_pass() -> None:
    rng, curve = np.random.default_rng(0), CostCurve({})
    assert not curve.is_measured
    curve.observe(4, 5.6)
    assert curve.is_measured
    assert curve.at(4) == pytest.approx(5.6)
    for _ in range(600):
        num_rows = int(rng.integers(1, 65))
        curve.observe(num_rows, (5.0 + 0.16 * num_rows) * float(rng.lognormal(0.0, 0.05)))
    for num_rows in (1, 4, 16, 48, 64):
        assert curve.at(num_rows) == pytest.approx(5.0 + 0.16 * num_rows, rel=0.12)


def test_a_mean_begins_with_what_it_sees_and_lets_no_outlier_rule() -> None:
    mean = Mean()
    for value in (1.0, 2.0, 3.0):
        mean.observe(value)
    assert mean.value == pytest.approx(2.0)
    for _ in range(200):
        mean.observe(2.0)
    mean.observe(1e9)
    assert mean.value < 2.3
    for _ in range(200):
        mean.observe(4.0)
    assert mean.value == pytest.approx(4.0, rel=0.01), "a lasting change is followed"


# -- the model ----------------------------------------------------------------------------------


def added(costs: CostModel, num_rows: int, more: int, num_requests: int = 1) -> float:
    """Seconds that so many more rows add to a pass."""
    return float(costs.row_seconds(num_rows, more, num_requests)[-1])


def test_the_price_of_rows_is_read_off_the_curve_until_steps_are_seen() -> None:
    costs = CostModel(PROFILE)
    assert costs.row_seconds(2, 6, 2) == pytest.approx(
        [0.0, 0.0005, 0.001, 0.003, 0.005, 0.007, 0.009]
    )
    assert costs.row_seconds(8, 0, 2).tolist() == [0.0]


def test_an_unmeasured_model_is_ready_after_one_step() -> None:
    costs = CostModel()
    assert not costs.is_ready
    step(costs, 1, forward_s=0.01)
    assert costs.is_ready
    assert costs.step_seconds(1) == pytest.approx(0.011)
    assert 0.0 < added(costs, 1, 4) < 0.01
    assert 0.0 < float(costs.draft_pass(1)) < 0.01, "a draft model that was never timed is smaller"
    assert CostModel(PROFILE).is_ready


def test_the_rate_is_that_of_a_plain_pass_until_a_step_was_seen() -> None:
    costs = CostModel(PROFILE)
    assert costs.rate(4) == pytest.approx(4 / 0.012)
    assert costs.step_seconds(4) == pytest.approx(0.012)


def test_the_rate_is_that_of_whole_steps_with_what_drafts_brought() -> None:
    costs = CostModel(PROFILE)
    step(costs, 4, num_drafts=4, num_tokens=6, host_s=0.004)
    assert costs.rate(4) == pytest.approx(6 / 0.024)
    assert costs.step_seconds(4) == pytest.approx(0.024)
    step(costs, 4, num_tokens=4, host_s=0.004, times=150)
    assert costs.rate(4) == pytest.approx(4 / 0.016, rel=0.02), "lately"


def test_the_rate_counts_all_tokens_of_the_few_steps_that_yield_most() -> None:
    costs = CostModel(PROFILE)
    step(costs, 1, times=9)
    step(costs, 1, num_tokens=16)
    assert costs.rate(1) == pytest.approx(25 / 0.110)
    assert costs.step_seconds(1) == pytest.approx(0.011)


def test_the_rate_of_about_as_many_requests_is_scaled_and_that_of_others_is_apart() -> None:
    costs = CostModel(PROFILE)
    step(costs, 4, num_tokens=8, host_s=0.008)
    assert costs.rate(6) == pytest.approx(6 * 2 / 0.020)
    assert costs.rate(8) == pytest.approx(8 / 0.020), "never seen: that of a plain pass"
    assert costs.rate(2) == pytest.approx(2 / 0.011)


def test_steps_with_prompts_are_no_measure_of_decoding() -> None:
    costs = CostModel(PROFILE)
    step(costs, 4, times=20)
    before = costs.rate(4), costs.step_seconds(4), costs.draft_overhead(4)
    step(costs, 4, num_drafts=60, num_tokens=1, host_s=0.5, with_prompts=True, times=20)
    assert (costs.rate(4), costs.step_seconds(4), costs.draft_overhead(4)) == before


def test_passes_with_prompts_still_teach_what_rows_cost() -> None:
    costs = CostModel(PROFILE)
    step(costs, 0, num_drafts=16, forward_s=0.020, with_prompts=True, times=100)
    assert added(costs, 1, 15) == pytest.approx(0.012, abs=0.002)


@pytest.mark.parametrize("factor", [0.5, 3.0])
def test_rows_that_cost_more_or_less_than_was_measured_are_priced_so(factor: float) -> None:
    costs, rng = CostModel(PROFILE), np.random.default_rng(0)
    for _ in range(200):
        num_drafts = int(rng.integers(0, 15))
        step(
            costs,
            1,
            num_drafts=num_drafts,
            forward_s=0.010 + factor * float(MACHINE.at(1 + num_drafts) - 0.010),
        )
    for more in (3, 7, 15):
        expected = factor * float(MACHINE.at(1 + more) - 0.010)
        assert added(costs, 1, more) == pytest.approx(expected, rel=0.3)


def test_what_every_pass_takes_beyond_its_rows_is_not_put_down_to_them() -> None:
    """A long context makes every pass of a load slower; another row costs what it did."""
    costs, rng = CostModel(PROFILE), np.random.default_rng(0)
    for _ in range(200):
        num_drafts = int(rng.integers(0, 15))
        step(costs, 1, num_drafts=num_drafts, forward_s=0.010 + float(MACHINE.at(1 + num_drafts)))
    for more in (3, 7, 15):
        expected = float(MACHINE.at(1 + more) - 0.010)
        assert added(costs, 1, more) == pytest.approx(expected, rel=0.3)


def test_where_all_passes_have_as_many_rows_their_price_stays_about_as_measured() -> None:
    costs, rng = CostModel(PROFILE), np.random.default_rng(0)
    for _ in range(300):
        noise = float(rng.lognormal(0.0, 0.05))
        step(costs, 1, num_drafts=3, forward_s=0.022 * noise)
    assert 0.6 < added(costs, 1, 15) / 0.020 < 2.2


def test_the_overhead_of_drafts_is_what_the_host_takes_beyond_plain_steps() -> None:
    costs = CostModel(PROFILE)
    step(costs, 1, num_drafts=4, host_s=0.005, times=10)
    assert costs.draft_overhead(1) == 0.0, "no plain step was seen"
    step(costs, 1, host_s=0.001, times=10)
    assert costs.draft_overhead(1) == pytest.approx(0.004)
    assert costs.draft_overhead(4) == 0.0, "of another load nothing is known"
    step(costs, 1, host_s=0.050, times=200)
    assert costs.draft_overhead(1) == 0.0, "drafts make no step shorter"


def test_steps_that_ask_a_draft_model_have_an_overhead_of_their_own() -> None:
    costs = CostModel(PROFILE)
    step(costs, 1, host_s=0.001, times=10)
    step(costs, 1, num_drafts=4, host_s=0.002, times=10)
    assert costs.draft_overhead(1, with_proposer=True) == pytest.approx(0.001), "none was seen"
    step(costs, 1, num_drafts=4, host_s=0.005, with_proposer=True, times=10)
    assert costs.draft_overhead(1, with_proposer=True) == pytest.approx(0.004)
    assert costs.draft_overhead(1) == pytest.approx(0.001)


def test_the_draft_models_own_time_is_no_overhead_of_the_host() -> None:
    costs = CostModel(PROFILE)
    step(costs, 1, times=10)
    step(costs, 1, num_drafts=3, draft_s=0.008, times=10)
    assert costs.draft_overhead(1) == pytest.approx(0.0, abs=1e-9)


def test_passes_of_the_draft_model_are_learnt_by_their_rows() -> None:
    costs = CostModel(PROFILE)
    for _ in range(100):
        costs.observe_draft([8] * 4, 4 * 0.006)
    costs.observe_draft([], 0.0)
    assert costs.draft_pass(8) == pytest.approx(0.006, rel=0.05)
    assert costs.draft_pass(1) < 0.003


def test_a_profile_loaded_later_is_a_new_beginning() -> None:
    costs = CostModel()
    step(costs, 1, forward_s=5.0)
    costs.load(PROFILE)
    assert added(costs, 1, 15) == pytest.approx(0.020)
    assert costs.rate(1) == pytest.approx(1 / 0.010)


# -- keys ---------------------------------------------------------------------------------------


def test_keys_that_drafts_attend_to_do_not_make_rows_dearer() -> None:
    key_s = 1e-6
    costs = CostModel(StepProfile(TABLE, {}, key_s))
    before = float(costs.row_seconds(1, 3, 1)[-1])
    for context_len in (200, 2000, 8000):
        for num_drafts in (0, 3, 7):
            num_keys = num_drafts * context_len
            pass_s = float(MACHINE.at(1 + num_drafts)) + key_s * num_keys
            step(costs, 1, num_drafts=num_drafts, forward_s=pass_s, num_keys=num_keys, times=20)
    assert float(costs.row_seconds(1, 3, 1)[-1]) == pytest.approx(before, rel=0.1)
    assert costs.key_seconds(1) == pytest.approx(key_s, rel=0.1)


def test_a_machine_that_became_slower_has_dearer_keys() -> None:
    costs = CostModel(StepProfile(TABLE, {}, 1e-6))
    for num_drafts in (0, 7, 3, 5) * 40:
        num_keys = 1000 * num_drafts
        pass_s = 2.0 * (float(MACHINE.at(1 + num_drafts)) + 1e-6 * num_keys)
        step(costs, 1, num_drafts=num_drafts, forward_s=pass_s, num_keys=num_keys)
    assert costs.key_seconds(1) == pytest.approx(2e-6, rel=0.3)
    assert costs.key_seconds(64) == 1e-6, "nothing is known of such a load"


def test_the_best_chain_is_as_long_as_its_odds_and_prices_let_it_be() -> None:
    level = {1: 1.0, 9: 1.0}
    assert best_chain_speedup(StepProfile(level, {1: 1e-9}), 1.0) == pytest.approx(9.0)
    assert best_chain_speedup(StepProfile(level, {1: 1e-9}), 1.0, longest=3) == pytest.approx(4.0)
    assert best_chain_speedup(StepProfile(level, {1: 0.5}), 0.7) == pytest.approx(1.7 / 1.5)
    assert best_chain_speedup(StepProfile(level, {1: 0.8}), 0.7) == 1.0, "no draft at all"
