"""A request's walk through both threads is counted, and does not grow unnoticed."""

from __future__ import annotations

import ast
import functools
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from foretoken.bench.lab.request_walk import PACKAGES, ROOT, Calls, Walk, function_lengths

pytestmark = pytest.mark.slow
PAGE = ROOT / "docs" / "architecture.md"
ONLY_FOR_TREES = {"KVPool.copy_slots", "StepTrees.template"}

CODE = """
import json, sys
from foretoken.bench.lab import request_walk
found = request_walk.walk(getattr(request_walk, sys.argv[1]))
threads = found.loop, found.model
print(json.dumps([[sorted(each.modules), sorted(each.functions)] for each in threads]))
"""

HTTP_CODE = """
import json
from foretoken.bench.lab import request_walk
found = request_walk.http_walk()
print(json.dumps([sorted(found.modules), sorted(found.functions), found.num_calls]))
"""


def printed(code: str, *args: str) -> Any:
    """Run code in a process of its own: a profiler sees what other tests have left in this one."""
    command = [sys.executable, "-c", code, *args]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    return json.loads(done.stdout)


@functools.cache
def walked(config: str) -> Walk:
    threads = printed(CODE, config)
    return Walk(*(Calls(set(modules), set(map(tuple, names))) for modules, names in threads))


def defined_methods() -> set[str]:
    """Return the methods of all classes in the packages that walks count, as `Class.method`."""
    return {
        f"{node.name}.{each.name}"
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef)
        for each in node.body
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)
    }


def assert_at_most(found: Walk, *, loop: tuple[int, int], model: tuple[int, int]) -> None:
    """Compare the threads with (files, classes), the model thread where kernels are native."""
    is_native = any(".ops.native." in module for module in found.model.modules)
    bounds = [(found.loop, loop), *([(found.model, model)] if is_native else [])]
    for calls, (num_files, num_classes) in bounds:
        assert len(calls.modules) <= num_files
        assert len(calls.classes) <= num_classes


def test_a_plain_request_meets_few_files_and_classes() -> None:
    """docs/architecture/rooms.md has the figures: change them there, too, with these bounds."""
    found = walked("PLAIN")
    assert {"foretoken.core.engine.engine", "foretoken.radix_cache.tree"} <= found.loop.modules
    assert "foretoken.core.execution.model_runner" in found.model.modules
    both = found.loop | found.model
    assert not any(module.startswith("foretoken.draft") for module in both.modules)
    assert_at_most(found, loop=(23, 32), model=(22, 22))


def test_a_request_with_look_ups_meets_the_speculator_and_its_sources() -> None:
    found = walked("LOOKUPS")
    expected = {"foretoken.draft.speculator", "foretoken.draft.sources.suffix"}
    assert expected <= found.loop.modules
    assert_at_most(found, loop=(36, 58), model=(24, 24))


def test_a_request_with_a_draft_model_meets_its_trees_in_the_model_thread() -> None:
    found = walked("MODEL")
    assert "foretoken.draft.proposers.tree_growth" in found.model.modules
    assert_at_most(found, loop=(37, 61), model=(32, 36))


def test_a_plain_chat_over_http_makes_few_calls() -> None:
    """A feature that the chat does not use costs no call, or next to none."""
    modules, functions, num_calls = printed(HTTP_CODE)
    calls = Calls(set(modules), {(module, name) for module, name in functions}, num_calls)
    assert {"foretoken.api.serving.serve", "foretoken.api.runtime.chat"} <= calls.modules
    assert len(calls.modules) <= 57
    assert len(calls.classes) <= 60
    assert calls.num_calls <= 470


@pytest.mark.parametrize(
    ("heading", "configs"),
    [
        ("One request", ["PLAIN"]),
        ("One draft", ["LOOKUPS", "MODEL", "AUTO"]),
        ("One page", ["PLAIN", "MODEL"]),
    ],
)
def test_a_request_calls_what_the_walks_of_the_page_name(heading: str, configs: list[str]) -> None:
    """Methods of classes in core/, draft/ and radix_cache/, and functions named with their file."""
    text = PAGE.read_text(encoding="utf-8")
    walk = text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    methods = set(re.findall(r"`([A-Z]\w+\.\w+)`", walk))
    functions = set(re.findall(r"`([a-z_]\w+)`\s+\(`(?:core|draft|radix_cache)/", walk))
    named = methods & defined_methods() | functions
    walks = [walked(config) for config in configs]
    called = {name for each in walks for _, name in (each.loop | each.model).functions}
    assert len(named) > 3
    assert named - called - ONLY_FOR_TREES == set()


def test_classes_are_those_of_which_a_method_ran() -> None:
    names = {("m", "f"), ("m", "A.g"), ("m", "A.h"), ("m", "A.B.g"), ("n", "f.<locals>.<lambda>")}
    assert Calls(functions=names).classes == {("m", "A"), ("m", "A.B")}


def test_the_lines_of_a_function_are_all_of_its_own(tmp_path: Path) -> None:
    code = (
        "def f():\n    pass\n\n\nclass A:\n    async def g(\n        self,\n    ):\n        pass\n"
    )
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "module.py").write_text(code)
    assert function_lengths("package", tmp_path) == [2, 4]
