"""The tables of `foretoken bench phases`, as Markdown."""

from __future__ import annotations

from collections.abc import Iterator

from .phases_data import Phases
from .report import table
from .roofline import decode_floor, prefill_floor


def tables(phases: Phases) -> Iterator[tuple[str, str]]:
    """Title and Markdown table of every phase that was measured."""
    shape, limits = phases.shape, phases.limits
    if phases.prefill:
        yield (
            "Prefill",
            table(
                [
                    {
                        "prompt": p.prompt_len,
                        "first token s": p.cold,
                        "tokens/s": p.prompt_len / p.cold.median,
                        "roofline": _share(
                            prefill_floor(shape, limits, p.prompt_len), p.cold.median
                        ),
                    }
                    for p in phases.prefill
                ]
            ),
        )
    if phases.decode:
        yield (
            "Decode",
            table(
                [
                    {
                        "position": p.position,
                        "s a token": p.seconds,
                        "roofline": _share(
                            decode_floor(shape, limits, p.position), p.seconds.median
                        ),
                    }
                    for p in phases.decode
                ]
            ),
        )
    yield from _more_tables(phases)


def _more_tables(phases: Phases) -> Iterator[tuple[str, str]]:
    if phases.batches:
        yield (
            "Batch size",
            table(
                [
                    {"requests": p.size, "tokens/s": p.rate, "s a token": p.seconds}
                    for p in phases.batches
                ]
            ),
        )
    if phases.prefill:
        yield (
            "Cold and cached",
            table(
                [
                    {
                        "prompt": p.prompt_len,
                        "cached tokens": p.num_cached,
                        "cold s": p.cold,
                        "cached s": p.cached,
                        "ratio": p.ratio,
                    }
                    for p in phases.prefill
                ]
            ),
        )
    if phases.depths:
        yield (
            "Depth of speculation",
            table(
                [
                    {
                        "depth": p.depth,
                        "tokens/step": p.tokens_per_step,
                        "acceptance": "-" if p.acceptance is None else p.acceptance,
                        "s a token": p.seconds,
                    }
                    for p in phases.depths
                ]
            ),
        )


def _share(floor: float, seconds: float) -> str:
    return f"{floor / seconds:.0%}"
