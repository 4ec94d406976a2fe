"""Every folder of tests is one that pytest looks into: by default it passes over `build`."""

from __future__ import annotations

from fnmatch import fnmatch
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]


def test_no_folder_of_tests_is_passed_over(pytestconfig: pytest.Config) -> None:
    folders = {path.parent for path in TESTS.rglob("test_*.py")}
    names = {part for folder in folders for part in folder.relative_to(TESTS).parts}
    assert "build" in names
    passed_over = pytestconfig.getini("norecursedirs")
    assert [name for name in names if any(fnmatch(name, each) for each in passed_over)] == []
