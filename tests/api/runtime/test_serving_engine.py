"""`ServingEngine` is all that the API uses of an engine, and each engine has all of it."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from foretoken.api.runtime.serving_engine import ServingEngine
from foretoken.core.engine.engine import Engine
from support.fake_engine import FakeEngine
from support.fake_model import make_scheduler

ROOT = Path(__file__).resolve().parents[3]
MEMBERS = {name for name in vars(ServingEngine) if not name.startswith("_")}
# The builder and a replica have an engine of their own.
OTHERS = {"build", "hosted_engine.py"}
FILES = [path for path in (ROOT / "api").rglob("*.py") if not OTHERS & set(path.parts)]


class _Never:
    """A runner of no steps."""


def _signature(owner: type, name: str) -> list[tuple[str, object, bool]] | None:
    """Parameters by name, kind, and whether they may be left out; None for a property."""
    member = inspect.getattr_static(owner, name, None)
    if not inspect.isfunction(member):
        return None
    parameters = inspect.signature(member).parameters.values()
    return [(each.name, each.kind, each.default is each.empty) for each in parameters]


@pytest.mark.parametrize("owner", [Engine, FakeEngine])
def test_an_engine_has_every_member_of_the_face_with_its_parameters(owner: type) -> None:
    engine = FakeEngine() if owner is FakeEngine else Engine(make_scheduler(), _Never())
    for name in sorted(MEMBERS):
        assert hasattr(engine, name), name
        assert _signature(owner, name) == _signature(ServingEngine, name), name
        wanted = inspect.iscoroutinefunction(getattr(ServingEngine, name))
        assert inspect.iscoroutinefunction(getattr(owner, name, None)) == wanted, name


@pytest.mark.parametrize("owner", [Engine, FakeEngine])
def test_its_limits_and_its_metrics_have_what_the_face_has(owner: type) -> None:
    engine = FakeEngine() if owner is FakeEngine else Engine(make_scheduler(), _Never())
    hints = {"limits": ("max_running", "max_queued"),
             "metrics": ("observers", "registry", "render")}  # fmt: skip
    for part, names in hints.items():
        assert all(hasattr(getattr(engine, part), name) for name in names)


def _uses(path: Path) -> Iterator[str]:
    """Attributes that a file reads of something called engine."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute):
            owner = node.value
            name = getattr(owner, "attr", getattr(owner, "id", None))
            if name == "engine":
                yield node.attr


def test_the_api_uses_the_whole_face_and_nothing_else_of_an_engine() -> None:
    used = {name for path in FILES for name in _uses(path)}
    assert used == MEMBERS


def test_no_file_of_the_api_but_the_builder_reads_a_scheduler_or_names_the_engines_class() -> None:
    wrong = []
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            reads = isinstance(node, ast.Attribute) and node.attr == "scheduler"
            names = isinstance(node, ast.ImportFrom) and node.module in (
                "core.engine.engine", "core.scheduling.scheduler",
            )  # fmt: skip
            if reads or names:
                wrong.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not wrong


def test_what_a_front_imports_is_free_of_torch() -> None:
    api = ROOT / "api"
    files = sorted(each.relative_to(api) for each in (api / "runtime").rglob("*.py"))
    names = ["build.built", "runtime", *(".".join(each.with_suffix("").parts) for each in files)]
    lines = [f"import foretoken.api.{each}" for each in names if not each.endswith("__")]
    code = "\n".join(["import sys", *lines, "sys.exit('torch' in sys.modules)"])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr or "torch was imported"
