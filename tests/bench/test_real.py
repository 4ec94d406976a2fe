"""`foretoken bench real`: what its settings are."""

from __future__ import annotations

from array import array

import pytest

from foretoken.bench.common.drafting import chain, tree
from foretoken.bench.real import (
    DRAFT_SETTINGS,
    SETTINGS,
    Figures,
    best_of,
    drafts_by,
    is_of_draft,
    main,
    paired,
)
from foretoken.core.interface.request import Request
from foretoken.core.interface.sampling import SamplingMetadata, TokenSamplingParams


def request(depth: object = "auto") -> Request:
    sampling = SamplingMetadata(params=TokenSamplingParams(), seed=0, prompt_len=2)
    return Request(request_id="a", tokens=array("q", [1, 2]), sampling=sampling, depth=depth)  # type: ignore[arg-type]


def test_settings_of_a_draft_have_a_speculator_of_their_own() -> None:
    own = [setting for setting in DRAFT_SETTINGS if is_of_draft(setting)]
    assert own == ["look-ups", "chain-2", "chain-4", "chain-8", "tree-8", "tree-16"]
    assert not any(map(is_of_draft, SETTINGS))
    assert {drafts_by(setting) for setting in own} == {"look-ups", "draft model or head"}


def test_a_fixed_plan_stays_within_limits_and_budget() -> None:
    requests = [request(), request(depth=0), request()]
    plans = tree(16).plan(requests, [16, 16, 3], budget=30, num_prefill=0)
    assert [plan.max_draft for plan in plans] == [10, 0, 3]
    assert plans[0].may_branch
    assert not chain(4).plan([request()], [8], budget=8, num_prefill=0)[0].may_branch
    assert chain(4).plan([request()], [8], budget=0, num_prefill=0)[0].max_draft == 0
    assert tree(8).drafts_nothing([requests[1]])
    assert not tree(8).drafts_nothing(requests)


@pytest.mark.parametrize(
    "rest", [["--settings", "bush-4"], ["--settings", "chain-0"], ["--settings", "chain-4"]]
)
def test_a_setting_that_cannot_be_is_refused(rest: list[str], capsys) -> None:
    with pytest.raises(SystemExit):
        main(rest)
    said = capsys.readouterr().err
    assert "unknown setting" in said or "name one with --draft" in said


def turns(*seconds: float) -> list[Figures]:
    """Turns of a setting that all yield 100 tokens."""
    return [Figures(each, 100) for each in seconds]


def test_a_ratio_is_of_all_seconds_and_its_error_of_the_turns_own_ratios() -> None:
    """A slow spell hits both settings of a turn, and so does not make their ratio less sure."""
    found = {"off": turns(2.0, 4.0, 2.0), "4": turns(1.1, 2.2, 1.1), "auto": turns(1.0, 2.0, 1.0)}
    assert best_of(found) == "4"
    ratio = paired(found["4"], found["auto"])
    assert ratio.value == pytest.approx(1.1)
    assert ratio.error == pytest.approx(0.0, abs=1e-9)
    unsure = paired(turns(1.0, 1.2, 0.8), found["auto"])
    assert unsure.error > 0.1
    assert str(ratio) == "1.100 ±0.000"


def test_one_turn_says_nothing_of_its_error_and_auto_alone_is_compared_with_nothing() -> None:
    assert paired(turns(1.0), turns(1.0)).error == float("inf")
    assert best_of({"auto": turns(1.0)}) is None
    assert best_of({"off": turns(1.0)}) is None
