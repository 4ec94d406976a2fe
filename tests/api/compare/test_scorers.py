"""Scores of answers, and scorers that fail."""

from __future__ import annotations

import asyncio
import math
import os
import socket
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from foretoken.api.compare import sandbox
from foretoken.api.compare.answer import Answer
from foretoken.api.compare.answering import _call
from foretoken.api.compare.judging import LocalJudge
from foretoken.api.compare.scorers import Scorers
from foretoken.api.compare.tasks import Task
from foretoken.core.errors import ForetokenError, InvalidRequest

TESTS = "def test_add():\n    assert add(1, 2) == 3\n"
BLOCK = "Here it is:\n```python\ndef add(a, b):\n    return a + b\n```\nDone."


def scored(text: str, *, calls: Any = (), seconds: float = 60, **fields: Any) -> float:
    task = Task(id="t", prompt="?", **fields)
    scorers = Scorers([task], "exact", seconds=seconds, has_judge=False)
    return asyncio.run(scorers.score(task, Answer(text=text, calls=list(calls)), None))


@pytest.mark.parametrize(
    ("scorer", "expected", "right", "wrong"),
    [
        ("exact", "Oslo", " Oslo\n", "oslo"),
        ("exact", ["Oslo", "Bergen"], "Bergen", "Oslo, Bergen"),
        ("exact", 4, "4", "4.0"),
        ("regex", r"\bred|green\b", "it is red", "scarred"),
        ("number", 1200, "5 of 12 make 1,200.00", "1200 of 5"),
        ("number", "-0.5", "x = -.5", "0.5"),
        ("number", 3, "3.", "no number"),
        ("json", {"a": [1, 2]}, '{"a": [1, 2.0]}', '{"a": [2, 1]}'),
        ("json", {"a": 1}, 'So:\n```json\n{"a": 1}\n```', '{"a": 1'),
        ("json", None, "null", ""),
        ("json", {"a": [True]}, '{"a": [true]}', '{"a": [1]}'),
    ],
)
def test_plain_scorers(scorer: str, expected: Any, right: str, wrong: str) -> None:
    assert scored(right, scorer=scorer, expected=expected) == 1.0
    assert scored(wrong, scorer=scorer, expected=expected) == 0.0


def test_calls_are_compared_as_json() -> None:
    call = {"name": "f", "arguments": {"x": 1}}
    assert scored("text", calls=[call], scorer="json", expected=call) == 1.0
    assert scored("text", calls=[call, call], scorer="json", expected=[call, call]) == 1.0
    assert scored("text", calls=[call, call], scorer="json", expected=call) == 0.0
    assert scored("", calls=[{**call, "arguments": "{"}], scorer="json", expected=call) == 0.0


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        (BLOCK, 1.0),
        ("def add(a, b):\n    return a - b", 0.0),
        ("no code", 0.0),
        ("import os\nos._exit(0)", 0.0),
        ("x = bytearray(2**33)\ndef add(a, b):\n    return a + b", 0.0),
    ],
    ids=["right", "wrong", "no code", "ends the process", "too much memory"],
)
def test_pytest_runs_on_the_code_of_an_answer(answer: str, score: float) -> None:
    assert scored(answer, scorer="pytest", tests=TESTS) == score


def test_code_that_never_ends_scores_0_and_leaves_no_process(tmp_path: Path) -> None:
    """The child leaves the group of its parent, so a signal to the group does not reach it."""
    reading, writing = os.pipe()
    os.set_inheritable(writing, True)
    forks = (
        f"import os\nif os.fork() == 0:\n    os.setsid()\nopen({str(tmp_path / 'began')!r}, 'w')"
    )
    try:
        loop = f"{forks}\nwhile True: pass"
        assert scored(loop, seconds=5, scorer="pytest", tests=TESTS) == 0.0
    finally:
        os.close(writing)
        os.close(reading)
    named = str(tmp_path / "began")
    for process in Path("/proc").glob("[0-9]*"):
        try:
            assert named not in (process / "cmdline").read_text("utf-8", "replace")
        except OSError:
            continue


def test_a_cancellation_while_a_process_starts_kills_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def act() -> None:
        started: list[asyncio.subprocess.Process] = []
        is_there, goes_on = asyncio.Event(), asyncio.Event()

        async def start(*command: Any, **options: Any) -> asyncio.subprocess.Process:
            started.append(await real(*command, **options))
            is_there.set()
            await goes_on.wait()
            return started[0]

        real = asyncio.create_subprocess_exec
        monkeypatch.setattr(asyncio, "create_subprocess_exec", start)
        sleeps = [sys.executable, "-c", "import time; time.sleep(600)"]
        running = asyncio.create_task(sandbox.run_limited(sleeps, seconds=600))
        await is_there.wait()
        running.cancel()
        asyncio.get_running_loop().call_later(0, goes_on.set)
        try:
            with pytest.raises(asyncio.CancelledError):
                await running
            assert started[0].returncode is not None
        finally:
            if started[0].returncode is None:
                started[0].kill()
                await started[0].wait()

    asyncio.run(act())


def test_the_folder_of_a_process_is_deleted_beside_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[threading.Thread] = []

    class Folder(tempfile.TemporaryDirectory[str]):
        def cleanup(self) -> None:
            threads.append(threading.current_thread())
            super().cleanup()

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(tempfile, "TemporaryDirectory", Folder)

    async def act() -> None:
        await sandbox.run_limited([sys.executable, "-c", ""], seconds=60)
        assert not os.listdir(tmp_path)
        sleeps = [sys.executable, "-c", "import time; time.sleep(600)"]
        running = asyncio.create_task(sandbox.run_limited(sleeps, seconds=600))
        await asyncio.sleep(0)  # it begins
        assert os.listdir(tmp_path)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert not os.listdir(tmp_path)

    asyncio.run(act())
    assert len(threads) == 2
    assert threading.main_thread() not in threads


def test_a_process_that_leaves_its_group_ends_too(tmp_path: Path) -> None:
    loops = "import os, time; os.setsid(); time.sleep(600)"
    own = function(tmp_path, loops)
    with pytest.raises(ForetokenError, match="did not return within 1 s"):
        scored("yes", seconds=1, scorer=own)
    wanted = str(tmp_path).encode()
    assert not [each for each in Path("/proc").glob("[0-9]*/cmdline") if wanted in read(each)]


def read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError:
        return b""


def test_an_output_that_stays_open_does_not_stop_the_comparison(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a namespace of processes, a child may leave the group and keep the output."""
    plain = sandbox._LAUNCHER.replace("unshare is not None", "False")
    assert plain != sandbox._LAUNCHER
    monkeypatch.setattr(sandbox, "_LAUNCHER", plain)
    leaves = "import os, time\n    if os.fork() == 0:\n        os.setsid()\n    time.sleep(15)"
    began = time.monotonic()
    with pytest.raises(ForetokenError, match="did not return within 1 s"):
        scored("yes", seconds=1, scorer=function(tmp_path, leaves))
    assert time.monotonic() - began < 10


def test_a_pattern_that_backtracks_without_end_is_stopped() -> None:
    with pytest.raises(ForetokenError, match="the scorer regex did not return within 1 s"):
        scored("a" * 50 + "b", seconds=1, scorer="regex", expected="(a+)+$")


LOGIN = [{"login": {"user": ["ann", "Ann"], "tries": [1, ""], "at": [{"host": ["a", "b"]}]}}]
AT_A = {"user": "ann", "at": {"host": "a"}}


@pytest.mark.parametrize(
    ("arguments", "score"),
    [
        (AT_A, 1.0),
        ({**AT_A, "user": "Ann", "tries": 1}, 1.0),
        ({**AT_A, "tries": 2}, 0.0),
        ({**AT_A, "tries": True}, 0.0),
        ({**AT_A, "other": 1}, 0.0),
        ({**AT_A, "at": {"host": "c"}}, 0.0),
        ({"user": "ann"}, 0.0),
        ("{", 0.0),
    ],
)
def test_each_argument_of_a_call_has_one_of_its_possible_values(
    arguments: Any, score: float
) -> None:
    call = {"name": "login", "arguments": arguments}
    assert scored("", calls=[call], scorer="calls", expected=LOGIN) == score
    assert scored("", calls=[call, call], scorer="calls", expected=LOGIN) == 0.0
    assert scored("", calls=[{**call, "name": "logout"}], scorer="calls", expected=LOGIN) == 0.0


def test_calls_are_expected_in_any_order_each_once() -> None:
    lines: Any = [{"add": {"word": word, "tags": [["x", "y"]]}} for word in ("one", "two")]
    calls = [
        {"name": "add", "arguments": {"word": word, "tags": ["x", "y"]}} for word in ("two", "one")
    ]
    assert scored("", calls=calls, scorer="calls", expected=lines) == 1.0
    assert scored("", calls=calls[:1], scorer="calls", expected=lines) == 0.0
    assert scored("", calls=calls[:1] * 2, scorer="calls", expected=lines) == 0.0


@pytest.mark.parametrize(
    ("possible", "values"),
    [(([1, 2], [1]), (1, 2)), (([1], [1, 2]), (1, 2)), (([1], [True]), (1, True))],
)
def test_calls_whose_possible_values_overlap_are_paired(possible: Any, values: Any) -> None:
    """A call must not take what only another call fits; in Python, True equals 1."""
    expected = [{"f": {"x": each}} for each in possible]
    for order in (values, values[::-1]):
        calls = [{"name": "f", "arguments": {"x": each}} for each in order]
        assert scored("", calls=calls, scorer="calls", expected=expected) == 1.0
    wrong = [{"name": "f", "arguments": {"x": values[1]}}] * 2
    assert scored("", calls=wrong, scorer="calls", expected=expected) == 0.0


@pytest.mark.parametrize("scorer", ["exact", "regex", "number", "json", "python"])
def test_an_answer_that_is_no_valid_unicode_is_scored(tmp_path: Path, scorer: str) -> None:
    own = function(tmp_path, "return 0.0") if scorer == "python" else scorer
    assert scored('"\ud800', scorer=own, expected="1") == 0.0


def test_a_process_that_cannot_start_fails_the_scorer(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(*_: Any, **__: Any) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(asyncio, "create_subprocess_exec", refuse)
    with pytest.raises(ForetokenError, match="cannot run: Resource temporarily unavailable"):
        scored("a", scorer="regex", expected="a")


def test_arguments_that_are_no_json_equal_themselves() -> None:
    assert _call("f", '{"x": NaN}') == _call("f", '{"x": NaN}')
    assert _call("f", '{"x": 1}') == {"name": "f", "arguments": {"x": 1}}


def test_code_has_no_network() -> None:
    """Skipped where Linux gives an unprivileged process no network namespace."""
    if os.system("unshare --user --net true 2>/dev/null") != 0:
        pytest.skip("no user namespaces")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        connects = f"import socket\nsocket.create_connection(('127.0.0.1', {port}), 2)\n"
        assert scored(connects, scorer="pytest", tests="def test_it(): pass") == 0.0


def test_the_number_of_processes_has_a_limit(tmp_path: Path) -> None:
    """Skipped for root, whom Linux does not limit, and without a namespace of processes."""
    if os.geteuid() == 0 or os.system("unshare --user --pid --fork true 2>/dev/null") != 0:
        pytest.skip("root, or no user namespaces")
    if int(os.uname().release.split(".")[0]) < 6:
        pytest.skip("Linux counts all processes of a user")
    forks = "import os, time\n    while True: os.fork() or time.sleep(60)"
    with pytest.raises(ForetokenError, match="failed: BlockingIOError"):
        scored("yes", seconds=20, scorer=function(tmp_path, forks))


def function(tmp_path: Path, body: str) -> str:
    file = tmp_path / "own.py"
    file.write_text(f"def score(answer, task):\n    {body}\n")
    return f"python:{file}:score"


@pytest.mark.parametrize(
    ("body", "score"),
    [
        ("return answer == task['expected']", 1.0),
        ("return 0.25", 0.25),
        ("import os; return float(os.environ['OMP_NUM_THREADS'] == '1')", 1.0),
        ("print('noise'); return len(task['calls'])", 0.0),
        ("print('0\\n' * 2**20); return 0.5", 0.5),
    ],
)
def test_a_function_scores(tmp_path: Path, body: str, score: float) -> None:
    assert scored("yes", scorer=function(tmp_path, body), expected="yes") == score


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("raise KeyError('x')", "failed: KeyError: 'x'"),
        ("return 1.5", "must return a number from 0 to 1, not 1.5"),
        ("return float('nan')", "must return a number from 0 to 1, not NaN"),
        ("return None", "failed: TypeError"),
        ("while True: pass", "did not return within 1 s"),
        ("print('x' * 2**20); raise SystemExit(3)", "failed: x{200}$"),
        (r"print('\x1b[31mred'); raise SystemExit(3)", r"failed: \[31mred$"),
    ],
)
def test_a_function_that_fails_is_told(tmp_path: Path, body: str, why: str) -> None:
    seconds = 1 if "while" in body else 60
    with pytest.raises(ForetokenError, match=rf"own.py:score {why}"):
        scored("yes", seconds=seconds, scorer=function(tmp_path, body))


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"scorer": "exakt"}, "unknown scorer 'exakt'"),
        ({}, "the scorer exact needs expected"),
        ({"scorer": "number", "expected": "many"}, "needs a number in expected, not 'many'"),
        ({"scorer": "regex", "expected": "("}, "not a regular expression"),
        ({"scorer": "number", "expected": "sNaN"}, "needs a number in expected, not 'sNaN'"),
        ({"scorer": "regex", "expected": 3}, "not a regular expression"),
        ({"scorer": "regex", "expected": "(" * 100_000}, "not a regular expression"),
        ({"scorer": "regex", "expected": "a{99999999999}"}, "not a regular expression"),
        ({"scorer": "calls", "expected": {"f": {}}}, "needs a list of {name: arguments}"),
        ({"scorer": "calls", "expected": [{"f": {}, "g": {}}]}, "needs a list of {name: argum"),
        ({"scorer": "pytest"}, "the scorer pytest needs tests"),
        ({"scorer": "judge"}, "needs --judge"),
        ({"scorer": "python:score"}, "is not python:FILE:FUNCTION"),
        ({"scorer": "python:/absent.py:score"}, "/absent.py is not a file"),
    ],
)
def test_a_task_without_what_its_scorer_needs_is_refused(fields: Any, why: str) -> None:
    with pytest.raises(InvalidRequest, match=f"task 't': .*{why}"):
        scored("x", **fields)


def test_a_judge_needs_a_valid_question() -> None:
    task = Task(id=1, prompt="?", scorer="judge", levels=["one"])
    with pytest.raises(InvalidRequest, match=r"task 1: .*levels"):
        Scorers([task], "exact", seconds=1, has_judge=True)


class OddJudge:
    """A model whose decision has no number."""

    async def decide(self, *_: Any) -> Any:
        return SimpleNamespace(answers=[SimpleNamespace(value=math.nan)])


def test_a_judge_whose_decision_is_no_number_fails_the_scorer() -> None:
    judge: Any = LocalJudge(OddJudge())  # type: ignore[arg-type]
    task = Task(id=1, prompt="?", scorer="judge")
    with pytest.raises(ForetokenError, match="the judge failed: a decision without a value"):
        asyncio.run(judge.score(task, Answer(text="yes")))


def test_folders_that_are_too_deep_to_delete_fail_the_scorer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cleanup = tempfile.TemporaryDirectory.cleanup

    def too_deep(self: tempfile.TemporaryDirectory[str]) -> None:
        cleanup(self)
        raise RecursionError

    monkeypatch.setattr(tempfile.TemporaryDirectory, "cleanup", too_deep)
    with pytest.raises(ForetokenError, match="too deep to delete"):
        scored("a", scorer="regex", expected="a")
