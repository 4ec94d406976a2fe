"""What every benchmark prints and records."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from foretoken.bench import report

RESULTS = Path(report.__file__).parent / "results"


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["/usr/bin/foretoken", "bench", "serve"], "foretoken bench serve"),
        (["bench/lab/engine.py", "--model", "/home/me/qwen"],
         "python -m foretoken.bench.lab.engine --model qwen"),
        (["foretoken", "bench", "phases", "--out", "a/b.json"],
         "foretoken bench phases --out a/b.json"),
    ],
)  # fmt: skip
def test_a_command_tells_no_place_on_this_machine(monkeypatch, argv, said) -> None:
    monkeypatch.setattr(sys, "argv", argv)
    assert report.command() == said


@pytest.mark.parametrize("path", sorted(RESULTS.rglob("*.json")), ids=lambda path: path.name)
def test_results_name_no_place_on_a_machine(path: Path) -> None:
    assert not re.search(r'[" =](/[\w.-]+){2,}', path.read_text(encoding="utf-8"))
