"""The planner beside a measured run: `python -m foretoken.bench.lab.plan`.

Replicas of a model serve a trace behind a front, by HTTP; the planner computes the same trace with
step costs that it measures on this machine, on an engine alone. Client, front and replicas share
the cores here, which a plan knows nothing of. So a shorter trace with other prompts is served
first. Of it come the two numbers that `foretoken bench plan` takes for that: ``--pace``, by which
steps are longer than alone, and ``--arrival-ms``, which first tokens take beyond their steps.

With ``--prefill`` some replicas compute prompts for the others (needs the extra pd).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import json
import os
import re
import tempfile
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from ..common.report import RESULTS, heading, table, write_json
from ..load.corpus import id_corpus
from ..load.figures import Record
from ..load.http import Http
from ..load.trace import TRACE
from ..load.workloads import Scene, above_zero, natural, positive
from ..planning.cluster import Figures, Shape, first_tokens, planned
from ..planning.costs import GB, StepCosts, measured_costs
from ..serve import main as bench_serve
from .replicas import Place, fronted, replica_of

LIMIT = 0.2  # share by which a plan may be off
TUNINGS = 3  # plans of the first trace, until both numbers stay
FIGURES = {
    "first token p50, ms": ("ttft_ms", "p50"),
    "first token mean, ms": ("ttft_ms", "mean"),
    "gap p50, ms": ("itl_ms", "p50"),
    "gap mean, ms": ("itl_ms", "mean"),
    "hit rate": ("prefix_hit_rate",),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One trace as it was served. ``step_s``: seconds of all steps, the host's part included."""

    figures: dict[str, Any]
    first_tokens: list[float]  # seconds, in the order in which requests were due
    step_s: float


def measured(place: Place, load: Namespace) -> Measured:
    """Serve a trace. Raises SystemExit where requests fail."""
    before = asyncio.run(step_seconds(place))
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "figures.json")
        flags = [
            "trace", "--requests", str(load.requests), "--seed", str(load.seed),
            "--speedup", str(load.speedup), "--scale", str(load.scale),
            "--url", place.url, "--speculation", "off", "--save-requests", "--out", str(out),
            *([] if load.trace is None else ["--trace", str(load.trace)]),
        ]  # fmt: skip
        with contextlib.redirect_stdout(io.StringIO()):
            failed = bench_serve(flags)
        found: dict[str, Any] = {} if failed else json.loads(out.read_text())
    if not found or found["served"] < found["requests"]:
        raise SystemExit(f"of {load.requests} requests some failed: {found.get('errors')}")
    records = msgspec.convert(found.pop("records"), list[Record])
    step_s = asyncio.run(step_seconds(place)) - before
    return Measured(figures=found, first_tokens=first_tokens(records), step_s=step_s)


async def step_seconds(place: Place) -> float:
    """Seconds that all steps of all replicas took so far, the host's part included."""
    http = Http(place.url)
    _, text = await http.get("/metrics")
    http.close()
    sums = re.findall(rb"^foretoken:step_part_seconds_sum\{[^}]*\} (\S+)$", text, re.MULTILINE)
    return sum(map(float, sums))


async def forget(place: Place) -> None:
    """Empty the prefix caches of all replicas."""
    http = Http(place.url)
    status = await http.post("/cache/flush", b"{}", lambda *_: None)
    http.close()
    if status != 200:
        raise SystemExit(f"/cache/flush: {status}")


def plan_of(costs: StepCosts, shape: Shape, load: Namespace) -> Figures:
    """Plan the trace of a load."""
    corpus = asyncio.run(id_corpus(None, costs.vocab_size, load.seed))
    return planned(
        costs, shape, TRACE.sessions(Scene(load, corpus, costs.max_model_len, load.seed)), {}
    )


def tuned(costs: StepCosts, shape: Shape, load: Namespace, found: Measured) -> tuple[float, float]:
    """Return pace and arrival (seconds) with which the plan of a load is as it was measured.

    Slower steps are fewer and wider, so both are found in turn.
    """
    pace, arrival_s = 1.0, 0.0
    for _ in range(TUNINGS):
        plan = plan_of(costs.slower(pace), replace(shape, arrival_s=arrival_s), load)
        pace *= found.step_s / plan["step_seconds"]
        plan = plan_of(costs.slower(pace), replace(shape, arrival_s=arrival_s), load)
        pairs = zip(found.first_tokens, plan["first_tokens_s"], strict=True)
        arrival_s = max(0.0, arrival_s + median(seen - expected for seen, expected in pairs))
    return pace, arrival_s


def compared(args: Namespace) -> dict[str, Any]:
    """Pace, arrival, and a line for each figure: measured, planned, and their ratio."""
    costs = measured_costs(args.model, {"threads": 1, "kv_tokens": args.kv_tokens})
    shape = Shape(
        num_replicas=args.replicas,
        num_prefill=args.prefill,
        kv_bytes=-(-args.kv_tokens // costs.page_size) * costs.page_bytes,
        max_running=costs.max_running,
        transfer_s=costs.page_bytes / (args.transfer_rate * GB),
    )
    first = Namespace(**{**vars(args), "trace": None, "requests": args.tuning_requests})
    first.seed += 1
    with fronted(args.model, "kv", commands(args)) as place:
        found = measured(place, first)
        asyncio.run(forget(place))
        pace, arrival_s = tuned(costs, shape, first, found)
        found = measured(place, args)
    alone = plan_of(costs, shape, args)
    plan = plan_of(costs.slower(pace), replace(shape, arrival_s=arrival_s), args)
    rows = [
        _row(name, *(_at(each, path) for each in (found.figures, plan, alone)))
        for name, path in FIGURES.items()
        if not (args.prefill and name == "hit rate")  # servers count what they read as hits
    ]
    return {"pace": pace, "arrival_ms": 1e3 * arrival_s, "rows": rows}


def commands(args: Namespace) -> list[Callable[[str], list[str]]]:
    """The commands of the replicas, by the front's address."""
    plain = replica_of(args.model, args.kv_tokens)

    def command(role: str) -> Callable[[str], list[str]]:
        return lambda address: [*plain(address), "--kv-transfer", "nixl", "--role", role]

    if not args.prefill:
        return [plain] * args.replicas
    num_decode = args.replicas - args.prefill
    return [command("prefill")] * args.prefill + [command("decode")] * num_decode


def _at(figures: dict[str, Any], path: Sequence[str]) -> float:
    value: Any = figures
    for name in path:
        value = value[name]
    return float(value)


def _row(name: str, found: float, plan: float, alone: float) -> dict[str, object]:
    return {
        "figure": name,
        "measured": found,
        "planned": plan,
        "ratio": plan / found,
        "within 20%": abs(plan / found - 1) <= LIMIT,
        "without pace and arrival": alone,
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, plan, print the table, write the JSON."""
    parser = argparse.ArgumentParser(
        prog="python -m foretoken.bench.lab.plan", description=str(__doc__).partition("\n")[0]
    )
    add = parser.add_argument
    add("--model", default="builtin")
    add("--replicas", type=positive, default=2)
    add("--prefill", type=natural, default=0, help="replicas of them that compute prompts")
    add("--transfer-rate", type=above_zero, default=4.0, help="GB/s of pages between replicas")
    add("--kv-tokens", type=positive, default=4096, help="KV pool of each replica")
    add("--trace", type=Path, metavar="FILE", help="trace (default: a synthetic one)")
    add("--requests", type=positive, default=80)
    add("--tuning-requests", type=positive, default=40, help="requests of the first trace")
    add("--speedup", type=above_zero, default=2.0)
    add("--scale", type=above_zero, default=0.25)
    add("--seed", type=int, default=0)
    add("--out", type=Path, default=RESULTS / "plan.json")
    args = parser.parse_args(argv)
    if args.prefill >= args.replicas:
        parser.error("--prefill must leave a replica for answers")
    args.write_trace = None
    os.environ.setdefault("FORETOKEN_CLUSTER_KEY", "of this benchmark")
    report = heading()
    print(*(f"{key}: {value}" for key, value in report.items()), "", sep="\n", flush=True)
    found = compared(args)
    print(f"pace {found['pace']:.2f}, arrival {found['arrival_ms']:.1f} ms")
    print(table(found["rows"]), "", sep="\n", flush=True)
    write_json(args.out, report | found)


if __name__ == "__main__":
    main()
