"""Simulated acceptance: the controller against the constant depth that was best in hindsight.

Each cell is a text in which guesses come true in some way, a machine whose rows cost so much, and
a number of requests. The speculator begins without knowledge, and its times are noisy; the constant
depths know which of them is the best. What is compared is virtual time: no test depends on how
fast anything runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TypeVar

import pytest

from foretoken.draft.control.cost_model import StepProfile
from support.draft_simulator import Auto, Machine, Regime, best_constant, run

pytestmark = pytest.mark.slow

T = TypeVar("T")
ROW_SHARES = (0.01, 0.03, 0.1, 0.3)  # what a row costs, in passes of a plain step
LM_DEPTHS = (0, 1, 2, 4, 6)
LEAST = 0.95  # of the tokens a second of the best constant depth


def constant(chance: float) -> Regime:
    return Regime(known=lambda at, ahead: chance)


def by_depth(*chances: float) -> Regime:
    """Make a regime of the chances of a draft's first, second, ... token; the last one holds on."""
    return Regime(known=lambda at, ahead: chances[min(ahead, len(chances) - 1)])


def in_turns(first: tuple[float, int], second: tuple[float, int], *, tells: bool = False) -> Regime:
    """A chance for so many tokens of the text, then the other; a source may tell which it is."""
    (one, length), (other, other_length) = first, second

    def turn(at: int) -> int:
        return int(at % (length + other_length) >= length)

    return Regime(
        known=lambda at, ahead: (one, other)[turn(at)], kind=turn if tells else lambda at: 0
    )


def drafting(*chances: tuple[float, int], prompt: int = 8) -> Regime:
    """A draft model with a chance until so many tokens were said, then the next."""
    return Regime(
        lm=lambda at, ahead: next(chance for chance, until in chances if at < until), prompt=prompt
    )


EVER = 1 << 30
REGIMES: dict[str, tuple[Regime, int]] = {  # and tokens of each request's seat
    "constant 0.05": (constant(0.05), 500),
    "constant 0.2": (constant(0.2), 500),
    "constant 0.4": (constant(0.4), 600),
    "constant 0.6": (constant(0.6), 700),
    "constant 0.8": (constant(0.8), 1200),
    "constant 0.9": (constant(0.9), 1800),
    "constant 0.95": (constant(0.95), 2500),
    "constant 0.98": (constant(0.98), 3000),
    "good at first": (by_depth(0.95, 0.95, 0.9, 0.5, 0.2, 0.05), 1000),
    "better and better": (by_depth(0.3, 0.5, 0.9, 0.98), 1000),
    "short copies": (in_turns((0.15, 80), (0.97, 20)), 1000),
    "copies that are told": (in_turns((0.1, 60), (0.98, 60), tells=True), 1200),
    "long copies": (in_turns((0.1, 200), (0.97, 200)), 1600),
    "turns for the worse": (in_turns((0.8, 500), (0.2, 500)), 2000),
    "turns for the better": (in_turns((0.05, 500), (0.95, 500)), 2000),
    "many turns": (in_turns((0.9, 100), (0.05, 100)), 1000),
}


def in_pairs(names: Iterable[str], prices: Sequence[T]) -> list[tuple[str, int, T]]:
    """Every text with every number of requests and with each of four prices, not all three at once.

    Of neighbours in the list of prices, which differ little, a text meets one alone and among many,
    the other among some.
    """
    cells = []
    for at, name in enumerate(names):
        cheap, dear = (prices[0], prices[2]), (prices[1], prices[3])
        ends, middle = (cheap, dear) if at % 2 == 0 else (dear, cheap)
        alone, many = ends if at % 4 < 2 else ends[::-1]
        cells += [(name, 1, alone), (name, 16, many), *((name, 4, price) for price in middle)]
    return cells


def num_tokens_of(length: int, num_requests: int) -> int:
    """Return the tokens of each request: many of them learn together, so each may say less."""
    return length * {1: 1, 4: 4, 16: 8}[num_requests]


def share_of_best(
    machine: Machine, regime: Regime, num_requests: int, num_tokens: int, **options: float
) -> float:
    """Tokens a second of the controller by those of the best constant depth."""
    best, _ = best_constant(machine, regime, num_requests=num_requests, num_tokens=num_tokens)
    policy = Auto(machine, **options)  # type: ignore[arg-type]
    return run(machine, regime, policy, num_requests=num_requests, num_tokens=num_tokens) / best


@pytest.mark.parametrize(("name", "num_requests", "row"), in_pairs(REGIMES, ROW_SHARES))
def test_it_keeps_up_with_the_best_constant_depth(name: str, num_requests: int, row: float) -> None:
    regime, length = REGIMES[name]
    number = num_tokens_of(length, num_requests)
    assert share_of_best(Machine(row), regime, num_requests, number) >= LEAST


@pytest.mark.parametrize("row", ROW_SHARES)
@pytest.mark.parametrize("num_requests", [1, 4, 16])
def test_short_turns_that_no_source_tells_of_cost_a_fifth_at_most(
    num_requests: int, row: float
) -> None:
    """The hardest text for what is learnt of a request: it turns as soon as that was learnt."""
    regime = in_turns((0.1, 60), (0.98, 60))
    number = num_tokens_of(1200, num_requests)
    assert share_of_best(Machine(row), regime, num_requests, number) >= 0.78


@pytest.mark.parametrize(("prior", "chance"), [(0.95, 0.05), (0.1, 0.95), (0.1, 0.05)])
def test_a_wrong_prior_is_soon_made_up_for(prior: float, chance: float) -> None:
    for row in (0.03, 0.1):
        share = share_of_best(Machine(row), constant(chance), 4, 4800, prior=prior)
        assert share >= 0.93


@pytest.mark.parametrize("num_requests", [1, 4])
@pytest.mark.parametrize("row", ROW_SHARES)
def test_where_looking_up_is_dear_and_in_vain_little_is_lost(row: float, num_requests: int) -> None:
    """Each look-up takes a twentieth of a step: most of them are left out."""
    machine = Machine(row, look_up=0.05)
    number = {"num_requests": num_requests, "num_tokens": 1500 * num_requests}
    plain, _ = best_constant(machine, constant(0.0), depths=[0], **number)
    found = run(machine, constant(0.0), Auto(machine), **number)
    assert found >= 0.965 * plain


def test_the_load_may_jump() -> None:
    machine, regime = Machine(0.1), constant(0.8)
    policy = Auto(machine)
    for num_requests in (1, 16, 1, 4):
        number = {"num_requests": num_requests, "num_tokens": 600 * num_requests}
        best, _ = best_constant(machine, regime, **number)
        assert run(machine, regime, policy, **number) >= 0.93 * best


@pytest.mark.parametrize("factor", [0.5, 2.0])
@pytest.mark.parametrize("num_requests", [1, 4, 16])
def test_a_profile_of_a_faster_or_slower_machine_is_put_right(
    num_requests: int, factor: float
) -> None:
    machine, regime = Machine(0.05), constant(0.7)
    number = {"num_requests": num_requests, "num_tokens": 1500 * num_requests}
    best, _ = best_constant(machine, regime, **number)
    wrong = replace(machine, step_s=factor * machine.step_s).profile()
    assert run(machine, regime, Auto(machine, profile=wrong), **number) >= 0.93 * best


def test_without_a_profile_drafts_that_come_true_are_put_to_use() -> None:
    machine, regime = Machine(0.03), constant(0.9)
    number = {"num_requests": 1, "num_tokens": 3000}
    best, _ = best_constant(machine, regime, **number)
    assert run(machine, regime, Auto(machine, profile=StepProfile()), **number) >= 0.9 * best


# -- a draft model ------------------------------------------------------------------------------

LM_REGIMES: dict[str, tuple[Regime, int]] = {
    "constant 0.05": (drafting((0.05, EVER)), 800),
    "constant 0.3": (drafting((0.3, EVER)), 800),
    "constant 0.6": (drafting((0.6, EVER)), 1000),
    "constant 0.85": (drafting((0.85, EVER)), 1500),
    "collapses": (drafting((0.9, 400), (0.05, EVER)), 1200),
    "hopeless behind long prompts": (drafting((0.05, EVER), prompt=1000), 800),
}


LM_PRICES = [(0.02, 0.05), (0.02, 0.2), (0.1, 0.2), (0.3, 0.2)]  # a row's, a draft pass's


@pytest.mark.parametrize(("name", "num_requests", "prices"), in_pairs(LM_REGIMES, LM_PRICES))
def test_a_draft_model_is_used_about_as_well_as_at_the_best_constant_depth(
    name: str, num_requests: int, prices: tuple[float, float]
) -> None:
    regime, length = LM_REGIMES[name]
    row, draft_pass = prices
    machine = Machine(row, draft_pass)
    number = {
        "num_requests": num_requests,
        "num_tokens": num_tokens_of(length, num_requests),
    }
    best, _ = best_constant(machine, regime, depths=LM_DEPTHS, lm=True, **number)
    assert run(machine, regime, Auto(machine, has_proposer=True), **number) >= 0.92 * best


@pytest.mark.parametrize(
    ("num_requests", "length", "draft_pass"), [(1, 8000, 0.2), (4, 4000, 0.05), (16, 4000, 0.2)]
)
def test_a_draft_model_that_comes_right_again_is_found_out(
    num_requests: int, length: int, draft_pass: float
) -> None:
    """Once it is out of use only trials can show it, and those are rare: it takes a while.

    Where a pass is dear, requests that owe it a long text go on without it; those behind them do
    not.
    """
    machine, regime = Machine(0.02, draft_pass), drafting((0.9, 300), (0.05, 1300), (0.9, EVER))
    number = {"num_requests": num_requests, "num_tokens": length * num_requests}
    plain, _ = best_constant(machine, regime, depths=[0], lm=True, **number)
    least = 1.05 if num_requests == 16 and draft_pass == 0.2 else 1.15
    assert run(machine, regime, Auto(machine, has_proposer=True), **number) >= least * plain
