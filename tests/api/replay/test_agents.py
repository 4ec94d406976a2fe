"""Sessions of three real agents, recorded by a server and replayed, as they were and changed."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from foretoken import bench
from foretoken.api.cli.commands import main
from foretoken.bench import serve
from support import recording_server
from support.server_process import running

pytestmark = pytest.mark.slow

SUPPORT = Path(recording_server.__file__)
RECORDINGS = Path(bench.__file__).parent / "recordings"
TURNS = 21
# The last result of a tool, and the turn whose answer it changes.
CHANGED = {
    "claude": ("messages[{}].content[0].content", "messages"),
    "codex": ("input[{}].output", "input"),
    "openai-agents": ("messages[{}].content", "messages"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for each agent with the records of its session."""
    folder = tmp_path_factory.mktemp("agents")
    for agent in CHANGED:
        records = folder / agent
        own = [sys.executable, str(SUPPORT), str(folder / "log.jsonl"), "--port", "0"]
        with running(started_by=[*own, "--record-requests", str(records)]) as server:
            file = RECORDINGS / f"{agent}.jsonl.xz"
            sent = ["agents", "--record", str(file), "--output-len", "200", "--warmup", "0"]
            assert serve.main([*sent, "--url", server.url, "--out", str(folder / "out")]) == 0
            assert server.stop() == 0
    return folder


@pytest.fixture(autouse=True)
def same_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    recording_server.install(monkeypatch.setattr, tmp_path / "log.jsonl")


@pytest.mark.parametrize("agent", CHANGED)
def test_a_recorded_session_of_an_agent_is_equal(
    agent: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (file,) = (folder / agent).glob("*.jsonl")
    assert main(["replay", str(file)]) == 0
    assert f"{TURNS} of {TURNS} turns equal" in capsys.readouterr().out


@pytest.mark.parametrize("agent", CHANGED)
def test_a_changed_session_of_an_agent_continues_with_the_tool(
    agent: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (file,) = (folder / agent).glob("*.jsonl")
    path, field = CHANGED[agent]
    records = [json.loads(line) for line in file.read_text("utf-8").splitlines()]
    bodies = [each["asked"]["body"] for each in sorted(records, key=lambda r: r["asked"]["at"])]
    changed = path.format(len(bodies[TURNS - 3][field]) - 1)
    flags = ["--change", f"{changed}={recording_server.OTHER}"]
    assert main(["replay", str(file), *flags]) == 1
    out = capsys.readouterr().out
    assert f"{TURNS - 3} turns before the change verified; 1 turn after it: 1 other" in out
    assert re.search(r"changed call: .*chapter 19", out) is not None
    assert "the recording has no result for" in out
    assert main(["replay", str(file), *flags, "--tools", "echo a page"]) == 0
    out = capsys.readouterr().out
    assert "result of the tool" in out
    assert "no longer called" in out
    assert f"turn {TURNS}: " in out
    assert "new turn" not in out
