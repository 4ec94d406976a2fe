"""A cluster that serves a trace in virtual time, with the real scheduler, cache, tiers and routing.

``foretoken bench plan --trace FILE --replicas 1,2,4 [--prefill N --decode M]``. Step times come
from the cost model of an engine of the model: measured now, or read from a file (``--costs``).
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ..api.cli.flags import Parser
from ..api.cluster.front.routing import Route
from ..core.config import format_size
from ..core.errors import ForetokenError
from ..core.interface.extras.tiers import Medium
from ..core.options.settings import parse_size
from .common.report import heading, table, write_json
from .load.corpus import id_corpus
from .load.figures import parse_slo
from .load.report import out_path
from .load.trace import TRACE
from .load.workloads import Scene, above_zero, natural, positive
from .planning.cluster import Figures, Shape, planned
from .planning.costs import GB, StepCosts, measured_costs, read_costs, write_costs
from .planning.drafts import Drafts
from .planning.replica import Tier

ABOUT = (
    "Plan a cluster: replay a trace through the real scheduler, prefix cache, tiers and router in "
    "virtual time, with measured step times. Prints the time to first tokens, token gaps, hit rate "
    "and KV occupancy for each number of replicas, with and without the tiers."
)
EXIT_USAGE = 2
DEFAULT_KV = "2GiB"


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _counts(text: str) -> list[int]:
    return [positive(part) for part in text.split(",")]


def _slo(text: str) -> dict[str, float]:
    try:
        return parse_slo(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _parser() -> Parser:
    parser = Parser(
        prog="foretoken bench plan",
        description=ABOUT,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    TRACE.add_flags(parser)
    add = parser.add_argument
    add("--seed", type=int, default=0, help="seed of the prompts, and of a synthetic trace")
    add("--replicas", type=_counts, metavar="N,N,..",
        help="numbers of replicas to plan (1; with --prefill and --decode: their sum)")  # fmt: skip
    add("--prefill", type=positive, metavar="N",
        help="number of prefill replicas in an additional plan (with --decode)")  # fmt: skip
    add("--decode", type=positive, metavar="M",
        help="number of decode replicas in an additional plan (with --prefill)")  # fmt: skip
    add("--transfer-rate", type=above_zero, default=10.0, metavar="GB/S",
        help="rate at which a replica reads KV pages of another one")  # fmt: skip
    add("--kv-memory", type=_size, default=DEFAULT_KV, metavar="SIZE",
        help="memory of each replica's KV pool")  # fmt: skip
    add("--kv-host", type=_size, metavar="SIZE", help="host memory of each replica for KV pages")
    add("--kv-disk", type=_size, metavar="SIZE", help="disk space of each replica for KV pages")
    add("--host-rate", type=above_zero, default=20.0, metavar="GB/S",
        help="rate at which KV pages are copied to and from host memory")  # fmt: skip
    add("--disk-rate", type=above_zero, default=2.0, metavar="GB/S",
        help="rate at which KV pages are written to and read from the disk")  # fmt: skip
    add("--route", type=Route, choices=list(Route), default=Route.KV,
        help="routing policy, as for foretoken serve --route")  # fmt: skip
    add("--max-running", type=positive, metavar="N",
        help="maximum running requests per replica (as in the measured engine)")  # fmt: skip
    add("--draft-depth", type=natural, default=0, metavar="K",
        help="draft tokens per request and step")  # fmt: skip
    add("--tokens-per-step", type=above_zero, default=1.0, metavar="X",
        help="mean tokens that a step adds to a request with such drafts, 1 to K + 1")  # fmt: skip
    add("--draft-ms", type=float, default=0.0, metavar="MS",
        help="time to propose the drafts of a step (lookups: almost 0)")  # fmt: skip
    add("--arrival-ms", type=float, default=0.0, metavar="MS",
        help="time from a client to an engine's queue, which delays first tokens")  # fmt: skip
    add("--pace", type=above_zero, default=1.0, metavar="X",
        help="factor by which steps take longer than measured, for example because replicas, "
        "front and clients share cores")  # fmt: skip
    add("--slo", type=_slo, default={},
        help="latency limits for goodput in ms, such as ttft=500,itl=50")  # fmt: skip
    add("--model", metavar="MODEL", help="model to measure, as for foretoken serve")
    add("--threads", type=positive, metavar="N", help="number of threads of the measured engine")
    add("--costs", type=Path, metavar="FILE", help="file of step costs to use instead of measuring")
    add("--write-costs", type=Path, metavar="FILE", help="file to write the step costs to")
    add("--plots", type=Path, metavar="DIR", help="folder for plots (needs matplotlib)")
    add(
        "--out",
        type=Path,
        metavar="FILE",
        help="JSON file to write (in bench/results/)",
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Plan, print the table, write JSON and plots; return the exit code."""
    parser = _parser()
    args = parser.parse_args(argv)
    if (args.prefill is None) != (args.decode is None):
        parser.error("--prefill and --decode must be given together")
    if args.plots is not None and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plots needs matplotlib: pip install 'foretoken[bench]'")
    try:
        costs = _costs(args).slower(args.pace)
        scene = _scene(args, costs)
        plans = [each for shape in _shapes(args, costs) for each in _planned(costs, shape, scene)]
    except (ForetokenError, OSError, ValueError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return EXIT_USAGE
    except SystemExit as error:  # The trace or the file of costs is malformed.
        print(f"{parser.prog}: {error.code}", file=sys.stderr)
        return EXIT_USAGE
    _show(args, costs, plans, scene.remarks())
    return 0


def _costs(args: argparse.Namespace) -> StepCosts:
    if args.costs is not None:
        costs = read_costs(args.costs)
    else:
        options = {} if args.threads is None else {"threads": args.threads}
        costs = measured_costs(args.model, options)
    if args.write_costs is not None:
        write_costs(args.write_costs, costs)
    return costs


def _scene(args: argparse.Namespace, costs: StepCosts) -> Scene:
    """Return the inputs of the trace's sessions, whose prompts are random tokens."""
    corpus = asyncio.run(id_corpus(None, costs.vocab_size, args.seed))
    return Scene(args, corpus, costs.max_model_len, args.seed)


def _shapes(args: argparse.Namespace, costs: StepCosts) -> list[Shape]:
    """Return a cluster for each number of replicas, without tiers and, if requested, with them."""
    asked: tuple[tuple[Medium, int | None, float], ...] = (
        ("host", args.kv_host, args.host_rate),
        ("disk", args.kv_disk, args.disk_rate),
    )
    tiers = [
        Tier(medium, num_bytes, costs.page_bytes / (rate * GB))
        for medium, num_bytes, rate in asked
        if num_bytes is not None
    ]
    plain = Shape(
        num_replicas=1,
        kv_bytes=args.kv_memory,
        max_running=args.max_running or costs.max_running,
        route=args.route,
        arrival_s=args.arrival_ms / 1e3,
        drafts=Drafts(
            depth=args.draft_depth,
            tokens_per_step=args.tokens_per_step,
            seconds=args.draft_ms / 1e3,
        ),
        transfer_s=costs.page_bytes / (args.transfer_rate * GB),
    )
    kinds = [plain] if not tiers else [plain, replace(plain, tiers=tiers)]
    return [
        replace(kind, num_replicas=count, num_prefill=num_prefill)
        for count, num_prefill in _counts_of(args)
        for kind in kinds
    ]


def _counts_of(args: argparse.Namespace) -> list[tuple[int, int]]:
    """Return (number of replicas, number of prefill replicas) pairs, those without roles first."""
    apart = [] if args.prefill is None else [(args.prefill + args.decode, args.prefill)]
    alike = args.replicas or [count for count, _ in apart] or [1]
    return [*((count, 0) for count in alike), *apart]


def _planned(costs: StepCosts, shape: Shape, scene: Scene) -> list[Figures]:
    scene.num_cut, scene.notes = 0, []
    figures = planned(costs, shape, TRACE.sessions(scene), scene.args.slo)
    names = "+".join(tier.medium for tier in shape.tiers)
    return [{"tiers_used": names or "none", **figures}]


# -- output -------------------------------------------------------------------------------------


def replicas_of(figures: Figures) -> str:
    """Return the number of replicas, by role."""
    number, prefill = figures["replicas"], figures["prefill"]
    return f"{prefill} prefill, {number - prefill} decode" if prefill else str(number)


def row(figures: Figures) -> dict[str, object]:
    """Return a row of the table."""
    first, gap = figures["ttft_ms"] or {}, figures["itl_ms"] or {}
    prompt = figures["prompt_tokens"] or 0
    return {
        "replicas": replicas_of(figures),
        "tiers": figures["tiers_used"],
        "served": f"{figures['served']} of {figures['requests']}",
        "first token p50, ms": first.get("p50", "-"),
        "p99": first.get("p99", "-"),
        "gap p50, ms": gap.get("p50", "-"),
        "gap p99": gap.get("p99", "-"),
        "tokens/s": figures["output_tokens_per_s"] or 0.0,
        "hit rate": figures["prefix_hit_rate"] or 0.0,
        "loaded": figures["loaded_tokens"] / prompt if prompt else 0.0,
        "KV held": figures["kv_held"],
        "at most": figures["kv_most_held"],
        "KV cached": figures["kv_cached"],
        "busy": _busy(figures),
        "preempted": figures["preemptions"],
        **({"goodput": figures["goodput"]["share"]} if figures["goodput"] else {}),
    }


def _busy(figures: Figures) -> object:
    """Return the share of time in which steps run, separately for each role."""
    busy, prefill = figures["busy_by_replica"], figures["prefill"]
    parts = [busy[:prefill], busy[prefill:]] if prefill else [busy]
    shares = [sum(part) / len(part) for part in parts]
    return ", ".join(f"{share:.2f}" for share in shares) if prefill else shares[0]


def _show(
    args: argparse.Namespace, costs: StepCosts, plans: Sequence[Figures], remarks: Sequence[str]
) -> None:
    report = heading()
    notes = [
        f"computed, not measured: step times come from {costs.machine.get('cpu')}, {costs.model}",
        f"each replica: {format_size(args.kv_memory)} for KV, route {args.route}; {_drafts(args)}",
        "KV held, KV cached: mean shares of the pools while steps run",
        "loaded: share of prompt tokens that were read from a tier or from another replica",
        *remarks,
    ]
    print(*(f"{key}: {value}" for key, value in report.items()), sep="\n")
    print(f"\n{table([row(each) for each in plans])}\n", *(f"- {note}" for note in notes), sep="\n")
    write_json(
        out_path(args.out, "plan", "trace"),
        {**report, "notes": notes, "plans": [_kept(each) for each in plans]},
    )
    if args.plots is not None:
        from .planning.plots import draw

        args.plots.mkdir(parents=True, exist_ok=True)
        print(*draw(plans, args.plots), sep="\n")


def _drafts(args: argparse.Namespace) -> str:
    if not args.draft_depth:
        return "no drafts"
    return f"drafts of {args.draft_depth} tokens, {args.tokens_per_step:g} tokens per step"


def _kept(figures: Figures) -> Figures:
    """Return the figures without the values of each request and each step."""
    left_out = ("occupancy", "first_tokens_s")
    return {name: value for name, value in figures.items() if name not in left_out}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
