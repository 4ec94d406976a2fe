"""Checks on the device that logits have equal bits and streams equal tokens, and the cost."""

from __future__ import annotations

import asyncio
import math
import random
from array import array
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ....api.build.model_files import BUILTIN
from ....core.model.decoder import Decoder
from ....core.ops.batch import Segment
from ...common.machine import prompt_text
from ...common.report import Spread
from ...phases.data import Depth
from ...phases.measure import Lab, Served
from .bed import PAGE_SIZE, Bed
from .lab import open_lab, random_prompts
from .stage import QWEN, SMALL, Stage

NUM_LAYERS = 4  # Layers of the 8B shape: bits and ratios need no more.
CONTEXT = 600  # Tokens before the compared rows: more than two splits of the attention kernel.
# Numbers of other rows in the batch of the compared row.
NUM_OTHERS = (0, 1, 2, 7, 15, 16, 31, 63, 64, 127, 191, 254)
DEPTH = 4
CHUNK = 40  # Rows of a prompt before the compared ones.
EXACTNESS = ("spec", "batch", "off")


def run(stage: Stage) -> None:
    """Compare bits and streams, and measure the cost."""
    models = {SMALL: stage.place.shape(SMALL)}
    if not stage.rehearses:
        models[f"{QWEN}, {NUM_LAYERS} layers"] = stage.place.shape(
            QWEN, num_hidden_layers=NUM_LAYERS
        )
    stage.try_each(
        {f"bits, {name}": partial(_bits, stage, name, path) for name, path in models.items()}
        | {
            f"streams, built-in pair, {draft}": partial(_streams, stage, None, draft)
            for draft in stage.few("auto", "self")  # The torch backend has no 4-bit copy.
        }
        | {f"streams, {SMALL}": partial(_streams, stage, models[SMALL], "radix,ngram")}
        | {f"cost, {name}": partial(_cost, stage, name, path) for name, path in models.items()}
    )


# -- bits ---------------------------------------------------------------------------------------


def _bits(stage: Stage, name: str, folder: Path) -> None:
    """Check what each setting of ``exact`` guarantees.

    "spec" covers decode and verify rows, and "batch" also the rows of prompts.
    """
    for exact in stage.few(*EXACTNESS[:2]):
        decoder = stage.place.decoder(folder, exact=exact)
        with stage.part(f"bits, {name}, {exact}"):
            _compare_rows(stage, name, exact, decoder)
        del decoder


def _compare_rows(stage: Stage, name: str, exact: str, decoder: Decoder) -> None:
    """Compare the logits of rows alone with those in batches of several sizes.

    Adds a row to the table, and an error for each difference.
    """
    context = 70 if stage.rehearses else CONTEXT
    beside = (0, 3) if stage.rehearses else NUM_OTHERS
    scene = Scene(decoder, context, max(beside))
    alone = torch.cat([scene.logits(context + at, 1, 0) for at in range(DEPTH + 1)])
    equal: Counter[str] = Counter()
    for num_others in beside:
        found = {
            "decoded": (scene.logits(context, 1, num_others), alone[:1]),
            "verified": (scene.logits(context, DEPTH + 1, num_others), alone),
        }
        if exact == "batch":
            chunk = scene.logits(context - CHUNK, CHUNK + DEPTH + 1, num_others)
            found["in a prompt"] = (chunk[CHUNK:], alone)
        for kind, (logits, expected) in found.items():
            off = difference(logits, expected)
            equal[kind] += off == 0
            if off:
                where = f"{num_others} rows beside"
                stage.wrong(f"{name}, {exact}: {kind}, {where}: bits differ by {off:.2g}")
    row = {"model": name, "exact": exact, "rows beside": f"{len(beside)} cases to {max(beside)}"}
    stage.add(
        "Logits whose bits are those of a row alone",
        row | {kind: f"{count} of {len(beside)}" for kind, count in equal.items()},
    )


def difference(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference: 0 for equal bits, infinite if a value is not finite."""
    if torch.equal(found, expected):
        return 0.0
    largest = float((found - expected).abs().max())
    return largest if largest > 0 else math.inf


class Scene:
    """One sequence whose context is computed, and other sequences to share its batches."""

    def __init__(self, decoder: Decoder, context: int, num_others: int) -> None:
        length = context + DEPTH + 1
        self._bed = Bed.make(decoder, num_others + 1, length)
        rng = random.Random(3)
        self._tokens = array("q", rng.choices(range(decoder.config.vocab_size), k=length))
        self._context = context
        for start in range(0, context, 64):
            self.logits(start, min(64, context - start), 0)

    def logits(self, start: int, count: int, num_others: int) -> Tensor:
        """Return logits [count, vocab] of rows of the sequence, batched with other rows."""
        segments = [self._segment(0, start, count)]
        segments += [self._segment(1 + i, self._context - i, 1) for i in range(num_others)]
        decoder = self._bed.decoder
        batch = decoder.batch(segments, page_size=PAGE_SIZE)
        return decoder.forward(batch, self._bed.pool).logits[:count].clone()

    def _segment(self, index: int, start: int, count: int) -> Segment:
        first, each = index * self._bed.pages_each, self._bed.pages_each
        pages = array("q", range(first, first + each))
        return Segment(self._tokens[start : start + count], start, pages, count)


# -- streams ------------------------------------------------------------------------------------


async def _streams(stage: Stage, folder: Path | None, draft: str) -> None:
    """Check that a request has the same tokens with any drafts, batch and cached prefix."""
    for exact in stage.few(*EXACTNESS[:2]):
        options: dict[str, Any] = {"exact": exact, "kv_tokens": 32768, "max_batch_tokens": 512}
        options |= {"draft": draft, "speculation": "auto"}
        async with open_lab(stage, folder, **options) as lab:
            for temperature in stage.few(0.0, 1.0):
                row: dict[str, Any] = {
                    "model": "built-in pair" if folder is None else SMALL,
                    "draft": draft,
                }
                row |= {"exact": exact, "temperature": temperature}
                await _compare_streams(stage, lab, folder, row)


async def _compare_streams(
    stage: Stage, lab: Lab, folder: Path | None, row: dict[str, Any]
) -> None:
    prompts = _prompts(lab, folder, 3 if stage.rehearses else 16)
    length, temperature = 8 if stage.rehearses else 32, row["temperature"]
    alone = []
    for seed, prompt in enumerate(prompts):
        await lab.flush()
        alone.append(await lab.serve(prompt, length, temperature=temperature, seed=seed))
    ways: dict[str, tuple[Depth, bool]] = {  # Draft depth, and whether the cache is empty.
        "together": (0, True),
        "cached": (0, False),
        "speculating": (DEPTH, True),
        "speculating, cached": (DEPTH, False),
        "auto, cached": ("auto", False),
    }
    row["requests"] = len(prompts)
    for way, (depth, is_cold) in ways.items():
        if is_cold:
            await lab.flush()
        served = await asyncio.gather(
            *(
                lab.serve(prompt, length, depth=depth, temperature=temperature, seed=seed)
                for seed, prompt in enumerate(prompts)
            )
        )
        row[way] = _num_equal(alone, served)
    stage.add("Streams equal to those of requests alone, undrafted, cold", row)
    if row["exact"] == "batch" and any(row[way] != len(prompts) for way in ways):
        stage.wrong(f"{row['model']}, {row['draft']}, temperature {temperature}: streams differ")


def _num_equal(alone: Sequence[Served], served: Sequence[Served]) -> int:
    return sum(a.token_ids == b.token_ids for a, b in zip(alone, served, strict=True))


def _prompts(lab: Lab, folder: Path | None, count: int) -> list[list[int]]:
    """Return prompts of different lengths, half of them with a common prefix.

    The built-in models get source code, other models random tokens.
    """
    vocab_size = lab.built.vocab_size
    text = random_prompts(1, 4096, vocab_size)[0]
    if folder is None:
        text, _ = prompt_text(BUILTIN / "target", vocab_size, 4096)
    shared = text[:200]
    own = [text[300 + 90 * i :][: 20 + 7 * i] for i in range(count)]
    return [shared + each if i % 2 else each for i, each in enumerate(own)]


# -- cost ---------------------------------------------------------------------------------------


def _cost(stage: Stage, name: str, folder: Path) -> None:
    """Measure the milliseconds of a step for each setting of ``exact``."""
    cases = {"1 row": (1, 1), "64 rows": (64, 1), "256 rows": (256, 1), "chunk": (1, 1024)}
    context = 64 if stage.rehearses else 512
    if stage.rehearses:
        cases = {"1 row": (1, 1), "chunk": (1, 64)}
    room = max(rows for rows, _ in cases.values()), context + max(n for _, n in cases.values())
    found: dict[str, dict[str, Spread]] = {exact: {} for exact in EXACTNESS}
    for exact in EXACTNESS:
        bed = Bed.make(stage.place.decoder(folder, exact=exact), *room)
        for case, (rows, length) in cases.items():
            plan = bed.plan(rows, context, length=length)
            found[exact][case] = bed.seconds(plan, repeats=3 if stage.rehearses else 10)
        del bed, plan
        stage.gauge.release()
    for exact in EXACTNESS:
        row: dict[str, object] = {"model": name, "exact": exact}
        for case, seconds in found[exact].items():
            row[f"{case}, ms"] = seconds.scaled(1e3)
            row[f"{case}, over off"] = seconds.median / found["off"][case].median
        stage.add("What exactness costs: ms of a step, and over off", row)
