"""The plots of `foretoken bench phases`, all in one style; imported only to draw them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

from ..common.report import Spread
from ..common.roofline import arithmetic_seconds, decode_floor, prefill_floor, weights_seconds
from .data import DepthPoint, Phases

# Okabe and Ito's colours can be told apart by colour-blind readers, and in grey.
BLUE, ORANGE, GREEN, INK, PALE = "#0072B2", "#D55E00", "#009E73", "#222222", "#777777"
STYLE: Any = {  # Matplotlib exports no type for its settings.
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.edgecolor": PALE,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e4e4e4",
    "grid.linewidth": 0.7,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "legend.fontsize": 9,
}
PANEL = (5.6, 4.0)  # Size of one plot in inches.
HEADROOM = 1.3  # Height of a linear axis as a multiple of its highest curve.
WIDE = 100.0  # A log axis over a smaller range also has ticks at 2 and 5.
Panels: TypeAlias = Sequence[Axes]


def draw_all(phases: Phases, folder: Path) -> list[str]:
    """Write NAME.png for every measured phase; return the names."""
    plots = {
        "prefill": (_prefill, phases.prefill),
        "decode": (_decode, phases.decode),
        "batch": (_batch, phases.batches),
        "cached": (_cached, phases.cached),
        "depth": (_depth, phases.depths),
    }
    drawn = [name for name, (_, points) in plots.items() if points]
    with mpl.rc_context(STYLE):
        for name in drawn:
            figure = Figure(figsize=(2 * PANEL[0], PANEL[1] + 0.4), layout="constrained")
            panels = figure.subplots(1, 2)
            plots[name][0](phases, list(panels))
            figure.suptitle(_subtitle(phases), fontsize=9, color=PALE, x=0.01, ha="left")
            figure.savefig(folder / f"{name}.png", dpi=130, metadata={"Software": None})
    return drawn


def _subtitle(phases: Phases) -> str:
    settings = [str(phases.settings["dtype"])]
    if phases.settings.get("quantize", "none") != "none":
        settings.append(str(phases.settings["quantize"]))
    return ", ".join([phases.model, *settings, phases.limits.how, str(phases.machine["cpu"])])


# -- the plots ----------------------------------------------------------------------------------


def _prefill(phases: Phases, panels: Panels) -> None:
    time, rate = panels
    lengths = [p.prompt_len for p in phases.prefill]
    fine = _between(lengths)
    shape, limits = phases.shape, phases.limits
    _measured(time, lengths, [p.cold for p in phases.prefill], BLUE, "measured")
    arithmetic = [arithmetic_seconds(shape, limits, n) for n in fine]
    _roof(time, fine, arithmetic, "roofline: operations / matrix rate")
    weights = [weights_seconds(shape, limits)] * len(fine)
    _roof(time, fine, weights, "roofline: weights / read bandwidth", dotted=True)
    _name(time, "Time to the first token", "prompt, tokens", "seconds")
    rates = [p.cold.inverse(p.prompt_len) for p in phases.prefill]
    _measured(rate, lengths, rates, BLUE, "measured")
    roof = [n / prefill_floor(shape, limits, n) for n in fine]
    _roof(rate, fine, roof, "roofline: the slower of both")
    _name(rate, "Prefill rate", "prompt, tokens", "tokens/s")
    for axes in panels:
        _log_log(axes, lengths)


def _decode(phases: Phases, panels: Panels) -> None:
    time, rate = panels
    positions = [p.position for p in phases.decode]
    fine = _between(positions)
    shape, limits = phases.shape, phases.limits
    _measured(time, positions, [p.seconds.scaled(1e3) for p in phases.decode], BLUE, "measured")
    floors = [1e3 * decode_floor(shape, limits, n) for n in fine]
    _roof(time, fine, floors, "roofline: (weights + KV) / read bandwidth")
    _name(time, "Time of a token", "position, tokens", "milliseconds")
    time.set_xlim(left=0)
    time.xaxis.set_major_formatter(FuncFormatter(_plain))
    rates = [p.seconds.inverse(shape.decode_bytes(p.position) / 1e9) for p in phases.decode]
    _measured(rate, positions, rates, BLUE, "measured")
    _roof(rate, fine, [limits.read / 1e9] * len(fine), "roofline: read bandwidth")
    _name(rate, "Weights and KV read per token", "position, tokens", "GB/s")
    rate.set_xscale("log")
    _ticks(rate, positions)
    for axes in panels:
        _from_zero(axes)


def _batch(phases: Phases, panels: Panels) -> None:
    rate, latency = panels
    sizes = [p.size for p in phases.batches]
    fine = _between(sizes)
    at = phases.batches[0].position
    floors = [decode_floor(phases.shape, phases.limits, at, size) for size in fine]
    roof = "roofline: the slower of bytes and operations"
    _measured(rate, sizes, [p.rate for p in phases.batches], BLUE, "measured")
    _roof(rate, fine, [n / floor for n, floor in zip(fine, floors, strict=True)], roof)
    _name(rate, "Throughput of all requests", "requests at once", "tokens/s")
    seconds = [p.seconds.scaled(1e3) for p in phases.batches]
    _measured(latency, sizes, seconds, BLUE, "measured")
    _roof(latency, fine, [1e3 * floor for floor in floors], roof)
    _name(latency, "Time per token of one request", "requests at once", "milliseconds")
    for axes in panels:
        _log_log(axes, sizes)


def _cached(phases: Phases, panels: Panels) -> None:
    time, ratio = panels
    lengths = [p.prompt_len for p in phases.cached]
    _measured(time, lengths, [p.cold for p in phases.cached], BLUE, "cold")
    _measured(time, lengths, [p.cached for p in phases.cached], ORANGE, "prompt cached", "s")
    fine = _between(lengths)
    floors = [prefill_floor(phases.shape, phases.limits, n) for n in fine]
    _roof(time, fine, floors, "roofline, cold")
    floors = [decode_floor(phases.shape, phases.limits, n) for n in fine]
    _roof(time, fine, floors, "roofline, cached: (weights + KV) / read", dotted=True)
    _name(time, "Time to the first token", "prompt, tokens", "seconds")
    ratios = [p.ratio for p in phases.cached]
    ratio.plot(lengths, ratios, color=GREEN, marker="o", markersize=4.5, label="cold / cached")
    _name(ratio, "Speedup by the cache", "prompt, tokens", "cold / cached")
    for axes in panels:
        _log_log(axes, lengths)


def _depth(phases: Phases, panels: Panels) -> None:
    steps, time = panels
    label = "simulated" if phases.simulated else "measured"
    fixed = [p for p in phases.depths if isinstance(p.depth, int)]
    places = [_place(p) for p in phases.depths]
    tokens = [p.tokens_per_step for p in phases.depths]
    most = [p.depth + 1 for p in fixed if isinstance(p.depth, int)]
    steps.plot(places[:-1], tokens[:-1], color=BLUE, marker="o", markersize=4.5, label=label)
    steps.plot(places[-1:], tokens[-1:], color=ORANGE, marker="D", linestyle="", label="auto")
    _roof(steps, places[:-1], most, "all drafts accepted")
    title = f"Tokens a step, simulated: {phases.draft}" if phases.simulated else "Tokens a step"
    _name(steps, title, "draft tokens a step", "tokens")
    steps.set_ylim(0, HEADROOM * max(*tokens, 1.5))
    spreads = [p.seconds.scaled(1e3) for p in phases.depths]
    _measured(time, places[:-1], spreads[:-1], BLUE, label)
    _measured(time, places[-1:], spreads[-1:], ORANGE, "auto", "D")
    floor = decode_floor(phases.shape, phases.limits, phases.depth_position)
    floors = [1e3 * floor / each for each in tokens[:-1]]
    _roof(time, places[:-1], floors, "roofline: weights and KV once a step")
    _name(time, "Time of a token", "draft tokens a step", "milliseconds")
    _from_zero(time)
    for axes in panels:
        axes.set_xticks(places, [str(p.depth) for p in phases.depths])


def _place(point: DepthPoint) -> float:
    """Return the place of a depth on the axis; "auto" stands apart from the numbers."""
    return point.depth if isinstance(point.depth, int) else 9.5


# -- one style for all --------------------------------------------------------------------------


def _measured(
    axes: Axes,
    xs: Sequence[float],
    spreads: Sequence[Spread],
    color: str,
    label: str,
    marker: str = "o",
) -> None:
    """Plot medians, with bars from the lowest to the highest value."""
    medians = [s.median for s in spreads]
    bars = [[s.median - s.low for s in spreads], [s.high - s.median for s in spreads]]
    axes.errorbar(
        xs,
        medians,
        yerr=bars,
        color=color,
        label=label,
        marker=marker,
        markersize=4.5,
        linewidth=1.6,
        elinewidth=1.1,
        capsize=2.5,
    )


def _roof(
    axes: Axes, xs: Sequence[float], ys: Sequence[float], label: str, *, dotted: bool = False
) -> None:
    style = (0, (1, 1.6)) if dotted else (0, (5, 3))
    axes.plot(xs, ys, color=INK, linewidth=1.2, linestyle=style, label=label, zorder=1.5)


def _name(axes: Axes, title: str, x: str, y: str) -> None:
    axes.set_title(title, pad=10)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    _legend(axes)


def _legend(axes: Axes, where: Literal["best", "upper left"] = "best") -> None:
    """Draw the legend: measurements first, then the lines."""
    named = zip(*axes.get_legend_handles_labels(), strict=True)
    handles, labels = zip(*sorted(named, key=lambda each: "roofline" in each[1]), strict=True)
    axes.legend(handles, labels, loc=where)


def _from_zero(axes: Axes) -> None:
    """Begin the axis at zero, with room for the legend above the curves."""
    axes.set_ylim(0, HEADROOM * axes.get_ylim()[1])
    _legend(axes, "upper left")


def _log_log(axes: Axes, xs: Sequence[int]) -> None:
    axes.set_xscale("log")
    axes.set_yscale("log")
    _ticks(axes, xs)
    low, high = axes.get_ylim()
    subs = (1.0, 2.0, 5.0) if high < WIDE * low else (1.0,)
    axes.yaxis.set_major_locator(LogLocator(subs=subs))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(_plain))
    _legend(axes)  # The curves have moved, so the legend needs a new place.


def _ticks(axes: Axes, xs: Sequence[int]) -> None:
    """Set ticks at the measured points, without those that would overlap."""
    kept = [xs[0]]
    for x in xs[1:]:
        if x >= 1.7 * kept[-1]:
            kept.append(x)
    axes.xaxis.set_major_locator(FixedLocator(kept))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(_plain))


def _plain(value: float, _: object = None) -> str:
    """Format a number: 32k for 32768, 20k for 20000, otherwise digits such as 2040 and 0.001."""
    for thousand in (1024, 1000):
        if value >= thousand and value % thousand == 0:
            return f"{value / thousand:.0f}k"
    return f"{value:g}" if value < 10000 else f"{value / 1000:.3g}k"


def _between(xs: Sequence[int], per_gap: int = 12) -> list[int]:
    """Return whole numbers from first to last, evenly spaced on a log axis, for a smooth line."""
    low, high = xs[0], xs[-1]
    count = per_gap * max(1, len(xs) - 1)
    return sorted({round(low * (high / low) ** (i / count)) for i in range(count + 1)})
