"""`foretoken bench self`: its whole run on a tiny shape, and what it counts."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from foretoken.bench import self as bench
from foretoken.bench.common.shapes import tiny_qwen3, tiny_qwen35
from foretoken.core.interface.draft import Draft, DraftPlan


@pytest.mark.parametrize("shape", [tiny_qwen3, tiny_qwen35])
def test_it_prices_passes_and_runs_chains_of_simulated_acceptance(
    tmp_path, shape, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    """The second has recurrent states."""
    monkeypatch.setattr(bench, "RANDOM", {"tiny": shape})
    monkeypatch.setattr(bench, "SIMULATED", (1.0,))
    out = tmp_path / "self.json"
    sizes = "--prompts 1 --turns 1 --max-tokens 16 --repeats 1 --requests 1 2 --threads 1"
    bench.main(["--models", "tiny", *sizes.split(), "--out", str(out)])
    report = json.loads(out.read_text())
    (price,), (speed,) = report["prices"], report["speed"]
    assert 0.1 < price["floor"] < 0.4, "of float32 or bfloat16"
    assert price["pass, 2"] > 0.0
    assert speed["simulated acceptance"] == 1.0
    assert "chain-8 / off" in speed
    assert "simulated acceptance" in capsys.readouterr().out


def test_accepted_tokens_and_the_first_rejected_one_are_counted_by_position() -> None:
    counting = bench.Counting(DraftPlan(max_draft=3))
    for path in ((0, 1), (), (0, 1, 2)):
        output = SimpleNamespace(draft=Draft.of([5, 6, 7], "self"), path=path)
        counting.observe(None, None, output, 1)  # type: ignore[arg-type]
    assert counting.tried[:4] == [3, 2, 2, 0]
    assert counting.right[:4] == [2, 2, 1, 0]


@pytest.mark.parametrize(("odds", "right"), [(0.0, [0, 0, 0]), (1.0, [7, 8, 0])])
def test_simulated_tokens_are_those_of_the_answer_or_none_of_it(odds, right) -> None:
    inner = SimpleNamespace(propose=lambda _: [Draft.of([1, 2, 3], "self")])
    runner = SimpleNamespace(recorded={"a": [6, 7, 8]})
    simulated = bench.Simulated(inner, runner)  # type: ignore[arg-type]
    simulated.odds = odds
    scheduled = SimpleNamespace(
        request_id="a", tokens=[9, 9, 6], sampling=SimpleNamespace(prompt_len=2)
    )
    (draft,) = simulated.propose([scheduled])  # type: ignore[list-item]
    assert draft.token_ids == right
