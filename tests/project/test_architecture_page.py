"""docs/architecture.md and its folder: drawings, names, files and the reading time are true."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

from foretoken.bench.lab.import_graph import PACKAGES, PAGE, graph_of, redrawn

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
FIRST = DOCS / "architecture.md"
OTHERS = sorted((DOCS / "architecture").glob("*.md"))
FEATURES = [page for page in OTHERS if page.name not in ("rooms.md", "words.md")]
PAGES = [FIRST, *OTHERS]
WORDS_A_MINUTE = 230


def words(text: str) -> int:
    """Count the words of a page."""
    return len(text.split())


def section(text: str, heading: str) -> str:
    """Return what stands below a heading of the second level."""
    return text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


def test_the_drawings_are_those_of_the_code() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert redrawn(text) == text, "run: python -m foretoken.bench.lab.import_graph --write"
    assert all(f"<!-- drawing of {package} -->" in text for package in PACKAGES)


def test_the_house_stays_small() -> None:
    core, draft = graph_of("core"), graph_of("draft")
    assert len(core.imports) <= 13
    assert max(core.floors().values()) <= 7
    assert len(draft.imports) <= 6


def test_the_first_page_names_the_time_that_it_takes_to_read() -> None:
    text = FIRST.read_text(encoding="utf-8")
    ((minutes, num_words),) = re.findall(
        r"takes about (\d+) minutes to read \(([\d,]+) words", text
    )
    assert abs(int(minutes) - words(text) / WORDS_A_MINUTE) <= 1
    assert abs(int(num_words.replace(",", "")) - words(text)) <= WORDS_A_MINUTE


def test_the_three_walks_take_no_more_than_2000_words() -> None:
    text = FIRST.read_text(encoding="utf-8")
    walks = [section(text, heading) for heading in ("One request", "One draft", "One page")]
    assert all(map(words, walks))
    assert sum(map(words, walks)) <= 2000


@pytest.mark.parametrize("page", FEATURES, ids=lambda page: page.stem)
def test_a_page_about_a_feature_is_short_and_has_its_invariants(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert 200 <= words(text) <= 600
    assert section(text, "Invariants")
    assert section(text, "Where to change it")


def test_the_first_page_links_every_other_one() -> None:
    text = FIRST.read_text(encoding="utf-8")
    assert [page.name for page in OTHERS if f"(architecture/{page.name})" not in text] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_files_of_a_page_exist(page: Path) -> None:
    named = r"`((?:core|draft|radix_cache|api|bench|tests)/[\w/.]+)`"
    files = set(re.findall(named, page.read_text(encoding="utf-8")))
    assert [name for name in sorted(files) if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_names_of_a_page_are_defined(page: Path) -> None:
    names = re.findall(r"`([A-Z]\w+(?:\.\w+)?)(?:\(\))?`", page.read_text(encoding="utf-8"))
    assert sorted(set(names) - _defined()) == []


@functools.cache
def _defined() -> frozenset[str]:
    """Classes, their methods and fields, and constants in the packages of the pages."""
    found: set[str] = set()
    for path in (path for package in (*PACKAGES, "api") for path in (ROOT / package).rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        found.update(name for node in tree.body for name in _constants(node))
        for node in ast.walk(tree):
            if not isinstance(node, ast.ClassDef):
                continue
            found.add(node.name)
            for each in ast.walk(node):
                if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef):
                    found.add(f"{node.name}.{each.name}")
                elif isinstance(each, ast.AnnAssign):
                    found.add(f"{node.name}.{ast.unparse(each.target).removeprefix('self.')}")
                elif isinstance(each, ast.Assign):
                    targets = (ast.unparse(target) for target in each.targets)
                    found.update(
                        f"{node.name}.{target.removeprefix('self.')}" for target in targets
                    )
    return frozenset(found)


def _constants(node: ast.stmt) -> list[str]:
    """Names that a statement at the top of a module assigns."""
    if isinstance(node, ast.AnnAssign):
        return [ast.unparse(node.target)]
    return [ast.unparse(target) for target in node.targets] if isinstance(node, ast.Assign) else []
