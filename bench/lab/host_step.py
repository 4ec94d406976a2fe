"""Host time and calls of an engine step, by part, for the Triton backend and without a GPU.

The scheduler, speculator, runner, batches, the backend's plans and inputs, and the event loop are
real. Kernels are replaced by a formula. The device's times are simulated: passes take the times of
an 8B model on an H100, and launching a kernel takes no time. Lookups and the draft model are right
with probability 0.8, so acceptance is simulated, too. First one thread does all the work, and each
part is timed; then the calls of the engine's functions and of the builtins that they call are
counted. Finally the engine runs with its two threads, and the gap between a round and the device's
work is measured.

    python -m foretoken.bench.lab.host_step --requests 4,64 --draft lookups
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from array import array
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from threading import get_ident
from types import FrameType
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar
from unittest.mock import patch

import numpy as np
import torch

from ...api.build.drafts import DraftSpec, make_speculator
from ...core.config import EngineConfig
from ...core.engine import step_executor
from ...core.engine.engine import Engine
from ...core.engine.inbox import RequestInbox
from ...core.engine.model_thread import Job, ModelThread, StepThread
from ...core.execution.model_runner import ModelRunner, PendingStep
from ...core.execution.step_layout import StepLayout
from ...core.interface.output import StepOutput
from ...core.interface.request import Request
from ...core.interface.sampling import SamplingMetadata, TokenSamplingParams
from ...core.ops.triton.graph import step
from ...core.ops.triton.graph.lm_head import FusedLmHead
from ...core.ops.triton.graph_inputs import GraphInputs
from ...core.scheduling import scheduler as scheduling
from ...core.scheduling.request_table import SchedulerLimits
from ...core.scheduling.scheduler import Scheduler
from ...draft.control.cost_model import StepProfile
from ...draft.proposers.lm_proposer import LmProposer
from ...radix_cache import PrefixCache
from ..common.oracle import oracles
from ..common.report import Row, heading, table, write_json
from .simulated_device import (
    CYCLE,
    VOCAB_SIZE,
    FormulaArgmax,
    FormulaOps,
    Replay,
    SimulatedDevice,
    formula_decoder,
    simulated,
)

T = TypeVar("T")
Depth: TypeAlias = Literal["auto"] | int
# The object that holds the function, the function's name, and the part that it belongs to.
Function: TypeAlias = tuple[Any, str, str]
PAGE_SIZE = EngineConfig().sizes("cuda").page_size
PACKAGES = ("foretoken.radix_cache.", "foretoken.core.", "foretoken.draft.")
# Seconds of a pass by rows of its graph, from docs/gpu-results.md: the 8B shape with the 0.6B shape
# as its draft.
FORWARD = {1: 6.8e-3, 8: 7.1e-3, 32: 9e-3, 64: 11.4e-3, 128: 14e-3, 384: 18.1e-3, 512: 22e-3}
DRAFT = {1: 1.5e-3, 8: 2.07e-3, 32: 3.25e-3, 64: 4.89e-3, 128: 8.03e-3, 256: 16.1e-3}
ACCURACY = 0.8
NUM_WARM_UP = 30  # Rounds in which all requests decode, before the measured ones.
MOST_TOKENS = 16  # Approximate maximum number of tokens that a request gains in a round.
SIMULATED = "acceptance, the device and its times; tokens per second are meaningless"
FORMULA, MODEL, INPUTS = "formula", "draft model", "fill, controls, upload"
REST = "event loop, readers, rest"
FORMULAS: list[Function] = [
    (Replay, "replay", FORMULA),
    (FormulaOps, "logits", FORMULA),
    (FormulaArgmax, "run", FORMULA),
]
# Parts that run while the device works, or on the device.
OVERLAPPED = ("account", "deliver", "index", FORMULA)


@dataclass(frozen=True, slots=True)
class Case:
    """Requests that decode together, and their drafts. Trees need the depth "auto"."""

    requests: int
    draft: Literal["none", "lookups", "model"] = "none"
    shape: Literal["chain", "tree"] = "chain"
    depth: Depth = 4
    context: int = 1024  # Prompt tokens of each request.

    @property
    def accuracies(self) -> tuple[float, ...]:
        """Accuracies of the oracles that replace the lookups; trees need two oracles."""
        if self.draft != "lookups":
            return ()
        return (ACCURACY, 0.5) if self.shape == "tree" else (ACCURACY,)

    def __str__(self) -> str:
        drafts = f"{self.draft}, {self.shape}s, depth {self.depth}"
        return f"{self.requests} requests, {'plain' if self.draft == 'none' else drafts}"


class Parts(ExitStack):
    """Amounts measured by a clock, by part; a nested part is subtracted from the one around it.

    The caller adds the amount of the whole round to `REST`, which then has the amount outside all
    parts.
    """

    def __init__(self, clock: Callable[[], float], functions: Sequence[Function]) -> None:
        super().__init__()
        self.amounts: defaultdict[str, float] = defaultdict(float)
        self._clock = clock
        self._under_way = [REST]
        for holder, name, part in functions:
            # Methods are looked up on the class, so patched functions still get their object, and
            # class methods their class.
            self.enter_context(patch.object(holder, name, self._of(getattr(holder, name), part)))

    def _of(self, inner: Callable[..., Any], part: str) -> Callable[..., Any]:
        """Wrap a function so that its calls count as ``part``.

        Calls inside the draft model count as the draft model, except for the formula.
        """

        def counted(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - passed on
            outer = self._under_way[-1]
            if outer == FORMULA or (outer == MODEL and part != FORMULA):
                return inner(*args, **kwargs)
            self._under_way.append(part)
            began = self._clock()
            try:
                return inner(*args, **kwargs)
            finally:
                whole = self._clock() - began
                self._under_way.pop()
                self.amounts[part] += whole
                self.amounts[outer] -= whole

        return counted


def functions_of(engine: Engine) -> list[Function]:
    """Return the functions to measure, of an engine with an `InlineThread`, and their parts."""
    scheduler, runner, metrics = engine.scheduler, engine.runner, engine.metrics
    assert isinstance(runner, ModelRunner)
    speculator, decoder, proposer = scheduler.speculator, runner.decoder, runner.proposer
    return [
        (scheduler, "schedule", "schedule"),
        (step_executor, "plan_next", "schedule"),
        (speculator, "plan", "Speculator.plan"),
        (scheduling, "decode_rows", "pages"),
        (runner, "launch", "launch"),
        *([] if proposer is None else [(proposer, "propose", MODEL)]),
        (StepLayout, "of", "layout"),
        (decoder, "row_batch", "batch"),
        (step, "fill_narrow", INPUTS),
        (FusedLmHead, "fill", INPUTS),
        (GraphInputs, "upload", INPUTS),
        (decoder.sampler, "begin_runs", INPUTS),
        (PendingStep, "finish", "finish, follow"),
        (scheduler, "commit", "commit"),
        (scheduler, "account", "account"),
        (metrics, "observe_step", "metrics"),
        (metrics, "observe_round", "metrics"),
        (speculator, "observe_step", "metrics"),
        (RequestInbox, "deliver", "deliver"),
        (speculator, "work", "index"),
        *FORMULAS,
    ]


class CallClock:
    """Counts calls of the engine's functions, and of the builtins that they call."""

    def __init__(self) -> None:
        self._count = 0

    def note(self, frame: FrameType, event: str, _: object) -> None:
        """Count a call; `sys.setprofile` takes this method."""
        if event in ("call", "c_call") and frame.f_globals["__name__"].startswith(PACKAGES):
            self._count += 1

    def __call__(self) -> float:
        """Return the number of calls so far."""
        return self._count


class InlineThread:
    """`StepThread` that computes at once, in the calling thread."""

    def __init__(self, name: str, on_start: Callable[[], None]) -> None:
        del name
        on_start()

    def start(self, work: Callable[[], T]) -> Job[T]:
        """Run the call to its end. Raises the call's errors."""
        job = Job(work)
        job.end(work(), None)
        return job

    def close(self) -> None:
        """Do nothing."""


class Session:
    """An engine on a simulated device, and the requests of a case.

    Create it and call `serve` inside a `simulated` block.
    """

    def __init__(
        self,
        case: Case,
        device: SimulatedDevice,
        num_rounds: int,
        make_thread: Callable[[str, Callable[[], None]], StepThread] = ModelThread,
    ) -> None:
        self._case, self._num_rounds = case, num_rounds
        answer_len = MOST_TOKENS * (NUM_WARM_UP + num_rounds)
        max_len = case.context + answer_len
        num_pages = case.requests * (max_len // PAGE_SIZE + 4)
        decoder = formula_decoder(FormulaOps(device, FORWARD), max_len)
        pool, proposer = decoder.make_pool(num_pages, page_size=PAGE_SIZE), None
        self.draft_ops = FormulaOps(device, DRAFT, ACCURACY)
        if case.draft == "model":
            draft = formula_decoder(self.draft_ops, max_len)
            proposer = LmProposer(draft, draft.make_pool(num_pages, page_size=PAGE_SIZE))
        with oracles(*case.accuracies) as names:
            speculator, costs = make_speculator(
                EngineConfig(speculation="off" if case.draft == "none" else case.depth),
                DraftSpec(names, "simulated" if proposer else None),
                overlaps=True,
                proposer=proposer,
            )
        costs.load(StepProfile(FORWARD, DRAFT if proposer else {}))
        # Each request is answered once, because oracles record the answers of ended requests.
        for index in range(case.requests):
            answered = self._request(index, answer_len)
            speculator.join(answered)
            speculator.leave(answered)
        speculator.work()
        limits = SchedulerLimits(
            max_batch_tokens=2048, max_running=256, max_queued=256, max_model_len=max_len,
            vocab_size=VOCAB_SIZE,
        )  # fmt: skip
        self.engine = Engine(
            Scheduler(PrefixCache(num_pages, PAGE_SIZE), limits, speculator),
            ModelRunner(decoder, pool, proposer),
            on_thread_start=self._thread_started,
            clock=device.now,
            make_thread=make_thread,
            overlap=True,
        )

    def _thread_started(self) -> None:
        torch.set_num_threads(1)
        self.model_clock = time.pthread_getcpuclockid(get_ident())

    def _request(self, index: int, num_answered: int = 0) -> Request:
        """Return a request that runs to the end of the context."""
        prompt_len = self._case.context
        at = 37 * index + np.arange(prompt_len + num_answered)
        params = TokenSamplingParams(temperature=0.0, max_tokens=None)
        return Request(
            request_id=str(index),
            tokens=array("q", CYCLE[at % VOCAB_SIZE].tobytes()),
            sampling=SamplingMetadata(params=params, seed=index, prompt_len=prompt_len),
        )

    async def serve(self, on_round: Callable[[StepOutput | None], None]) -> None:
        """Decode for the warm-up rounds and the measured rounds.

        ``on_round`` gets None after the warm-up, then the output of each measured round.
        """
        num_left, is_over = NUM_WARM_UP + self._num_rounds + 1, asyncio.Event()
        metrics, observe_round = self.engine.metrics, self.engine.metrics.observe_round

        def observed(output: StepOutput, seconds: float) -> None:
            nonlocal num_left
            observe_round(output, seconds)
            num_left -= sum(bool(each.token_ids) for each in output.requests) == self._case.requests
            if 0 < num_left <= self._num_rounds + 1:
                on_round(None if num_left == self._num_rounds + 1 else output)
            elif num_left == 0:
                is_over.set()
                # An engine with an `InlineThread` returns to the event loop when it is idle.
                for request_id in [*self.engine.scheduler.running]:
                    self.engine.abort(request_id)

        with patch.object(metrics, "observe_round", observed):
            await self.engine.start()
            readers = [self._read(self._request(index)) for index in range(self._case.requests)]
            reading = asyncio.gather(*readers)
            # The readers end before the last round only if the engine failed.
            reading.add_done_callback(lambda _: is_over.set())
            await is_over.wait()
            await self.engine.close()
            await reading

    async def _read(self, request: Request) -> None:
        async for _ in self.engine.submit(request):
            pass


class Round(NamedTuple):
    """Amounts measured by a clock in one round, by part, and the number of draft model passes."""

    parts: dict[str, float]
    num_passes: int

    @property
    def host(self) -> float:
        """Amount of all parts during which the device waits."""
        return sum(amount for part, amount in self.parts.items() if part not in OVERLAPPED)

    @property
    def draft_pass(self) -> float:
        """Amount of one pass of the draft model."""
        return self.parts[MODEL] / max(1, self.num_passes)


def rounds_of(case: Case, num_rounds: int, clock: Callable[[], float]) -> list[Round]:
    """Measure the rounds of an engine that works in this thread, by part."""
    device, rounds, began, num_passes = SimulatedDevice(sleeps=False), list[Round](), 0.0, 0

    def on_round(output: StepOutput | None) -> None:
        nonlocal began, num_passes
        if output is not None:
            parts.amounts[REST] += clock() - began
            amounts = {part: parts.amounts[part] for part in names}
            rounds.append(Round(amounts, session.draft_ops.num_passes - num_passes))
        parts.amounts.clear()
        began, num_passes = clock(), session.draft_ops.num_passes

    with simulated(device):
        session = Session(case, device, num_rounds, InlineThread)
        functions = functions_of(session.engine)
        names = list(dict.fromkeys([*(part for *_, part in functions), MODEL, REST]))
        with Parts(clock, functions) as parts:
            asyncio.run(session.serve(on_round))
    return rounds


def count_calls(case: Case, num_rounds: int) -> list[Round]:
    """Count the calls of each part; the numbers are the same on every run."""
    calls = CallClock()
    sys.setprofile(calls.note)
    try:
        return rounds_of(case, num_rounds, calls)
    finally:
        sys.setprofile(None)


def by_part(case: Case, num_rounds: int) -> list[Row]:
    """Return the CPU time in microseconds and the calls of each part.

    CPU time is the measure that other processes lengthen least.
    """
    timed = rounds_of(case, num_rounds, time.thread_time)
    counted = count_calls(case, min(num_rounds, 40))

    def row(name: str, amount: Callable[[Round], float]) -> Row:
        us = sorted(1e6 * amount(each) for each in timed)
        calls = statistics.fmean(map(amount, counted))
        spread = {"CPU us a step": statistics.median(us), "p10": us[len(us) // 10]}
        return {"part": name, **spread, "calls": calls, "calls a request": calls / case.requests}

    parts = [part for part in timed[0].parts if any(each.parts[part] for each in timed)]
    rows = [row(part, lambda each, part=part: each.parts[part]) for part in parts]  # type: ignore[misc]
    if case.draft == "model":
        num_passes = statistics.fmean(each.num_passes for each in timed)
        rows.append(row(f"one of {num_passes:.1f} draft passes", lambda each: each.draft_pass))
    return [*rows, row("total that the device waits for", lambda each: each.host)]


def gap(case: Case, num_rounds: int) -> Row:
    """Return the milliseconds by which rounds with two threads exceed the device's work."""
    device, marks, num_tokens = SimulatedDevice(sleeps=True), list[tuple[float, ...]](), 0

    def on_round(output: StepOutput | None) -> None:
        nonlocal num_tokens
        model = time.clock_gettime(session.model_clock) - parts.amounts[FORMULA]
        marks.append((time.monotonic(), device.busy_seconds, time.thread_time(), model))
        num_tokens += sum(len(each.token_ids) for each in output.requests) if output else 0

    with simulated(device), Parts(time.thread_time, FORMULAS) as parts:
        session = Session(case, device, num_rounds)
        asyncio.run(session.serve(on_round))
    # Milliseconds of round, device, event loop and model thread.
    taken = 1e3 * np.diff(np.array(marks), axis=0)
    gaps = taken[:, 0] - taken[:, 1]
    medians = np.median(taken, axis=0).tolist()
    names = ("round", "device", "CPU, loop", "CPU, model thread")
    return {
        "ms a step": str(case),
        "tokens a request": num_tokens / num_rounds / case.requests,
        "gap": float(np.median(gaps)),
        "gap, p10": float(np.quantile(gaps, 0.1)),
        **dict(zip(names, medians, strict=True)),
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print tables, and write the JSON if it was requested."""
    program = "python -m foretoken.bench.lab.host_step"
    parser = argparse.ArgumentParser(prog=program, description=__doc__)
    parser.add_argument("--requests", default="1,4,16,64")
    parser.add_argument("--draft", choices=("lookups", "model", "none"), default="lookups")
    parser.add_argument("--shape", choices=("chain", "tree"), default="chain")
    parser.add_argument(
        "--depth", help="draft depth: tokens or auto; default: 4 for chains, auto for trees"
    )
    parser.add_argument("--context", type=int, default=1024, help="prompt tokens of each request")
    parser.add_argument("--rounds", type=int, default=150)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    is_auto = args.depth == "auto" or (args.depth is None and args.shape == "tree")
    if is_auto != (args.shape == "tree") and (args.draft == "model" or not is_auto):
        parser.error(
            "--shape tree needs --depth auto, and --shape chain with --draft model needs a number"
        )
    depth: Depth = "auto" if is_auto else int(args.depth or 4)
    report: dict[str, object] = {**heading(), "simulated": SIMULATED}
    print(*(f"{key}: {value}" for key, value in report.items()), sep="\n")
    requests = map(int, args.requests.split(","))
    cases = [Case(each, args.draft, args.shape, depth, args.context) for each in requests]
    parts = {str(case): by_part(case, args.rounds) for case in cases}
    for name, rows in parts.items():
        print(f"\nBy part, one thread: {name}\n\n{table(rows)}", flush=True)
    gaps = [gap(case, args.rounds) for case in cases]
    print(f"\nThe engine, two threads; gap: round less device\n\n{table(gaps)}")
    if args.json is not None:
        write_json(args.json, {**report, "by part": parts, "engine": gaps})


if __name__ == "__main__":
    main()
