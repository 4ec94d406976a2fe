"""The plots of `foretoken bench plan`; imported only to draw them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..phases.plots import BLUE, GREEN, ORANGE, PALE, PANEL, STYLE

NO_TIMES = {"p99": float("nan")}
COLOURS = (BLUE, ORANGE, GREEN, PALE)


def draw(plans: Sequence[dict[str, Any]], folder: Path) -> list[Path]:
    """Plot latencies and hits by number of replicas, and occupancy over time; return the paths."""
    paths = [folder / "plan.png", folder / "occupancy.png"]
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(3 * PANEL[0], PANEL[1]), layout="constrained")
        _by_replicas(plans, list(figure.subplots(1, 3)))
        figure.savefig(paths[0], dpi=130, metadata={"Software": None})
        figure = Figure(figsize=(PANEL[0] * 2, PANEL[1]), layout="constrained")
        _over_time(plans, figure.subplots(1, 1))
        figure.savefig(paths[1], dpi=130, metadata={"Software": None})
    return paths


def _by_replicas(plans: Sequence[dict[str, Any]], panels: Sequence[Axes]) -> None:
    figures: dict[str, Callable[[dict[str, Any]], float]] = {
        "first token p99, ms": lambda plan: (plan["ttft_ms"] or NO_TIMES)["p99"],
        "gap p99, ms": lambda plan: (plan["itl_ms"] or NO_TIMES)["p99"],
        "hit rate": lambda plan: plan["prefix_hit_rate"] or 0.0,
    }
    kinds = list(dict.fromkeys(map(_kind, plans)))
    for panel, (name, read) in zip(panels, figures.items(), strict=True):
        for kind, colour in zip(kinds, COLOURS, strict=False):
            own = [plan for plan in plans if _kind(plan) == kind]
            counts = [plan["replicas"] for plan in own]
            panel.plot(counts, [read(plan) for plan in own], "o-", color=colour, label=kind)
        panel.set(title=name, xlabel="replicas", xticks=counts)
        panel.set_ylim(bottom=0)
    panels[0].legend(title="tiers")


def _kind(plan: dict[str, Any]) -> str:
    tiers = str(plan["tiers_used"])
    return f"{tiers}, {plan['prefill']} for prompts" if plan["prefill"] else tiers


def _over_time(plans: Sequence[dict[str, Any]], panel: Axes) -> None:
    """Plot the held pages of each plan's first replica over time."""
    for plan, colour in zip(plans, COLOURS, strict=False):
        times, held, _ = zip(*plan["occupancy"][0], strict=True)
        label = f"{plan['replicas']} replicas, tiers: {_kind(plan)}"
        panel.plot(times, held, color=colour, label=label, linewidth=1)
    panel.set(title="KV that requests hold, share of a replica's pool", xlabel="seconds")
    panel.legend()
