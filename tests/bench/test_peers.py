"""Servers that are measured in turn, beside a fake one with OpenAI's shape."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys

import pytest
from tokenizers import Tokenizer

from foretoken.bench.lab import servers
from foretoken.bench.lab.peers import __main__ as peers
from foretoken.bench.lab.peers import checkpoints, environments
from foretoken.bench.lab.peers.checkpoints import CHECKPOINTS, SmolLM2, numbered_tokenizer
from foretoken.bench.lab.servers import Server, StartError, compare, started, token_rows, words
from foretoken.bench.load.figures import Record
from foretoken.bench.load.http import Failure

FAKE = """\
import sys
sys.path.insert(0, {support!r})
import uvicorn
from support.fake_openai import FakeServer
uvicorn.run(FakeServer().app, port=int(sys.argv[-1]), log_level="critical", ws="none")
"""
TINY = CHECKPOINTS["qwen3-tiny"]


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A folder of the test in place of that of environments and checkpoints."""
    for module in (checkpoints, environments, peers):
        monkeypatch.setattr(module, "HOME", tmp_path)
    return tmp_path


def fake_command() -> list[str]:
    support = os.path.dirname(os.path.dirname(__file__))
    return [sys.executable, "-c", FAKE.format(support=support)]


# -- servers ------------------------------------------------------------------------------------


def test_a_server_is_started_stands_still_between_its_turns_and_ends():
    with started("fake", fake_command()) as server:
        assert server.model == "fake"
        assert len(server.ready) == 1
        process = server.process
        assert process is not None
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)  # returns once it stands still
        with server.awake():
            record = asyncio.run(servers.chat(server, "hi"))
        assert (record.num_tokens, record.prompt_tokens) == (servers.ANSWER_TOKENS, 10)
        resident, peak = server.memory() or (0, 0)
        assert peak >= resident > 0
    assert process.poll() is not None


def test_a_server_that_ends_at_its_start_is_told_with_its_last_line():
    with (
        pytest.raises(StartError, match="ended: no such library"),
        started("broken", [sys.executable, "-c", "raise SystemExit('no such library')"]),
    ):
        pass


def test_a_server_that_fails_costs_its_own_cells(server):
    async def fails(at: Server, turn: int) -> float:
        if at.name == "a":
            raise Failure("HTTP 400", "no such field")
        return 2.0 + turn

    broken = [sys.executable, "-c", "raise SystemExit('out of memory')"]
    commands = {"a": server.url, "b": server.url, "c": broken}
    found = compare(commands, {"row": fails}, 3, 0)
    assert found["row"]["a"] == "failed: HTTP 400: no such field"
    assert str(found["row"]["b"]) == "3 [2 .. 4]"
    assert found["row"]["c"] == "-"
    assert found["ready, s"] == {"a": "-", "b": "-", "c": "failed: the server ended: out of memory"}
    assert set(found["peak, GB"].values()) == {"-"}


@pytest.mark.parametrize("prompt", [words, TINY.prompt], ids=["words", "ids"])
def test_rows_of_tokens_send_what_the_checkpoint_reads(prompt, monkeypatch):
    async def ask(server, path, body):
        bodies.append(body)
        return Record("fake", due=1.0, times=[2.0, 3.0], counts=[1, 8], prompt_tokens=700)

    bodies: list = []
    monkeypatch.setattr(servers, "ask", ask)
    rows = token_rows(prompt)
    rates = [asyncio.run(row(Server("fake", ""), turn)) for turn in (0, 1) for row in rows.values()]
    assert rates == 2 * [700, 700, 8, 32]
    prompts = [body["prompt"] for body in bodies]
    sizes = [len(each.split() if isinstance(each, str) else each) for each in prompts]
    assert sizes[:3] == [700, 2900, 12]
    assert len({str(each) for each in prompts}) == len(prompts), "nothing can be looked up"


# -- engines ------------------------------------------------------------------------------------


def columns(home, *flags: str) -> dict:
    def compared(commands, rows, turns, starts):
        found.append((commands, rows))
        return {"row": dict.fromkeys(commands, 1.0)}

    found: list = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peers, "compare", compared)
        patch.setattr(SmolLM2, "write", lambda self: None)
        assert peers.main(["run", "--out", str(home / "out.json"), *flags]) == 0
    assert json.loads((home / "out.json").read_text())["rows"]["row"]
    return found[0][0]


def test_what_is_set_up_is_measured_and_what_runs_elsewhere_too(home):
    assert [*columns(home)] == ["foretoken", "plain"]
    for environment, name in (("llama_cpp", "llama-server"), ("vllm", "python")):
        (home / environment / "bin").mkdir(parents=True)
        (home / environment / "bin" / name).touch()
    others = ["llama.cpp", "llama.cpp, n-gram", "vllm", "vllm, n-gram"]
    found = columns(home, "--url", "far=http://1.2.3.4/v3")
    assert [*found] == ["foretoken", "plain", *others, "far"]
    assert found["far"] == "http://1.2.3.4/v3"
    int4 = columns(home, "--dtype", "int4")
    assert [*int4] == ["foretoken", "plain", "llama.cpp", "llama.cpp, n-gram"]
    assert "int4" in int4["plain"]
    assert str(home / "checkpoints" / "smollm2" / "gguf" / "int4.gguf") in int4["llama.cpp"]
    pair = columns(home, "--checkpoint", "qwen3-tiny")
    assert {"foretoken, draft", "llama.cpp, draft", "vllm, draft"} < {*pair}
    assert [*columns(home, "--only", "vllm")] == ["vllm"]


def test_an_address_without_a_name_is_refused(capsys):
    with pytest.raises(SystemExit):
        peers.main(["--url", "http://1.2.3.4"])
    assert "is not NAME=URL" in capsys.readouterr().err


# -- checkpoints and environments ---------------------------------------------------------------


def test_every_token_of_a_made_up_vocabulary_has_a_text_and_prompts_have_ids_of_it(home):
    TINY.write()
    tokenizer = Tokenizer.from_file(str(TINY.target / "tokenizer.json"))
    assert all(tokenizer.decode([index]) for index in range(256, 512))
    assert tokenizer.decode([300, 301]) == "[300][301]"
    assert (TINY.draft / "tokenizer.json").is_file()
    assert min(TINY.prompt(500, 1)) >= 256
    assert max(TINY.prompt(500, 1)) < numbered_tokenizer(512).vocab_size


def test_an_environment_that_does_not_install_is_skipped_with_a_line(home, monkeypatch, capsys):
    def refuse(command, log):
        raise subprocess.CalledProcessError(1, "pip")

    monkeypatch.setattr(environments, "_run", refuse)
    assert not environments.set_up(["llama.cpp"], TINY, "bf16")
    assert "llama.cpp: skipped:" in capsys.readouterr().out


def test_an_environment_is_made_once_and_again_when_its_requirements_change(home, monkeypatch):
    commands = []
    monkeypatch.setattr(environments, "_run", lambda command, log: commands.append(command))
    (home / "vllm").mkdir()
    for _ in range(2):
        assert environments.set_up(["vllm"], TINY, "int8")
    (home / "vllm" / ".done").write_text("something older")
    assert environments.set_up(["vllm"], TINY, "int8")
    assert sum("install" in command for command in commands) == 2
    assert sum("uninstall" in command for command in commands) == 2
    assert commands[-1][-3:] == [str(TINY.folder), "int8", "int8-draft"]


@pytest.mark.parametrize("environment", environments.SOURCE.values())
def test_every_engine_has_pinned_requirements_and_a_converter(environment):
    lines = (environments.HERE / f"requirements-{environment}.txt").read_text().split()
    assert lines
    assert all("==" in pin for pin in lines)
    assert (environments.HERE / f"convert_{environment}.py").is_file()
