"""The example that starts tools while the model still writes."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from support.server_process import running

ROOT = Path(__file__).parents[2]
SCRIPTED = ROOT / "tests" / "support" / "scripted_server.py"
NAMES = ("a.txt", "b.txt")


@pytest.fixture
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("early", ROOT / "examples" / "early_calls.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_tools_run_while_the_answer_goes_on(example: ModuleType, capsys, monkeypatch) -> None:
    started: list[str] = []

    def read_file(path: str) -> str:
        started.append(path)
        return f"the text of {path}"

    monkeypatch.setattr(example, "read_file", read_file)
    calls = [json.dumps({"name": "read_file", "arguments": {"path": name}}) for name in NAMES]
    said = "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)
    flags = ["--tool-parser", "hermes", "--idle-prefill", "off"]
    with running(started_by=[sys.executable, str(SCRIPTED), "--port", "0", *flags]) as server:
        question = f"Read both. [[{said}]]"
        found = example.ready_calls(server.url, question)
        assert json.loads(next(found)["function"]["arguments"]) == {"path": "a.txt"}
        assert len([*found]) == 1
        for is_early in (False, True):
            started.clear()
            assert example.run(server.url, question, is_early=is_early) > 0
            assert sorted(started) == sorted(NAMES)
    assert capsys.readouterr().out.count("the text of b.txt") == 2
