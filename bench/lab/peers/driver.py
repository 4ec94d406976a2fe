"""``python -m foretoken.bench.lab.peers``: rows by engines in turn, and a table of ratios.

For each setting every engine loads its model once. Then, row by row, the engines take turns
(A B C A B C), so that a slow spell of the machine hits all of them. See README.md.
"""

from __future__ import annotations

import argparse
import itertools
import os
import signal
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from ....core.ops.native.library import native_library
from ...common.machine import Meter
from ...common.report import RESULTS, heading, table, write_json
from ...common.roofline import Limits
from . import engines as known
from .checkpoints import SHAPES, Shape
from .engines import NAMES, Engine
from .environments import set_up
from .limits import num_params, roofline
from .measure import Ask, Prompts, WrongAnswerError, measure, warm_up
from .rows import Row, Setting, shrunk
from .special_rows import ROWS
from .table import Figures, line, notes, record
from .wire import Answer, Call, Job
from .worker import Worker, WorkerError

_OUT = RESULTS / "peers.json"
KV_TOKENS = 20480
Found = dict[str, dict[str, Figures]]
"""Results by row and engine."""


@dataclass(slots=True)
class Run:
    """One pass over all rows with so many threads. ``budget``: seconds of one engine in a row."""

    engines: Sequence[Engine]
    threads: int
    repeats: int
    timeout: float
    budget: float
    logs: Path
    versions: dict[str, dict[str, str]] = field(default_factory=dict)
    found: Found = field(default_factory=dict)

    def setting(self, setting: Setting, rows: Sequence[Row]) -> None:
        """All rows of a setting, with the models loaded once."""
        shape = SHAPES[setting.shape]
        job = Job(
            checkpoint=str(shape.write()),
            dtype=setting.dtype,
            threads=self.threads,
            depth=setting.depth,
            mode=setting.mode,
            max_len=max(row.max_len for row in rows) + 32,
            kv_tokens=KV_TOKENS,
        )
        for row in rows:
            self.found[row.name] = {e.name: Figures() for e in self.engines if e.takes(row)}
        workers: dict[str, Worker] = {}
        try:
            for engine in self.engines:  # one after another: loading is work too
                if any(engine.takes(row) for row in rows):
                    self._start(engine, job, rows, workers)
            for row in rows:
                self._row(row, shape, workers)
        finally:
            for worker in workers.values():
                worker.close()

    def _start(
        self, engine: Engine, job: Job, rows: Sequence[Row], workers: dict[str, Worker]
    ) -> None:
        folder = self.logs / f"{engine.name}-{job.mode}-{job.dtype}-{job.depth}-{job.threads}"
        own = replace(job, mode=engine.mode or job.mode, depth=engine.depth or job.depth)
        worker = Worker(engine.command, own, folder, timeout=self.timeout)
        workers[engine.name] = worker
        try:
            ready = worker.ready()
        except WorkerError as failure:
            workers.pop(engine.name).close()
            self._fail(engine.name, rows, str(failure))
            return
        self.versions[engine.name] = ready.versions
        print(f"  {engine.name}: loaded in {ready.load_seconds:.1f} s", flush=True)

    def _fail(self, name: str, rows: Iterable[Row], error: str) -> None:
        print(f"  {name}: {error}", flush=True)
        for row in rows:
            if name in self.found[row.name]:
                self.found[row.name][name].error = error

    def _row(self, row: Row, shape: Shape, workers: dict[str, Worker]) -> None:
        text, tasks = shape.text(), shape.tasks(row.task) if row.task else ()
        for turn, name in itertools.product(range(-1, self.repeats), self.found[row.name]):
            prompts = Prompts(row, shape.vocab_size, turn, text, tasks)
            prompts.pictures = self.logs / "pictures"
            self._turn(row, name, workers, prompts)
        medians = {n: str(f.spread or f.error) for n, f in self.found[row.name].items()}
        print(f"  {row.name}: {medians}", flush=True)

    def _turn(self, row: Row, name: str, workers: dict[str, Worker], prompts: Prompts) -> None:
        """Turn -1 warms up. An engine that failed, or used up its time, does no more."""
        figures, worker = self.found[row.name][name], workers.get(name)
        if figures.error or figures.seconds > self.budget:
            return
        if worker is None:
            figures.error = "its worker ended in an earlier row"
            return
        try:
            if prompts.turn < 0:
                warm_up(row, worker.ask, prompts)
            else:
                figures.values.append(measure(row, _kept(worker.ask, figures), prompts))
        except WrongAnswerError as error:
            figures.error = str(error)
        except WorkerError as failure:
            figures.error = str(failure)
            workers.pop(name).close()


def _kept(ask: Ask, figures: Figures) -> Ask:
    """Note the time it takes and, in the first turn, what is answered."""
    is_first = not (figures.tokens or figures.numbers)

    def keeping(call: Call) -> Answer:
        answer = ask(call)
        figures.seconds += answer.seconds
        if is_first:
            figures.tokens += answer.tokens
            figures.numbers += answer.numbers
        return answer

    return keeping


# -- command line -------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    """Set up, or measure, print and write JSON; the exit code."""
    args = _parser().parse_args(argv)
    rows = [row for row in ROWS if row.name in (args.rows or [row.name])]
    if args.shape is not None:
        rows = [shrunk(row, args.shape) for row in rows]
    engines = known.find(args.engines)
    if args.command == "setup":
        return 0 if set_up(engines, rows) else 1
    _bench(args, rows, engines)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m foretoken.bench.lab.peers", description=__doc__
    )
    parser.add_argument(
        "command",
        nargs="?",
        choices=["run", "setup"],
        default="run",
        help="command; setup: make the environments and convert the checkpoints",
    )
    parser.add_argument(
        "engines", nargs="*", default=list(NAMES), help=f"engines: {', '.join(NAMES)}"
    )
    names = [row.name for row in ROWS]
    parser.add_argument(
        "--rows", nargs="+", choices=names, metavar="ROW", help=f"rows: {', '.join(names)}"
    )
    every = len(os.sched_getaffinity(0))
    parser.add_argument("--threads", nargs="+", type=int, default=[every], metavar="N")
    parser.add_argument(
        "--repeats", type=int, default=3, help="number of turns of each engine in a row"
    )
    parser.add_argument(
        "--shape", choices=list(SHAPES), help="single shape to measure, on an eighth of the prompts"
    )
    parser.add_argument("--timeout", type=float, default=400, help="seconds of a call or a load")
    parser.add_argument(
        "--budget", type=float, default=20, help="seconds after which an engine ends a row early"
    )
    parser.add_argument("--out", type=Path, default=_OUT)
    return parser


def _bench(args: argparse.Namespace, rows: Sequence[Row], engines: Sequence[Engine]) -> None:
    report: dict[str, object] = heading()
    print(*(f"{key}: {value}" for key, value in report.items()), sep="\n", flush=True)
    missing = [engine for engine in engines if not engine.is_installed]
    for engine in missing:
        print(
            f"{engine.name}: skipped: run python -m foretoken.bench.lab.peers setup {engine.name}",
            flush=True,
        )
    present = [engine for engine in engines if engine not in missing]
    with tempfile.TemporaryDirectory() as logs, _sigterm_unwinds():
        runs = [
            _pass(Run(present, threads, args.repeats, args.timeout, args.budget, Path(logs)), rows)
            for threads in args.threads
        ]
    report |= {"load_average_after": os.getloadavg()[0], "skipped": [e.name for e in missing]}
    write_json(args.out, report | {"runs": runs})


@contextmanager
def _sigterm_unwinds() -> Iterator[None]:
    """Workers that stand still would outlive a driver that just ends."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _pass(run: Run, rows: Sequence[Row]) -> dict[str, object]:
    library = native_library()
    meter = Meter(library, torch.bfloat16, run.threads) if library is not None else None
    if meter is not None:
        meter.measure()
    for setting, group in itertools.groupby(rows, key=lambda row: row.setting):
        print(f"{setting}, {run.threads} threads", flush=True)
        run.setting(setting, list(group))
    if meter is not None:
        meter.measure()
    limits = None if meter is None else meter.limits
    lines = {row.name: _roofline(row, limits) for row in rows}
    names = [engine.name for engine in run.engines]
    lines_of_rows = [line(row, run.found[row.name], names, lines[row.name]) for row in rows]
    print(f"\n{run.threads} threads; {limits}\n\n{table(lines_of_rows)}\n")
    print(*(note for row in rows for note in notes(row, run.found[row.name])), sep="\n", flush=True)
    return {
        "threads": run.threads,
        "limits": limits,
        "versions": run.versions,
        "rows": [record(row, run.found[row.name], lines[row.name]) for row in rows],
    }


def _roofline(row: Row, limits: Limits | None) -> float | None:
    shape = SHAPES[row.setting.shape]
    if limits is None:
        return None
    return roofline(row, shape, num_params(shape.folder / "target"), limits)
