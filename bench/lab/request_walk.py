"""Counts the files, functions and classes that one request passes through, in both threads.

A request to the built-in model runs through a real engine. All calls into radix_cache/, core/ and
draft/ are counted from `Engine.submit` until the engine is idle, separately for the event loop's
thread, the model thread, and the audit that an idle engine begins. The lengths of all functions in
the packages are printed, too. The same is counted in api/ for a plain chat over HTTP, with a null
engine in place of the real one.

    python -m foretoken.bench.lab.request_walk
"""

from __future__ import annotations

import ast
import asyncio
import socket
import statistics
import sys
import threading
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from types import FrameType

import uvicorn

from ...api.build.engine_builder import build
from ...api.runtime.engine_client import EngineClient
from ...api.server.process import uvicorn_config
from ...api.serving.settings import Listen
from ...core.config import EngineConfig
from ...core.engine.audit import Auditor
from ...core.interface.request import Request
from ...core.interface.sampling import SamplingMetadata, TokenSamplingParams
from ..load.http import Http
from .http import CHAT, requests
from .null_engine import Clock, null_model

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("radix_cache", "core", "draft")
MODULES = tuple(f"foretoken.{package}." for package in PACKAGES)
HTTP_MODULES = ("foretoken.api.",)
NUM_UNCOUNTED = 2  # Chats before the counted one: they compile templates and fill caches.
PROMPT = array("q", range(40, 80))
IDLE_AUDIT = Auditor.audit_while_idle.__code__
NUM_TOKENS = 24
PLAIN = EngineConfig(draft="none")
# A request with a predicted output or a grammar would get drafts from these, too.
LOOKUPS = EngineConfig(draft="radix,suffix", speculation=4)
MODEL = EngineConfig(draft="auto", speculation=4)  # The built-in draft model, and lookups.
# The built-in draft model and lookups; the controller decides how much is drafted.
AUTO = EngineConfig(draft="auto")


@dataclass
class Calls:
    """Calls of one thread."""

    modules: set[str] = field(default_factory=set)
    functions: set[tuple[str, str]] = field(default_factory=set)  # Module and qualified name.
    num_calls: int = 0
    num_all: int = 0  # Calls of any function, builtins and the client included; for HTTP only.

    @property
    def classes(self) -> set[tuple[str, str]]:
        """Classes of the methods that ran."""
        names = ((module, name.split(".<locals>")[0]) for module, name in self.functions)
        return {(module, name.rpartition(".")[0]) for module, name in names if "." in name}

    def count(self, frame: FrameType, modules: tuple[str, ...] = MODULES) -> None:
        """Count a call into one of the packages."""
        module, name = str(frame.f_globals.get("__name__")), frame.f_code.co_qualname
        if module.startswith(modules) and name != "<module>":
            self.modules.add(module)
            self.functions.add((module, name))
            self.num_calls += 1

    def __or__(self, other: Calls) -> Calls:
        """Return the calls of both threads together."""
        modules, functions = self.modules | other.modules, self.functions | other.functions
        return Calls(modules, functions, self.num_calls + other.num_calls)

    def __str__(self) -> str:
        return (
            f"{len(self.modules)} files, {len(self.functions)} functions, "
            f"{len(self.classes)} classes, {self.num_calls} calls"
        )


@dataclass
class Walk:
    """Calls of a request by thread; ``audit`` has the calls of the idle engine's audit."""

    loop: Calls = field(default_factory=Calls)
    model: Calls = field(default_factory=Calls)
    audit: Calls = field(default_factory=Calls)
    is_under_way: bool = False
    _is_auditing: bool = False

    def note(self, frame: FrameType, event: str, _: object) -> None:
        """Count a call in the event loop's thread; `sys.setprofile` takes this method."""
        # A coroutine returns when it is suspended, and is called again when it continues.
        if frame.f_code is IDLE_AUDIT:
            self._is_auditing = event == "call"
        if event == "call" and self.is_under_way:
            (self.audit if self._is_auditing else self.loop).count(frame)

    def note_model(self, frame: FrameType, event: str, _: object) -> None:
        """Count a call in the model thread; `threading.setprofile` takes this method."""
        if event == "call" and self.is_under_way:
            self.model.count(frame)


def walk(config: EngineConfig) -> Walk:
    """Serve one request and record every call."""
    return asyncio.run(_walk(config))


async def _walk(config: EngineConfig) -> Walk:
    found = Walk()
    threading.setprofile(found.note_model)
    engine = build("builtin", config).engine
    threading.setprofile(None)
    await engine.start()
    params = TokenSamplingParams(temperature=0.0, max_tokens=NUM_TOKENS)
    sampling = SamplingMetadata(params=params, seed=0, prompt_len=len(PROMPT))
    request = Request(request_id="a", tokens=array("q", PROMPT), sampling=sampling)
    found.is_under_way = True
    sys.setprofile(found.note)
    try:
        async for _ in engine.submit(request):
            pass
        await asyncio.sleep(0.05)  # Long enough for the engine to become idle and be audited.
    finally:
        sys.setprofile(None)
        found.is_under_way = False
        await engine.close()
    return found


def http_walk() -> Calls:
    """Answer a plain chat over HTTP and record every call into api/, in the only thread."""
    return asyncio.run(_http_walk())


async def _http_walk() -> Calls:
    llm = EngineClient.from_built(null_model(Clock(1))[0])
    await llm.start()
    server = uvicorn.Server(uvicorn_config(llm, Listen(log_level="warning")))
    found, body = Calls(), requests()[CHAT]
    with socket.create_server(("127.0.0.1", 0)) as sock:
        serving = asyncio.create_task(server.serve([sock]))
        http = Http(f"http://127.0.0.1:{sock.getsockname()[1]}")
        for _ in range(NUM_UNCOUNTED):
            await http.post_whole(CHAT, body)
        sys.setprofile(lambda frame, event, _: _count_http(found, frame, event))
        try:
            status, answer = await http.post_whole(CHAT, body)
        finally:
            sys.setprofile(None)
        http.close()
        server.should_exit = True
        await serving
    if status != HTTPStatus.OK:
        raise RuntimeError(f"the server rejected the chat: {status} {answer!r}")
    return found


def _count_http(found: Calls, frame: FrameType, event: str) -> None:
    found.num_all += event in ("call", "c_call")
    if event == "call":
        found.count(frame, HTTP_MODULES)


def function_lengths(package: str, root: Path = ROOT) -> list[int]:
    """Return the lines of each function of a package, with signature and docstring, sorted."""
    return sorted(
        (node.end_lineno or node.lineno) - node.lineno + 1
        for node in _nodes(root / package)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )


def _nodes(folder: Path) -> Iterator[ast.AST]:
    for path in folder.rglob("*.py"):
        yield from ast.walk(ast.parse(path.read_text(encoding="utf-8")))


def main() -> None:
    """Print the counts."""
    print(f"{len(PROMPT)} prompt tokens, {NUM_TOKENS} output tokens, the built-in model")
    for name, config in (("plain", PLAIN), ("look-ups", LOOKUPS), ("draft model", MODEL)):
        found = walk(config)
        print(f"{name}, both threads: {found.loop | found.model}")
        print(f"  event loop: {found.loop}\n  model thread: {found.model}")
        print(f"  audit of the idle engine afterwards: {found.audit}")
    found_http = http_walk()
    print(f"a plain chat over HTTP, in api/: {found_http}; {found_http.num_all} calls in all")
    for package in PACKAGES:
        lengths = function_lengths(package)
        p90 = lengths[len(lengths) * 9 // 10]
        median = statistics.median(lengths)
        num_files = len(list((ROOT / package).rglob("*.py")))
        print(
            f"{package}: {num_files} files; lines of a function: "
            f"median {median:g}, p90 {p90}, most {lengths[-1]}"
        )


if __name__ == "__main__":
    main()
