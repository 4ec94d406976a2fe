"""Decoding on the whole engine: step time compared with the roofline, and the host's share."""

from __future__ import annotations

import statistics
from functools import partial

from ...common.machine import shape_of
from ...common.report import Spread
from ...common.roofline import Shape, decode_floor
from ...phases.measure import Lab
from ..profile import HOST, Round
from .bed import PAGE_SIZE
from .lab import open_lab, plant, random_prompts, runner, together
from .stage import EXPERTS, LLAMA, QWEN, SMALL, STATES, Stage

BATCHES = (1, 8, 32, 64, 128, 256)
LOOKED_INTO = (1, 64, 256)  # Batch sizes whose kernels and host time are reported.
REPEATS = 3
SMALLER: tuple[dict[str, str], ...] = (  # Ways to store the 8B shape in fewer bytes.
    {"quantize": "int8"}, {"kv_cache_dtype": "fp8"}, {"kv_cache_dtype": "int8"},
)  # fmt: skip
WATCHED = 12  # Steps in which kernels are profiled, which is slow.
NUM_KERNELS = 8  # Number of kernels to report, the longest first.


def run(stage: Stage) -> None:
    """Measure random models of real shapes with 1,024 tokens of context per request."""
    plain = {name: partial(_model, stage, name, {}) for name in stage.few(QWEN, SMALL, LLAMA)}
    stage.try_each(plain)


def run_kinds(stage: Stage) -> None:
    """Measure smaller weights and KV, mixtures of experts, and recurrent states."""
    kinds = {str(more): partial(_model, stage, QWEN, more) for more in SMALLER}
    kinds |= {EXPERTS: partial(_model, stage, EXPERTS, {}), STATES: partial(_states, stage)}
    if stage.rehearses:  # The processor has no kernels for the other kinds.
        kinds = {name: kinds[name] for name in (EXPERTS, STATES)}
    stage.try_each(kinds)


async def _states(stage: Stage) -> None:
    """Measure a model with recurrent states after short prompts.

    The prompts are computed, because `plant` cannot cache them: it saves no recurrent states.
    """
    batches, length = ((2,), 4) if stage.rehearses else ((1, 8, 64), 24)
    backend = {"backend": "auto"} if stage.rehearses else {}
    options = {"kv_tokens": 2**15, "max_batch_tokens": 2048, "max_running": 64, **backend}
    async with open_lab(stage, stage.place.shape(STATES), **options) as lab:
        prompts = random_prompts(batches[-1], 16, lab.built.vocab_size)
        for batch in batches:
            await together(lab, prompts[:batch], length)
            step = await _step(lab, prompts[:batch], length)
            row = {"model": STATES, "batch": batch, "ms a step": step.scaled(1e3)}
            stage.add("Decode of a model with recurrent states", row)


async def _model(stage: Stage, name: str, more: dict[str, str]) -> None:
    context, length = (64, 6) if stage.rehearses else (1024, 32)
    is_brief = bool(more) or name == EXPERTS
    batches = (1, 4) if stage.rehearses else LOOKED_INTO if is_brief else BATCHES
    room = context + length + 2 * PAGE_SIZE
    options = {"kv_tokens": batches[-1] * room, "max_batch_tokens": 1024}
    async with open_lab(stage, stage.place.shape(name), **options, **more) as lab:
        prompts = random_prompts(batches[-1], context + 1, lab.built.vocab_size)
        plant(lab.built.engine, prompts)
        found = runner(lab.built)
        shape = shape_of(found.decoder, found.pool)
        name = " ".join([name, *more.values()])
        for batch in batches:
            await _batch(stage, lab, shape, name, prompts[:batch], length)
        timed = Round(lab.built.engine)
        for batch in sorted({*LOOKED_INTO} & {*batches}):
            await _host(stage, lab, timed, name, prompts[:batch], length)


async def _batch(
    stage: Stage, lab: Lab, shape: Shape, name: str, prompts: list[list[int]], length: int
) -> None:
    await together(lab, prompts, length)
    step = await _step(lab, prompts, length)
    batch, position = len(prompts), len(prompts[0]) + length // 2
    floor = decode_floor(shape, stage.result.limits, position, batch) if stage.result.limits else 0
    busy = await _busy(stage, lab, name, prompts, length)
    stage.add(
        "Decode, 1,024 tokens behind each request",
        {
            "model": name,
            "batch": batch,
            "ms a step": step.scaled(1e3),
            "tokens/s": batch / step.median,
            "roofline ms": 1e3 * floor,
            "of the roofline": floor / step.median,
            "device busy ms": 1e3 * busy,
            "host gap": 1 - busy / step.median if busy else "-",
        },
    )
    if batch in LOOKED_INTO:
        await _sampled(stage, lab, name, prompts, step.median)


async def _sampled(
    stage: Stage, lab: Lab, name: str, prompts: list[list[int]], greedy: float
) -> None:
    """Measure a batch at temperature 1, to report the cost of sampling."""
    await together(lab, prompts, 4, temperature=1.0)
    step = await _step(lab, prompts, WATCHED, temperature=1.0)
    stage.add(
        "Decode at temperature 1",
        {
            "model": name,
            "batch": len(prompts),
            "ms a step": step.scaled(1e3),
            "over greedy": step.median / greedy,
        },
    )


async def _step(
    lab: Lab, prompts: list[list[int]], length: int, temperature: float = 0.0
) -> Spread:
    """Return the seconds of a step in which all requests decode."""
    runs = [await together(lab, prompts, length, temperature=temperature) for _ in range(REPEATS)]
    return Spread.of([statistics.median(each.pace for each in run) for run in runs])


async def _busy(stage: Stage, lab: Lab, name: str, prompts: list[list[int]], length: int) -> float:
    """Return the seconds of a step in which the device is busy; report its longest kernels."""
    length = min(length, WATCHED)
    with stage.gauge.watch() as activity:
        await together(lab, prompts, length)
    if len(prompts) in LOOKED_INTO:
        for kernel, seconds in activity.seconds_by_name.most_common(NUM_KERNELS):
            stage.add(
                "Kernels of a step",
                {
                    "model": name,
                    "batch": len(prompts),
                    "kernel": kernel[:60],
                    "us a step": 1e6 * seconds / length,
                    "share": seconds / activity.busy_seconds,
                },
            )
    return activity.busy_seconds / length


async def _host(
    stage: Stage, lab: Lab, timed: Round, name: str, prompts: list[list[int]], length: int
) -> None:
    """Measure the parts of a round on the host; waiting for the device is one of them."""
    timed.clear()
    await together(lab, prompts, length)
    parts = timed.parts()
    stage.add(
        "A round of the host, ms; forward: launching, verify: with the wait for the device",
        {
            "model": name,
            "requests": len(prompts),
            "round": parts["round"],
            "forward": parts["forward"],
        }
        | {part: parts[part] for part in HOST},
    )
