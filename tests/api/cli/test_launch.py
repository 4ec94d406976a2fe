"""`foretoken launch` starts a client with the variables of a server, its own or a running one."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from foretoken.api.cli import commands, launch
from foretoken.core.ops.machine.cache_folder import cache_folder

CLIENT = """#!/bin/sh
env > "$HOME/env"
for each in "$@"; do echo "$each" >> "$HOME/args"; done
exit 7
"""


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    """A home with clients that write their variables and arguments to files."""
    for name in launch.AGENTS:
        program = tmp_path / name
        program.write_text(CLIENT)
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("FORETOKEN_CACHE", str(cache_folder()))  # with its compiled kernels
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("ANTHROPIC_API_KEY", "a developer's own")
    monkeypatch.delenv("FORETOKEN_API_KEY", raising=False)
    return tmp_path


def variables(home: Path) -> dict[str, str]:
    lines = (home / "env").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if "=" in line)


def context(server) -> int:
    with urllib.request.urlopen(f"{server.url}/v1/models") as answer:
        return json.load(answer)["data"][0]["max_model_len"]


def test_claude_gets_the_server_its_model_and_the_arguments(home, server):
    args = ["launch", "claude", "--url", server.url, "--api-key", "k", "--", "-p", "say hi"]
    assert commands.main(args) == 7
    found = variables(home)
    assert found["ANTHROPIC_BASE_URL"] == server.url
    assert found["ANTHROPIC_AUTH_TOKEN"] == "k"
    assert found["ANTHROPIC_MODEL"] == found["ANTHROPIC_DEFAULT_HAIKU_MODEL"] == "tiny/model"
    assert found["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] == str(context(server))
    assert "ANTHROPIC_API_KEY" not in found
    assert (home / "args").read_text().splitlines() == ["-p", "say hi"]


def test_codex_gets_a_provider(home, server):
    assert commands.main(["launch", "codex", "--url", f"{server.url}/v1", "--", "exec"]) == 7
    args = (home / "args").read_text()
    assert "-m\ntiny/model\n" in args
    assert f"model_context_window={context(server)}\n" in args
    assert f'base_url="{server.url}/v1",wire_api="responses"' in args
    assert "stream_idle_timeout_ms=3600000}" in args
    assert args.endswith("exec\n")
    assert variables(home)["LOCAL_KEY"] == "none"


def test_opencode_gets_a_config(home, server):
    assert commands.main(["launch", "opencode", "--url", server.url]) == 7
    config = json.loads(variables(home)["OPENCODE_CONFIG_CONTENT"])
    assert config["model"] == "foretoken/tiny/model"
    provider = config["provider"]["foretoken"]
    assert provider["options"]["baseURL"] == f"{server.url}/v1"
    limit = provider["models"]["tiny/model"]["limit"]
    assert limit["context"] == context(server)
    assert 0 < limit["output"] < limit["context"]


def test_a_context_too_small_for_agents_is_told(home, server, capsys):
    assert commands.main(["launch", "opencode", "--url", server.url]) == 7
    told = f"tiny/model has a context of {context(server)} tokens"
    assert capsys.readouterr().err.startswith(told)


def test_show_prints_what_would_be_done(server, capsys, monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert commands.main(["launch", "claude", "--url", server.url, "--show"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "unset ANTHROPIC_API_KEY"
    assert f"export ANTHROPIC_BASE_URL={server.url}" in out
    assert out[-1] == "claude"


def test_show_without_a_server_names_the_usual_address_and_starts_nothing(capsys, monkeypatch):
    monkeypatch.setattr(launch, "URL", "http://127.0.0.1:1")
    monkeypatch.setattr(launch, "_fresh", None)
    assert commands.main(["launch", "claude", "--show"]) == 0
    assert "export ANTHROPIC_BASE_URL=http://127.0.0.1:1" in capsys.readouterr().out.splitlines()
    with pytest.raises(SystemExit) as info:
        commands.main(["launch", "claude", "builtin", "--show"])
    assert info.value.code == 2


@pytest.fixture
def fresh(server, monkeypatch) -> list[object]:
    """Arguments and key of each server that would be started, its scheme, "ended" at its end."""
    found: list[object] = []

    @contextmanager
    def start(args, key, scheme) -> Iterator[str]:
        found.extend([(list(args), key), scheme])
        try:
            yield server.url
        finally:
            found.append("ended")

    monkeypatch.setattr(launch, "_fresh", start)
    return found


def test_a_fresh_server_gets_every_flag_as_it_was_given(home, fresh):
    flags = ["--offline", "--no-images", "--lora", "a=/x", "--lora", "b=/y", "--threads", "1"]
    values = ["--override-generation-config", '{"top_k": 3}', "--config", os.devnull]
    assert commands.main(["launch", "codex", "m", *flags, *values, "--api-key", "k"]) == 7
    args, key = fresh[0]
    assert args[:2] == ["serve", "m"]
    assert {
        "--offline", "--no-images", "--lora=a=/x", "--lora=b=/y", "--threads=1",
        '--override-generation-config={"top_k": 3}', f"--config={os.devnull}",
    } <= {*args}  # fmt: skip
    assert len(args) == 2 + 7 + len(launch.OWN_FLAGS)
    assert key == "k"


def test_a_config_file_wants_a_fresh_server_also_beside_a_running_one(home, fresh, tmp_path):
    file = tmp_path / "own.toml"
    file.write_text('api-key = ["of the file"]')
    assert commands.main(["launch", "codex", "--config", str(file)]) == 7
    assert f"--config={file}" in fresh[0][0]
    assert variables(home)["LOCAL_KEY"] == "of the file"


def test_a_signal_ends_the_fresh_server(home, fresh):
    (home / "codex").write_text('#!/bin/sh\nkill -TERM "$PPID"\nexec sleep 60\n')
    with pytest.raises(SystemExit) as info:
        commands.main(["launch", "codex", "m"])
    assert info.value.code == 128 + 15
    assert fresh[-1] == "ended"


def test_a_unix_socket_in_the_settings_is_an_error(home, fresh, capsys, monkeypatch):
    monkeypatch.setenv("FORETOKEN_UDS", "/run/s")
    assert commands.main(["launch", "codex", "m"]) == 1
    assert "clients need a TCP port: remove the setting uds (/run/s)" in capsys.readouterr().err
    assert not fresh


def test_a_certificate_in_the_settings_makes_the_address_https(home, fresh, monkeypatch):
    monkeypatch.setenv("FORETOKEN_SSL_CERTFILE", "/etc/cert.pem")
    assert commands.main(["launch", "codex", "m"]) == 7
    assert fresh[1] == "https"


def test_the_module_is_the_command():
    command = [sys.executable, "-m", "foretoken", "--version"]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    assert found.stdout.startswith("foretoken ")


@pytest.mark.slow
def test_a_model_gets_a_server_of_its_own_which_ends_with_the_client(home, capsys, monkeypatch):
    monkeypatch.setenv("FORETOKEN_LOG_FORMAT", "json")
    flags = ["--no-images", "--threads", "1", "--max-model-len", "512", "--draft", "none"]
    assert commands.main(["launch", "codex", "builtin", *flags]) == 7
    line = capsys.readouterr().err.splitlines()[-2]
    assert line.startswith("started a server at http://127.0.0.1:")
    log = Path(line.rpartition(" ")[2])
    try:
        assert "waiting up to" in log.read_text()  # it was asked to end
    finally:
        log.unlink()
    assert "foretoken-builtin" in (home / "args").read_text()


@pytest.mark.parametrize(
    ("args", "code", "told"),
    [
        (["launch", "claude", "--url", "http://127.0.0.1:1"], 1, "does not answer"),
        (
            ["launch", "claude", "m", "--url", "http://127.0.0.1:1"],
            2,
            "cannot be combined with --url",
        ),
        (["launch", "claude", "/no/such/model"], 1, "did not start"),
        (["launch", "claude", "--threads", "0"], 2, "threads"),
        (["launch", "vim"], 2, "invalid choice"),
    ],
    ids=str,
)
def test_what_cannot_be_launched_is_told_in_one_line(args, code, told, home, capsys):
    try:
        found = commands.main(args)
    except SystemExit as exited:
        found = exited.code
    assert found == code
    err = capsys.readouterr().err
    assert told in err
    assert err.count("\n") == 1


def test_a_client_that_is_missing_is_told_with_its_command(monkeypatch, capsys):
    monkeypatch.setenv("PATH", "")
    assert commands.main(["launch", "opencode"]) == 1
    assert "npm install -g opencode-ai" in capsys.readouterr().err
