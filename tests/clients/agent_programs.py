"""Coding agents that npm has installed, run once in a folder against a server."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

AGENTS = Path(__file__).resolve().parent / "agents" / "node_modules"
ARE_INSTALLED = shutil.which("node") is not None and (AGENTS / ".done").is_file()
NOT_INSTALLED = "npm has not installed the agents: run make test-rest"
OPENCODE = AGENTS / "opencode-linux-x64" / "bin" / "opencode"  # for one kind of machine
MODEL, KEY = "foretoken-64k", "sk-local"
EDITOR = "gpt-5.5"  # Codex gives models that it knows a custom tool with a grammar, apply_patch
SECONDS = 300.0
FOREIGN = ("OPENAI_", "ANTHROPIC_", "CLAUDE", "CODEX_")  # a developer's own keys and addresses


def environment(home: Path, **more: str) -> dict[str, str]:
    """Variables of a program whose home is ``home``, without a developer's own."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
    return {**own, "HOME": str(home), **more}


def run(
    command: list[str], home: Path, told: str = "", *, timeout: float = SECONDS, **more: str
) -> str:
    """Run a program in the folder ``home``, with the text ``told``; return what it prints."""
    done = subprocess.run(
        command,
        cwd=home,
        env=environment(home, **more),
        input=told,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def codex(
    prompt: str,
    url: str,
    home: Path,
    *,
    goes_on: bool = False,
    model: str = MODEL,
    provider: str = "foretoken",
    settings: Sequence[str] = (),
    timeout: float = SECONDS,
) -> str:
    """Return what Codex CLI prints at the end of a turn."""
    facts = f'{{name="{provider}",base_url="{url}/v1",wire_api="responses",env_key="LOCAL_KEY"}}'
    options = ["-c", "model_provider=foretoken", "-c", f"model_providers.foretoken={facts}"]
    options += [word for each in settings for word in ("-c", each)]
    sandbox = ["--skip-git-repo-check", "-s", "danger-full-access"]
    program = [str(AGENTS / ".bin" / "codex"), "exec", *sandbox, "-m", model, *options]
    (home / ".codex").mkdir(exist_ok=True)
    program += ["resume", "--last"] if goes_on else []
    more = {"CODEX_HOME": str(home / ".codex"), "LOCAL_KEY": KEY}
    return run([*program, prompt], home, timeout=timeout, **more)


def claude(prompt: str, url: str, home: Path, *, goes_on: bool = False) -> str:
    """Return what Claude Code prints at the end of a turn."""
    options = ["--model", MODEL, "--allowedTools", "Bash", "--output-format", "json"]
    options += ["--continue"] if goes_on else []
    told = run(
        [str(AGENTS / ".bin" / "claude"), "-p", prompt, *options],
        home,
        ANTHROPIC_BASE_URL=url,
        ANTHROPIC_API_KEY=KEY,
        ANTHROPIC_DEFAULT_HAIKU_MODEL=MODEL,
        CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
        DISABLE_AUTOUPDATER="1",
    )
    return str(json.loads(told)["result"])


def opencode(prompt: str, url: str, home: Path, *, goes_on: bool = False) -> str:
    """Return what opencode prints at the end of a turn."""
    model = {"name": MODEL, "limit": {"context": 65536, "output": 4096}}
    options = {"baseURL": f"{url}/v1", "apiKey": KEY}
    provider = {"npm": "@ai-sdk/openai-compatible", "options": options, "models": {MODEL: model}}
    config = {
        "provider": {"foretoken": provider},
        "model": f"foretoken/{MODEL}",
        "small_model": f"foretoken/{MODEL}",
        "autoupdate": False,
        "share": "disabled",
        "permission": {"bash": "allow"},
    }
    more = {"OPENCODE_CONFIG_CONTENT": json.dumps(config), "OPENCODE_DISABLE_MODELS_FETCH": "1"}
    command = [str(OPENCODE), "run", *(["--continue"] if goes_on else [])]
    return run(command, home, told=prompt, PWD=str(home), **more)
