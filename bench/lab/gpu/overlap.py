"""Steps launched one behind the other, beside steps one by one: the same tokens, in what time.

Without an engine: what the host does for a step is to lay it out and to read it. An engine commits
and plans besides, which is hidden as well.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable

from msgspec.structs import replace

from ....core.interface.output import StepOutput
from ....core.interface.plan import ScheduledRequest, StepPlan
from ...common.report import Spread
from .bed import PAGE_SIZE, Bed
from .stage import Stage

BATCHES = (1, 64, 256)
CONTEXT, LENGTH = 1024, 32  # tokens behind each row, and to come in each run
REPEATS = 3
# To rehearse: only these kernels are launched at all, and the interpreter is slow.
REHEARSED = {"backend": "triton", "exact": "off"}


def run_overlap(stage: Stage, name: str) -> None:
    """One model at some batch sizes."""
    batches = (2,) if stage.rehearses else BATCHES
    context, length = (8, 3) if stage.rehearses else (CONTEXT, LENGTH)
    options = REHEARSED if stage.rehearses else {}
    decoder = stage.place.decoder(stage.place.shape(name), **options)
    bed = Bed.make(decoder, batches[-1], context + length + PAGE_SIZE)
    for batch in batches:
        _compare(stage, name, Chain(bed, batch, context), length)


def _compare(stage: Stage, name: str, chain: Chain, length: int) -> None:
    runs: dict[str, Callable[[int], None]] = {
        "one by one": chain.one_by_one,
        "overlapped": chain.overlapped,
    }
    found: dict[str, list[float]] = {kind: [] for kind in runs}
    outputs: list[list[list[int]]] = []
    for _ in range(1 if stage.rehearses else 1 + REPEATS):  # in turn: a card's clock changes
        for kind, run in runs.items():
            began = time.perf_counter()
            run(length)
            found[kind].append((time.perf_counter() - began) / length)
            outputs.append(chain.outputs)
    if any(each != outputs[0] for each in outputs):
        stage.wrong(f"{name}: steps that overlap choose other tokens than steps one by one")
    apart, overlapped = (Spread.of(found[kind][-REPEATS:]) for kind in runs)
    stage.add(
        "Steps launched before the one ahead of them is read",
        {
            "model": name,
            "batch": chain.num_rows,
            "one by one, ms": apart.scaled(1e3),
            "overlapped, ms": overlapped.scaled(1e3),
            "overlapped over one by one": overlapped.median / apart.median,
        },
    )


class Chain:
    """Sequences that decode from a made-up context on."""

    def __init__(self, bed: Bed, num_rows: int, context: int) -> None:
        self.num_rows = num_rows
        self._runner = bed.runner
        self._start = bed.plan(num_rows, context)
        self._texts: list[array[int]] = []

    @property
    def outputs(self) -> list[list[int]]:
        """Tokens that each sequence received since the start."""
        firsts = (len(row.tokens) for row in self._start.requests)
        return [text[first:].tolist() for text, first in zip(self._texts, firsts, strict=True)]

    def one_by_one(self, length: int) -> None:
        """Each step when the one ahead of it is committed."""
        self._restart()
        for _ in range(length):
            self._take(self._runner.step(self._plan()))

    def overlapped(self, length: int) -> None:
        """Each step launched before the one ahead of it is read."""
        self._restart()
        under_way = self._runner.launch(self._plan())
        for _ in range(length - 1):
            following = self._runner.launch(self._plan(num_ahead=1), under_way)
            self._take(under_way.finish())
            under_way = following
        self._take(under_way.finish())

    def _restart(self) -> None:
        self._texts = [row.tokens[:] for row in self._start.requests]

    def _plan(self, num_ahead: int = 0) -> StepPlan:
        """The next step, or the one behind it."""
        pairs = zip(self._start.requests, self._texts, strict=True)
        return replace(self._start, requests=[_row(row, text, num_ahead) for row, text in pairs])

    def _take(self, output: StepOutput) -> None:
        for text, row in zip(self._texts, output.requests, strict=True):
            text.extend(row.token_ids)


def _row(row: ScheduledRequest, text: array[int], num_ahead: int) -> ScheduledRequest:
    stop = len(text) + num_ahead
    return replace(row, tokens=text, start=stop - 1, stop=stop, is_ahead=num_ahead > 0)
