"""What the controller allocates, step by step."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import ArrayLike

from foretoken.draft.allocation import Search
from foretoken.draft.controller import Allocation, Candidates, Controller
from foretoken.draft.costs import CostModel, StepProfile
from foretoken.draft.watch import BASE_MARGIN, PATIENCE, Guard

CHEAP = StepProfile({n: 0.010 + 0.0001 * n for n in (1, 2, 4, 8, 16, 64)}, {1: 0.001, 64: 0.0016})
DEAR = StepProfile({n: 0.001 * n for n in (1, 2, 4, 8, 16, 64)}, {1: 0.001, 64: 0.0016})


def candidates(free: ArrayLike, lm: ArrayLike, *, budget: int = 99, **options: int) -> Candidates:
    free, lm = np.array(free, dtype=float), np.array(lm, dtype=float)
    return Candidates(
        free=free,
        lm=lm.reshape(len(free), -1),
        backlog=np.full(len(free), options.get("backlog", 0)),
        horizon=np.full(len(free), options.get("horizon", 1000)),
        budget=budget,
        num_prefill=options.get("num_prefill", 0),
    )


def choices(row_free: np.ndarray, row_lm: np.ndarray) -> Iterator[tuple[int, int]]:
    yield 0, 0
    yield from ((count, 0) for count in range(1, np.count_nonzero(row_free) + 1))
    yield from ((0, depth) for depth in range(1, np.count_nonzero(row_lm) + 1))


def rate_of(c: Candidates, costs: CostModel, pairs: list[tuple[int, int]]) -> float:
    tokens = len(pairs) + sum(
        c.free[row, :count].sum() + c.lm[row, :depth].sum()
        for row, (count, depth) in enumerate(pairs)
    )
    depths = np.array([depth for _, depth in pairs])
    passes = np.array([(depths > level).sum() for level in range(depths.max())])
    chosen = sum(map(sum, pairs))
    seconds = (
        costs.forward(c.num_rows + chosen)
        + costs.per_step(len(c.free))
        + costs.per_token * tokens
        + costs.draft_per_token * depths.sum()
        + (costs.draft(passes) if len(passes) else 0.0)
    )
    return float(tokens / seconds)


def random_case(rng: np.random.Generator) -> tuple[Candidates, CostModel]:
    num_requests, width, depth = rng.integers(1, 4), rng.integers(0, 5), rng.integers(0, 5)
    steps = rng.exponential(rng.choice([0.01, 0.1, 0.5]), 20)
    forward = {n: float(seconds) for n, seconds in enumerate(1.0 + steps.cumsum(), 1)}
    passes = rng.uniform(0.01, 0.5)
    draft = {n: float(passes * (1.0 + 0.05 * n)) for n in (1, 2, 3, 4, 8)}
    low = rng.choice([0.1, 0.5, 0.9])
    free = rng.uniform(low, 1.0, (num_requests, width)).cumprod(axis=1)
    free *= np.arange(width) < rng.integers(0, width + 1, (num_requests, 1))
    lm = rng.uniform(low, 1.0, (num_requests, depth)).cumprod(axis=1)
    lm *= rng.random((num_requests, 1)) < 0.8
    costs = CostModel(StepProfile(forward, draft), per_token=rng.uniform(0.0, 0.1), per_step=0.05)
    return candidates(free, lm.reshape(num_requests, depth), budget=int(rng.integers(1, 13))), costs


def test_the_search_comes_close_to_trying_everything() -> None:
    rng, ratios = np.random.default_rng(1), []
    for _ in range(400):
        c, costs = random_case(rng)
        if c.is_empty:
            continue
        found = [option for option in Search(c, costs).best() if option is not None]
        everything = itertools.product(*map(choices, c.free, c.lm))
        allowed = (pairs for pairs in everything if sum(map(sum, pairs)) <= c.budget)
        best = max(rate_of(c, costs, list(pairs)) for pairs in allowed)
        option = max(found, key=lambda option: option.rate)
        if option.num_free is None or option.depths is None:
            pairs = [(0, 0)] * len(c.free)
        else:
            pairs = list(zip(option.num_free.tolist(), option.depths.tolist(), strict=True))
        assert sum(map(sum, pairs)) <= c.budget
        assert not any(count and depth for count, depth in pairs)
        assert option.rate == pytest.approx(rate_of(c, costs, pairs), rel=1e-9)
        ratios.append(option.rate / best)
    assert min(ratios) > 0.95
    assert np.mean(ratios) > 0.998


def allocate(c: Candidates, profile: StepProfile = CHEAP) -> Allocation:
    return Controller(CostModel(profile)).allocate(c)


def test_nothing_is_drafted_when_there_is_nothing_to_draft() -> None:
    for c in (
        candidates(np.zeros((2, 4)), np.zeros((2, 3))),
        candidates(np.zeros((2, 0)), np.zeros((2, 0))),
        candidates([[0.9, 0.8]], [[0.9]], budget=0),
    ):
        allocation = allocate(c)
        assert allocation.kind == "plain"
        assert not allocation.num_free.any()
        assert not allocation.lm_depth.any()


def test_nothing_is_drafted_when_a_row_costs_as_much_as_a_token() -> None:
    c = candidates([[0.9, 0.8]] * 4, [[0.9, 0.8]] * 4)
    assert allocate(c, DEAR).reason == "plain: drafts cost more than they give"


def test_a_sure_draft_is_verified_whole_and_a_doubtful_one_in_part() -> None:
    allocation = allocate(candidates([[1.0] * 6, [0.3, 0.001, 0, 0, 0, 0]], np.zeros((2, 0))))
    assert allocation.num_free.tolist() == [6, 1]
    assert allocation.rate > allocation.plain_rate


def test_each_request_takes_the_better_of_its_two_drafts() -> None:
    c = candidates([[0.95, 0.9, 0.85], [0.1, 0, 0]], [[0.3, 0.1], [0.9, 0.8]])
    allocation = allocate(c)
    assert allocation.num_free.tolist() == [3, 0]
    assert allocation.lm_depth.tolist() == [0, 2]
    assert allocation.reason == "draft: lm"


def test_the_budget_is_shared_by_the_likeliest_tokens() -> None:
    c = candidates([[0.99, 0.98, 0.97, 0.96], [0.9, 0.8, 0.7, 0.6]], np.zeros((2, 0)), budget=5)
    assert allocate(c).num_free.tolist() == [4, 1]


def test_a_request_about_to_end_does_not_catch_up_with_a_long_prompt() -> None:
    profile = StepProfile(CHEAP.forward, {1: 0.001, 512: 0.050})
    lm = [[0.9, 0.8, 0.7]]
    late = candidates(np.zeros((1, 0)), lm, backlog=400, horizon=4)
    early = candidates(np.zeros((1, 0)), lm, backlog=400, horizon=1000)
    assert not allocate(late, profile).lm_depth.any()
    assert allocate(early, profile).lm_depth.any()


def test_prompts_in_the_same_pass_do_not_make_drafts_look_cheap() -> None:
    # 40 rows of prompts take ten times as long as the step; a token costs more than it brings
    c = candidates([[0.9, 0.8]] * 4, np.zeros((4, 0)), num_prefill=40)
    allocation = allocate(c, DEAR)
    assert not allocation.num_free.any()


def test_without_a_profile_the_first_steps_are_plain() -> None:
    controller = Controller(costs := CostModel())
    c = candidates([[0.9, 0.9, 0.9]], np.zeros((1, 0)))
    kinds = []
    for _ in range(12):
        kinds.append(controller.allocate(c).kind)
        costs.observe(num_rows=1, forward_s=0.01, verify_s=0.0, num_tokens=1)
        controller.observe(1, 0.01)
    assert kinds[:8] == ["plain"] * 8
    assert kinds[-1] == "draft"


def test_a_small_gain_neither_starts_nor_stops_drafting() -> None:
    def lm(chance: float) -> Candidates:
        return candidates(np.zeros((1, 0)), [[chance]])

    controller = Controller(CostModel(CHEAP))
    even = 0.11 * 10.1 / 10.1  # a pass of 1 ms and a row of 0.1 ms on a step of 10.1 ms
    kinds = [controller.allocate(lm(even + gain)).kind for gain in (0.02, 0.2, 0.02, -0.02, 0.02)]
    assert kinds == ["plain", "draft", "draft", "plain", "plain"]


def test_an_idle_draft_model_is_tried_rarely_and_more_rarely_after_failures() -> None:
    controller = Controller(CostModel(CHEAP))
    c = candidates(np.zeros((4, 0)), [[0.02]] * 4)
    tried = []
    for step in range(3000):
        allocation = controller.allocate(c)
        if allocation.kind == "probe":
            tried.append(step)
            assert allocation.lm_depth.sum() == 1
        is_probe = allocation.kind == "probe"
        controller.observe(4, 0.0115 if is_probe else 0.0104, num_lm_drafted=int(is_probe))
    gaps = np.diff([0, *tried])
    assert gaps[0] == 32
    assert gaps[-1] >= 512
    assert (np.diff(gaps) >= 0).all()


def test_probes_that_take_longer_than_their_passes_are_made_more_rarely() -> None:
    def num_probes(seconds: float) -> int:
        controller = Controller(CostModel(CHEAP))
        c = candidates(np.zeros((4, 0)), [[0.02]] * 4)
        count = 0
        for _ in range(3000):
            hits = int(controller.allocate(c).kind == "probe")  # each comes true
            count += hits
            controller.observe(
                4 + hits, seconds if hits else 0.0104, num_lm_drafted=hits, num_lm_hits=hits
            )
        return count

    assert num_probes(0.0156) < 0.1 * num_probes(0.0115)


def test_a_probe_that_came_true_brings_the_next_one_nearer() -> None:
    controller = Controller(CostModel(CHEAP))
    c = candidates(np.zeros((4, 0)), [[0.02]] * 4)
    tried = []
    for step in range(100):
        is_probe = controller.allocate(c).kind == "probe"
        tried += [step] * is_probe
        hits = int(is_probe)
        controller.observe(4 + hits, 0.0104, num_lm_drafted=hits, num_lm_hits=hits)
    assert len(tried) > 5


def test_long_drafting_refreshes_the_price_of_a_plain_step() -> None:
    controller = Controller(costs := CostModel(CHEAP))
    c = candidates([[0.3, 0.1]], np.zeros((1, 0)))
    kinds = []
    for _ in range(300):
        allocation = controller.allocate(c)
        kinds.append(allocation.reason)
        num_rows = 1 + int(allocation.num_free.sum())
        costs.observe(
            num_rows=num_rows, forward_s=costs.forward(num_rows), verify_s=0.0, num_tokens=1
        )
        controller.observe(2, costs.forward(num_rows))
    assert 2 <= kinds.count("plain: measuring its cost") <= 5


def test_no_plain_step_is_waited_for_where_others_draft_whatever_is_chosen() -> None:
    """It would not come, and nothing would be drafted until they end."""
    controller = Controller(costs := CostModel(CHEAP))
    alone = candidates([[0.9, 0.8]], np.zeros((1, 0)))
    mixed = replace(alone, is_mixed=True)
    for _ in range(300):
        costs.observe(num_rows=3, forward_s=0.01, verify_s=0.0, num_tokens=3, num_drafts=2)
        assert controller.allocate(mixed).kind == "draft"
        controller.observe(3, 0.01)
    assert controller.allocate(alone).measures


def test_measurements_that_contradict_each_other_promise_no_wonders() -> None:
    """Steps with drafts beside prompts were faster than those without, by luck."""
    costs = CostModel(CHEAP)
    for _ in range(50):
        for num_drafts, forward_s in ((0, 0.091), (2, 0.07)):
            costs.observe(num_rows=516 + num_drafts, forward_s=forward_s,
                          verify_s=0.0, num_tokens=4,
                          num_requests=4, num_drafts=num_drafts, with_prompts=True)  # fmt: skip
    c = candidates(np.full((4, 2), 0.05), np.zeros((4, 0)))
    c = replace(c, num_prefill=512, levels=costs.levels(4, with_prompts=True))
    search = Search(c, costs)
    assert search.best()[0].rate <= 1.11 * search.plain.rate, "no more than its tokens say"


def test_the_guard_ends_drafting_that_does_not_pay_whatever_is_predicted() -> None:
    controller = Controller(CostModel(CHEAP))
    c = candidates([[0.5]], np.zeros((1, 0)))
    kinds = []
    for _ in range(400):
        allocation = controller.allocate(c)
        kinds.append(allocation.kind)
        # in truth no draft ever comes true, and nobody tells
        controller.observe(1, 0.0125 if allocation.kind == "draft" else 0.0101)
    assert kinds[0] == "draft"
    assert kinds[-100:].count("draft") < 10
    assert controller.describe()["guard_alarms"] >= 1


def test_the_guard_forgives_by_halves() -> None:
    guard = Guard()
    while not guard.num_alarms:
        guard.observe(worth=0.5, spent=1.0, expected=1.0)
    above = guard.margin - BASE_MARGIN
    guard.relax(2 * PATIENCE)  # one alarm doubles the patience that it takes
    assert guard.margin - BASE_MARGIN == pytest.approx(above / 2)


def test_luck_and_stalls_do_not_alarm_the_guard() -> None:
    rng, controller = np.random.default_rng(0), Controller(CostModel(CHEAP))
    c = candidates([[0.5]], np.zeros((1, 0)))
    for step in range(2000):
        controller.allocate(c)
        seconds = 0.0102 * float(rng.lognormal(0.0, 0.1)) * (10.0 if step % 100 == 7 else 1.0)
        controller.observe(1 + int(rng.random() < 0.5), seconds)
    assert controller.describe()["guard_alarms"] == 0


def test_more_rows_are_worth_what_they_bring_at_the_going_rate() -> None:
    controller = Controller(CostModel(CHEAP))
    assert not controller.takes(1.0, 1)  # nothing was allocated yet
    controller.allocate(candidates([[0.9, 0.8]], np.zeros((1, 0))))
    assert controller.takes(0.5, 3)
    assert not controller.takes(0.01, 8)


def test_the_summary_tells_shares_and_starts_anew() -> None:
    controller = Controller(CostModel(CHEAP))
    for free in ([[0.9, 0.8]], [[0.0, 0.0]]):
        controller.allocate(candidates(free, np.zeros((1, 0))))
        controller.observe(1, 0.01)
    summary = controller.describe()
    assert summary["share_free"] == summary["share_plain"] == 0.5
    assert summary["mean_drafted"] == 1.0
    assert summary["reason"] == "plain: nothing to draft"
    assert controller.describe()["share_free"] == 0.0


@pytest.mark.parametrize("free", [[[0.9], [0.9]], [[0.0], [0.0]]], ids=["both", "lm"])
def test_what_cannot_come_is_not_drafted_even_where_more_rows_take_less_time(free) -> None:
    lm = [[0.9, 0.8, 0.0, 0.0], [0.9, 0.8, 0.7, 0.0]]
    given = candidates(free, lm)
    levels = np.array([0.0, 0.0, 0.0, -0.001, -0.004, *[-0.006] * 7])  # from 8 rows on, less
    search = Search(replace(given, levels=levels), CostModel(CHEAP))
    for option in search.best():
        if option is not None and option.num_free is not None and option.depths is not None:
            assert (option.num_free <= np.count_nonzero(given.free, axis=1)).all()
            assert (option.depths <= np.count_nonzero(given.lm, axis=1)).all()
