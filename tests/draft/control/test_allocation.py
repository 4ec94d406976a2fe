"""Allocation of a batch's rows: a draft token is verified if it is worth more than its row."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import ArrayLike

from foretoken.draft.control import controller
from foretoken.draft.control.controller import (
    FEW_UNCACHED_TOKENS,
    PAYBACK_STEPS,
    Allocation,
    StepCandidates,
    allocate,
)
from foretoken.draft.control.cost_model import CostModel, StepProfile

LINE = StepProfile({1: 1.0, 101: 11.0})  # a row takes 0.1 s


def candidates(
    lookup: ArrayLike,
    lm: ArrayLike = (),
    *,
    budget: int = 99,
    num_uncached_draft_tokens: Sequence[int] = (),
    **more: Any,
) -> StepCandidates:
    table = np.array(lookup, dtype=float)
    number = len(table)
    return StepCandidates(
        lookup_survival=table,
        expected_accepted=np.array(lm, dtype=float).reshape(number, -1),
        num_uncached_draft_tokens=np.array(num_uncached_draft_tokens or [0] * number),
        budget=budget,
        **more,
    )


def with_draft_model(pass_s: float, row_s: float = 0.0) -> CostModel:
    draft = {1: pass_s, 101: pass_s + 100 * row_s}
    return CostModel(StepProfile(LINE.forward, draft))


def free_of(given: StepCandidates, rate: float = 1.0, costs: CostModel | None = None) -> list[int]:
    found: list[int] = allocate(given, costs or CostModel(LINE), rate).num_lookup.tolist()
    return found


def behind(*context_lens: int) -> dict[str, object]:
    return {"context_lens": np.array(context_lens)}


# -- known drafts -------------------------------------------------------------------------------


def test_every_token_is_taken_that_is_worth_more_than_its_row() -> None:
    given = candidates([[0.9, 0.5, 0.11, 0.09], [0.3, 0.05, 0.0, 0.0], [0.02, 0.0, 0.0, 0.0]])
    assert free_of(given) == [3, 1, 0]
    assert free_of(given, rate=4.0) == [2, 0, 0], "a second is worth more: a row costs 0.4 tokens"
    assert free_of(given, rate=0.1) == [4, 2, 1]


def test_a_row_of_a_longer_request_must_bring_more() -> None:
    keys = CostModel(StepProfile(LINE.forward, {}, key_s=1e-4))  # 0.1 s for 1,000 tokens behind
    rows = [[0.5, 0.25, 0.15], [0.5, 0.25, 0.15]]
    assert free_of(candidates(rows, **behind(10, 2000)), costs=keys) == [3, 1]
    assert free_of(candidates(rows, **behind(1000, 5000)), costs=keys) == [2, 0]
    assert free_of(candidates(rows, **behind(10, 4000), budget=2), costs=keys) == [2, 0]


def test_the_draft_model_learns_what_a_row_must_bring() -> None:
    costs = CostModel(StepProfile(LINE.forward, {1: 0.01, 101: 0.02}, key_s=1e-4))
    lm = [[0.9, 0.8, 0.7], [0.9, 0.8, 0.7]]
    chosen = allocate(candidates([[], []], lm, **behind(0, 1000)), costs, 1.0)
    assert chosen.row_prices is not None
    assert chosen.row_prices.tolist() == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5, 0.6])
    assert chosen.key_prices is not None
    assert chosen.key_prices.tolist() == pytest.approx([0.0, 0.1])


def test_the_draft_model_learns_where_a_tile_of_rows_ends() -> None:
    costs = CostModel(StepProfile({1: 1.0, 3: 1.0, 4: 1.5, 6: 1.5}, {1: 0.01, 101: 0.02}))
    chosen = allocate(candidates([[]], [[0.9, 0.8, 0.7, 0.6]]), costs, 1.0)
    assert chosen.row_prices is not None
    assert chosen.row_prices.tolist() == pytest.approx([0.0, 0.0, 0.5, 0.5])


def test_nothing_is_taken_where_there_is_nothing_or_no_room() -> None:
    for given in (
        candidates(np.zeros((2, 4)), np.zeros((2, 3))),
        candidates(np.zeros((2, 0))),
        candidates([[0.9, 0.8]], [[0.9]], budget=0),
        candidates([[0.9, 0.8]], [[0.9]], budget=-1),
    ):
        found = allocate(given, CostModel(LINE), 1.0)
        assert (found.num_rows, found.net_gain) == (0, 0.0)
        assert len(found.num_lookup) == len(found.num_proposer) == len(given.lookup_survival)


def test_the_budget_goes_to_the_likeliest_tokens_of_all_requests() -> None:
    given = candidates([[0.99, 0.98, 0.97, 0.6], [0.9, 0.8, 0.7, 0.65]], budget=5)
    assert free_of(given) == [3, 2]
    given = candidates([[0.9, 0.9, 0.9], [0.9, 0.9, 0.9]], budget=4)
    assert free_of(given) == [3, 1], "equal tokens go to the first request, in order"


def test_a_dear_first_row_is_paid_where_those_behind_it_make_up_for_it() -> None:
    """Kernels take rows by the block: the second row opens one, the rest of it is nearly free."""
    block = CostModel(StepProfile({1: 1.0, 2: 3.0, 8: 3.06}))
    assert free_of(candidates([[0.9] * 7]), costs=block) == [7]
    assert free_of(candidates([[0.9, 0.9, 0.1, 0.01]]), costs=block) == [0]


def test_a_proposer_is_asked_for_a_block_of_rows_of_which_the_first_is_dear() -> None:
    costs = CostModel(StepProfile({1: 1.0, 2: 2.0, 8: 2.06}, {1: 0.3, 101: 0.3}))
    guesses = [[0.95, 0.9, 0.85, 0.8, 0.75, 0.7]]
    chosen = allocate(candidates([[]], guesses, tokens_per_pass=8), costs, 0.9)
    assert chosen.num_proposer.tolist() == [6]


def test_rows_of_others_and_of_prompts_move_the_pass_along_its_curve() -> None:
    curve = CostModel(StepProfile({1: 1.0, 8: 1.07, 64: 57.07}))  # 0.01 s a row, then 1 s
    assert free_of(candidates([[0.9] * 4]), costs=curve) == [4]
    assert free_of(candidates([[0.9] * 4], num_others=7), costs=curve) == [0]
    assert free_of(candidates([[0.9] * 4], num_prefill=7), costs=curve) == [0]


def test_an_overhead_that_eats_the_gain_leaves_nothing_to_draft() -> None:
    costs = CostModel(LINE)
    for num_rows, pass_s, host_s in ((1, 1.0, 0.0), (3, 1.2, 1.0)):
        costs.observe(num_rows=num_rows, num_requests=1, num_tokens=1, forward_s=pass_s,
                      draft_s=0.0, seconds=pass_s + host_s, with_prompts=False)  # fmt: skip
    assert costs.draft_overhead(1) == pytest.approx(1.0)
    assert free_of(candidates([[0.8, 0.3]]), costs=costs) == [0]  # 0.9 tokens beyond their rows
    assert free_of(candidates([[0.8, 0.5]]), costs=costs) == [2]  # 1.1


def test_of_all_prefixes_the_best_are_taken() -> None:
    rng = np.random.default_rng(1)
    for _ in range(300):
        given, costs, rate = random_case(rng, with_proposer=False)
        found = allocate(given, costs, rate)
        best = max(net_of(given, costs, rate, pairs) for pairs in every_choice(given))
        assert found.net_gain == pytest.approx(best, abs=1e-9)
        pairs = [(count, 0) for count in found.num_lookup.tolist()]
        assert net_of(given, costs, rate, pairs) == pytest.approx(best, abs=1e-9)


# -- the draft model ----------------------------------------------------------------------------


def lm_of(given: StepCandidates, costs: CostModel, rate: float = 1.0) -> Allocation:
    return allocate(given, costs, rate)


def test_the_draft_model_goes_as_deep_as_its_passes_pay() -> None:
    given = candidates([[]], [[0.9, 0.7, 0.5, 0.3, 0.1]])
    depths = [
        lm_of(given, with_draft_model(pass_s)).num_proposer.tolist() for pass_s in (0.01, 0.25, 0.9)
    ]
    assert depths == [[4], [3], [0]]


def test_nodes_that_a_draft_hardly_ever_has_bring_nothing() -> None:
    """However much cheaper the rows behind the first are, which they do not take."""
    costs = CostModel(StepProfile({1: 1.0, 2: 1.1, 18: 1.1}, {1: 0.15}))
    shown = np.array([[1.0] + 15 * [0.01]])
    given = candidates([[]], [[0.2] + 15 * [0.001]], node_probability=shown)
    assert not lm_of(given, costs).num_proposer.any(), (
        "a row and a pass cost more than the first node"
    )
    given = candidates([[]], [[0.3] + 15 * [0.001]], node_probability=shown)
    assert lm_of(given, costs).net_gain == pytest.approx(0.3 - 0.1 - 0.15, abs=0.03)


def test_each_request_takes_the_better_of_its_two_drafts_never_both() -> None:
    given = candidates([[0.95, 0.9, 0.85], [0.1, 0, 0]], [[0.3, 0.1], [0.9, 0.8]])
    found = lm_of(given, with_draft_model(0.1))
    assert found.num_lookup.tolist() == [3, 0]
    assert found.num_proposer.tolist() == [0, 2]
    assert found.num_rows == 5


def test_one_pass_serves_all_requests_that_are_drafted_for() -> None:
    costs = with_draft_model(0.9)
    assert not lm_of(candidates([[]], [[0.9]]), costs).num_proposer.any()
    assert lm_of(candidates([[]] * 3, [[0.9]] * 3), costs).num_proposer.tolist() == [1, 1, 1]


def test_a_draft_model_that_cannot_pay_is_found_without_trying_and_no_other_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drawn = np.random.default_rng(3)
    cases = []
    for _ in range(300):
        number, width = drawn.integers(1, 4), drawn.integers(1, 6)
        given = candidates(
            -np.sort(-drawn.random((number, 3)) * (drawn.random() < 0.5)),
            -np.sort(-drawn.random((number, width))),
            num_uncached_draft_tokens=drawn.integers(0, 9, number).tolist(),
            tokens_per_pass=int(drawn.integers(1, 4)),
            passes_per_node=float(drawn.uniform(0.2, 1.0)),
        )
        cases.append((given, with_draft_model(drawn.uniform(0, 4), 0.1), drawn.uniform(0.2, 2)))
    quick = [allocate(*case) for case in cases]
    pays = [controller._may_pay(*case) for case in cases]
    assert 50 < sum(pays) < 250
    monkeypatch.setattr(controller, "_may_pay", lambda *_: True)
    for case, found in zip(cases, quick, strict=True):
        whole = allocate(*case)
        for name in ("num_lookup", "num_proposer"):
            assert getattr(found, name).tolist() == getattr(whole, name).tolist()
        assert found.net_gain == whole.net_gain


def test_the_draft_model_is_not_asked_where_it_may_not_be() -> None:
    found = lm_of(candidates([[]] * 2, [[0.9, 0.8], [0.0, 0.0]]), with_draft_model(0.01))
    assert found.num_proposer.tolist() == [2, 0]


def test_a_long_backlog_must_pay_within_a_few_steps_and_a_short_one_at_once() -> None:
    costs = with_draft_model(0.05, row_s=0.05)
    net = 0.9 - 0.1 - 0.05  # a token, its row, the pass of one row

    def is_asked(num_uncached_draft_tokens: int) -> bool:
        return bool(
            lm_of(
                candidates([[]], [[0.9]], num_uncached_draft_tokens=[num_uncached_draft_tokens]),
                costs,
            ).num_proposer.any()
        )

    most = int(FEW_UNCACHED_TOKENS + PAYBACK_STEPS * (net / 0.05 - FEW_UNCACHED_TOKENS))
    assert is_asked(most - 1)
    assert not is_asked(most + 1)
    worth = [
        lm_of(candidates([[]], [[0.9]], num_uncached_draft_tokens=[n]), costs).net_gain
        for n in (0, 2, 4)
    ]
    assert np.diff(worth) == pytest.approx([-0.1, -0.1], abs=1e-6)


def test_the_choice_comes_close_to_trying_everything() -> None:
    rng, lost, total = np.random.default_rng(2), [], 0.0
    for _ in range(300):
        given, costs, rate = random_case(rng, with_proposer=True)
        found = allocate(given, costs, rate)
        pairs = list(zip(found.num_lookup.tolist(), found.num_proposer.tolist(), strict=True))
        assert sum(map(sum, pairs)) <= given.budget
        assert not any(count and depth for count, depth in pairs)
        assert found.net_gain == pytest.approx(net_of(given, costs, rate, pairs), abs=1e-9)
        best = max(net_of(given, costs, rate, pairs) for pairs in every_choice(given))
        lost.append(best - found.net_gain)
        total += best
    assert max(lost) < 0.2, "tokens of a step"
    assert sum(lost) < 0.005 * total


# -- trying everything --------------------------------------------------------------------------


def random_case(
    rng: np.random.Generator, *, with_proposer: bool
) -> tuple[StepCandidates, CostModel, float]:
    number, width = int(rng.integers(1, 4)), int(rng.integers(0, 5))
    num_depths = int(rng.integers(1, 4)) if with_proposer else 0
    row_s = rng.choice(
        [0.02, 0.2, 0.5]
    )  # the shares of the draft model are weighed by a straight line
    rows = np.full(30, row_s) if with_proposer else rng.exponential(row_s, 30)
    forward = {n: float(seconds) for n, seconds in enumerate(1.0 + rows.cumsum(), 1)}
    pass_s = float(rng.choice([0.02, 0.2]))
    low = rng.choice([0.1, 0.5, 0.9])
    free = rng.uniform(low, 1.0, (number, width)).cumprod(axis=1)
    free *= np.arange(width) < rng.integers(0, width + 1, (number, 1))
    lm = rng.uniform(low, 1.0, (number, num_depths)).cumprod(axis=1)
    lm *= rng.random((number, 1)) < 0.8
    costs = CostModel(StepProfile(forward, {1: pass_s, 8: 1.1 * pass_s}))
    given = candidates(
        free, lm, budget=int(rng.integers(1, 13)), num_others=int(rng.integers(0, 4))
    )
    return given, costs, float(rng.uniform(0.5, 2.0))


def every_choice(given: StepCandidates) -> Iterator[list[tuple[int, int]]]:
    """Yield every choice within the budget: (known, draft model's) tokens of each request."""
    choices = [
        [
            *((count, 0) for count in range(np.count_nonzero(free) + 1)),
            *((0, depth) for depth in range(1, np.count_nonzero(lm) + 1)),
        ]
        for free, lm in zip(given.lookup_survival, given.expected_accepted, strict=True)
    ]
    for pairs in itertools.product(*choices):
        if sum(map(sum, pairs)) <= given.budget:
            yield list(pairs)


def net_of(
    given: StepCandidates, costs: CostModel, rate: float, pairs: Sequence[tuple[int, int]]
) -> float:
    """Expected tokens beyond the price of their rows and of the draft model's passes."""
    gain = sum(
        given.lookup_survival[row, :count].sum() + given.expected_accepted[row, :depth].sum()
        for row, (count, depth) in enumerate(pairs)
    )
    chosen = sum(map(sum, pairs))
    rows_s = costs.row_seconds(given.num_rows, chosen, given.num_decodes)[-1]
    passes_s = costs.draft_pass(len(pairs)) * max(depth for _, depth in pairs)
    return float(gain - rate * (rows_s + passes_s))
