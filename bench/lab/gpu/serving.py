"""Whole workloads: many requests over one long prefix, and nano-vllm's published one."""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Sequence
from functools import partial

from ...common.report import Spread
from ...phases.measure import Lab, Served
from .bed import PAGE_SIZE
from .lab import MAX_RUNNING, THROUGHPUT, open_lab, output_rate, random_prompts, together
from .stage import QWEN, SMALL, Stage

REPEATS = 3
PREFIX, OWN, ANSWER = 4096, 128, 64  # tokens
CHUNK = 8192  # tokens of a step
MARGIN = 8.0  # seconds that a stage keeps for its end
SHARING_TABLE = "Requests over one prefix of 4,096 tokens, 128 own, 64 answered"


def run_sharing(stage: Stage) -> None:
    """Cold, cold but in one burst, and with the prefix in the cache."""
    counts = {name: {SMALL: 64, QWEN: 16}[name] for name in stage.few(SMALL, QWEN)}
    stage.try_each({name: partial(_sharing, stage, name, n) for name, n in counts.items()})


async def _sharing(stage: Stage, name: str, count: int) -> None:
    prefix, own, answer = (96, 8, 4) if stage.rehearses else (PREFIX, OWN, ANSWER)
    count = 3 if stage.rehearses else count
    room = prefix + own + answer + 2 * PAGE_SIZE
    options = {"kv_tokens": count * room, "max_batch_tokens": CHUNK, "max_slowdown": THROUGHPUT}
    async with open_lab(stage, stage.place.shape(name), **options) as lab:
        vocab_size = lab.built.vocab_size
        shared = random_prompts(1, prefix, vocab_size)[0]
        prompts = [shared + each for each in random_prompts(count, own, vocab_size, seed=1)]
        runs: dict[str, list[tuple[float, list[Served]]]] = {}
        for _ in range(REPEATS + 1):
            for way in ("cold, nothing shared", "cold, one burst", "prefix cached"):
                runs.setdefault(way, []).append(await _one_way(lab, way, prompts, shared, answer))
    kept = {way: found[1:] for way, found in runs.items()}  # the first warms up
    cold = statistics.median(seconds for seconds, _ in kept["cold, nothing shared"])
    for way, found in kept.items():
        stage.add(SHARING_TABLE, _sharing_row(name, way, found, cold))


async def _one_way(
    lab: Lab, way: str, prompts: Sequence[Sequence[int]], shared: Sequence[int], answer: int
) -> tuple[float, list[Served]]:
    await lab.flush()
    if way == "prefix cached":
        await lab.serve(shared, 1)
    is_private = way == "cold, nothing shared"
    began = time.perf_counter()
    served = await asyncio.gather(
        *(
            lab.serve(prompt, answer, namespace=str(index) if is_private else None)
            for index, prompt in enumerate(prompts)
        )
    )
    return time.perf_counter() - began, list(served)


def _sharing_row(
    name: str, way: str, found: Sequence[tuple[float, list[Served]]], cold: float
) -> dict[str, object]:
    seconds = Spread.of([each for each, _ in found])
    firsts = [statistics.median(s.usage.time_to_first_token for s in run) for _, run in found]
    one = found[0][1]
    return {
        "model": name,
        "requests": len(one),
        "way": way,
        "seconds in all": seconds,
        "first token, median s": Spread.of(firsts),
        "answered tokens/s": output_rate(one, seconds.median),
        "throughput over cold": cold / seconds.median,
        "cached tokens each": sum(s.usage.cached_tokens for s in one) / len(one),
    }


# -- nano-vllm's workload -----------------------------------------------------------------------


def run_nano(stage: Stage) -> None:
    """256 sequences, 100 to 1,024 random tokens in and 100 to 1,024 out; scaled to the time."""
    stage.try_each({"256 sequences": partial(_nano, stage)})


async def _nano(stage: Stage) -> None:
    rng = random.Random(0)
    low, high, count = (5, 12, 4) if stage.rehearses else (100, 1024, MAX_RUNNING)
    lengths = [(rng.randint(low, high), rng.randint(low, high)) for _ in range(count)]
    tokens = sum(a + b + 2 * PAGE_SIZE for a, b in lengths)
    options = {"kv_tokens": tokens, "max_batch_tokens": CHUNK, "max_slowdown": THROUGHPUT}
    async with open_lab(stage, stage.place.shape(SMALL), **options) as lab:
        vocab_size = lab.built.vocab_size
        prompts = [rng.choices(range(vocab_size), k=length) for length, _ in lengths]
        step = await _step_seconds(lab, prompts)
        wanted = max(length for _, length in lengths) * step
        share = min(1.0, (stage.seconds_left - MARGIN) / wanted)
        if share < 1.0:
            stage.note(f"Scaled to the time: answers are {share:.0%} as long as published.")
        await lab.flush()
        outputs = [max(1, int(length * share)) for _, length in lengths]
        began = time.perf_counter()
        served = await asyncio.gather(
            *(lab.serve(p, n) for p, n in zip(prompts, outputs, strict=True))
        )
        seconds = time.perf_counter() - began
    stage.add(
        "nano-vllm's workload: 256 sequences, 100 to 1,024 tokens in and out, Qwen3-0.6B's shape",
        {
            "sequences": count,
            "tokens in": sum(map(len, prompts)),
            "tokens out": sum(outputs),
            "of the published length": share,
            "seconds": seconds,
            "answered tokens/s": output_rate(served, seconds),
            "runs": 1,
        },
    )


async def _step_seconds(lab: Lab, prompts: Sequence[Sequence[int]]) -> float:
    """Median seconds of a step in which all prompts decode.

    Every size of a step runs once before, as it does before serving.
    """
    for count in sorted({1 << bits for bits in range(9)} | {len(prompts)}):
        await together(lab, prompts[:count], 4)
    return statistics.median(each.pace for each in await together(lab, prompts, 8))
