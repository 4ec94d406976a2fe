"""docs/architecture.md: its drawings are those of the code, and what it names is there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from foretoken.bench.lab.import_graph import PACKAGES, PAGE, graph_of, redrawn

ROOT = Path(__file__).resolve().parents[2]
TEXT = PAGE.read_text(encoding="utf-8")
FILES = sorted(set(re.findall(r"`((?:core|draft|radix_cache|api|bench|tests)/[\w/.]+)`", TEXT)))
NAMES = sorted(set(re.findall(r"`([A-Z]\w+(?:\.\w+)?)(?:\(\))?`", TEXT)))


def test_the_drawings_are_those_of_the_code() -> None:
    assert redrawn(TEXT) == TEXT, "run: python -m foretoken.bench.lab.import_graph --write"
    assert all(f"<!-- drawing of {package} -->" in TEXT for package in PACKAGES)


def test_the_house_stays_small() -> None:
    core, draft = graph_of("core"), graph_of("draft")
    assert len(core.imports) <= 13
    assert max(core.floors().values()) <= 7
    assert len(draft.imports) <= 6


def test_the_files_of_the_page_exist() -> None:
    assert [name for name in FILES if not (ROOT / name).exists()] == []


def test_the_names_of_the_page_are_defined() -> None:
    assert set(NAMES) <= _defined()


def _defined() -> frozenset[str]:
    """Classes, their methods and fields, in the packages of the page."""
    found: set[str] = set()
    for path in (path for package in (*PACKAGES, "api") for path in (ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
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
