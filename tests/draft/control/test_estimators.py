"""The trust in each source: by source, kind, position and temperature, and by request."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from foretoken.draft.control.estimators import MAX_LENGTH, AcceptanceModel, GuessClass
from foretoken.draft.sources.source import BUCKETS, Chances, Priors


def model(*chances: float) -> AcceptanceModel:
    """A model of one source, with the same prior chance at every position of each kind."""
    made = AcceptanceModel()
    made.register("lm", Priors.constant(*(chances or (0.7,))))
    return made


def score(
    made: AcceptanceModel,
    num_hits: int,
    *,
    missed: bool = True,
    times: int = 1,
    request_id: str = "a",
    kind: int = 0,
    sampled: bool = False,
) -> None:
    for _ in range(times):
        made.score("lm", kind, request_id, num_hits, missed=missed, sampled=sampled)


def draw(made: AcceptanceModel, chance: float, times: int, *, seed: int = 0, **of: object) -> None:
    """Score ``times`` guesses of six tokens, each of which comes true with that chance."""
    rng = np.random.default_rng(seed)
    for _ in range(times):
        hits = min(6, int(rng.geometric(1.0 - chance)) - 1)
        score(made, hits, missed=hits < 6, **of)  # type: ignore[arg-type]


def survival(
    made: AcceptanceModel,
    length: int,
    *,
    request_id: str = "new",
    kind: int = 0,
    sampled: bool = False,
) -> list[float]:
    found = made.survivals([GuessClass("lm", kind, request_id, sampled)], length)
    return found[0].tolist()


def first(made: AcceptanceModel, request_id: str = "new", **of: object) -> float:
    return survival(made, 1, request_id=request_id, **of)[0]  # type: ignore[arg-type]


def test_an_unknown_source_is_trusted_by_its_prior() -> None:
    assert survival(model(0.7), 4) == pytest.approx([0.7, 0.7**2, 0.7**3, 0.7**4])
    assert survival(model(), 0) == []
    assert len(survival(model(), MAX_LENGTH)) == MAX_LENGTH


def test_a_prior_may_differ_by_kind_by_position_and_by_temperature() -> None:
    steep: Chances = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4)
    flat: Chances = (0.3,) * len(BUCKETS)
    made = AcceptanceModel()
    made.register("lm", Priors(greedy=(steep, flat), sampled=(flat, steep)))
    each: Sequence[float] = np.array(steep)[[0, 1, 2, 2, 3, 3, 3, 3, *[4] * 8, 5, 5]]
    assert survival(made, 18) == pytest.approx(np.cumprod(each))
    assert survival(made, 18, kind=1, sampled=True) == pytest.approx(np.cumprod(each))
    assert first(made, kind=1) == first(made, sampled=True) == pytest.approx(0.3)


def test_sources_are_learnt_apart() -> None:
    made = model(0.5)
    made.register("radix", Priors.constant(0.5))
    score(made, 0, times=30)
    other = made.survivals([GuessClass("radix", 0, "a", sampled=False)], 1)
    assert other[0, 0] == pytest.approx(0.5)


@pytest.mark.parametrize(("prior", "hits"), [(0.9, 0), (0.1, 1)])
def test_a_wrong_prior_is_overruled_within_a_few_tens_of_tokens(prior: float, hits: int) -> None:
    made = model(prior)
    score(made, hits, missed=hits == 0, times=40)
    assert abs(first(made) - hits) < 0.2


@pytest.mark.parametrize("chance", [0.3, 0.6, 0.9])
def test_chances_converge_to_the_truth(chance: float) -> None:
    made = model(0.5)
    for number in range(20):
        draw(made, chance, 20, request_id=f"r{number}", seed=number)
    expected = chance ** np.arange(1, 5)
    assert survival(made, 4) == pytest.approx(expected, abs=0.1)


def test_kinds_are_learnt_apart() -> None:
    made = model(0.5, 0.5)
    draw(made, 0.9, 60, kind=0)
    draw(made, 0.2, 60, kind=1)
    assert first(made, kind=0) > 0.8
    assert first(made, kind=1) < 0.35


def test_greedy_and_sampled_requests_are_learnt_apart() -> None:
    made = model(0.5)
    score(made, 0, times=40, sampled=True)
    assert first(made, sampled=False) == pytest.approx(0.5)
    assert first(made, sampled=True) < 0.15


def test_positions_are_learnt_apart() -> None:
    made = model(0.5)
    score(made, 2, times=100)  # the third token is always wrong
    chances = survival(made, 3)
    assert chances[1] > 0.9
    assert chances[2] < 0.1


def test_a_late_miss_says_nothing_against_the_positions_before_it() -> None:
    made = model(0.9)
    before = survival(made, 8)
    score(made, 8, times=20)  # the ninth token is always wrong
    after = survival(made, 9)
    assert all(new >= old for new, old in zip(after, before, strict=False))
    assert after[8] / after[7] < 0.5


def test_a_change_for_the_worse_is_followed_and_so_is_one_for_the_better() -> None:
    made = model()
    draw(made, 0.95, 60)
    assert first(made) > 0.85
    score(made, 0, times=200, request_id="b")
    assert first(made) < 0.35
    score(made, 6, missed=False, times=150, request_id="c")
    assert first(made) > 0.6


def test_one_failure_bends_a_request_a_little_and_three_bend_it_a_lot() -> None:
    made = model()
    draw(made, 0.85, 100, request_id="other")
    usual = survival(made, 4)
    score(made, 0)
    once = survival(made, 4, request_id="a")
    score(made, 0, times=2)
    thrice = survival(made, 4, request_id="a")
    assert 0.5 * usual[0] < once[0] < 0.95 * usual[0]
    assert thrice[0] < 0.7 * usual[0]
    assert thrice[3] < 0.4 * usual[3]
    assert first(made) > 0.9 * usual[0], "others are trusted as before"


def test_a_request_that_fails_no_more_is_soon_trusted_again() -> None:
    made = model(0.85)
    score(made, 0, times=3)
    assert first(made, "a") < 0.6 * first(made)
    score(made, 6, missed=False, times=8)
    assert first(made, "a") > 0.9 * first(made)


def test_a_request_that_does_better_than_usual_is_trusted_more() -> None:
    made = model(0.5)
    draw(made, 0.5, 60, request_id="other")
    score(made, 6, missed=False, times=4)
    assert first(made, "a") > first(made) + 0.15


def test_survivals_never_rise_and_stay_chances() -> None:
    made, rng = model(), np.random.default_rng(0)
    for _ in range(300):
        score(made, int(rng.integers(0, 40)), missed=bool(rng.random() < 0.5))
        for request_id in ("a", "new"):
            chances = survival(made, 40, request_id=request_id)
            assert (np.diff(chances) <= 0.0).all()
            assert 0.0 <= chances[-1] <= chances[0] < 1.0


def test_a_guess_that_was_used_up_is_no_miss() -> None:
    used_up, failed = model(0.5), model(0.5)
    score(used_up, 1, missed=False, times=30)
    score(failed, 1, missed=True, times=30)
    assert first(used_up) == first(failed) > 0.8
    assert survival(used_up, 2)[1] == pytest.approx(0.5 * first(used_up)), "not known: the prior"
    assert survival(failed, 2)[1] < 0.2
    assert first(used_up, "a") > first(failed, "a")


def test_a_guess_of_which_nothing_is_known_teaches_nothing() -> None:
    made = model()
    before = survival(made, 6, request_id="a")
    score(made, 0, missed=False)
    assert survival(made, 6, request_id="a") == before


def test_what_a_request_taught_outlives_it_and_what_was_its_own_does_not() -> None:
    made = model()
    score(made, 0, times=30)
    assert first(made, "a") < first(made) < 0.3, "the next request profits"
    made.forget("a")
    made.forget("never seen")
    assert first(made, "a") == first(made)


def test_guesses_longer_than_the_curve_are_counted_as_far_as_it_goes() -> None:
    made = model(0.5)
    score(made, 3 * MAX_LENGTH, missed=True, times=20)
    assert survival(made, MAX_LENGTH)[-1] > 0.5**6
