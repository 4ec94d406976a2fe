"""The house rules that a reader of one file cannot see."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from foretoken.bench.lab.import_graph import PACKAGES, files_of, graph_of

ROOT = Path(__file__).resolve().parents[2]
LAYERS = ("radix_cache", "core", "draft", "api", "bench")
GAUGE = ROOT / "bench" / "lab" / "gpu" / "gauge.py"
FILES = {layer: sorted((ROOT / layer).rglob("*.py")) for layer in LAYERS}


class _RunTime(ast.NodeTransformer):
    """Leaves out what only type checkers see."""

    def visit_If(self, node: ast.If) -> ast.AST | None:
        if isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            return None
        return self.generic_visit(node)


def _imports(path: Path, *, at_run_time: bool = False) -> Iterator[str]:
    """Dotted names of all that a file imports; relative ones resolved below `foretoken`."""
    package = ("foretoken", *path.relative_to(ROOT).parent.parts)
    tree: ast.AST = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(_RunTime().visit(tree) if at_run_time else tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            yield ".".join((*base, *filter(None, [node.module])))


def _layer(name: str) -> int | None:
    parts = name.split(".")
    return LAYERS.index(parts[1]) if parts[0] == "foretoken" and parts[1:2] and (
        parts[1] in LAYERS
    ) else None  # fmt: skip


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("layer", LAYERS)
def test_imports_point_left(layer: str) -> None:
    own = LAYERS.index(layer)
    wrong = {
        f"{_name(path)} imports {name}"
        for path in FILES[layer]
        for name in _imports(path)
        if (_layer(name) or 0) > own
    }
    assert not wrong


# Inside a package, too: a room imports only those that stand before it, never a neighbour.
ROOMS: dict[str, tuple[tuple[str, ...], ...]] = {
    "core": (
        ("errors",),
        ("validation", "startup"),
        ("interface",),
        ("config",),
        ("scheduling", "sampling"),
        ("ops", "telemetry"),
        ("model", "tiers"),
        ("execution", "engine"),
    ),
    "draft": (("sources",), ("control",), ("proposers",), ("heads", "speculator"), ("training",)),
    "api": (
        ("types",),
        ("text",),
        ("media",),
        ("structured", "build"),
        ("parsing",),
        ("runtime",),
        ("sdk", "serving"),
        ("certify",),
        ("dialects",),
        ("server",),
        ("cluster",),
        ("cli",),
    ),
}


@pytest.mark.parametrize("package", ROOMS)
def test_rooms_import_only_what_stands_before_them(package: str) -> None:
    place = {room: index for index, rooms in enumerate(ROOMS[package]) for room in rooms}
    imports = graph_of(package).imports
    assert imports.keys() == place.keys()
    wrong = {
        f"{room} imports {other}"
        for room, others in imports.items()
        for other in others
        if place[other] >= place[room]
    }
    assert not wrong


@pytest.mark.parametrize("package", PACKAGES)
def test_no_files_import_each_other(package: str) -> None:
    """Imports inside functions and for type checkers count: they hide a circle, and leave it."""
    assert files_of(package).circles() == []


def test_a_circle_of_files_is_found_however_it_is_hidden(tmp_path: Path) -> None:
    texts = {
        "__init__": "",
        "a": "from .b import two\none = two",
        "b": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .c.d import three",
        "c/__init__": "",
        "c/d": "def three():\n    from .. import a\n    return a.one",
        "e": "from foretoken.room.a import one\nimport foretoken.room.c.d",
    }
    for name, text in texts.items():
        file = tmp_path / "room" / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    found = files_of("room", tmp_path)
    assert found.circles() == ["a", "b", "c.d"]
    assert found.imports["e"] == {"a", "c.d"}


def test_radix_cache_needs_only_sortedcontainers() -> None:
    foreign = {"torch", "numpy", "transformers", "msgspec", "starlette"}
    for path in FILES["radix_cache"]:
        assert not foreign & {name.split(".")[0] for name in _imports(path)}, path


def test_the_scheduler_and_all_it_imports_are_free_of_torch() -> None:
    seen: set[Path] = set()
    todo = [ROOT / "core" / "engine" / "engine.py", ROOT / "core" / "scheduling" / "scheduler.py"]
    while todo:
        path = todo.pop()
        seen.add(path)
        names = set(_imports(path, at_run_time=True))
        assert not {"torch", "numpy"} & {name.split(".")[0] for name in names}, path
        found = [ROOT.joinpath(*name.split(".")[1:]).with_suffix(".py") for name in names
                 if name.startswith("foretoken.")]  # fmt: skip
        todo += [path for path in found if path.is_file() and path not in seen]


@pytest.mark.parametrize("layer", LAYERS)
def test_cuda_is_named_only_in_ops_and_by_the_gauge_of_the_lab(layer: str) -> None:
    for path in FILES[layer]:
        if path.is_relative_to(ROOT / "core" / "ops") or path == GAUGE:
            continue
        named = [
            node
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            if isinstance(node, ast.Attribute)
            and node.attr == "cuda"
            and isinstance(node.value, ast.Name)
            and node.value.id == "torch"
        ]
        assert not named, path
        assert not any(name.startswith(("torch.cuda", "triton")) for name in _imports(path)), path


def test_triton_is_imported_only_beside_its_kernels() -> None:
    ops = ROOT / "core" / "ops"
    for path in sorted({*ops.rglob("*.py")} - {*(ops / "triton").rglob("*.py")}):
        assert not any(name.split(".")[0] == "triton" for name in _imports(path)), path


@pytest.mark.parametrize("room", ["interface", "scheduling"])
def test_interface_and_scheduling_are_free_of_torch(room: str) -> None:
    for path in (ROOT / "core" / room).glob("*.py"):
        names = {name.split(".")[0] for name in _imports(path, at_run_time=True)}
        assert not {"torch", "numpy", "asyncio"} & names, path
