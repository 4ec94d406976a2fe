"""Reports of all benchmarks: what they print and record."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from foretoken.bench.common import report

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["/usr/bin/foretoken", "bench", "serve"], "foretoken bench serve"),
        (["bench/lab/profile.py", "--model", "/home/me/qwen"],
         "python -m foretoken.bench.lab.profile --model qwen"),
        (["foretoken", "bench", "phases", "--out", "a/b.json"],
         "foretoken bench phases --out a/b.json"),
    ],
)  # fmt: skip
def test_a_command_tells_no_place_on_this_machine(monkeypatch, argv, said) -> None:
    monkeypatch.setattr(sys, "argv", argv)
    assert report.command() == said


@pytest.fixture(scope="module")
def kept() -> list[Path]:
    """The JSON files of benchmarks that git keeps."""
    if not (ROOT / ".git").exists():
        pytest.skip("only git knows which results are kept")
    listing = ["git", "ls-files", "bench/results/*.json"]
    done = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=True)
    return [ROOT / line for line in done.stdout.splitlines()]


def test_results_name_no_place_on_a_machine(kept: list[Path]) -> None:
    place = re.compile(r'[" =](/[\w.-]+){2,}')
    assert [path.name for path in kept if place.search(path.read_text("utf-8"))] == []


def test_a_result_is_kept_only_while_it_is_small_and_a_page_links_to_it(kept: list[Path]) -> None:
    pages = "".join(path.read_text("utf-8") for path in (ROOT / "docs").glob("*.md"))
    assert [path.name for path in kept if f"](../{path.relative_to(ROOT)})" not in pages] == []
    assert [path.name for path in kept if path.stat().st_size > 10_000] == []
