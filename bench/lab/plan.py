"""The planner beside a measured run: `python -m foretoken.bench.lab.plan`.

Replicas of a model serve a trace behind a front, by HTTP; the planner computes the same trace with
step costs that it measures on this machine. The table has both and their ratio. The time from a
client to an engine's queue is measured with single requests before the load and given to the plan.

Client, front and replicas share this machine, maybe with other programs: steps that wait for a core
take longer than they were measured. So there is a second plan, *at the run's pace*: its steps are
longer by one factor, with which all of them together take as long as those of the measured run.
What it is off by is the planner's own error; what the first plan is off by beyond that is the
machine's.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import json
import random
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from ..common.report import RESULTS, heading, table, write_json
from ..load.corpus import id_corpus
from ..load.http import Http
from ..load.trace import TRACE
from ..load.workloads import Scene, above_zero, positive
from ..planning.cluster import Shape, planned
from ..planning.costs import StepCosts, measured_costs
from ..serve import main as bench_serve
from .replicas import PROMPT_LEN, Place, arrivals, body_of, fronted, replica_of

LIMIT = 0.2  # share by which a plan may be off
PROBES = 20
PACES = 3  # plans until the pace of the run is met
FIGURES = {
    "first token p50, ms": ("ttft_ms", "p50"),
    "first token mean, ms": ("ttft_ms", "mean"),
    "gap p50, ms": ("itl_ms", "p50"),
    "gap mean, ms": ("itl_ms", "mean"),
    "hit rate": ("prefix_hit_rate",),
}


def measured(place: Place, args: argparse.Namespace) -> dict[str, Any]:
    """Figures of the trace on running servers."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "figures.json")
        load = ["trace", *_load_flags(args), "--url", place.url, "--speculation", "off"]
        with contextlib.redirect_stdout(io.StringIO()):
            if bench_serve([*load, "--out", str(out)]):
                raise SystemExit("nothing was served")
        found: dict[str, Any] = json.loads(out.read_text())
        return found


def _load_flags(args: argparse.Namespace) -> list[str]:
    flags = ["--requests", str(args.requests), "--seed", str(args.seed)]
    flags += ["--speedup", str(args.speedup), "--scale", str(args.scale)]
    return flags if args.trace is None else [*flags, "--trace", str(args.trace)]


def arrival_seconds(place: Place, costs: StepCosts, seed: int) -> float:
    """Seconds that a single request's first token takes beyond its step."""
    rng = random.Random(seed)

    async def probe() -> list[float]:
        http, found = Http(place.url), list[float]()
        loop = asyncio.get_running_loop()
        for _ in range(PROBES):
            began = loop.time()
            times, _ = await arrivals(http, body_of(rng, 2))
            found.append(times[0] - began)
        http.close()
        return found

    step_s = costs.scale * float(costs.curve().at(PROMPT_LEN)) + costs.step_s + costs.request_s
    return max(0.0, median(asyncio.run(probe())) - step_s)


def compared(model: str, args: argparse.Namespace) -> list[dict[str, object]]:
    """A line for each figure: measured, planned, and their ratio."""
    costs = measured_costs(model, {"threads": 1, "kv_tokens": args.kv_tokens})
    replicas = [replica_of(model, args.kv_tokens)] * args.replicas
    with fronted(model, "kv", replicas) as place:
        arrival_s = arrival_seconds(place, costs, args.seed)
        before = asyncio.run(step_seconds(place))
        found = measured(place, args)
        spent = asyncio.run(step_seconds(place)) - before
    corpus = asyncio.run(id_corpus(None, costs.vocab_size, args.seed))
    shape = Shape(
        num_replicas=args.replicas,
        kv_bytes=-(-args.kv_tokens // costs.page_size) * costs.page_bytes,
        max_running=costs.max_running,
        arrival_s=arrival_s,
    )
    scene = Scene(args, corpus, costs.max_model_len, args.seed)
    plan = planned(costs, shape, TRACE.sessions(scene), {})
    paced, pace = plan, 1.0
    for _ in range(PACES):  # slower steps are fewer and wider
        pace *= spent / paced["step_seconds"]
        paced = planned(slower(costs, pace), shape, TRACE.sessions(scene), {})
    print(f"pace of the run: steps took {pace:.2f} times as long as measured alone\n", flush=True)
    return [
        _row(name, _at(found, path), _at(plan, path), _at(paced, path))
        for name, path in FIGURES.items()
    ]


async def step_seconds(place: Place) -> float:
    """Seconds that all steps of all replicas took so far, the host's part included."""
    http = Http(place.url)
    _, text = await http.get("/metrics")
    http.close()
    sums = re.findall(rb"^foretoken:step_part_seconds_sum\{[^}]*\} (\S+)$", text, re.MULTILINE)
    return sum(map(float, sums))


def slower(costs: StepCosts, pace: float) -> StepCosts:
    """Costs of steps that take so many times as long."""
    names = ("scale", "step_s", "request_s", "key_s")
    return msgspec.structs.replace(costs, **{name: pace * getattr(costs, name) for name in names})


def _at(figures: dict[str, Any], path: Sequence[str]) -> float:
    value: Any = figures
    for name in path:
        value = value[name]
    return float(value)


def _row(name: str, found: float, plan: float, paced: float) -> dict[str, object]:
    return {
        "figure": name,
        "measured": found,
        "planned": plan,
        "ratio": plan / found,
        "at the run's pace": paced,
        "its ratio": paced / found,
        "within 20%": abs(paced / found - 1) <= LIMIT,
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, plan, print the table, write the JSON."""
    parser = argparse.ArgumentParser(
        prog="python -m foretoken.bench.lab.plan", description=str(__doc__).partition("\n")[0]
    )
    add = parser.add_argument
    add("--model", default="builtin")
    add("--replicas", type=positive, default=2)
    add("--kv-tokens", type=positive, default=4096, help="KV pool of each replica")
    add("--trace", type=Path, metavar="FILE", help="trace (default: a synthetic one)")
    add("--requests", type=positive, default=80)
    add("--speedup", type=above_zero, default=2.0)
    add("--scale", type=above_zero, default=0.25)
    add("--seed", type=int, default=0)
    add("--out", type=Path, default=RESULTS / "plan.json")
    args = parser.parse_args(argv)
    args.write_trace = None
    report = heading()
    print(*(f"{key}: {value}" for key, value in report.items()), "", sep="\n", flush=True)
    rows = compared(args.model, args)
    print(table(rows), "", sep="\n", flush=True)
    report["rows"] = rows
    write_json(args.out, report)


if __name__ == "__main__":
    main()
