"""Promises of docs/server.md about the command line."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch

import foretoken
from foretoken import LLM, SamplingParams
from foretoken.api.cli.commands import main
from support.certificates import make_certificate
from support.forked import command, run_forked, started
from support.plain_http import get, opened, payloads, post
from support.server_process import Server, running

COMMAND = str(Path(sys.executable).parent / "foretoken")
SMALL = ["--kv-tokens", "2048", "--max-model-len", "1024", "--threads", "1"]
PROMPT = "def quicksort(items):\n"
TEXT = "/v1/completions"
ENDLESS = {"prompt": PROMPT, "max_tokens": 240, "ignore_eos": True, "stream": True}
COMMANDS = ["serve", "replica", "run", "chat", "bench"]
SERVE_FLAGS = """--draft --speculation --exact --device --dtype --quantize --kv-cache-dtype
--kv-memory --kv-tokens --page-size --max-model-len --max-batch-tokens --max-running --max-queued
--threads --host --port --uds --api-key --served-model-name --log-level --load-format"""


def call(
    *args: str, stdin: str = "", variables: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return run_forked(command, *args, stdin=stdin, env={**os.environ, **(variables or {})})


def call_anew(*args: str) -> subprocess.CompletedProcess[str]:
    """The command as pip installs it, in a new process."""
    return subprocess.run([COMMAND, *args], capture_output=True, text=True, timeout=120)


def call_here(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[object, str, str]:
    """The command in this process, which has its imports: exit code, stdout and stderr."""
    try:
        code: object = main(args)
    except SystemExit as end:
        code = end.code
    shown = capsys.readouterr()
    return code, shown.out, shown.err


def assert_one_line(done: subprocess.CompletedProcess[str]) -> None:
    assert done.stdout == ""
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert "Traceback" not in done.stderr


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("builtin", kv_tokens=2048, max_model_len=1024, threads=1) as llm:
        yield llm


@pytest.fixture
def server() -> Iterator[Server]:
    with running(SMALL) as server:
        yield server


def test_version_is_that_of_the_package() -> None:
    done = call_anew("--version")
    assert (done.returncode, done.stdout) == (0, f"foretoken {foretoken.__version__}\n")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, shown, logged = call_here(capsys, command, "--help")
    assert (code, logged) == (0, "")
    assert f"foretoken {command}" in shown


def test_help_names_every_command_and_serve_every_flag() -> None:
    shown = call("--help").stdout
    assert [command for command in COMMANDS if command not in shown] == []
    flags = set(re.findall(r"--[a-z-]+", call("serve", "--help-all").stdout))
    assert set(SERVE_FLAGS.split()) - flags == set()


@pytest.mark.parametrize(
    "args",
    [
        ["--nope"],
        ["dance"],
        ["serve", "--nope"],
        ["serve", "--port", "x"],
        ["serve", "--port", "99999999"],
        ["serve", "--kv-memory", "4apples"],
        ["serve", "--kv-tokens", "0"],
        ["serve", "--kv-tokens", "64", "--kv-memory", "1GiB"],
        ["serve", "--speculation", "maybe"],
        ["serve", "--log-level", "loud"],
        ["serve", "one", "two"],
        ["run", "x", "builtin"],
        ["run", "x", "--temperature", "-1"],
        ["run", "x", "--max-tokens", "0"],
        ["chat", "--seed", "x"],
    ],
    ids=" ".join,
)
def test_a_bad_flag_exits_2_with_one_line(
    args: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    code, shown, logged = call_here(capsys, *args)
    assert (code, shown, len(logged.splitlines())) == (2, "", 1), logged


def test_the_process_of_a_bad_flag_exits_2_with_one_line() -> None:
    done = call_anew("serve", "--nope")
    assert done.returncode == 2, done.stderr
    assert_one_line(done)


def test_what_is_not_supported_is_refused_by_name() -> None:
    done = call("run", "x", "--quantize", "int3")
    assert done.returncode == 2
    assert_one_line(done)
    assert "quantize" in done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU has it")
@pytest.mark.parametrize(("flag", "value"), [("--device", "cuda"), ("--kv-cache-dtype", "fp8")])
def test_what_a_machine_has_not_is_refused_with_one_line(flag: str, value: str) -> None:
    done = call("run", "x", flag, value)
    assert done.returncode == 2
    assert_one_line(done)
    assert flag.strip("-").replace("-", "_") in done.stderr


@pytest.mark.parametrize("args", [["serve", "/no/such"], ["run", "/no/such", "x"]], ids=" ".join)
def test_a_missing_model_fails_with_one_line(args: list[str]) -> None:
    done = call(*args)
    assert done.returncode not in (0, -11)
    assert_one_line(done)
    assert "/no/such" in done.stderr


def test_a_port_in_use_fails_with_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = call("serve", "builtin", "--port", str(taken.getsockname()[1]), *SMALL)
    assert done.returncode != 0
    assert_one_line(done)


SEEDED = ["--seed", "5", "--max-tokens", "11", "--ignore-eos", *SMALL]


def test_run_prints_the_answer_of_the_sdk_and_nothing_else(llm: LLM) -> None:
    params = SamplingParams(seed=5, max_tokens=11, ignore_eos=True)
    asked = [{"role": "user", "content": f"{PROMPT}\nsort it"}]
    done = call("run", "builtin", "sort it", *SEEDED, stdin=PROMPT)
    assert (done.returncode, done.stdout) == (0, llm.chat(asked, params).text.rstrip("\n") + "\n")
    raw = call("run", "builtin", PROMPT, "--raw", "--stats", *SEEDED)
    assert (raw.returncode, raw.stdout) == (0, llm.generate(PROMPT, params).text + "\n")
    assert re.search(r"\b11\b.*token", raw.stderr.splitlines()[-1])


def test_run_ends_quietly_when_its_reader_leaves() -> None:
    line = f"{COMMAND} run builtin 'def f' --raw --ignore-eos --max-tokens 300 {' '.join(SMALL)}"
    shell = f"{line} | head -c 1 > /dev/null; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, timeout=120)
    assert (done.returncode, "Traceback" in done.stderr) == (141, False), done.stderr


@pytest.mark.parametrize("args", [[], ["--raw", "--ignore-eos", "--max-tokens", "900"]])
def test_ctrl_c_ends_run_with_130_while_it_loads_and_while_it_answers(args: list[str]) -> None:
    with subprocess.Popen(
        [COMMAND, "run", "builtin", PROMPT, "--verbose", *args, *SMALL],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stderr is not None
        first = process.stdout.read(1) if args else process.stderr.readline()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert first
    assert process.returncode == 130
    assert "Traceback" not in err
    assert bool(out) == bool(args), "the text that has come is kept"


REPEATING = "x = [1, 2, 3, 1, 2, 3, "


def test_drafts_are_shown_in_colour_and_the_text_stays_the_same() -> None:
    args = [
        "run",
        "builtin",
        REPEATING,
        "--raw",
        "--temperature",
        "0",
        "--max-tokens",
        "20",
        "--speculation",
        "4",
        *SMALL,
    ]
    plain = call(*args)
    shown = call(*args, "--show-drafts", variables={"FORCE_COLOR": "1", "NO_COLOR": ""})
    assert shown.returncode == 0, shown.stderr
    assert "\x1b[3" in shown.stdout
    assert re.sub(r"\x1b\[\d+m", "", shown.stdout) == plain.stdout
    legend, cost = shown.stderr.splitlines()[-2:]
    assert "the model itself = plain: " in legend
    assert "draft tokens accepted (" in cost
    quiet = call(*args, "--show-drafts", variables={"NO_COLOR": "1"})
    assert quiet.stdout == plain.stdout


def test_chat_answers_every_line_of_a_pipe_and_remembers(llm: LLM) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=8)
    messages = [{"role": "user", "content": "hi"}]
    first = llm.chat(messages, greedy).text
    messages += [{"role": "assistant", "content": first}, {"role": "user", "content": "more"}]
    second = llm.chat(messages, greedy).text
    done = call(
        "chat", "builtin", "--temperature", "0", "--max-tokens", "8", *SMALL, stdin="hi\nmore\n"
    )
    assert done.returncode == 0, done.stderr
    assert first.strip() in done.stdout
    assert second.strip() in done.stdout[done.stdout.index(first.strip()) + len(first.strip()) :]


def test_the_key_of_the_environment_and_the_served_name_count() -> None:
    variables = {"FORETOKEN_API_KEY": "sesame"}
    with running(["--served-model-name", "mine", *SMALL], variables=variables) as server:
        assert get(server.url, "/v1/models").status == 401
        listed = get(server.url, "/v1/models", {"Authorization": "Bearer sesame"}).json
        assert [model["id"] for model in listed["data"]] == ["mine"]
        assert server.stop() == 0


def test_serve_listens_on_a_unix_socket(tmp_path: Path) -> None:
    path = tmp_path / "foretoken.sock"
    with started(command, "serve", "builtin", "--uds", str(path), *SMALL) as process:
        assert any(str(path) in line for line in process.stderr), "it never said where"
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))
            client.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            assert client.recv(12) == b"HTTP/1.1 200"
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")
def test_serve_speaks_tls(tmp_path: Path) -> None:
    cert, key = make_certificate(tmp_path)
    flags = ["--port", "0", "--ssl-certfile", cert, "--ssl-keyfile", key, *SMALL]
    with started(command, "serve", "builtin", *flags) as process:
        found = (re.search(r"https://(127\.0\.0\.1:\d+)(?=\s)", line) for line in process.stderr)
        address = next(match[1] for match in found if match)
        trust = ssl.create_default_context(cafile=cert)
        connection = http.client.HTTPSConnection(address, timeout=60, context=trust)
        with contextlib.closing(connection):
            body = json.dumps({**ENDLESS, "max_tokens": 40})
            connection.request("POST", TEXT, body, {"Content-Type": "application/json"})
            seen = [*payloads(connection.getresponse())]
        assert len(seen) > 2
        assert seen[-1] == "[DONE]"
        assert json.loads(seen[-2])["choices"][0]["finish_reason"] == "length"
        with ssl.create_default_context(cafile=cert).wrap_socket(
            socket.create_connection(address.split(":")), server_hostname="127.0.0.1"
        ) as client:
            client.sendall(b"nonsense\r\n\r\n")
            assert client.recv(12) == b"HTTP/1.1 400"
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        assert "Traceback" not in process.stderr.read()


def test_sigterm_lets_a_running_stream_finish_and_exits_0(server: Server) -> None:
    with opened(server.url, "POST", TEXT, ENDLESS) as response:
        events = payloads(response)
        seen = [next(events)]
        server.process.send_signal(signal.SIGTERM)
        while (ready := get(server.url, "/ready")).status == 200:
            pass
        assert ready.status == 503
        refused = post(server.url, TEXT, {"prompt": "x", "max_tokens": 1})
        assert (refused.status, bool(refused.error)) == (503, True)
        assert get(server.url, "/health").status == 200
        seen += events
    *chunks, done = seen
    assert done == "[DONE]"
    last = json.loads(chunks[-1])
    assert last["choices"][0]["finish_reason"] == "length"
    assert server.process.wait(60) == 0


def test_a_second_sigterm_does_not_wait_for_streams(server: Server) -> None:
    with opened(server.url, "POST", TEXT, {**ENDLESS, "max_tokens": 1000}) as response:
        events = payloads(response)
        seen = [next(events)]
        server.process.send_signal(signal.SIGTERM)
        while get(server.url, "/ready").status == 200:
            pass
        server.process.send_signal(signal.SIGTERM)
        with contextlib.suppress(OSError, http.client.HTTPException):
            seen += events
        assert "[DONE]" not in seen or '"finish_reason":"length"' not in "".join(seen)
    server.process.wait(60)


def test_an_idle_server_exits_0_on_interrupt(server: Server) -> None:
    server.process.send_signal(signal.SIGINT)
    assert server.process.wait(60) == 0
