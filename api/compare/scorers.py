"""Scorers: the score of an answer, from 0 to 1.

A scorer is named by a task's field ``scorer`` or by the flag ``--scorer``: one of `PLAIN`,
``pytest``, ``judge``, or ``python:FILE:FUNCTION``.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Annotated, Any

import msgspec

from ...core.errors import ForetokenError, InvalidRequest
from ..runtime.decisions.questions import read_questions
from .answer import Answer
from .judging import Judge, question_of
from .sandbox import Ended, run_limited
from .tasks import Task

PYTHON = "python:"
ExpectedCall = Annotated[dict[str, dict[str, Any]], msgspec.Meta(min_length=1, max_length=1)]
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?(?:[eE][-+]?\d+)?|-?\.\d+")
MOST_SHOWN = 200  # characters of a scorer's output that an error shows
FENCE = re.compile(r"```[^\n`]*\n(.*?)(?:```|\Z)", re.DOTALL)
COUNTS = re.compile(r'errors="(\d+)" failures="(\d+)" skipped="\d+" tests="(\d+)"')
"""The counts in a report of pytest."""

_SEARCH = """
import json, re, sys
asked = json.load(sys.stdin)
print(int(re.search(asked["pattern"], asked["answer"]) is not None))
"""
"""Searches a regular expression, which may take time without end, and prints the score."""

_CALL = """
import importlib.util, json, sys, os
asked = json.load(sys.stdin)
sys.path.insert(0, os.path.dirname(sys.argv[1]))
spec = importlib.util.spec_from_file_location("scorer", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
score = getattr(module, sys.argv[2])(asked["answer"], asked["task"])
print("\\n" + json.dumps(float(score)))
"""
"""Calls a function of the user with the answer's text and the task; prints the score last."""

_TEST = """
import os, subprocess, sys
os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
flags = "-q -x -p no:cacheprovider --junitxml report.xml".split()
command = [sys.executable, "-m", "pytest", *flags, "test_solution.py"]
ran = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
if os.path.exists("report.xml"):
    print(open("report.xml", encoding="utf-8", errors="replace").read(4096))
else:
    print(ran.stdout.decode("utf-8", "replace"))
"""
"""Runs pytest without plugins, which are slow to import. Prints the beginning of its report, which
has the counts, or else its output."""


def exact(answer: Answer, task: Task) -> float:
    """Return 1 if the answer, without space at its ends, is the expected text or one of a list."""
    wanted = task.expected if isinstance(task.expected, list) else [task.expected]
    return float(answer.text.strip() in [str(each).strip() for each in wanted])


def number(answer: Answer, task: Task) -> float:
    """Return 1 if the last number of the answer equals the expected one, commas left out."""
    found = NUMBER.findall(answer.text)
    return float(bool(found) and _decimal(found[-1]) == _decimal(str(task.expected)))


def json_equal(answer: Answer, task: Task) -> float:
    """Return 1 if the answer is the expected JSON value: its calls, its first block or its text.

    One call is an object with ``name`` and ``arguments``, several are a list of them.
    """
    try:
        if answer.calls:
            calls: Any = answer.calls[0] if len(answer.calls) == 1 else answer.calls
            return float(_is_same(calls, task.expected))
        return float(_is_same(msgspec.json.decode(_block(answer.text).strip()), task.expected))
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return 0.0


def calls(answer: Answer, task: Task) -> float:
    """Return 1 if the answer's tool calls are the expected ones, in any order.

    An expected call is an object ``{name: arguments}`` as in BFCL. An argument that is a list gives
    its possible values; "" is among them if the argument may be left out.
    """
    expected = [next(iter(each.items())) for each in task.expected]
    if len(answer.calls) != len(expected):
        return 0.0
    alike = [
        [
            at
            for at, (name, arguments) in enumerate(expected)
            if each["name"] == name and _fits(each["arguments"], arguments)
        ]
        for each in answer.calls
    ]
    return float(_can_pair(alike))


def _can_pair(alike: Sequence[Sequence[int]]) -> bool:
    """Whether each call can have an expected call of its own; ``alike`` lists those it fits.

    Kuhn's algorithm: a call fits several expected calls if their possible values overlap, so the
    first one that it fits may be the only one of a later call.
    """
    owners: dict[int, int] = {}  # the call of each expected call

    def place(call: int, tried: set[int]) -> bool:
        for at in alike[call]:
            if at not in tried:
                tried.add(at)
                if at not in owners or place(owners[at], tried):
                    owners[at] = call
                    return True
        return False

    return all(place(call, set()) for call in range(len(alike)))


def _fits(value: object, expected: object) -> bool:
    """Whether a value is an expected one; each field of an object may have several in a list."""
    if isinstance(expected, list):
        if not (isinstance(value, list) and len(value) == len(expected)):
            return False
        return all(map(_fits, value, expected))
    if not isinstance(expected, dict):
        return _is_same(value, expected)
    if not (isinstance(value, dict) and value.keys() <= expected.keys()):
        return False
    possible = {name: each if isinstance(each, list) else [each] for name, each in expected.items()}
    return all(
        any(_fits(value.get(name, ""), one) for one in each) for name, each in possible.items()
    )


def _is_same(value: object, expected: object) -> bool:
    """Whether two JSON values are equal. In Python ``True`` equals 1, in JSON it does not."""
    if isinstance(value, dict) and isinstance(expected, dict):
        is_alike = value.keys() == expected.keys()
        return is_alike and all(_is_same(each, expected[name]) for name, each in value.items())
    if isinstance(value, list) and isinstance(expected, list):
        is_alike = len(value) == len(expected)
        return is_alike and all(map(_is_same, value, expected))
    return isinstance(value, bool) == isinstance(expected, bool) and value == expected


def _decimal(text: str) -> Decimal | None:
    try:
        return Decimal(text.replace(",", ""))
    except InvalidOperation:
        return None


def _block(text: str) -> str:
    """Return the content of the first fenced block, or the whole text if it has none."""
    found = FENCE.search(text)
    return text if found is None else found.group(1)


PLAIN: Mapping[str, Callable[[Answer, Task], float]] = {
    "exact": exact, "number": number, "json": json_equal, "calls": calls,
}  # fmt: skip
"""Scorers that compute the score at once, in a time that the length of the answer bounds."""


class Scorers:
    """Scores answers. At most one scorer's process per core runs at a time.

    ``seconds``: limit of one run of a pattern, a function or pytest. Raises `InvalidRequest`, which
    names the task, if a task does not have what its scorer needs.
    """

    def __init__(
        self, tasks: Iterable[Task], default: str, *, seconds: float, has_judge: bool
    ) -> None:
        self._default, self._seconds = default, seconds
        self._room = asyncio.Semaphore(len(os.sched_getaffinity(0)))
        self._has_judge, self._has_pytest = has_judge, False
        for task in tasks:
            self._check(task)

    async def score(self, task: Task, answer: Answer, judge: Judge | None) -> float:
        """Return the score of an answer. Raises `ForetokenError` if its scorer fails."""
        name = self._name(task)
        if (plain := PLAIN.get(name)) is not None:
            return plain(answer, task)
        if name == "judge":
            assert judge is not None
            return await judge.score(task, answer)
        async with self._room:
            if name == "pytest":
                return await self._tested(task, answer)
            if name == "regex":
                asked = {"pattern": task.expected, "answer": answer.text}
                return await self._printed(name, [_SEARCH], asked)
            plain = msgspec.to_builtins(task)
            plain["calls"] = answer.calls
            asked = {"answer": answer.text, "task": plain}
            return await self._printed(name, [_CALL, *_function_of(name)], asked)

    def _name(self, task: Task) -> str:
        return task.scorer or self._default

    def _check(self, task: Task) -> None:
        name = self._name(task)
        if (problem := self._problem(name, task)) is not None:
            raise InvalidRequest(f"--tasks: task {task.id!r}: {problem}", param="tasks")

    def _problem(self, name: str, task: Task) -> str | None:
        """Return what the task or this machine lacks for a scorer, or None."""
        if name == "judge":
            return _judge_problem(task) if self._has_judge else "judge needs --judge MODEL or URL"
        if name == "pytest":
            if importlib.util.find_spec("pytest") is None:
                return "the scorer pytest needs the package: pip install pytest"
            return None if task.tests else "the scorer pytest needs tests"
        if name.startswith(PYTHON):
            file, function = _function_of(name)
            if not function.isidentifier() or name.count(":") < 2:
                return f"{name} is not python:FILE:FUNCTION"
            return None if Path(file).is_file() else f"{name}: {file} is not a file"
        if name not in PLAIN and name != "regex":
            known = ", ".join([*PLAIN, "regex", "pytest", "judge"])
            return f"unknown scorer {name!r}: must be {known} or python:FILE:FUNCTION"
        return _expected_problem(name, task)

    async def _tested(self, task: Task, answer: Answer) -> float:
        """Return 1 if all tests pass on the answer's first fenced block, or on its text.

        The code is the module ``solution``, whose names the tests have. The result is read from
        pytest's report, since code may end its process with any status.
        """
        code, tests = _block(answer.text), f"from solution import *\n{task.tests}\n"
        if not self._has_pytest:  # a pytest that cannot run must not look like a wrong answer
            trial = await self._run_pytest("", "def test_nothing(): pass\n")
            if COUNTS.search(trial.output) is None:
                told = trial.output.strip() or f"no report within {self._seconds:g} s"
                raise ForetokenError(f"the scorer pytest does not run here: {told}")
            self._has_pytest = True
        counts = COUNTS.search((await self._run_pytest(code, tests)).output)
        if counts is None:  # the time was over, or the code ended the process
            return 0.0
        errors, failures, num_tests = map(int, counts.groups())
        return float(num_tests > 0 and errors == failures == 0)

    async def _run_pytest(self, code: str, tests: str) -> Ended:
        files = {"solution.py": code, "test_solution.py": tests, "pytest.ini": "[pytest]\n"}
        return await run_limited([sys.executable, "-c", _TEST], seconds=self._seconds, files=files)

    async def _printed(self, name: str, command: Sequence[str], asked: Mapping[str, Any]) -> float:
        """Return the score that a program prints last. It gets ``asked`` as JSON."""
        ended = await run_limited(
            [sys.executable, "-c", *command],
            seconds=self._seconds,
            stdin=json.dumps(asked).encode(),  # an answer may have lone surrogates
        )
        where = f"the scorer {name}"
        if ended.status is None:
            raise ForetokenError(f"{where} did not return within {self._seconds:g} s")
        last = "".join(filter(str.isprintable, ended.output.strip().rpartition("\n")[2]))
        last = last[-MOST_SHOWN:]
        if ended.status != 0:
            raise ForetokenError(f"{where} failed: {last or f'exit status {ended.status}'}")
        return checked_score(last, where)


def checked_score(text: str, where: str) -> float:
    """Return a score that was printed. Raises `ForetokenError` unless it is from 0 to 1."""
    try:
        score = float(text)
    except ValueError:
        score = math.nan
    if not 0 <= score <= 1:
        raise ForetokenError(f"{where} must return a number from 0 to 1, not {text}")
    return score


def _judge_problem(task: Task) -> str | None:
    """Return why a judge cannot be asked the question of a task, or None."""
    try:
        read_questions([question_of(task)])
    except InvalidRequest as error:
        return str(error)
    return None


def _function_of(name: str) -> tuple[str, str]:
    """Return the absolute path and the name of the function of a scorer python:FILE:FUNCTION."""
    file, _, function = name.removeprefix(PYTHON).rpartition(":")
    return os.path.abspath(file), function


def _expected_problem(name: str, task: Task) -> str | None:
    """Return why a plain scorer cannot compare answers with the task's ``expected``, or None."""
    if task.expected is None and name != "json":
        return f"the scorer {name} needs expected"
    wanted = _decimal(str(task.expected))
    if name == "number" and not (wanted is not None and wanted.is_finite()):
        return f"the scorer number needs a number in expected, not {task.expected!r}"
    if name == "calls":
        try:
            msgspec.convert(task.expected, list[ExpectedCall])
        except msgspec.ValidationError:
            return "the scorer calls needs a list of {name: arguments} in expected"
    if name == "regex":
        try:
            re.compile(task.expected)
        except (re.error, TypeError, OverflowError, RecursionError) as error:
            return f"expected is not a regular expression: {error}"
    return None
