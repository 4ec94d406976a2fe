"""Table of the figures: medians, the best of the others, ratios, aims. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import mul

from ...common.report import Spread
from .engines import OURS
from .rows import Row


@dataclass(slots=True)
class Figures:
    """Results of one engine in one row: a value for each turn, or an error."""

    values: list[float] = field(default_factory=list)
    tokens: list[list[int]] = field(default_factory=list)  # of the first turn
    numbers: list[list[float]] = field(default_factory=list)  # the same, of vectors and scores
    error: str = ""
    seconds: float = 0.0  # of all its measured calls

    @property
    def spread(self) -> Spread | None:
        """Spread of the values; None where nothing was measured, or where a turn failed."""
        return None if self.error or not self.values else Spread.of(self.values)


Found = Mapping[str, Figures]
"""Results by engine."""


def best_other(row: Row, found: Found) -> tuple[str, float] | None:
    """The engine, other than ours, with the best median; the one that the row names, if it does."""
    medians = {
        name: figures.spread.median
        for name, figures in found.items()
        if name != OURS.name and figures.spread is not None and row.against in ("", name)
    }
    if not medians:
        return None
    name = (max if row.is_rate else min)(medians, key=lambda name: medians[name])
    return name, medians[name]


def ratio(row: Row, found: Found) -> float | None:
    """Ours over the best of the others, so that above 1 we are ahead, also where seconds count."""
    best, ours = best_other(row, found), found.get(OURS.name, Figures()).spread
    if best is None or ours is None:
        return None
    return ours.median / best[1] if row.is_rate else best[1] / ours.median


def verdict(row: Row, times: float | None) -> str:
    """The aim, and which part of it is met."""
    if row.must is None or row.stretch is None:
        return ""
    aim = f"{row.must:g} / {row.stretch:g}"
    if times is None:
        return aim
    met = "met" if times >= row.must else "missed"
    return f"{aim}: {'stretch' if times >= row.stretch else met}"


def agreement(left: Sequence[Sequence[int]], right: Sequence[Sequence[int]]) -> float | None:
    """Share of the tokens before the first difference of each pair of answers."""
    wanted = sum(map(len, left))
    if not wanted:
        return None
    return sum(_common(*pair) for pair in zip(left, right, strict=False)) / wanted


def _common(left: Sequence[int], right: Sequence[int]) -> int:
    pairs = zip(left, right, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(left), len(right)))


def line(
    row: Row, found: Found, names: Sequence[str], limit: float | None = None
) -> dict[str, object]:
    """One line of the table. ``limit``: the row's roofline."""
    best, times = best_other(row, found), ratio(row, found)
    cells: dict[str, object] = {"workload": f"{row.title} ({row.unit})"}
    cells |= {name: _cell(found.get(name)) for name in names}
    cells["roofline"] = "-" if limit is None else _number(limit)
    cells["best other"] = best[0] if best is not None else "-"
    cells["ours over it"] = "-" if times is None else f"{times:.2f}"
    cells["aim, must / stretch"] = verdict(row, times)
    return cells


def _cell(figures: Figures | None) -> str:
    if figures is None:
        return "-"
    if figures.error:
        return "cannot" if figures.error.startswith("cannot") else "failed"
    spread = figures.spread
    if spread is None:
        return "-"
    return f"{_number(spread.median)} [{_number(spread.low)} .. {_number(spread.high)}]"


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def notes(row: Row, found: Found) -> list[str]:
    """Why cells have no figure, and how far others say the same tokens as we do.

    bfloat16 leaves near ties to rounding; a share near 0 would be another model.
    """
    said = [f"{row.name}: {name}: {each.error}" for name, each in found.items() if each.error]
    shares = {
        name: share
        for name, share in _agreements(found).items()
        if share is not None and row.setting.dtype == "bf16" and name != OURS.name
    }
    if row.kind in ("embed", "score") and shares:
        listed = ", ".join(f"{name} {share:.4f}" for name, share in shares.items())
        said.append(f"{row.name}: cosine of all numbers with ours: {listed}")
    elif shares:
        listed = ", ".join(f"{name} {share:.2f}" for name, share in shares.items())
        said.append(f"{row.name}: tokens before the first that differs from ours: {listed}")
    return said


def _agreements(found: Found) -> dict[str, float | None]:
    ours = found.get(OURS.name, Figures())
    return {name: _alike(ours, each) for name, each in found.items()}


def _alike(ours: Figures, other: Figures) -> float | None:
    if other.numbers:
        return closeness(ours.numbers, other.numbers)
    return agreement(ours.tokens, other.tokens) if other.tokens else None


def closeness(left: Sequence[Sequence[float]], right: Sequence[Sequence[float]]) -> float | None:
    """Cosine of all numbers, one list behind the other; None where they differ in their count."""
    one, two = ([number for each in side for number in each] for side in (left, right))
    lengths = math.hypot(*one) * math.hypot(*two)
    return sum(map(mul, one, two)) / lengths if len(one) == len(two) and lengths else None


def record(row: Row, found: Found, limit: float | None = None) -> dict[str, object]:
    """The same for JSON, with every value."""
    best, agreements = best_other(row, found), _agreements(found)
    return {
        "row": row.name,
        "title": row.title,
        "unit": row.unit,
        "engines": {
            name: {
                "values": each.values,
                "spread": each.spread,
                "error": each.error,
                "agreement": agreements[name],
            }
            for name, each in found.items()
        },
        "roofline": limit,
        "best_other": None if best is None else best[0],
        "ratio": ratio(row, found),
        "must": row.must,
        "stretch": row.stretch,
    }
