"""``foretoken launch``: start a coding agent with a running server or a new one."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from ...core.config import EngineConfig
from ...core.errors import ForetokenError
from ...core.options.settings import Setting, settings_of
from ..serving.settings import Listen, Settings
from .config import Chosen, Given
from .flags import Parser

KINDS = (Chosen, EngineConfig)
URL = "http://127.0.0.1:8000"
NO_MODEL = "MODEL"  # placeholder for --show without a server
NO_KEY = "none"  # clients require a key, and a server without keys accepts any
KEY_VARIABLE = "LOCAL_KEY"  # environment variable that Codex reads
# Codex ends a stream without an event for 5 minutes, and comments are no events. On a CPU the
# prefill of its first prompt may take longer.
IDLE_MS = 3_600_000
MOST_OUTPUT = 32000  # tokens that opencode reserves for an answer
ENOUGH = 32768  # tokens of context for an agent's first prompts and some turns
END_SECONDS = 10.0  # time limit for a client or a new server to end
LOOK_SECONDS = 0.1  # interval between attempts to connect to a new server
HOST = "127.0.0.1"  # address of a new server
OWN_FLAGS = (f"--host={HOST}", "--log-format=text")  # failures show the last log line


class Server(NamedTuple):
    """Address, model, key and context length of a server."""

    url: str
    model: str
    key: str
    context: int | None  # number of tokens; None if unknown


class Started(NamedTuple):
    """The command that starts a client, and changes to its environment.

    ``variables`` are set, and the variables named in ``without`` are unset.
    """

    command: list[str]
    variables: dict[str, str]
    without: tuple[str, ...] = ()


class Agent(NamedTuple):
    """A client: its program, how to install it, and how to configure it for a server."""

    program: str
    get: str
    start: Callable[[Server], Started]


def _claude(server: Server) -> Started:
    variables = {
        "ANTHROPIC_BASE_URL": server.url,
        "ANTHROPIC_AUTH_TOKEN": server.key,
        "ANTHROPIC_MODEL": server.model,
        "ANTHROPIC_DEFAULT_OPUS_MODEL": server.model,
        "ANTHROPIC_DEFAULT_SONNET_MODEL": server.model,
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": server.model,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }
    if server.context is not None:  # the client would assume a million tokens
        variables["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] = str(server.context)
    return Started(["claude"], variables, ("ANTHROPIC_API_KEY",))


def _codex(server: Server) -> Started:
    provider = (
        f'{{name="foretoken",base_url="{server.url}/v1",wire_api="responses",'
        f'env_key="{KEY_VARIABLE}",stream_idle_timeout_ms={IDLE_MS}}}'
    )
    options = ["-c", "model_provider=foretoken", "-c", f"model_providers.foretoken={provider}"]
    if server.context is not None:
        options += ["-c", f"model_context_window={server.context}"]
    return Started(["codex", "-m", server.model, *options], {KEY_VARIABLE: server.key})


def _opencode(server: Server) -> Started:
    model: dict[str, object] = {"name": server.model}
    if server.context is not None:
        model["limit"] = {
            "context": server.context,
            "output": min(MOST_OUTPUT, server.context // 4),
        }
    config = {
        "model": f"foretoken/{server.model}",
        "provider": {
            "foretoken": {
                "npm": "@ai-sdk/openai-compatible",
                "name": "foretoken",
                "options": {"baseURL": f"{server.url}/v1", "apiKey": server.key},
                "models": {server.model: model},
            }
        },
    }
    return Started(["opencode"], {"OPENCODE_CONFIG_CONTENT": json.dumps(config)})


AGENTS = {
    "claude": Agent("claude", "npm install -g @anthropic-ai/claude-code", _claude),
    "codex": Agent("codex", "npm install -g @openai/codex", _codex),
    "opencode": Agent("opencode", "npm install -g opencode-ai", _opencode),
}


def add_flags(parser: Parser) -> None:
    """Add the client argument and the flags of ``foretoken launch``, except the model."""
    parser.add_argument("agent", choices=tuple(AGENTS), help="client to start")
    parser.add_argument(
        "--url", metavar="URL", help=f"server to use ({URL} if one runs there, else a new one)"
    )
    parser.add_argument(
        "--api-key",
        action="append",
        metavar="KEY",
        help="API key of the server (FORETOKEN_API_KEY)",
    )
    parser.add_argument(
        "--show",
        action="store_true",
        help="print the client's command and environment variables without starting it",
    )


def launch(parsed: argparse.Namespace, client_args: Sequence[str]) -> int:
    """Start the client, wait for it and return its exit status. A new server ends with it.

    Raises `ForetokenError` if the client is not installed or the server does not start.
    """
    agent = AGENTS[parsed.agent]
    if not parsed.show and shutil.which(agent.program) is None:
        raise ForetokenError(f"{agent.program} is not installed; install it with: {agent.get}")
    given = Given(parsed, (*KINDS, Settings))
    key = next(iter(given.make(Settings).api_keys), None)
    with _ending_by_signals(), _server(parsed, given, key) as server:
        started = agent.start(server)
        command = [*started.command, *client_args]
        if parsed.show:
            lines = [f"unset {each}" for each in started.without]
            lines += [f"export {n}={shlex.quote(v)}" for n, v in started.variables.items()]
            print("\n".join([*lines, shlex.join(command)]))
            return 0
        if server.context is not None and server.context < ENOUGH:
            print(_small_context(server), file=sys.stderr)
        return _run(command, started)


def _small_context(server: Server) -> str:
    return (
        f"{server.model} has a context of {server.context} tokens, but agents' prompts have "
        "thousands of tokens: serve a model with a longer context, or raise --max-model-len"
    )


def _run(command: Sequence[str], started: Started) -> int:
    env = {name: value for name, value in os.environ.items() if name not in started.without}
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # the client handles Ctrl-C
    client = subprocess.Popen(command, env=env | started.variables)
    try:
        return client.wait()
    finally:
        _end(client)  # the client still runs if a signal ends this process
        signal.signal(signal.SIGINT, before)


def _end(process: subprocess.Popen[Any]) -> None:
    process.terminate()
    try:
        process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@contextmanager
def _ending_by_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP (a closed terminal) end the new server and the client."""

    def end(number: int, _frame: FrameType | None) -> None:
        sys.exit(128 + number)

    names = ("SIGTERM", "SIGHUP")  # Windows has no SIGHUP
    numbers = [getattr(signal, name) for name in names if hasattr(signal, name)]
    before = {number: signal.signal(number, end) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _server(parsed: argparse.Namespace, given: Given, key: str | None) -> Iterator[Server]:
    """Yield the running server, or start one: for a MODEL or engine flags, or if none runs.

    Raises `ForetokenError` if no server can be used.
    """
    flags = _flags(parsed)
    wants_own = parsed.model is not None or bool(flags)
    if parsed.url is not None and wants_own:
        parsed.parser.error(
            "MODEL and engine flags cannot be combined with --url: the server has already "
            "loaded its model"
        )
    if parsed.show and wants_own:
        parsed.parser.error("--show does not start a server: leave out MODEL and engine flags")
    if not wants_own:
        try:
            yield _connect(parsed.url or URL, key)
            return
        except _NoServerError as problem:
            if parsed.url is not None:
                raise ForetokenError(str(problem)) from None
        if parsed.show:
            yield Server(URL, NO_MODEL, key or NO_KEY, None)
            return
    model = [] if parsed.model is None else [parsed.model]
    listen = given.make(Listen)
    if listen.uds is not None:
        raise ForetokenError(f"clients need a TCP port: remove the setting uds ({listen.uds})")
    scheme = "http" if listen.ssl_certfile is None else "https"
    with _fresh(["serve", *model, *OWN_FLAGS, *flags], key, scheme) as url:
        yield _connect(url, key)


class _NoServerError(ForetokenError):
    """Raised if no server answers at the address."""


def _connect(url: str, key: str | None) -> Server:
    from ..serving.http_client import checked
    from .terminal.remote import ServerModel

    try:
        model = asyncio.run(ServerModel.connect(url, key))
    except ForetokenError as error:
        raise _NoServerError(str(error)) from None
    return Server(checked(url), model.name, key or NO_KEY, model.context)


def _flags(parsed: argparse.Namespace) -> list[str]:
    """Return the given flags of a new server, as command-line arguments."""
    found: list[str] = []
    for name, each in {**settings_of(Chosen), **settings_of(EngineConfig)}.items():
        value = getattr(parsed, name)
        if value is not None and name != "model":
            found += _written(each, value)
    return found


def _written(each: Setting, value: object) -> list[str]:
    """Return a flag with its value as arguments; a list becomes one argument per value."""
    if each.is_switch:
        return [each.flag]
    if isinstance(value, list):
        return [f"{each.flag}={text}" for text in value]
    text = json.dumps(value) if isinstance(value, Mapping) else str(value)
    return [f"{each.flag}={text}"]


@contextmanager
def _fresh(args: Sequence[str], key: str | None, scheme: str) -> Iterator[str]:
    """Run a server until the block ends, with its log in a file. Yield its address.

    Raises `ForetokenError` with the last log line if the server ends before it listens.
    """
    key_variable = {} if key is None else {"FORETOKEN_API_KEY": key}
    root = str(Path(__file__).resolve().parents[3])
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    port = _free_port()
    with tempfile.NamedTemporaryFile("w+", prefix="foretoken-", suffix=".log", delete=False) as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "foretoken", *args, f"--port={port}"],
            stderr=log,
            stdout=subprocess.DEVNULL,
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C reaches only the client
            env={**os.environ, **key_variable, "PYTHONPATH": path},
        )
        try:
            if not _listens(port, process):
                lines = Path(log.name).read_text(errors="replace").split("\n")
                last = next((each for each in reversed(lines) if each.strip()), "")
                raise ForetokenError(f"the server did not start: {last.strip()}")
            url = f"{scheme}://{HOST}:{port}"
            print(f"started a server at {url}, log in {log.name}", file=sys.stderr)
            yield url
        finally:
            _end(process)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def _listens(port: int, process: subprocess.Popen[Any]) -> bool:
    """Wait until the port accepts connections. Return False if the process ends first."""
    while process.poll() is None:
        try:
            socket.create_connection((HOST, port), END_SECONDS).close()
            return True
        except OSError:
            time.sleep(LOOK_SECONDS)
    return False
