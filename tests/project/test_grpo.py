"""`examples/grpo.py` on the tiny checkpoint: one seed, one curve, with drafts and without."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from foretoken.api.build.model_files import BUILTIN
from foretoken.api.train.policy import FILE
from support.new_weights import digest

PATH = Path(__file__).resolve().parents[2] / "examples" / "grpo.py"


@pytest.fixture(scope="module")
def grpo() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("grpo_example", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look it up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def tasks(grpo: ModuleType) -> list[Any]:
    """Tasks that a model of Python code solves now and then: a name, and a call."""
    grade = lambda text: (any(each.isalpha() for each in text), "(" in text)  # noqa: E731
    return [grpo.Task(f"def function_{number}(items):\n    return ", grade) for number in range(4)]


def curve(grpo: ModuleType, out: Path, **options: Any) -> list[dict[str, Any]]:
    """The steps of a run, without their times."""
    given = {"steps": 3, "num_prompts": 2, "num_answers": 4, "max_tokens": 8, "threads": 1}
    run = grpo.Options(**given, rank=4, **options)
    training = grpo.train(BUILTIN / "target", out, run, tasks(grpo), tasks(grpo)[:1], str)
    steps = asyncio.run(training)
    return [{**asdict(step), "seconds": 0} for step in steps]


def test_a_seed_gives_one_curve_and_one_digest_with_drafts_and_without(
    grpo: ModuleType, tmp_path: Path
) -> None:
    drafted = curve(grpo, tmp_path, draft="auto,self")
    plain = curve(grpo, tmp_path, draft="none")
    assert drafted == plain
    digests = [step["digest"] for step in plain]
    assert len({*digests, digest(BUILTIN / "target" / FILE)}) == 4, "each step changed the weights"
    assert digest(tmp_path / "policy" / FILE) == digests[-1]
    assert [(step["kl_v1"], step["kl_v2"]) for step in plain] == [(0.0, 0.0)] * 3
    assert all(step["torch_kl_v2"] > 0 for step in plain), "torch alone rounds differently"
    other = curve(grpo, tmp_path, draft="none", seed=1)
    assert other != plain


def test_answers_are_graded_by_their_form_and_their_sum(grpo: ModuleType) -> None:
    grade = grpo.make_task(2, 3).grade
    assert grade(' {"sum": 5}') == (True, True)
    assert grade('{"sum": 6}') == (True, False)
    for text in ("5", '{"sum": "5"}', '{"sum": 5, "a": 5}', '{"sum": true}', "{5", "[5]", ""):
        assert grade(text) == (False, False)
    assert [grpo.reward_of(each) for each in ((True, True), (True, False))] == [1.0, 0.2]
    training, held_out = grpo.make_tasks()
    prompts = [{task.prompt for task in each} for each in (training, held_out)]
    assert not prompts[0] & prompts[1]
    assert (len(prompts[0]), len(prompts[1])) == (64, 17)


def test_the_plot_has_a_line_for_each_column(grpo: ModuleType) -> None:
    image = grpo.plot({"reward": [0.0, 0.5, 1.0], "right sum": [0.0, 0.0, 0.25]})
    assert image.count('<polyline fill="none" stroke="#') == 2
    assert 'points="40.0,280.0 320.0,160.0 600.0,40.0"' in image
