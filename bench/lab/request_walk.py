"""Counts the files, functions and classes that one request passes through, in both threads.

A request to the built-in model runs through a real engine. All calls into radix_cache/, core/ and
draft/ are counted from `Engine.submit` until the engine is idle, separately for the event loop's
thread, the model thread, and the audit that an idle engine begins. The lengths of all functions in
the packages are printed, too.

    python -m foretoken.bench.lab.request_walk
"""

from __future__ import annotations

import ast
import asyncio
import statistics
import sys
import threading
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from ...api.build.engine_builder import build
from ...core.config import EngineConfig
from ...core.engine.audit import Auditor
from ...core.interface.request import Request
from ...core.interface.sampling import SamplingMetadata, TokenSamplingParams

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("radix_cache", "core", "draft")
MODULES = tuple(f"foretoken.{package}." for package in PACKAGES)
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

    @property
    def classes(self) -> set[tuple[str, str]]:
        """Classes of the methods that ran."""
        names = ((module, name.split(".<locals>")[0]) for module, name in self.functions)
        return {(module, name.rpartition(".")[0]) for module, name in names if "." in name}

    def count(self, frame: FrameType) -> None:
        """Count a call into one of the packages."""
        module, name = str(frame.f_globals.get("__name__")), frame.f_code.co_qualname
        if module.startswith(MODULES) and name != "<module>":
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
