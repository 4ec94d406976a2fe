"""The runner, on a repository of a few lines: what is caught, what survives, what is neither."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from prove.forker import NOT_RUN
from prove.mutation import Mutation
from prove.run import Outcome, Verdict, _outcome, prove
from prove.workplace import TestRun, Workplace

pytestmark = [pytest.mark.skipif(shutil.which("git") is None, reason="needs git"), pytest.mark.slow]
ROOT = Path(__file__).resolve().parents[2]
FILES = {
    "pyproject.toml": (ROOT / "pyproject.toml").read_text(encoding="utf-8"),  # pytest's options
    "__init__.py": "",
    "core/__init__.py": "",
    "core/sums.py": "def double(x):\n    return 2 * x\n\n\ndef half(x):\n    return x / 2\n",
    "tests/test_sums.py": """\
import foretoken.core.sums as sums

def test_two_is_doubled():
    assert sums.double(2) == 4

def test_what_fails_anyway():
    assert sums.half(2) == 2
""",
}
SUMS = "core/sums.py"
DOUBLED, FAILING = "test_two_is_doubled", "test_what_fails_anyway"


def full_name(test: str) -> str:
    return f"tests/test_sums.py::{test}"


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workplace]:
    repository = tmp_path_factory.mktemp("repository")
    for name, text in FILES.items():
        (repository / name).parent.mkdir(exist_ok=True)
        (repository / name).write_text(text, encoding="utf-8")
    shutil.copytree(Path(__file__).parent, repository / "tests" / "prove")
    subprocess.run(["git", "init", "-q"], cwd=repository, check=True)
    made = Workplace(repository, tmp_path_factory.mktemp("copy"))
    yield made
    made.close()


def judged(
    workplace: Workplace, before: str, after: str, *tests: str, seconds: float = 60.0
) -> Verdict:
    place = "half" if "/" in before else "double"
    mutation = Mutation("name", place, before, after, tests or (DOUBLED,), "a law", seconds)
    [verdict] = prove(workplace, [mutation])
    return verdict


@pytest.mark.parametrize(
    ("before", "after", "outcome"),
    [
        ("2 * x", "3 * x", "caught"),
        ("2 * x", "x * x", "survived"),
        ("x / 2", "x / 3", "survived"),
        ("2 * x", "2 * ", "survived"),  # cannot be imported: no test has said anything
        ("4 * x", "5 * x", "does not apply"),
    ],
)
def test_a_mistake_is_caught_where_a_test_fails_and_only_there(
    workplace: Workplace, before: str, after: str, outcome: Outcome
) -> None:
    verdict = judged(workplace, before, after)
    caught_by = full_name(DOUBLED) if outcome == "caught" else ""
    assert (verdict.outcome, verdict.caught_by) == (outcome, caught_by)
    assert (workplace.root / SUMS).read_text(encoding="utf-8") == FILES[SUMS]


def test_a_test_that_fails_without_the_mistake_proves_nothing(workplace: Workplace) -> None:
    verdict = judged(workplace, "2 * x", "3 * x", DOUBLED, FAILING)
    assert (verdict.outcome, verdict.detail) == ("its tests fail anyway", full_name(FAILING))


def test_a_mistake_that_makes_tests_hang_is_caught_by_the_clock(
    workplace: Workplace,
) -> None:
    verdict = judged(workplace, "return 2 * x", "while True:\n        pass", seconds=0.5)
    assert (verdict.outcome, verdict.caught_by) == ("caught", "the clock")


def test_a_mistake_that_ends_the_process_is_caught_by_its_crash(workplace: Workplace) -> None:
    verdict = judged(workplace, "return 2 * x", "import os; os.abort()")
    assert (verdict.outcome, verdict.caught_by) == ("caught", "a crash")


@pytest.mark.parametrize(("failed", "outcome"), [("a.py::test_a", "caught"), ("a.py", "survived")])
def test_a_test_that_fails_counts_although_pytest_itself_fails_at_its_end(
    failed: str, outcome: Outcome
) -> None:
    assert _outcome(TestRun(NOT_RUN, (failed,), "", 0.0)) == outcome
