"""A request's walk on the event loop's side is counted, and does not grow unnoticed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from foretoken.bench.lab.request_walk import LOOKUPS, NO_DRAFTS, Walk, function_lengths

CODE = """
import json, sys
from foretoken.bench.lab.request_walk import walk
found = walk(sys.argv[1], int(sys.argv[2]))
print(json.dumps([sorted(found.modules), sorted(found.functions)]))
"""


def walked(drafts: str, num_tokens: int) -> Walk:
    """In a process of its own: a profiler sees what other tests have left in this one, too."""
    command = [sys.executable, "-c", CODE, drafts, str(num_tokens)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    modules, functions = json.loads(done.stdout)
    return Walk(set(modules), {(module, name) for module, name in functions})


def test_a_plain_request_meets_few_files_and_classes() -> None:
    """docs/architecture.md names the figures; whoever raises these bounds changes that page."""
    found = walked(NO_DRAFTS, 4)
    assert {"foretoken.core.engine.engine", "foretoken.radix_cache.tree"} <= found.modules
    assert not any(module.startswith("foretoken.draft") for module in found.modules)
    assert len(found.modules) <= 23
    assert len(found.classes) <= 32


def test_a_request_with_drafts_meets_the_speculator_and_its_sources() -> None:
    found = walked(LOOKUPS, 40)
    assert {"foretoken.draft.speculator", "foretoken.draft.sources.suffix"} <= found.modules
    assert len(found.modules) <= 35
    assert len(found.classes) <= 60


def test_classes_are_those_of_which_a_method_ran() -> None:
    names = {("m", "f"), ("m", "A.g"), ("m", "A.h"), ("m", "A.B.g"), ("n", "f.<locals>.<lambda>")}
    assert Walk(functions=names).classes == {("m", "A"), ("m", "A.B")}


def test_the_lines_of_a_function_are_all_of_its_own(tmp_path: Path) -> None:
    code = (
        "def f():\n    pass\n\n\nclass A:\n    async def g(\n        self,\n    ):\n        pass\n"
    )
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "module.py").write_text(code)
    assert function_lengths("package", tmp_path) == [2, 4]
