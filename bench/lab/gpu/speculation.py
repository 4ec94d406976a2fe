"""Speed with speculation over speed without it at rising batch sizes, at 80% acceptance.

The drafts come from an oracle: they are the answer of an earlier run with a fifth of the tokens
replaced. So acceptance is simulated; the time of every step is real.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

from ...common.oracle import oracles
from ...common.report import Spread
from ...phases.data import Depth
from ...phases.measure import Lab, Served
from ..profile import HOST, Round
from .bed import PAGE_SIZE
from .lab import open_lab, plant, random_prompts
from .stage import QWEN, SMALL, Stage

ACCURACY = 0.8
DEPTHS: tuple[Depth, ...] = (0, 4, "auto")
BATCHES = (1, 4, 16, 64)
REPEATS = 3
TABLE = "Speculation on over off, simulated acceptance (oracle:0.8)"


def run(stage: Stage) -> None:
    """Measure the models, the 8B shape first."""
    stage.note(
        "Acceptance is simulated: drafts are an earlier run's answers with a fifth of the tokens "
        "wrong."
    )
    stage.try_each({name: partial(_model, stage, name) for name in stage.few(QWEN, SMALL)})


async def _model(stage: Stage, name: str) -> None:
    context, length = (64, 12) if stage.rehearses else (1024, 96)
    batches = (1, 2) if stage.rehearses else BATCHES
    room = context + length + 4 * PAGE_SIZE
    options = {
        "kv_tokens": 2 * batches[-1] * room,
        "max_batch_tokens": 1024,
        "speculation": "auto",
    }
    with oracles(ACCURACY) as (oracle,):
        async with open_lab(stage, stage.place.shape(name), draft=oracle, **options) as lab:
            await _batches(stage, lab, name, batches, context, length)


async def _batches(
    stage: Stage, lab: Lab, name: str, batches: Sequence[int], context: int, length: int
) -> None:
    prompts = random_prompts(batches[-1], context + 1, lab.built.vocab_size)
    plant(lab.built.engine, prompts)
    for batch in batches:
        with stage.part(f"{name}, batch {batch}"):
            await _batch(stage, lab, name, prompts[:batch], length)
    timed = Round(lab.built.engine)
    for batch in reversed(batches):  # The batch with the most host work comes first.
        with stage.part(f"{name}, batch {batch}, the host"):
            await _host(stage, lab, timed, name, prompts[:batch], length)


async def _batch(
    stage: Stage, lab: Lab, name: str, prompts: Sequence[Sequence[int]], length: int
) -> None:
    runs: dict[Depth, list[list[Served]]] = {depth: [] for depth in DEPTHS}
    for repeat in range(REPEATS + 1):
        for depth in DEPTHS:
            runs[depth].append(await _run(lab, prompts, length, depth, repeat))
    # The first run warms up, and records the answers for the oracle.
    plain = [_seconds(run) for run in runs[0][1:]]
    for depth in DEPTHS[1:]:
        kept = runs[depth][1:]
        served = [each for run in kept for each in run]
        proposed = sum(each.usage.proposed_tokens for each in served)
        accepted = sum(each.usage.accepted_tokens for each in served)
        on = [_seconds(run) for run in kept]
        stage.add(
            TABLE,
            {
                "model": name,
                "batch": len(prompts),
                "depth": depth,
                "on / off": Spread.of([a / b for a, b in zip(plain, on, strict=True)]),
                "tokens/s off": len(prompts) * length / Spread.of(plain).median,
                "tokens/s on": len(prompts) * length / Spread.of(on).median,
                "accepted of the drafts": accepted / proposed if proposed else "-",
                "tokens a step": sum(len(s.token_ids) for s in served)
                / sum(s.usage.verify_steps for s in served),
                "answers equal": f"{_num_equal(runs[0][-1], kept[-1])} of {len(prompts)}",
            },
        )


async def _host(
    stage: Stage,
    lab: Lab,
    timed: Round,
    name: str,
    prompts: Sequence[Sequence[int]],
    length: int,
) -> None:
    """Measure the parts of a round, and the time in which the device is busy."""
    for depth in DEPTHS:
        timed.clear()
        run = await _run(lab, prompts, length, depth, REPEATS)
        parts, rounds = timed.parts(), timed.num_rounds
        with stage.gauge.watch() as activity:
            await _run(lab, prompts, length, depth, REPEATS)
        row: dict[str, object] = {"model": name, "requests": len(prompts)}
        row |= {"depth": depth, "rounds": rounds}
        # The parts "round" and "rest" would include the wait for the first requests.
        row |= {"round": 1e3 * _seconds(run) / rounds}
        row |= {"device busy": 1e3 * activity.busy_seconds / rounds}
        row |= {part: parts[part] for part in ("forward", *HOST) if part != "rest"}
        stage.add("A round, ms; forward: launching, verify: with the wait for the device", row)


async def _run(
    lab: Lab, prompts: Sequence[Sequence[int]], length: int, depth: Depth, repeat: int
) -> list[Served]:
    """Serve all prompts at once, greedily; the seeds only decide which drafts are wrong."""
    first = 1000 * repeat
    asked = (
        lab.serve(prompt, length, depth=depth, seed=seed)
        for seed, prompt in enumerate(prompts, first)
    )
    return list(await asyncio.gather(*asked))


def _seconds(run: Sequence[Served]) -> float:
    """Return the seconds from the first token of any request to the last token of all."""
    return max(each.times[-1] for each in run) - min(each.times[0] for each in run)


def _num_equal(some: Sequence[Served], others: Sequence[Served]) -> int:
    return sum(a.token_ids == b.token_ids for a, b in zip(some, others, strict=True))
