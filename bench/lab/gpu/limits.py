"""The card's measured limits: bytes and operations per second, and the cost of a launch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from ...common.report import Spread
from ...common.roofline import Limits
from .stage import Stage

REPEATS = 10
LAUNCHES = 1000


def run(stage: Stage) -> None:
    """Measure the card, and set the limits that all other stages are compared with."""
    reads = {
        "read and add up": _reading(stage),
        "copy, reads and writes counted": _copying(stage),
    }
    rates = {"bfloat16 matrix product": _multiplying(stage)}
    for name, spread in reads.items():
        stage.add("Limits", {"what": name, "TB/s or TFLOP/s": spread.scaled(1e-12)})
    for name, spread in rates.items():
        stage.add("Limits", {"what": name, "TB/s or TFLOP/s": spread.scaled(1e-12)})
    best = max(reads.values(), key=lambda spread: spread.high)
    product = rates["bfloat16 matrix product"]
    stage.result.limits = Limits(
        read=best.high,
        matrix=product.high,
        drift=max(1 - best.low / best.high, 1 - product.low / product.high),
        dtype="bfloat16",
        how="torch",
    )
    stage.save()
    stage.try_each({"launches": partial(_launches, stage)})


def _rate(stage: Stage, call: Callable[[], object], amount: float) -> Spread:
    seconds = stage.gauge.seconds(call, repeats=REPEATS)
    return Spread.of([amount / each for each in seconds])


def _reading(stage: Stage) -> Spread:
    data = _random(stage, 2**30)
    return _rate(stage, data.sum, data.nbytes)


def _copying(stage: Stage) -> Spread:
    data = _random(stage, 2**30)
    other = torch.empty_like(data)
    return _rate(stage, lambda: other.copy_(data), 2 * data.nbytes)


def _multiplying(stage: Stage) -> Spread:
    """Measure operations per second on random numbers: zeros take less power and run faster."""
    side = 256 if stage.rehearses else 8192
    a, b = (_random(stage, side * side).view(side, side).to(torch.bfloat16) for _ in range(2))
    return _rate(stage, lambda: a @ b, 2 * side**3)


def _random(stage: Stage, num_items: int) -> Tensor:
    count = 2**16 if stage.rehearses else num_items
    return torch.randn(count, device=stage.place.device)


def _launches(stage: Stage) -> None:
    """Measure the launch of a tiny kernel, alone and in a graph of many."""
    gauge, tiny = stage.gauge, torch.zeros(16, device=stage.place.device)
    count = 50 if stage.rehearses else LAUNCHES

    def many() -> None:
        for _ in range(count):
            tiny.add_(1.0)

    alone = gauge.host_seconds(lambda: tiny.add_(1.0), repeats=count)
    eager = Spread.of(gauge.seconds(many, repeats=REPEATS))
    graph = gauge.graph(many)
    replay = Spread.of(gauge.seconds(graph, repeats=REPEATS))
    one = gauge.graph(lambda: tiny.add_(1.0))
    rows = {
        "a launch: host": alone,
        "a launch: device, one after another": eager.median / count,
        "a kernel of a replayed graph": replay.median / count,
        "a replay of a graph of one kernel: host": gauge.host_seconds(one, repeats=count),
    }
    for name, seconds in rows.items():
        stage.add("Overheads", {"what": name, "microseconds": 1e6 * seconds})
