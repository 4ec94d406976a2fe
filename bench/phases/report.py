"""One page of `foretoken bench phases`: each plot, and one plain sentence of what it shows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ..common.report import Spread, listed, table
from ..common.roofline import batch_ridge, decode_floor, prefill_floor, prefill_ridge
from .data import DepthPoint, Phases, PrefillPoint

LOUD = 0.15  # of a median: repeats that lie further apart are mentioned


def write_report(phases: Phases, folder: Path, *, has_plots: bool) -> Path:
    """Write report.md; its path."""
    path = folder / "report.md"
    path.write_text(render(phases, has_plots=has_plots), encoding="utf-8")
    return path


def render(phases: Phases, *, has_plots: bool) -> str:
    """The page: machine, then a title, a plot or a table, and sentences for each phase."""
    rows = dict(tables(phases))
    parts = [_head(phases)]
    for name, title, sentence in sections(phases):
        body = f"![{title}]({name}.png)" if has_plots else rows[title]
        parts.append(f"## {title}\n\n{body}\n\n{sentence}")
    return "\n\n".join(parts) + "\n"


def sections(phases: Phases) -> Iterator[tuple[str, str, str]]:
    """File name, title and sentence of every phase that was measured."""
    if phases.prefill:
        yield "prefill", "Prefill", f"{prefill_sentence(phases)}{noise(phases, 'prefill')}"
    if phases.decode:
        yield "decode", "Decode", f"{decode_sentence(phases)}{noise(phases, 'decode')}"
    if phases.batches:
        yield "batch", "Batch size", f"{batch_sentence(phases)}{noise(phases, 'batch')}"
    if phases.cached:
        yield "cached", "Cold and cached", f"{cached_sentence(phases)}{noise(phases, 'cached')}"
    if phases.depths:
        sentence = f"{depth_sentence(phases)}{noise(phases, 'depth')}"
        yield "depth", "Depth of speculation", sentence


def _head(phases: Phases) -> str:
    limits, shape = phases.limits, phases.shape
    settings, machine = listed(phases.settings), listed(phases.machine)
    notes = ""
    if phases.settings.get("quantize", "none") != "none":
        notes += " Quantised weights are multiplied by other units, which may be faster."
    if limits.drift > LOUD:
        notes += (
            f" The limits differed by {limits.drift:.0%} within the run: the machine was not quiet."
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
    """Title and Markdown table of every phase that was measured."""
    for title, rows in _rows(phases).items():
        if rows:
            yield title, table(rows)


def _rows(phases: Phases) -> dict[str, list[dict[str, object]]]:
    shape, limits = phases.shape, phases.limits
    prefill: list[dict[str, object]] = [
        {
            "prompt": p.prompt_len,
            "first token s": p.cold,
            "tokens/s": p.prompt_len / p.cold.median,
            "roofline": _share(prefill_floor(shape, limits, p.prompt_len), p.cold),
        }
        for p in phases.prefill
    ]
    decode: list[dict[str, object]] = [
        {
            "position": p.position,
            "s a token": p.seconds,
            "roofline": _share(decode_floor(shape, limits, p.position), p.seconds),
        }
        for p in phases.decode
    ]
    batches: list[dict[str, object]] = [
        {"requests": p.size, "tokens/s": p.rate, "s a token": p.seconds} for p in phases.batches
    ]
    cached: list[dict[str, object]] = [
        {
            "prompt": p.prompt_len,
            "cached tokens": p.num_cached,
            "cold s": p.cold,
            "cached s": p.cached,
            "ratio": p.ratio,
        }
        for p in phases.prefill
    ]
    depths: list[dict[str, object]] = [
        {
            "depth": p.depth,
            "tokens/step": p.tokens_per_step,
            "acceptance": "-" if p.acceptance is None else p.acceptance,
            "s a token": p.seconds,
        }
        for p in phases.depths
    ]
    return {
        "Prefill": prefill,
        "Decode": decode,
        "Batch size": batches,
        "Cold and cached": cached,
        "Depth of speculation": depths,
    }


def _share(floor: float, seconds: Spread) -> str:
    return f"{floor / seconds.median:.0%}"


# -- sentences ----------------------------------------------------------------------------------


def prefill_sentence(phases: Phases) -> str:
    """Write from which length prefill is bound by arithmetic, and how fast it is."""
    shape, limits = phases.shape, phases.limits
    fastest = max(phases.prefill, key=lambda p: p.prompt_len / p.cold.median)
    last = phases.prefill[-1]
    share = shape.attention_ops(last.prompt_len) / shape.prefill_ops(last.prompt_len)
    slower = "" if last is fastest else f"; at {last.prompt_len:,} tokens, {_rate(phases, last)}"
    return (
        f"By the limits, prefill is bound by arithmetic from {prefill_ridge(shape, limits)} tokens "
        f"on and by reading the weights below. It is fastest at {fastest.prompt_len:,} tokens, "
        f"{_rate(phases, fastest)}{slower}. Attention is {share:.0%} of the "
        f"operations of {last.prompt_len:,} tokens."
    )


def _rate(phases: Phases, point: PrefillPoint) -> str:
    floor = prefill_floor(phases.shape, phases.limits, point.prompt_len)
    rate = point.prompt_len / point.cold.median
    return f"{rate:,.0f} tokens/s, {floor / point.cold.median:.0%} of the roofline"


def decode_sentence(phases: Phases) -> str:
    """Write the cost of a long context, and the cost of its bytes alone."""
    shape, limits = phases.shape, phases.limits
    first, last = phases.decode[0], phases.decode[-1]
    slower = last.seconds.median / first.seconds.median
    by_bytes = shape.decode_bytes(last.position) / shape.decode_bytes(first.position)
    shares = [decode_floor(shape, limits, p.position) / p.seconds.median for p in phases.decode]
    said = (
        f"A token at position {last.position:,} takes {_time(last.seconds.median)}, {slower:.3g} "
        f"times as long as at position {first.position:,} ({_time(first.seconds.median)}); by "
        f"bytes read it would be {by_bytes:.3g} times. Decoding runs at {min(shares):.0%} to "
        f"{max(shares):.0%} of the roofline."
    )
    if slower < 1 + LOUD and first.seconds.high > last.seconds.low:
        said += " The two are not told apart from the noise."
    return said + _cache_note(phases)


def _cache_note(phases: Phases) -> str:
    """Write that the roofline is no limit where the weights stay in a cache; else nothing."""
    if phases.shape.weight_bytes >= phases.cache_bytes:
        return ""
    return (
        f" The weights ({_size(phases.shape.weight_bytes)}) fit into the processor's cache "
        f"({_size(phases.cache_bytes)}), so the line, drawn for memory, is no strict limit here."
    )


def batch_sentence(phases: Phases) -> str:
    """Write the gain of a batch, and its cost to each request."""
    first = phases.batches[0]
    best = max(phases.batches, key=lambda p: p.rate.median)
    gain = best.rate.median / first.rate.median
    slower = best.seconds.median / first.seconds.median
    floor = decode_floor(phases.shape, phases.limits, best.position, best.size)
    ridge = batch_ridge(phases.shape, phases.limits, best.position)
    bound = "bound by reading at any size" if ridge is None else f"bound by arithmetic from {ridge}"
    return (
        f"{best.size} requests together make {best.rate.median:,.0f} tokens/s, {gain:.3g} times as "
        f"many as one alone, and each waits {slower:.3g} times as long for a token "
        f"({_time(best.seconds.median)} against {_time(first.seconds.median)}); that is "
        f"{best.rate.median * floor / best.size:.0%} of the roofline. By the limits, a step is "
        f"{bound}{'' if ridge is None else ' requests on'}."
    )


def cached_sentence(phases: Phases) -> str:
    """A sentence that says how much sooner the first token comes."""
    first, last = phases.cached[0], phases.cached[-1]
    return (
        f"With its prompt in the cache, the first token of {last.prompt_len:,} tokens comes after "
        f"{_time(last.cached.median)} instead of {_time(last.cold.median)}: {last.ratio:.3g} times "
        f"sooner ({last.num_cached:,} tokens were found); at {first.prompt_len:,} tokens it is "
        f"{first.ratio:.3g} times."
    )


def depth_sentence(phases: Phases) -> str:
    """Write which depth pays, and the results of "auto"."""
    plain = next(p for p in phases.depths if p.depth == 0)
    fixed = [p for p in phases.depths if isinstance(p.depth, int) and p.depth > 0]
    best = min(fixed, key=lambda p: p.seconds.median)
    auto = next(p for p in phases.depths if p.depth == "auto")
    pays = best.seconds.median < plain.seconds.median
    verdict = f"The best fixed depth is {best.depth}"
    if not pays:
        verdict = f"No fixed depth pays here; the best of them is {best.depth}"
    drafts = f"Drafts: {phases.draft}; acceptance is "
    drafts += "simulated." if phases.simulated else "real, answers sampled at temperature 1."
    return (
        f"{verdict}: {best.tokens_per_step:.3g} tokens a step, {_acceptance(best)} of the drafts "
        f"accepted, {_time(best.seconds.median)} a token, against "
        f"{_time(plain.seconds.median)} without drafts, {_chunk_budget(best, plain)}. Auto makes "
        f"{auto.tokens_per_step:.3g} tokens a step, "
        f"{_time(auto.seconds.median)} a token, {_chunk_budget(auto, plain)}. {drafts}"
    )


def _acceptance(point: DepthPoint) -> str:
    return "none" if point.acceptance is None else f"{point.acceptance:.0%}"


def _chunk_budget(point: DepthPoint, plain: DepthPoint) -> str:
    apart = point.seconds.high < plain.seconds.low or plain.seconds.high < point.seconds.low
    speed = f"{plain.seconds.median / point.seconds.median:.3g} times the speed"
    return speed if apart else f"{speed} (within the noise)"


def noise(phases: Phases, phase: str) -> str:
    """A warning where the repeats lie far apart, or where there were none."""
    found = [(runs, spread) for name, runs, spread in phases.spreads() if name == phase]
    widest = max((s.high - s.low) / s.median for _, s in found)
    said = ""
    if widest > LOUD:
        said += f" Repeats of a point lie up to {widest:.0%} of its median apart."
    single = sum(runs == 1 for runs, _ in found)
    if single:
        said += f" Points measured once, so without a bar: {single}."
    return said


def _time(seconds: float) -> str:
    """1.23 s, 45.6 ms or 789 us."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} us"


def _size(num_bytes: float) -> str:
    """1.23 GB, 45.6 MB or 7.89 kB."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= size:
            return f"{num_bytes / size:.3g} {unit}"
    return f"{num_bytes:.3g} bytes"
