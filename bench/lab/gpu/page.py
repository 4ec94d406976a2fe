"""Writes the results page from the JSON of the stages: ``python -m foretoken.bench.lab.gpu.page``.

``--from FILE`` first splits the combined JSON of a run on another machine.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import msgspec

from ...common.report import RESULTS, listed, table, write_json
from .stage import Result, read_result

PAGE = Path(__file__).resolve().parents[3] / "docs" / "gpu-results.md"
ORDER = (
    "facts", "compiling", "oracle", "equality", "decode", "verify", "drafts", "prefill",
    "speculation", "kinds", "sharing",
)  # fmt: skip
HEAD = """\
# Results on a GPU

Written by `bench/lab/gpu_check.sh`, which measures everything in one run of under nine minutes.
Figures are medians, with the lowest and the highest of the repeats in brackets. Roofline: the
least time for the bytes and the operations of a step, at the limits that the same run measured.
"""
NOTHING = "Not yet measured.\n"


def main(argv: Sequence[str] | None = None) -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--from", type=Path, dest="combined", help="combined JSON file of a run")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the JSON files")
    parser.add_argument("--page", type=Path, default=PAGE)
    args = parser.parse_args(argv)
    if args.combined is not None:
        split(args.combined, args.results)
    args.page.write_text(render(read_results(args.results)), encoding="utf-8")


def split(combined: Path, folder: Path) -> None:
    """Split a combined JSON file into one file per stage."""
    found = msgspec.json.decode(combined.read_bytes(), type=dict[str, Result])
    for name, result in found.items():
        write_json(folder / f"gpu-{name}.json", msgspec.to_builtins(result))


def read_results(folder: Path) -> list[Result]:
    """Read the results in a folder, in the order of the stages."""
    paths = [folder / f"gpu-{name}.json" for name in ORDER]
    return [read_result(path) for path in paths if path.is_file()]


def render(results: Sequence[Result]) -> str:
    """Return the page as Markdown."""
    if not results:
        return f"{HEAD}\n{NOTHING}"
    return "\n".join([HEAD, *_about(results[0]), *(_section(each) for each in results)])


def _about(first: Result) -> list[str]:
    warning = "**A rehearsal without a GPU: the figures mean nothing.**\n"
    lines = [warning] if first.simulated else []
    for title, named in (("Card", first.card), ("Machine", first.machine)):
        lines.append(f"{title}: {listed(named)}.\n")
    lines.append(f"Versions: {listed(first.versions)}.\n")
    if first.limits is not None:
        lines.append(
            f"Limits of this run: {first.limits.read / 1e12:.3g} TB/s, "
            f"{first.limits.matrix / 1e12:.4g} TFLOP/s in {first.limits.dtype}.\n"
        )
    return lines


def _section(result: Result) -> str:
    """Return a stage's title, verdict, tables, notes and errors."""
    parts = [
        f"## {result.title}\n",
        f"`{result.command}`: {result.status}, {result.seconds:.0f} s "
        f"([JSON](../bench/results/gpu-{result.stage}.json)).\n",
    ]
    for title, rows in result.tables.items():
        parts.append(f"### {title}\n\n{table(rows)}\n")
    parts += [f"{note}\n" for note in result.notes]
    if result.errors:
        parts.append("What went wrong:\n")
        parts.append("\n".join("- " + error.replace("\n", " ") for error in result.errors) + "\n")
    return "\n".join(parts)


if __name__ == "__main__":
    main()
