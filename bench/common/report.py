"""Output of every benchmark: command, machine, table, spread, JSON."""

from __future__ import annotations

import argparse
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
    """Lowest, median and highest value of a few runs."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Return the spread of at least one value."""
        return cls(min(values), statistics.median(values), max(values))

    def scaled(self, factor: float) -> Spread:
        """Return the spread multiplied by ``factor``, to convert it to another unit."""
        return Spread(self.low * factor, self.median * factor, self.high * factor)

    def inverse(self, amount: float) -> Spread:
        """Convert the seconds for ``amount`` items to a rate."""
        return Spread(amount / self.high, amount / self.median, amount / self.low)

    def __str__(self) -> str:
        return f"{number(self.median)} [{number(self.low)} .. {number(self.high)}]"


def number(value: float) -> str:
    """Format a number with three digits and without an exponent."""
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"


def heading() -> dict[str, object]:
    """Return the command and the machine, with which every report begins."""
    return {"command": command(), "machine": machine()}


def read_options(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the arguments of a measurement, with --out added, and print the heading."""
    parser.add_argument("--out", type=Path, help="file to write")
    options = parser.parse_args(argv)
    print(*(f"{key}: {value}" for key, value in heading().items()), sep="\n", flush=True)
    return options


def machine() -> dict[str, object]:
    """Return processor, cores, memory and Python version, which readers need to judge figures."""
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
    """Return the command line as typed, with absolute paths cut to their last part."""
    program = Path(sys.argv[0])
    said = [Path(each).name if Path(each).is_absolute() else each for each in sys.argv[1:]]
    return " ".join(["foretoken" if program.name == "foretoken" else _as_module(program), *said])


def _as_module(program: Path) -> str:
    """Return the command that runs a file of this package.

    Either `foretoken bench NAME` or `python -m` for a module of `bench/lab`.
    """
    parts = [part for part in program.with_suffix("").parts if part != "__main__"]
    if "lab" not in parts:
        return f"foretoken bench {parts[-1]}"
    return ".".join(["python -m foretoken.bench", *parts[parts.index("lab") :]])


def table(rows: Sequence[Row]) -> str:
    """Return a Markdown table with the columns of all rows; missing cells are empty."""
    columns = list(dict.fromkeys(column for row in rows for column in row))
    cells = [columns, ["---"] * len(columns)]
    cells += [[_cell(row.get(column, "")) for column in columns] for row in rows]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    padded = ([c.ljust(w) for c, w in zip(line, widths, strict=True)] for line in cells)
    return "\n".join(f"| {' | '.join(line)} |" for line in padded)


def listed(named: Mapping[str, object]) -> str:
    """Return names and values in one line."""
    return ", ".join(f"{name} {_cell(value)}" for name, value in named.items())


def _cell(value: object) -> str:
    """Return the text of a cell. Escapes bars and newlines, which would end it."""
    if isinstance(value, dict):
        value = msgspec.convert(value, Spread)
    if value is None:
        return "-"
    text = number(value) if isinstance(value, float) else str(value)
    return text.replace("|", "\\|").replace("\n", " ")


def write_json(path: Path, report: Mapping[str, object]) -> None:
    """Write a report as indented JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    plain = msgspec.to_builtins(report)
    path.write_text(json.dumps(plain, indent=1) + "\n", encoding="utf-8")
