"""How far each source is trusted."""

from __future__ import annotations

import math

import numpy as np
import pytest

from foretoken.draft.calibration import MAX_LENGTH, Calibration


def calibration(*priors: float) -> Calibration:
    made = Calibration()
    made.register("lm", priors or (0.7,))
    return made


def feed(
    made: Calibration, chance: float, num_guesses: int, *, request_id: str = "a", length: int = 6,
    seed: int = 0, kind: int = 0,
) -> None:  # fmt: skip
    rng = np.random.default_rng(seed)
    for _ in range(num_guesses):
        hits = min(length, int(rng.geometric(1.0 - chance)) - 1)
        made.score("lm", kind, request_id, hits, hits < length)


def first(made: Calibration, request_id: str = "new", kind: int = 0) -> float:
    return float(made.survival("lm", kind, request_id, 1)[0])


def test_an_unknown_source_is_trusted_by_its_prior() -> None:
    survival = calibration(0.7).survival("lm", 0, "a", 4)
    assert survival == pytest.approx([0.7, 0.7**2, 0.7**3, 0.7**4])
    assert calibration().survival("lm", 0, "a", 0).shape == (0,)
    assert calibration().survival("lm", 0, "a", MAX_LENGTH).shape == (MAX_LENGTH,)


@pytest.mark.parametrize("chance", [0.3, 0.6, 0.9])
def test_chances_converge_to_the_truth(chance: float) -> None:
    made = calibration(0.5)
    for request in range(30):
        feed(made, chance, 40, request_id=f"r{request}", seed=request)
    expected = chance ** np.arange(1, 5)
    assert made.survival("lm", 0, "new", 4) == pytest.approx(expected, abs=0.08)


def test_kinds_are_learnt_apart() -> None:
    made = calibration(0.5, 0.5)
    feed(made, 0.9, 300)
    feed(made, 0.2, 300, kind=1, request_id="b")
    assert first(made) > 0.8
    assert first(made, kind=1) < 0.35


def test_positions_are_learnt_apart() -> None:
    made = calibration(0.5)
    for _ in range(200):
        made.score("lm", 0, "a", 2, True)  # the third token is always wrong
    survival = made.survival("lm", 0, "new", 3)
    assert survival[1] > 0.9
    assert survival[2] < 0.1


def test_a_collapse_is_followed_within_a_few_hundred_tokens() -> None:
    made = calibration()
    feed(made, 0.95, 200)
    assert first(made) > 0.85
    for _ in range(300):
        made.score("lm", 0, "b", 0, True)
    assert first(made) < 0.3
    for _ in range(150):
        made.score("lm", 0, "c", 6, False)
    assert first(made) > 0.6


def test_three_failures_in_a_row_bend_one_request_at_once() -> None:
    made = calibration()
    feed(made, 0.85, 300, request_id="other")
    before = first(made, "a")
    trust = [before]
    for _ in range(3):
        made.score("lm", 0, "a", 0, True)
        trust.append(first(made, "a"))
    assert trust == sorted(trust, reverse=True)
    assert trust[-1] < 0.8 * before
    assert first(made, "new") > 0.9 * before


def test_survivals_never_rise_and_stay_chances() -> None:
    made, rng = calibration(), np.random.default_rng(0)
    for _ in range(500):
        made.score("lm", 0, "a", int(rng.integers(0, 40)), bool(rng.random() < 0.5))
        survival = made.survival("lm", 0, "a", 40)
        assert (np.diff(survival) <= 0.0).all()
        assert 0.0 <= survival[-1] <= survival[0] < 1.0


def test_a_guess_of_which_nothing_came_to_light_teaches_nothing() -> None:
    made = calibration()
    before = made.survival("lm", 0, "a", 6).copy()
    made.score("lm", 0, "a", 0, False)
    assert (made.survival("lm", 0, "a", 6) == before).all()


def test_a_request_that_left_is_forgotten_and_its_lesson_stays() -> None:
    made = calibration()
    for _ in range(30):
        made.score("lm", 0, "a", 0, True)
    made.forget("a")
    made.forget("never seen")
    assert first(made, "a") == first(made, "new") < 0.5


def hazard(made: Calibration, request_id: str) -> float:
    """How many times as often as usual a request's guesses seem to fail."""
    return math.log(first(made, request_id)) / math.log(first(made))


def test_a_request_long_silent_is_trusted_again_in_part() -> None:
    made = calibration()
    feed(made, 0.9, 100, request_id="good")
    for _ in range(5):
        made.score("lm", 0, "bad", 0, True)
    feed(made, 0.9, 100, request_id="good")
    before = hazard(made, "bad")
    feed(made, 0.9, 600, request_id="good", seed=1)
    assert 1.0 < hazard(made, "bad") < 0.9 * before


def test_the_chance_at_a_glance_is_that_of_the_first_token() -> None:
    made = calibration(0.6)
    feed(made, 0.8, 30)
    for request_id in ("a", "new"):
        glance = made.chance("lm", 0, request_id)
        assert glance == pytest.approx(first(made, request_id))
    assert made.chance("lm", 0, "a") != made.chance("lm", 0, "new")
