"""Collection by pytest: every folder of tests, in a checkout of any name."""

from __future__ import annotations

import shutil
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]


def test_no_folder_of_tests_is_passed_over(pytestconfig: pytest.Config) -> None:
    """By default pytest passes over `build`."""
    folders = {path.parent for path in TESTS.rglob("test_*.py")}
    names = {part for folder in folders for part in folder.relative_to(TESTS).parts}
    assert "build" in names
    passed_over = pytestconfig.getini("norecursedirs")
    assert [name for name in names if any(fnmatch(name, each) for each in passed_over)] == []


def test_tests_run_in_a_folder_whose_name_no_package_can_have(tmp_path: Path) -> None:
    """An unpacked source distribution has one. The root's `__init__.py` is not imported."""
    root = tmp_path / "foretoken-1.0"
    (root / "tests").mkdir(parents=True)
    shutil.copy(TESTS.parent / "pyproject.toml", root)
    (root / "__init__.py").write_text("from ._version import __version__\n")
    (root / "tests" / "test_one.py").write_text("def test_one():\n    assert True\n")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "tests"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
