"""The simulation of sessions' pins: it runs all sessions, and its policies are in order."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from foretoken.bench.lab import session_pins
from foretoken.bench.lab.session_pins import (
    MIXES,
    PAGE_SIZE,
    POLICIES,
    RECORDINGS,
    Shape,
    Simulation,
)
from foretoken.bench.load.recording import read_recordings

NUM_LIVE, NUM_ALL = 12, 24


@pytest.fixture(scope="module")
def shapes() -> list[Shape]:
    return [Shape(each) for each in read_recordings(RECORDINGS).values()]


def simulated(
    shapes: list[Shape], policy: str, num_pages: int, mix: str = "slow", seed: int = 1
) -> Simulation:
    limits = {"num_live": NUM_LIVE, "num_all": NUM_ALL, "seed": seed}
    return Simulation(shapes, MIXES[mix], POLICIES[policy](), num_pages, **limits).run()


@pytest.mark.parametrize("policy", POLICIES)
def test_a_pool_that_holds_everything_saves_all_that_was_computed_before(shapes, policy) -> None:
    run = simulated(shapes, policy, 40_000)
    asked = sum(
        shapes[number % len(shapes)].num_shared + prompt
        for number in range(NUM_ALL)
        for prompt in shapes[number % len(shapes)].prompts
    )
    assert run.num_asked == asked
    best = simulated(shapes, "oracle", 40_000)
    assert abs(run.num_saved - best.num_saved) < 0.01 * best.num_saved


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("share", [2, 4])
def test_fitted_pins_save_seven_eighths_of_what_the_oracle_saves(shapes, share, seed) -> None:
    num_pages = simulated(shapes, "last use", 40_000, seed=seed).most_needed // share // PAGE_SIZE
    saved = {name: simulated(shapes, name, num_pages, seed=seed).num_saved for name in POLICIES}
    assert saved["oracle"] == max(saved.values())
    assert saved["fitted pins"] >= 0.875 * saved["oracle"]
    assert saved["fitted pins, whole pool"] >= saved["fitted pins"] > saved["fixed pins"]


def test_the_command_prints_a_row_for_each_mix_and_pool(capsys, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    assert session_pins.main(["--live", "14", "--sessions", "15", "--out", str(out)]) == 0
    rows = json.loads(out.read_text("utf-8"))["rows"]
    assert [(row["waits"], row["pool"]) for row in rows][:2] == [
        ("measured", "1/1"),
        ("measured", "1/2"),
    ]
    assert "fitted pins" in capsys.readouterr().out
