"""``foretoken compare`` on the built-in model, on servers of foretoken and of others."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from foretoken.api.cli.commands import main
from support.server_process import running

FLAGS = ["--model", "builtin", "--kv-tokens", "4096", "--max-model-len", "256", "--threads", "1"]
SAMPLING = ["--max-tokens", "8", "--temperature", "1.5"]
Shown = pytest.CaptureFixture[str]


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    file = tmp_path / "tasks.jsonl"
    asked = [{"role": "system", "content": "Rules."}, {"role": "user", "content": "a loop"}]
    lines: list[dict[str, Any]] = [{"messages": asked}, {"prompt": "def f(n):"}]
    lines = [{**each, "expected": "e", "scorer": "regex"} for each in lines * 3]
    file.write_text("\n".join(map(json.dumps, lines)))
    return file


def compared(capsys: Shown, tasks: Path, *words: str) -> tuple[int, list[str], str]:
    status = main(["compare", *words, "--tasks", str(tasks)])
    shown = capsys.readouterr()
    return status, shown.out.splitlines(), shown.err


def test_equal_variants_give_equal_answers_with_other_drafts_and_settings(
    capsys: Shown, tasks: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out.json"
    words = ("draft=none", "base max-running=2", *FLAGS, *SAMPLING, "--json", str(out))
    status, lines, err = compared(capsys, tasks, *words, "--samples", "2")
    assert status == 0, err
    assert lines[0].startswith("undecided: B - A is +0.0 points (95%: -")
    assert lines[0].endswith("after 6 of 6 tasks")
    assert "0 of 12 answers differ" in lines
    found = json.loads(out.read_text())
    assert (found["exact"], found["differing_answers"], found["tasks"]["used"]) == (True, 0, 6)
    assert {len(each["a"]["answers"]) for each in found["pairs"]} == {2}
    assert [each["a"]["answers"] for each in found["pairs"]] == [
        each["b"]["answers"] for each in found["pairs"]
    ]
    assert found["variants"]["b"]["engine"]["max_running"] == 2
    assert [*tmp_path.glob(".*")] == []


@pytest.mark.slow
def test_a_server_gives_the_answers_of_the_engine(capsys: Shown, tasks: Path) -> None:
    with running(["--exact", "batch", *FLAGS[2:]]) as server:
        status, lines, err = compared(capsys, tasks, "base", server.url, *FLAGS, *SAMPLING)
        assert (status, lines[2]) == (0, "0 of 6 answers differ"), err
        words = (server.url, f"{server.url} temperature=0.1", *SAMPLING)
        status, lines, err = compared(capsys, tasks, *words)
        assert status == 0, err
        assert lines[2].endswith("of 6 answers differ")
        assert lines[2] != "0 of 6 answers differ"


class Foreign(BaseHTTPRequestHandler):
    """A server of another kind: it answers every chat alike and has no other route."""

    bodies: list[dict[str, Any]]
    keys: set[str | None]

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        self._answer(200, {"data": [{"id": "theirs", "exact": True}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.bodies.append(body)
        self.keys.add(self.headers["authorization"])
        if not self.path.endswith("/chat/completions"):
            self._answer(404, {"error": {"message": "no such route here"}})
            return
        message = {"role": "assistant", "content": "yes"}
        self._answer(200, {"choices": [{"message": message, "finish_reason": "stop"}]})

    def _answer(self, status: int, value: object) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@pytest.fixture
def foreign() -> Iterator[str]:
    Foreign.bodies, Foreign.keys = [], set()
    with ThreadingHTTPServer(("127.0.0.1", 0), Foreign) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_other_servers_are_compared_without_a_promise(
    capsys: Shown, tasks: Path, tmp_path: Path, foreign: str
) -> None:
    chats = [line for line in tasks.read_text().splitlines() if "messages" in line]
    tasks.write_text("\n".join(chats))
    (tmp_path / "own.txt").write_text("Other rules.")
    words = (foreign, f"{foreign} temperature=0.5 system={tmp_path}/own.txt")
    status, lines, err = compared(capsys, tasks, *words)
    assert status == 0, err
    assert lines[2].startswith("0 of 3 answers differ; exact: false")
    a, b = ([each for each in Foreign.bodies if ("temperature" in each) == is_b] for is_b in (0, 1))
    assert sorted(each["seed"] for each in a) == sorted(each["seed"] for each in b)
    assert {each["messages"][0]["content"] for each in a} == {"Rules."}
    assert {each["messages"][0]["content"] for each in b} == {"Other rules."}
    assert {len(each["messages"]) for each in Foreign.bodies} == {2}
    assert {each["model"] for each in Foreign.bodies} == {"theirs"}


def test_an_answer_that_fails_is_one_line_and_no_file(
    capsys: Shown, tasks: Path, tmp_path: Path, foreign: str
) -> None:
    out = tmp_path / "out.json"
    words = (foreign, foreign, "--json", str(out))
    status, lines, err = compared(capsys, tasks, *words, "--max-tokens", "8")
    assert (status, lines) == (1, [])
    assert err.splitlines()[-1].startswith("foretoken: A, task ")
    assert err.endswith(": no such route here\n")
    assert not out.exists()


class Odd(Foreign):
    """A server that answers with ``data``, or never if it is None, except for its models."""

    data: bytes | None
    is_odd_at_once = False  # whether its models are answered so, too
    ends = threading.Event()

    def do_GET(self) -> None:
        if self.is_odd_at_once:
            self.do_POST()
        else:
            super().do_GET()

    def do_POST(self) -> None:
        if self.data is None:
            self.ends.wait(60)
            return
        self.send_response(200)
        self.send_header("content-length", str(len(self.data)))
        self.end_headers()
        self.wfile.write(self.data)

    def finish(self) -> None:
        """End a connection that the client may have closed."""
        with suppress(OSError):
            super().finish()


@pytest.fixture
def odd() -> Iterator[str]:
    Odd.ends.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), Odd) as server:
        server.daemon_threads = True
        server.handle_error = lambda *_: None  # type: ignore[method-assign]
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        Odd.ends.set()
        server.shutdown()


@pytest.mark.parametrize("is_odd_at_once", [True, False])
@pytest.mark.parametrize("data", [None, b"<html>", b"[" * 100_000, b"null", b'{"choices": [1]}'])
def test_servers_that_hang_or_answer_otherwise_are_one_line_and_no_file(
    capsys: Shown, tasks: Path, tmp_path: Path, odd: str, data: bytes | None, is_odd_at_once: bool
) -> None:
    Odd.data, Odd.is_odd_at_once = data, is_odd_at_once
    out = tmp_path / "out.json"
    words = (odd, odd, "--json", str(out), "--max-tokens", "8", "--server-seconds", "0.2")
    status, lines, err = compared(capsys, tasks, *words)
    assert (status, lines) == (1, [])
    assert f"{odd} did not " in err
    assert err.count("\n") == 1
    assert [each.name for each in tmp_path.iterdir()] == ["tasks.jsonl"]


@pytest.mark.parametrize("data", [None, b"<html>", b'{"answers": [{"probability": NaN}]}'])
def test_a_judge_that_hangs_or_answers_otherwise_ends_the_comparison(
    capsys: Shown, tasks: Path, odd: str, data: bytes | None
) -> None:
    Odd.data, Odd.is_odd_at_once = data, False
    tasks.write_text(tasks.read_text().replace('"regex"', '"judge"'))
    flags = ("--judge", odd, "--server-seconds", "0.2")
    status, lines, err = compared(capsys, tasks, "base", "base", *FLAGS, *SAMPLING, *flags)
    assert (status, lines) == (1, [])
    assert "6 tasks in a row have no score: " in err
    assert f"{odd} did not answer " in err


def test_a_task_whose_pattern_never_ends_is_left_out(
    capsys: Shown, tasks: Path, tmp_path: Path
) -> None:
    """The pattern takes time without end for each answer that is not empty."""
    lines = [json.loads(line) for line in tasks.read_text().splitlines()]
    endless = {**lines[0], "expected": r"(?s)(.*.*.*.*.*.*.*.*)*\Zx", "id": "endless"}
    tasks.write_text("\n".join(map(json.dumps, [endless, *lines])))
    out = tmp_path / "out.json"
    flags = ("--scorer-seconds", "1", "--json", str(out))
    status, shown, err = compared(capsys, tasks, "base", "base", *FLAGS, *SAMPLING, *flags)
    assert status == 0, err
    assert shown[0].endswith("after 6 of 7 tasks")
    assert "1 tasks left out, whose scorers failed:" in shown
    (failed,) = json.loads(out.read_text())["failed"]
    assert failed["task"] == "endless"
    assert failed["why"].endswith("task 'endless': the scorer regex did not return within 1 s")


def test_a_prompt_for_a_server_needs_a_limit_since_servers_have_another_default(
    capsys: Shown, tasks: Path, foreign: str
) -> None:
    status, _, err = compared(capsys, tasks, foreign, foreign)
    assert status == 1
    assert "a prompt for a server needs max-tokens" in err


def test_servers_get_the_key_of_the_environment_and_no_result_has_a_password(
    capsys: Shown, tasks: Path, tmp_path: Path, foreign: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks.write_text(next(line for line in tasks.read_text().splitlines() if "messages" in line))
    monkeypatch.setenv("FORETOKEN_API_KEY", "of-the-environment")
    out, address = tmp_path / "out.json", foreign.replace("://", "://me:hidden@")
    status, lines, err = compared(capsys, tasks, address, f"{address}/v1", "--json", str(out))
    assert status == 0, err
    assert Foreign.keys == {"Bearer of-the-environment"}
    shown = out.read_text()
    assert foreign in shown
    assert "hidden" not in shown + err + "".join(lines)
    status, _, err = compared(capsys, tasks, "http://me:hidden@127.0.0.1:1", "base")
    assert status == 1
    assert "hidden" not in err


def test_a_judge_scores(capsys: Shown, tmp_path: Path) -> None:
    file = tmp_path / "judged.jsonl"
    levels = {"levels": ["bad", "fair", "good"], "question": "How good is it?"}
    lines = [{"messages": [{"role": "user", "content": "a"}]}] * 2
    file.write_text("\n".join(json.dumps(each) for each in (lines[0], {**lines[1], **levels})))
    out = tmp_path / "out.json"
    more = ["--scorer", "judge", "--json", str(out)]
    with running(FLAGS[2:]) as server:
        found = []
        for judge in ("builtin", server.url):
            words = ("base", "temperature=0.1", *FLAGS, *SAMPLING, *more, "--judge", judge)
            status, _, err = compared(capsys, file, *words)
            assert status == 0, err
            pairs = json.loads(out.read_text())["pairs"]
            found.append([each[name]["scores"] for each in pairs for name in "ab"])
    assert found[0] == [pytest.approx(each, abs=1e-3) for each in found[1]]
    assert all(0 < score < 1 for scores in found[0] for score in scores)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["base", "temprature=1"], "unknown setting temprature"),
        (["base", "temperature=-1"], "'temperature=-1': temperature must be"),
        (["base", "base kv-tokens=-1"], "'base kv-tokens=-1': kv_tokens"),
        (["base", "base", "--scorer", "exakt"], "task"),
        (["base", "base", "--json", "/absent/out.json"], "--json: the folder /absent does not"),
        (["base", "base", "--lora", "x=/y"], "--lora: compare takes lora=DIR in a variant"),
        (["base", "base", "--level", "100"], "--level: must be a number above 0 and below 100"),
        (["base", "base", "--samples", "0"], "--samples: must be a number of at least 1"),
    ],
)
def test_what_is_wrong_is_told_before_a_model_is_loaded(
    capsys: Shown, tasks: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], why: str
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("foretoken.api.runtime.engine_client._build", refuse)
    try:
        tasks.write_text(tasks.read_text().replace(', "scorer": "regex"', ""))
        status, lines, err = compared(capsys, tasks, *words)
    except SystemExit as ended:
        status, lines, err = int(ended.code or 0), [], capsys.readouterr().err
    assert (status, lines) == (2, [])
    assert why in err
