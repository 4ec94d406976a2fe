"""The controller in the loop with its calibration, in virtual time, on machines of many kinds.

The promise: never worse than plain decoding by more than 2%, and near the best fixed depth where
one pays. Totals are free of noise, what the controller observes is not.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from draft_simulator import Adaptive, Fixed, Machine, Phase, run

MACHINES = {
    "tiny model on a CPU": Machine(
        lambda n: 5.2e-3 + 0.16e-3 * n, lambda n: 2.5e-3 + 0.05e-3 * n, 0.15e-3, 0.3e-3
    ),
    "0.6B on a CPU": Machine(
        lambda n: 60e-3 + 4e-3 * max(0, n - 4), lambda n: 8e-3 + 1e-3 * n, 0.3e-3, 0.5e-3
    ),
    "8B on a GPU": Machine(
        lambda n: 4.6e-3 + 4e-6 * min(n, 128) + 26e-6 * max(0, n - 128),
        lambda n: 0.28e-3,
        5e-6,
        0.3e-3,
    ),
    "bound by arithmetic": Machine(lambda n: 1e-3 * n, lambda n: 0.2e-3 + 0.05e-3 * n, 1e-5, 1e-4),
}
NOISY = {"quiet": (0.0, 0.0), "noisy": (0.1, 0.01)}
SERVED = {1: 1500, 8: 3000, 32: 5000}  # tokens of a trace by running requests


def traces(num_requests: int) -> dict[str, list[Phase]]:
    def phase(share: float = 1.0, **drafts: object) -> Phase:
        num_tokens = round(share * SERVED[num_requests])
        return Phase(num_tokens, num_requests, **drafts)  # type: ignore[arg-type]

    always_wrong, now_and_then = (1.0, 16, 1e-4), (0.1, 40, 0.95)
    return {
        "good": [phase(lm=0.85)],
        "poor": [phase(lm=0.3)],
        "hopeless": [phase(lm=0.05)],
        "collapse": [phase(0.3, lm=0.9), phase(lm=0.05)],
        "recover": [phase(0.3, lm=0.9), phase(0.5, lm=0.05), phase(1.5, lm=0.9)],
        "free come and go": [phase(0.4, free=now_and_then), phase(0.4), phase(free=now_and_then)],
        "adversarial": [phase(free=always_wrong)],
        "adversarial and good": [phase(lm=0.8, free=always_wrong)],
        "both": [phase(lm=0.7, free=(0.05, 40, 0.95))],
    }


@cache
def fixed(machine: str, trace: str, num_requests: int, depth: int) -> float:
    """Seconds per token."""
    return run(MACHINES[machine], traces(num_requests)[trace], Fixed(depth)).token_s


@pytest.mark.parametrize("noise", NOISY)
@pytest.mark.parametrize("trace", traces(1))
@pytest.mark.parametrize("num_requests", SERVED)
@pytest.mark.parametrize("machine", MACHINES)
def test_drafting_never_costs_speed(
    machine: str, num_requests: int, trace: str, noise: str
) -> None:
    sigma, stalls = NOISY[noise]
    noisy = replace(MACHINES[machine], noise=sigma, stalls=stalls)
    plain = fixed(machine, trace, num_requests, 0)
    policy = Adaptive(MACHINES[machine].profile())
    assert run(noisy, traces(num_requests)[trace], policy, 1).token_s < 1.02 * plain


@pytest.mark.parametrize("trace", ["good", "poor", "adversarial and good"])
@pytest.mark.parametrize("num_requests", SERVED)
@pytest.mark.parametrize("machine", MACHINES)
def test_drafting_is_about_as_fast_as_the_best_fixed_depth(
    machine: str, num_requests: int, trace: str
) -> None:
    best = min(fixed(machine, trace, num_requests, depth) for depth in range(7))
    policy = Adaptive(MACHINES[machine].profile())
    served = run(MACHINES[machine], traces(num_requests)[trace], policy, 1)
    assert served.token_s < 1.1 * best


@pytest.mark.parametrize("machine", MACHINES)
def test_a_jump_of_the_load_is_followed(machine: str) -> None:
    jump = [Phase(1000, 1, lm=0.8), Phase(6400, 32, lm=0.8), Phase(1000, 1, lm=0.8)]
    every = [run(MACHINES[machine], jump, Fixed(depth)).token_s for depth in range(7)]
    policy = Adaptive(MACHINES[machine].profile())
    served = run(MACHINES[machine], jump, policy, 1).token_s
    assert served < 1.02 * every[0]
    assert served < 1.1 * min(every)


def test_a_draft_model_that_comes_right_again_is_found_out() -> None:
    for name, least in (("8B on a GPU", 1.9), ("0.6B on a CPU", 1.35)):
        trace = traces(1)["recover"]
        served = run(MACHINES[name], trace, Adaptive(MACHINES[name].profile()), 1).token_s
        assert fixed(name, "recover", 1, 0) > least * served


def test_without_a_profile_a_fitting_draft_model_is_put_to_use() -> None:
    machine = MACHINES["8B on a GPU"]
    served = run(machine, traces(1)["good"], Adaptive(None), 1).token_s
    assert fixed("8B on a GPU", "good", 1, 0) > 2.0 * served


def test_a_profile_that_is_wrong_throughout_is_put_right() -> None:
    # measured when rows looked free, on a machine where each costs as much as a step of its own
    flat = MACHINES["bound by arithmetic"]
    wrong = replace(flat, forward=lambda n: 1e-3 + 1e-5 * n).profile()
    trace = [Phase(4000, 4, lm=0.6, free=(0.1, 40, 0.9))]
    plain = run(flat, trace, Fixed(0)).token_s
    assert run(flat, trace, Adaptive(wrong), 1).token_s < 1.25 * plain
