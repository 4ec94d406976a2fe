"""Output of every benchmark: command, machine, table, spread, JSON."""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

Row = Mapping[str, object]
RESULTS = Path(__file__).parents[1] / "results"


class Spread(msgspec.Struct, frozen=True):
    """Lowest, median and highest of a few runs."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Spread of at least one value."""
        return cls(min(values), statistics.median(values), max(values))

    def scaled(self, factor: float) -> Spread:
        """Multiply by ``factor``, to another unit."""
        return Spread(self.low * factor, self.median * factor, self.high * factor)

    def inverse(self, amount: float) -> Spread:
        """Seconds for ``amount`` to a rate."""
        return Spread(amount / self.high, amount / self.median, amount / self.low)

    def __str__(self) -> str:
        return f"{number(self.median)} [{number(self.low)} .. {number(self.high)}]"


def number(value: float) -> str:
    """Three digits, and no powers of ten."""
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"


def heading() -> dict[str, object]:
    """Command and machine, which every report begins with."""
    return {"command": command(), "machine": machine()}


def machine() -> dict[str, object]:
    """Processor, cores, memory, Python: what a reader needs to judge a figure."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "python": platform.python_version(),
        "load_average": os.getloadavg()[0],
    }


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.is_file() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def command() -> str:
    """The command line as typed, but for where this machine keeps its files."""
    program = Path(sys.argv[0])
    said = [Path(each).name if Path(each).is_absolute() else each for each in sys.argv[1:]]
    return " ".join(["foretoken" if program.name == "foretoken" else _as_module(program), *said])


def _as_module(program: Path) -> str:
    """Command of a file of this package: `foretoken bench serve`, or a module of `bench/lab`."""
    parts = [part for part in program.with_suffix("").parts if part != "__main__"]
    if "lab" not in parts:
        return f"foretoken bench {parts[-1]}"
    return ".".join(["python -m foretoken.bench", *parts[parts.index("lab") :]])


def table(rows: Sequence[Row]) -> str:
    """A Markdown table with the columns of all rows; what a row lacks is left empty."""
    columns = list(dict.fromkeys(column for row in rows for column in row))
    cells = [columns, ["---"] * len(columns)]
    cells += [[_cell(row.get(column, "")) for column in columns] for row in rows]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    padded = ([c.ljust(w) for c, w in zip(line, widths, strict=True)] for line in cells)
    return "\n".join(f"| {' | '.join(line)} |" for line in padded)


def listed(named: Mapping[str, object]) -> str:
    """Names and values in one line."""
    return ", ".join(f"{name} {_cell(value)}" for name, value in named.items())


def _cell(value: object) -> str:
    """A number in short, a spread of a JSON as such; a bar or a new line would end the cell."""
    if isinstance(value, dict):
        value = msgspec.convert(value, Spread)
    if value is None:
        return "-"
    text = number(value) if isinstance(value, float) else str(value)
    return text.replace("|", "\\|").replace("\n", " ")


def write_json(path: Path, report: Mapping[str, object]) -> None:
    """One report, readable by people too."""
    path.parent.mkdir(parents=True, exist_ok=True)
    plain = msgspec.to_builtins(report)
    path.write_text(json.dumps(plain, indent=1) + "\n", encoding="utf-8")
