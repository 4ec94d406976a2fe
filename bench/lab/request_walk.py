"""Counts what one request meets in both threads: files, functions and classes.

A request of the built-in model runs through a real engine. All calls into radix_cache/, core/ and
draft/ are noted from `Engine.submit` until the engine is idle, those of the event loop's thread and
those of the model thread apart. The audit that an idle engine begins is counted apart, too. The
lengths of all functions of these packages are printed besides.

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
LOOKUPS = EngineConfig(draft="radix,suffix", speculation=4)  # a prediction and a grammar besides
MODEL = EngineConfig(draft="auto", speculation=4)  # the built-in draft model, and look-ups
AUTO = EngineConfig(draft="auto")  # the same, and the controller decides how much is drafted


@dataclass
class Calls:
    """Calls of one thread."""

    modules: set[str] = field(default_factory=set)
    functions: set[tuple[str, str]] = field(default_factory=set)  # module, qualified name
    num_calls: int = 0

    @property
    def classes(self) -> set[tuple[str, str]]:
        """Classes of which a method ran."""
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
        """Those of both."""
        modules, functions = self.modules | other.modules, self.functions | other.functions
        return Calls(modules, functions, self.num_calls + other.num_calls)

    def __str__(self) -> str:
        return (
            f"{len(self.modules)} files, {len(self.functions)} functions, "
            f"{len(self.classes)} classes, {self.num_calls} calls"
        )


@dataclass
class Walk:
    """Calls of a request; those of an idle audit are in ``audit``."""

    loop: Calls = field(default_factory=Calls)
    model: Calls = field(default_factory=Calls)
    audit: Calls = field(default_factory=Calls)
    is_under_way: bool = False
    _is_auditing: bool = False

    def note(self, frame: FrameType, event: str, _: object) -> None:
        """Count a call; for `sys.setprofile` in the event loop's thread."""
        if frame.f_code is IDLE_AUDIT:  # suspended, it returns, and is called to go on
            self._is_auditing = event == "call"
        if event == "call" and self.is_under_way:
            (self.audit if self._is_auditing else self.loop).count(frame)

    def note_model(self, frame: FrameType, event: str, _: object) -> None:
        """Count a call; for threads that are started."""
        if event == "call" and self.is_under_way:
            self.model.count(frame)


def walk(config: EngineConfig) -> Walk:
    """Serve one request and note every call."""
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
        await asyncio.sleep(0.05)  # until the engine is idle and has been audited
    finally:
        sys.setprofile(None)
        found.is_under_way = False
        await engine.close()
    return found


def function_lengths(package: str, root: Path = ROOT) -> list[int]:
    """Lines of each function of a package, its signature and docstring included."""
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
    print(f"{len(PROMPT)} prompt tokens, {NUM_TOKENS} tokens, the built-in model")
    for name, config in (("plain", PLAIN), ("look-ups", LOOKUPS), ("draft model", MODEL)):
        found = walk(config)
        print(f"{name}, both threads: {found.loop | found.model}")
        print(f"  event loop: {found.loop}\n  model thread: {found.model}")
        print(f"  the audit of the idle engine behind it: {found.audit}")
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
