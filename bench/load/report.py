"""Output of a load: progress while it runs, tables and JSON at its end."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import TextIO

from ..common.report import table
from .figures import PERCENTILES, Record
from .generator import Load

LATENCIES = {
    "ttft_ms": "TTFT ms",
    "itl_ms": "ITL ms, per token",
    "chunk_gap_ms": "gap between chunks ms",
    "tpot_ms": "TPOT ms",
    "e2e_ms": "E2E ms",
    "tokens_per_s_user": "tokens/s per user, reached by 50, 90, 99%",
}
WIDTH = 78
BUSY = 0.5  # Share of a core above which the client may limit the result.
TICK_SECONDS = 0.05
STALL_SECONDS = 0.1  # Stalls of the client longer than this are reported.

Figures = Mapping[str, object]


@contextlib.asynccontextmanager
async def progress(load: Load, planned: int, *, wanted: bool) -> AsyncIterator[None]:
    """Show a line of progress on stderr, rewritten on a terminal, else every few seconds."""
    is_terminal = sys.stderr.isatty()
    if not (wanted or is_terminal):
        yield
        return
    shown = asyncio.create_task(_show(load, planned, sys.stderr, is_terminal))
    try:
        yield
    finally:
        shown.cancel()
        if is_terminal:
            print(f"\r{' ' * WIDTH}\r", end="", file=sys.stderr, flush=True)


async def _show(load: Load, planned: int, out: TextIO, is_terminal: bool) -> None:
    begin = time.monotonic()
    while True:
        await asyncio.sleep(0.25 if is_terminal else 5.0)
        line = progress_line(load.records, load.running, planned, time.monotonic() - begin)
        if is_terminal:
            print(f"\r{line[:WIDTH]:{WIDTH}}", end="", file=out, flush=True)
        else:
            print(line, file=out, flush=True)


def progress_line(records: Sequence[Record], running: int, planned: int, seconds: float) -> str:
    """Return a line such as ``[#######.....] 14/24  8 run  212 chunks/s  0 errors  3 s``."""
    ended = len(records) - running
    share = min(1.0, ended / planned) if planned else 0.0
    bar = "#" * round(20 * share)
    tokens = sum(len(record.counts) for record in records)
    errors = sum(record.error is not None for record in records)
    rate = f"{tokens / seconds:.0f} chunks/s" if seconds > 0 else ""
    return (
        f"[{bar:.<20}] {ended}/{planned}  {running} run  {rate}  {errors} errors  {seconds:.0f} s"
    )


@contextlib.asynccontextmanager
async def stalls() -> AsyncIterator[list[float]]:
    """Measure the longest time by which timers of this loop were late, while the block runs."""
    worst = [0.0]

    async def watch() -> None:
        while True:
            begin = time.perf_counter()
            await asyncio.sleep(TICK_SECONDS)
            worst[0] = max(worst[0], time.perf_counter() - begin - TICK_SECONDS)

    task = asyncio.create_task(watch())
    try:
        yield worst
    finally:
        task.cancel()


# -- tables -------------------------------------------------------------------------------------


def latency_rows(figures: Figures) -> list[dict[str, object]]:
    """Return rows of mean and percentiles; 99% of users reach a rate's "p99"."""
    rows = []
    for name, title in LATENCIES.items():
        found = figures.get(name)
        cells: dict[str, object] = dict.fromkeys(["mean", *PERCENTILES], "-")
        if isinstance(found, Mapping):
            cells |= {column: found[column] for column in cells}
        rows.append({"": title, **cells})
    return rows


def total_rows(figures: Figures) -> list[dict[str, object]]:
    """Return rows of the totals, which are figures without a distribution."""
    shown = {
        "requests served / sent": f"{figures['served']} / {figures['requests']}",
        "errors": _errors(figures["errors"]),
        "seconds": figures["seconds"],
        "output tokens/s, total": figures["output_tokens_per_s"],
        "prompt tokens/s, cached ones too": figures["prompt_tokens_per_s"],
        "prefix hits": _of(figures, "prefix_hit_rate", "cached_tokens", "prompt_tokens"),
        "acceptance": _of(figures, "acceptance_rate", "accepted_tokens", "proposed_tokens"),
        "tokens/step": figures["tokens_per_step"],
        "tokens/chunk": figures["tokens_per_chunk"],
        **_goodput(figures["goodput"]),
        "KV occupancy, mean / max": _kv(figures.get("kv_usage")),
        "client, share of a core": figures.get("client_cpu"),
        "roofline": figures.get("roofline") or "unknown",
    }
    return [{"": key, "value": value} for key, value in shown.items()]


def _errors(errors: object) -> str:
    assert isinstance(errors, Mapping)
    return ", ".join(f"{count} x {kind}" for kind, count in errors.items()) or "none"


def _of(figures: Figures, share: str, part: str, whole: str) -> str | None:
    value = figures[share]
    if not isinstance(value, float):
        return None
    return f"{value:.3g} ({figures[part]} of {figures[whole]} tokens)"


def _kv(usage: object) -> str | None:
    return f"{usage['mean']:.3g} / {usage['max']:.3g}" if isinstance(usage, Mapping) else None


def _goodput(goodput: object) -> dict[str, object]:
    if not isinstance(goodput, Mapping):
        return {}
    slo = ", ".join(f"{name} {limit:g} ms" for name, limit in goodput["slo_ms"].items())
    share, rate = goodput["share"] or 0.0, goodput["requests_per_s"] or 0.0
    return {f"goodput ({slo})": f"{share:.3g} of the requests, {rate:.3g} requests/s"}


def neighbour_rows(found: Figures) -> list[dict[str, object]]:
    """Return rows of the streams before and during a long prompt, over all rounds."""
    return [
        {
            "p99 of the streams": title,
            "before, ms": found[f"{name}_p99_before_ms"],
            "while it joins, ms": found[f"{name}_p99_during_ms"],
            "ratio": found[f"{name}_ratio"],
        }
        for name, title in (("itl", "ITL per token"), ("chunk_gap", "gap between chunks"))
    ]


BESIDE = {
    "ttft_p50": "TTFT of the short ones, p50",
    "ttft_p99": "TTFT of the short ones, p99",
    "longest_gap": "longest gap between chunks of a short one",
    "long": "first long one sent to last first token",
}


def beside_rows(found: Sequence[Figures]) -> list[dict[str, object]]:
    """Return rows of short and long prompts, alone and together, by number of long prompts."""
    return [
        {
            "short beside long": f"{each['num_short']} beside {each['num_long']}",
            "": title,
            "alone, ms": each[f"{name}_alone_ms"],
            "beside, ms": each[f"{name}_beside_ms"],
            "ratio": each[f"{name}_ratio"],
        }
        for each in found
        for name, title in BESIDE.items()
    ]


def show(name: str, figures: Figures, notes: Sequence[str]) -> None:
    """Print the figures of one run."""
    print(f"\n{name}\n\n{table(latency_rows(figures))}\n\n{table(total_rows(figures))}")
    neighbour = figures.get("neighbour")
    if isinstance(neighbour, Mapping):
        rounds = f"{neighbour['rounds']} rounds; aim: ratio at most {neighbour['aim']:g}"
        long = f"TTFT of the long prompt, ms: {neighbour['long_ttft_ms']}"
        left = f"streams still running at its first token: {neighbour['streams_left']}"
        print(f"\n{table(neighbour_rows(neighbour))}\n\n{rounds}\n{long}\n{left}")
    beside = figures.get("short_beside_long")
    if isinstance(beside, list) and beside:
        print(f"\n{table(beside_rows(beside))}")
    print("", *(f"- {note}" for note in notes), sep="\n", flush=True)


def out_path(given: Path | None, command_name: str, workload: str) -> Path:
    """Return the given path, or one such as ``bench/results/serve-agents.json``."""
    return given or Path(f"bench/results/{command_name}-{workload}.json")


def stall_note(seconds: float) -> list[str]:
    """Return a warning if the client itself was stalled."""
    if seconds <= STALL_SECONDS:
        return []
    return [f"WARNING: the client stalled for {1e3 * seconds:.0f} ms, which latencies include"]


def busy_note(share: float) -> list[str]:
    """Return a warning if the client itself may have limited the result."""
    if share <= BUSY:
        return []
    return [f"WARNING: the client used {share:.0%} of a core and may have limited the result"]
