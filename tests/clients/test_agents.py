"""Codex CLI, Claude Code and opencode, as npm has them, against a server with a context of 64k."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from clients.agent_programs import (
    AGENTS,
    ARE_INSTALLED,
    EDITOR,
    KEY,
    MODEL,
    NOT_INSTALLED,
    OPENCODE,
    claude,
    codex,
    opencode,
    run,
)
from support.server_process import Server, running

TESTS = Path(__file__).resolve().parent.parent
HITS = 0.9  # of the second turn's prompt, at least
# What the shell puts together must not be a mark before that.
ECHO = "echo '[''[All done.]'']'"
# A system message comes first or not at all, arguments are objects.
STRICT = """{%- for m in messages -%}
{%- if m.role == 'system' and not loop.first -%}
{{ raise_exception('System message must be at the beginning.') }}
{%- endif -%}
{{ '<|im_start|>' + m.role + '\\n' }}
{%- if loop.first %}{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}{% endif -%}
{{ m.content }}
{%- for call in m.tool_calls or [] -%}
{{ '<tool_call>' + call.function.name }}
{%- for name, value in call.function.arguments | items %} {{ name }}={{ value }}{% endfor -%}
{{ '</tool_call>' }}
{%- endfor -%}
{{ '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif -%}
"""

pytestmark = [
    pytest.mark.skipif(not ARE_INSTALLED, reason=NOT_INSTALLED),
    pytest.mark.slow,
]


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("agents") / "log.jsonl"


@pytest.fixture(scope="module")
def server(log: Path) -> Iterator[Server]:
    command = [sys.executable, str(TESTS / "support" / "agents_server.py"), str(log)]
    names = ["--served-model-name", f"{MODEL},{EDITOR}"]
    with running(started_by=[*command, *names, "--port", "0", "--api-key", KEY]) as server:
        yield server


@pytest.fixture(scope="module")
def strict(log: Path) -> Iterator[Server]:
    """A server whose template refuses what agents send as a matter of course."""
    template = log.with_name("strict.jinja")
    template.write_text(STRICT, "utf-8")
    command = [sys.executable, str(TESTS / "support" / "agents_server.py"), str(log)]
    options = ["--port", "0", "--api-key", KEY, "--chat-template", str(template)]
    with running(started_by=[*command, *options]) as server:
        yield server


RUN = {"codex": codex, "claude": claude}
RUN_LONG = {**RUN, **({"opencode": opencode} if OPENCODE.is_file() else {})}
IN_ONE_TURN = {
    "codex": ["exec", "--skip-git-repo-check", "-s", "danger-full-access"],
    "claude": ["-p", "--output-format", "text"],
}
CALLS = {
    "codex": {"name": "exec_command", "arguments": {"cmd": ECHO}},
    "claude": {"name": "Bash", "arguments": {"command": ECHO, "description": "Say it."}},
}


@pytest.mark.parametrize("agent", RUN)
def test_an_agent_converses(agent: str, server: Server, tmp_path: Path) -> None:
    assert RUN[agent]("Say this: [[Hello there.]]", server.url, tmp_path).strip() == "Hello there."


@pytest.mark.parametrize("agent", RUN)
def test_an_agent_calls_a_tool_and_its_second_turn_is_cached(
    agent: str, server: Server, log: Path, tmp_path: Path
) -> None:
    log.unlink(missing_ok=True)
    call = f"<tool_call>\n{json.dumps(CALLS[agent])}\n</tool_call>"
    assert RUN[agent](f"Do this: [[{call}]]", server.url, tmp_path).strip() == "All done."
    turns = [json.loads(line) for line in log.read_text("utf-8").splitlines()]
    assert len(turns) == 2, "one that calls, one that is told what came of it"
    assert turns[1]["prompt"] > turns[0]["prompt"] > 4096
    assert turns[1]["cached"] >= HITS * turns[1]["prompt"], turns


def turns_of(log: Path) -> list[dict[str, int]]:
    """The requests since the last call."""
    lines = log.read_text("utf-8").splitlines()
    log.unlink()
    return [json.loads(line) for line in lines]


def test_claude_code_compacts_and_goes_on(server: Server, log: Path, tmp_path: Path) -> None:
    log.unlink(missing_ok=True)
    claude("Say this: [[Hello there.]]", server.url, tmp_path)
    claude("/compact", server.url, tmp_path, goes_on=True)
    _, *compaction = turns_of(log)
    assert compaction, "a summary is asked for"
    assert all(turn["cached"] > 0.85 * turn["prompt"] for turn in compaction), compaction
    told = claude("Say this: [[Still here.]]", server.url, tmp_path, goes_on=True)
    assert told.strip() == "Still here."
    after = turns_of(log)[-1]
    assert after["cached"] > 0.7 * after["prompt"], "tools and instructions stayed"


def test_codex_compacts_by_an_item_of_the_server_and_goes_on(
    server: Server, log: Path, tmp_path: Path
) -> None:
    """Codex asks a provider of this name for compaction items: it sends a compaction_trigger."""
    log.unlink(missing_ok=True)

    def say(text: str, **options: Any) -> str:
        prompt = f"Say this: [[{text}]]"
        told = codex(prompt, server.url, tmp_path, model=EDITOR, provider="OpenAI", **options)
        return told.strip()

    say("Hello there.")
    few = ["model_auto_compact_token_limit=1000"]
    assert say("Still here.", goes_on=True, settings=few) == "Still here."
    _, compaction, answer = turns_of(log)
    assert compaction["prompt"] > answer["prompt"]
    assert all(turn["cached"] >= HITS * turn["prompt"] for turn in (compaction, answer))
    [session] = (tmp_path / ".codex" / "sessions").rglob("*.jsonl")
    compacted = [line for line in session.read_text().splitlines() if '"type":"compacted"' in line]
    assert len(compacted) == 1
    assert '"type":"compaction"' in compacted[0], "its history has the sealed item"
    assert say("And on.", goes_on=True) == "And on."
    assert turns_of(log)[0]["cached"] >= HITS * answer["prompt"]


def test_codex_edits_files_by_a_custom_tool_with_a_grammar(
    server: Server, log: Path, tmp_path: Path
) -> None:
    (tmp_path / "greet.py").write_text('def greet():\n    return "hello"\n')
    patch = (
        "*** Begin Patch\n*** Update File: greet.py\n@@ def greet():\n"
        '-    return "hello"\n+    return "good day"\n'
        "*** Add File: done.txt\n+done\n*** End Patch\n"
    )
    call = json.dumps({"name": "apply_patch", "arguments": {"input": patch}})
    told = codex(
        f"Do this: [[<tool_call>\n{call}\n</tool_call>]]", server.url, tmp_path, model=EDITOR
    )
    assert (tmp_path / "greet.py").read_text() == 'def greet():\n    return "good day"\n', told
    assert (tmp_path / "done.txt").is_file()


def written(agent: str, command: str) -> str:
    """Return an answer of the model that has a command run."""
    names = {"codex": ("exec_command", "cmd"), "claude": ("Bash", "command")}
    name, argument = names.get(agent, ("bash", "command"))
    arguments = {argument: command, **({} if agent == "codex" else {"description": "Do it."})}
    return f"[[<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>]]"


@pytest.mark.parametrize("agent", RUN_LONG)
def test_an_agent_goes_on_behind_a_call_that_was_no_json_by_a_strict_template(
    agent: str, strict: Server, log: Path, tmp_path: Path
) -> None:
    """Each later request has the bad call and system messages between: none may fail."""
    say = RUN_LONG[agent]
    (tmp_path / "one.txt").write_text(written(agent, "cat two.txt"))
    (tmp_path / "two.txt").write_text("[[All done.]]")
    cut = written(agent, "echo x").replace('"echo x"', '"echo "x""')
    say(f"Do this: {cut}", strict.url, tmp_path)
    log.unlink()
    told = say(f"Do this: {written(agent, 'cat one.txt')}", strict.url, tmp_path, goes_on=True)
    assert told.strip().splitlines()[-1] == "All done."
    turns = [json.loads(line) for line in log.read_text("utf-8").splitlines()]
    assert len(turns) >= 3, "two that call, one that is told what came of it"
    assert all(turn["cached"] >= HITS * turn["prompt"] for turn in turns[-2:]), turns


@pytest.mark.parametrize("agent", IN_ONE_TURN)
def test_an_agent_that_is_launched_converses(agent: str, server: Server, tmp_path: Path) -> None:
    """`foretoken launch` alone points it at the server: nothing is set, and no file is there."""
    (tmp_path / ".codex").mkdir()
    launch = "from foretoken.api.cli import main; raise SystemExit(main())"
    command = [sys.executable, "-c", launch, "launch", agent, "--url", server.url]
    command += ["--api-key", KEY, "--", *IN_ONE_TURN[agent], "Say this: [[Hello there.]]"]
    path = f"{AGENTS / '.bin'}{os.pathsep}{os.environ['PATH']}"
    more = {"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "DISABLE_AUTOUPDATER": "1"}
    told = run(command, tmp_path, PATH=path, CODEX_HOME=str(tmp_path / ".codex"), **more)
    assert told.strip().splitlines()[-1] == "Hello there."
