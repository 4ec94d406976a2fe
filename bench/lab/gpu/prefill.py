"""Prompts in chunks, and new turns after a cached prefix: the share of the card that they use."""

from __future__ import annotations

import time
from functools import partial

from ...common.machine import shape_of
from ...common.report import Spread
from .bed import PAGE_SIZE, Bed
from .stage import LLAMA, QWEN, SMALL, Stage

REPEATS = 3
TABLE = "Prefill"
TURN_TABLE = "A new turn behind a cached prefix"
TURNS, PREFIX = (64, 256), 32768  # Lengths in tokens.


def run(stage: Stage) -> None:
    """Measure prompts in chunks of 2,048 and 8,192 tokens, then turns of 64 and 256 tokens."""
    stage.try_each({name: partial(_model, stage, name) for name in stage.few(QWEN, SMALL, LLAMA)})


def _model(stage: Stage, name: str) -> None:
    prompt_len, chunks = (256, (64, 256)) if stage.rehearses else (16384, (2048, 8192))
    prefix, turns = (prompt_len, TURNS[:1]) if stage.rehearses else (PREFIX, TURNS)
    room = max(prompt_len, prefix + max(turns)) + PAGE_SIZE
    bed = Bed.make(stage.place.decoder(stage.place.shape(name)), 1, room)
    shape, limits = shape_of(bed.decoder, bed.pool), stage.result.limits
    for chunk in chunks:
        _prompt(bed, prompt_len, chunk)
        seconds = Spread.of([_prompt(bed, prompt_len, chunk) for _ in range(REPEATS)])
        ops = shape.prefill_ops(prompt_len)
        stage.add(
            TABLE,
            {
                "model": name,
                "prompt": prompt_len,
                "chunk": chunk,
                "seconds": seconds,
                "tokens/s": prompt_len / seconds.median,
                "TFLOP/s": ops / seconds.median / 1e12,
                "of the measured matrix rate": (
                    ops / seconds.median / limits.matrix if limits else "-"
                ),
            },
        )

    for turn in turns:
        _turn(stage, bed, name, prefix, turn)


def _turn(stage: Stage, bed: Bed, name: str, prefix: int, turn: int) -> None:
    """Compare a step of one chunk after a prefix with the same chunk without one."""
    shape, limits = shape_of(bed.decoder, bed.pool), stage.result.limits
    behind, alone = (
        bed.seconds(bed.plan(1, start, length=turn), repeats=2 * REPEATS) for start in (prefix, 0)
    )
    row: dict[str, object] = {
        "model": name,
        "rows": turn,
        "behind": prefix,
        "ms": behind.scaled(1e3),
        "ms behind nothing": alone.scaled(1e3),
        "over the floor of the limits": "-",
    }
    if limits:
        ops = shape.prefill_ops(prefix + turn) - shape.prefill_ops(prefix)
        floor = max(ops / limits.matrix, shape.decode_bytes(prefix + turn) / limits.read)
        row["over the floor of the limits"] = behind.median / floor
    stage.add(TURN_TABLE, row)


def _prompt(bed: Bed, prompt_len: int, chunk: int) -> float:
    """Return the seconds from an empty context to the first token."""
    whole = bed.plan(1, 0, length=prompt_len).requests[0]
    plans = [bed.part(whole, start, start + chunk) for start in range(0, prompt_len, chunk)]
    began = time.perf_counter()
    for plan in plans:
        bed.runner.step(plan)
    return time.perf_counter() - began
