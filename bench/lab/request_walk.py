"""Counts what one request meets: files, functions and classes on the event loop's side.

A request runs through a real engine whose model is a formula. All calls of the event loop's thread
into radix_cache/, core/ and draft/ are noted, from `Engine.submit` until the engine is idle. The
audit that an idle engine begins is counted apart; what the model thread runs is not counted. The
lengths of all functions of these packages are printed, too.

    python -m foretoken.bench.lab.request_walk
"""

from __future__ import annotations

import ast
import asyncio
import statistics
import sys
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from ...api.build.drafts import make_speculator, parse_draft
from ...core.config import EngineConfig
from ...core.engine.audit import Auditor
from ...core.engine.engine import Engine
from ...core.execution.launch_behind import Finished, launch_behind
from ...core.interface.output import RequestOutput, StepOutput
from ...core.interface.plan import ScheduledRequest, StepPlan
from ...core.interface.protocols import OnKernelsStarted, Pending, ignore_kernels
from ...core.interface.request import Request
from ...core.interface.sampling import SamplingMetadata, TokenSamplingParams
from ...core.scheduling.request_table import SchedulerLimits
from ...core.scheduling.scheduler import Scheduler
from ...radix_cache import PrefixCache

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("radix_cache", "core", "draft")
MODULES = tuple(f"foretoken.{package}." for package in PACKAGES)
VOCAB_SIZE, CYCLE = 64, 5
PROMPT = array("q", range(20, 29))
IDLE_AUDIT = Auditor.audit_while_idle.__code__
NO_DRAFTS, LOOKUPS = "none", "radix,suffix"  # a prediction and a grammar come with the latter


@dataclass
class Walk:
    """Calls of the event loop's thread; those of an idle audit are in ``audit``."""

    modules: set[str] = field(default_factory=set)
    functions: set[tuple[str, str]] = field(default_factory=set)  # module, qualified name
    num_calls: int = 0
    audit: Walk | None = None
    _is_auditing: bool = False

    @property
    def classes(self) -> set[tuple[str, str]]:
        """Classes of which a method ran."""
        names = ((module, name.split(".<locals>")[0]) for module, name in self.functions)
        return {(module, name.rpartition(".")[0]) for module, name in names if "." in name}

    def note(self, frame: FrameType, event: str, _: object) -> None:
        """Count a call; for `sys.setprofile`."""
        if frame.f_code is IDLE_AUDIT:  # suspended, it returns, and is called to go on
            self._is_auditing = event == "call"
        if self._is_auditing:
            self.audit = self.audit or Walk()
            self.audit._count(frame, event)
        else:
            self._count(frame, event)

    def _count(self, frame: FrameType, event: str) -> None:
        module, name = str(frame.f_globals.get("__name__")), frame.f_code.co_qualname
        if event == "call" and module.startswith(MODULES) and name != "<module>":
            self.modules.add(module)
            self.functions.add((module, name))
            self.num_calls += 1

    def __str__(self) -> str:
        return (
            f"{len(self.modules)} files, {len(self.functions)} functions, "
            f"{len(self.classes)} classes, {self.num_calls} calls"
        )


class FormulaRunner:
    """A `StepRunner` whose next token depends on the position alone, and so repeats."""

    is_async = False

    def launch(
        self,
        plan: StepPlan,
        after: Pending | None = None,
        on_kernels_started: OnKernelsStarted = ignore_kernels,
    ) -> Pending:
        """Compute at once."""
        if after is not None:
            return launch_behind(self.launch, plan, after.finish())
        on_kernels_started()
        rows = [self._row(row) for row in plan.requests]
        return Finished(StepOutput(requests=rows, times={"forward": 1e-3}, num_rows=len(rows)))

    def _row(self, row: ScheduledRequest) -> RequestOutput:
        if not row.samples:
            return RequestOutput(request_id=row.request_id)
        draft = row.draft_plan.draft.token_ids
        right = [1 + (len(row.tokens) + i) % CYCLE for i in range(len(draft) + 1)]
        pairs = zip(draft, right, strict=False)
        num_accepted = next((i for i, (ours, true) in enumerate(pairs) if ours != true), len(draft))
        return RequestOutput(
            request_id=row.request_id,
            token_ids=right[: num_accepted + 1],
            draft=row.draft_plan.draft,
            path=range(num_accepted),
        )


def walk(drafts: str, num_tokens: int) -> Walk:
    """Serve one request of ``num_tokens`` and note every call."""
    return asyncio.run(_walk(drafts, num_tokens))


async def _walk(drafts: str, num_tokens: int) -> Walk:
    config = EngineConfig(draft=drafts)
    spec = parse_draft(config, own_draft=None)
    speculator, _ = make_speculator(config, spec, VOCAB_SIZE, overlaps=False)
    limits = SchedulerLimits(
        max_batch_tokens=64, max_running=4, max_queued=4, max_model_len=256, vocab_size=VOCAB_SIZE
    )
    scheduler = Scheduler(PrefixCache(64, 4), limits, speculator)
    engine = Engine(scheduler, FormulaRunner())
    await engine.start()
    params = TokenSamplingParams(max_tokens=num_tokens)
    sampling = SamplingMetadata(params=params, seed=0, prompt_len=len(PROMPT))
    found = Walk()
    sys.setprofile(found.note)
    try:
        request = Request(request_id="a", tokens=array("q", PROMPT), sampling=sampling)
        async for _ in engine.submit(request):
            pass
        await asyncio.sleep(0.05)  # until the engine is idle and has been audited
    finally:
        sys.setprofile(None)
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
    plain = walk(NO_DRAFTS, 4)
    print(f"9 prompt tokens, 4 tokens, no drafts:     {plain}")
    print(f"the audit of the idle engine behind it:   {plain.audit}")
    print(f"9 prompt tokens, 40 tokens, look-ups:     {walk(LOOKUPS, 40)}")
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
