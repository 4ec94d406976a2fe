"""Report of `foretoken bench phases`: each phase with its plot, its table and notes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ..common.report import listed, table
from ..common.roofline import batch_ridge, decode_floor, prefill_floor, prefill_ridge
from .data import Phases

LOUD = 0.15  # Repeats that differ by more than this share of their median are mentioned.
TITLES = {
    "prefill": "Prefill",
    "decode": "Decode",
    "batch": "Batch size",
    "cached": "Cold and cached",
    "depth": "Depth of speculation",
}
"""Titles of phases by the names of their plots."""


def write_report(phases: Phases, folder: Path, *, has_plots: bool) -> Path:
    """Write report.md and return its path."""
    path = folder / "report.md"
    path.write_text(render(phases, has_plots=has_plots), encoding="utf-8")
    return path


def render(phases: Phases, *, has_plots: bool) -> str:
    """Return the page: machine, then a title, a plot, a table and notes for each phase."""
    parts = [_head(phases)]
    for name, rows in tables(phases):
        parts.append(f"## {TITLES[name]}")
        parts += [f"![{TITLES[name]}]({name}.png)"] if has_plots else []
        parts += [rows, " ".join(_notes(phases, name))]
    return "\n\n".join(part for part in parts if part) + "\n"


def _head(phases: Phases) -> str:
    limits, shape = phases.limits, phases.shape
    settings, machine = listed(phases.settings), listed(phases.machine)
    notes = ""
    if phases.settings.get("quantize", "none") != "none":
        notes += " Quantised weights are multiplied by other instructions, which may be faster."
    if limits.drift > LOUD:
        notes += (
            f" The limits differed by {limits.drift:.0%} within the run: the machine was not idle."
        )
    return (
        f"# The phases of inference: {phases.model}\n\n"
        f"    {phases.command}\n\n"
        f"Machine: {machine}. Engine: {settings}. Prompts: {phases.text}.\n\n"
        f"A step reads {_size(shape.weight_bytes)} of weights and {_size(shape.kv_bytes)} of KV "
        f"for each position that it looks back on; a token costs "
        f"{2 * shape.block_params / 1e6:.4g} million operations in the layers. At best the machine "
        f"reads {limits.read / 1e9:.3g} GB/s and multiplies {limits.matrix / 1e9:.4g} GFLOP/s "
        f"in {limits.dtype} ({limits.how}); dashed lines follow from that.{notes} "
        f"Points are medians, bars reach from the lowest to the highest of the repeats."
    )


# -- tables -------------------------------------------------------------------------------------


def tables(phases: Phases) -> Iterator[tuple[str, str]]:
    """Yield name and Markdown table of every measured phase."""
    for name, rows in _rows(phases).items():
        if rows:
            yield name, table(rows)


def _rows(phases: Phases) -> dict[str, list[dict[str, object]]]:
    shape, limits = phases.shape, phases.limits
    prefill: list[dict[str, object]] = [
        {
            "prompt": (n := p.prompt_len),
            "first token s": p.cold,
            "tokens/s": n / p.cold.median,
            "roofline": _share(prefill_floor(shape, limits, n), p.cold.median),
            "of it attention": _share(shape.attention_ops(n), shape.prefill_ops(n)),
        }
        for p in phases.prefill
    ]
    decode: list[dict[str, object]] = [
        {
            "position": p.position,
            "s a token": p.seconds,
            "roofline": _share(decode_floor(shape, limits, p.position), p.seconds.median),
        }
        for p in phases.decode
    ]
    batches: list[dict[str, object]] = [
        {
            "requests": p.size,
            "tokens/s": p.rate,
            "s a token": p.seconds,
            "roofline": _share(decode_floor(shape, limits, p.position, p.size), p.seconds.median),
        }
        for p in phases.batches
    ]
    cached: list[dict[str, object]] = [
        {
            "prompt": p.prompt_len,
            "cached tokens": p.num_cached,
            "cold s": p.cold,
            "cached s": p.cached,
            "ratio": p.ratio,
        }
        for p in phases.cached
    ]
    plain = next((p.seconds.median for p in phases.depths if p.depth == 0), 0.0)
    depths: list[dict[str, object]] = [
        {
            "depth": p.depth,
            "tokens/step": p.tokens_per_step,
            "acceptance": "-" if p.acceptance is None else p.acceptance,
            "s a token": p.seconds,
            "times the speed": plain / p.seconds.median,
        }
        for p in phases.depths
    ]
    return dict(zip(TITLES, (prefill, decode, batches, cached, depths), strict=True))


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.0%}"


# -- notes --------------------------------------------------------------------------------------


def _notes(phases: Phases, name: str) -> Iterator[str]:
    """Yield notes on a phase: what bounds it on this machine, and the spread of its repeats."""
    shape, limits = phases.shape, phases.limits
    if name == "prefill":
        ridge = prefill_ridge(shape, limits)
        yield f"By the limits, prompts of {ridge} tokens or more are bound by arithmetic."
    if name == "decode" and shape.weight_bytes < phases.cache_bytes:
        yield (
            f"The weights ({_size(shape.weight_bytes)}) fit into the processor's cache "
            f"({_size(phases.cache_bytes)}): the line, which is drawn for memory, is not a strict "
            "limit."
        )
    if name == "batch":
        by_batch = batch_ridge(shape, limits, phases.batches[0].position)
        bound = (
            "reading at any batch size"
            if by_batch is None
            else f"arithmetic from {by_batch} requests on"
        )
        yield f"By the limits, a step is bound by {bound}."
    if name == "depth":
        kind = "simulated" if phases.simulated else "real, answers sampled at temperature 1"
        yield f"Drafts: {phases.draft}; acceptance is {kind}."
    found = [(runs, spread) for phase, runs, spread in phases.spreads() if phase == name]
    widest = max((s.high - s.low) / s.median for _, s in found)
    if widest > LOUD:
        yield f"Repeats of a point differ by up to {widest:.0%} of its median."
    if single := sum(runs == 1 for runs, _ in found):
        yield f"Points measured only once, without a bar: {single}."


def _size(num_bytes: float) -> str:
    """Format a size as 1.23 GB, 45.6 MB or 7.89 kB."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= size:
            return f"{num_bytes / size:.3g} {unit}"
    return f"{num_bytes:.3g} bytes"
