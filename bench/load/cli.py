"""The flags that ``bench serve`` and ``bench offline`` share, and one run of one workload."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from ...api.cli.flags import Parser
from .agents import AGENTS
from .figures import SLO_MEASURES, Record, parse_slo, summary
from .generator import Load, Session, arrivals, warm_up
from .noisy_neighbour import NOISY_NEIGHBOUR
from .report import progress, stall_note, stalls
from .short_beside_long import SHORT_BESIDE_LONG
from .trace import TRACE
from .workloads import (
    MIXED,
    SHARED_PREFIX,
    Scene,
    Workload,
    above_zero,
    natural,
    positive,
)

WORKLOADS = {
    each.name: each
    for each in (SHARED_PREFIX, AGENTS, MIXED, NOISY_NEIGHBOUR, SHORT_BESIDE_LONG, TRACE)
}
ALL = "all"


class _WithDefaults(argparse.ArgumentDefaultsHelpFormatter):
    """Help that tells the defaults that there are."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default in (None, False, {}):
            return action.help
        return super()._get_help_string(action)


def parsed(
    prog: str, about: str, argv: Sequence[str], add_own: Callable[[Parser], None]
) -> list[argparse.Namespace]:
    """One namespace for each workload that is to run: several for "all"."""
    parser = Parser(prog=prog, description=about)
    commands = parser.add_subparsers(
        dest="workload", metavar="WORKLOAD", required=True, parser_class=Parser
    )
    for workload in WORKLOADS.values():
        own = commands.add_parser(workload.name, help=workload.help, formatter_class=_WithDefaults)
        workload.add_flags(own)
        _add_common(own)
        add_own(own)
    every = commands.add_parser(
        ALL, help="all of them, with their default settings", formatter_class=_WithDefaults
    )
    _add_common(every)
    add_own(every)
    args = parser.parse_args(argv)
    if args.workload != ALL:
        if WORKLOADS[args.workload].has_loop and (args.request_rate or args.concurrency):
            parser.error(f"{args.workload} has a loop of its own: no rate, no concurrency")
        if recorded(args) is not None and (args.request_rate or args.concurrency):
            parser.error("--record sends one session after the other: no rate, no concurrency")
        return [_settled(args)]
    if args.out is not None:
        parser.error("--out is for one workload; all write their own file")
    at = list(argv).index(ALL)
    rest = [*argv[:at], *argv[at + 1 :]]
    return [_settled(parser.parse_args([name, *rest])) for name in WORKLOADS]


def _settled(args: argparse.Namespace) -> argparse.Namespace:
    """Complete the options with those that the workload decides."""
    workload = WORKLOADS[args.workload]
    if args.temperature is None and recorded(args) is None:
        args.temperature = workload.temperature
    if workload.has_loop:
        args.request_rate = args.concurrency = None
    return args


def recorded(args: argparse.Namespace) -> Path | None:
    """Recorded sessions that are to be sent."""
    found: Path | None = getattr(args, "record", None)
    return found


def _add_common(parser: Parser) -> None:
    add = parser.add_argument_group("load").add_argument
    add("--seed", type=int, default=0, help="seed of prompts, lengths and arrivals")
    add(
        "--concurrency",
        "--max-concurrency",
        type=positive,
        help="sessions at a time (closed loop); with --request-rate their largest number",
    )
    add(
        "--request-rate",
        type=above_zero,
        metavar="R",
        help="sessions started each second (open loop), or inf",
    )
    add(
        "--burstiness",
        type=above_zero,
        default=1.0,
        metavar="B",
        help="shape of the arrivals; 1: Poisson; lower: in bursts",
    )
    add(
        "--slo",
        type=_slo,
        default={},
        help=f"limits in ms that a good request keeps: {','.join(f'{n}=N' for n in SLO_MEASURES)}",
    )
    add(
        "--warmup",
        type=natural,
        default=4,
        metavar="N",
        help="number of requests before the measurement",
    )
    add(
        "--temperature",
        type=float,
        help="sampling temperature (0; of noisy-neighbour 1; of --record as recorded)",
    )
    add(
        "--progress",
        action="store_true",
        help="show progress on stderr even where it is no terminal",
    )
    add("--out", type=Path, metavar="FILE", help="JSON file to write (in bench/results/)")
    add("--save-requests", action="store_true", help="write every request to the JSON file, too")


def _slo(text: str) -> dict[str, float]:
    try:
        return parse_slo(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


# -- one run ------------------------------------------------------------------------------------


async def run(load: Load, scene: Scene) -> tuple[dict[str, object], list[str]]:
    """Figures and notes of one workload, after its warm-up."""
    args, workload = scene.args, WORKLOADS[scene.args.workload]
    warmed = await warm_up(load, scene.corpus, args.warmup)
    failed = [record for record in warmed if record.error is not None]
    sessions = workload.sessions(scene)
    planned = sum(session.planned for session in sessions)
    cpu, begin = time.process_time(), time.perf_counter()
    async with progress(load, planned, wanted=args.progress), stalls() as worst:
        how = await _drive(load, workload, sessions, scene)
    seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
    await load.driver.settle()
    figures = {
        "workload": workload.name,
        "loop": how,
        **summary(load.records, args.slo),
        "process_cpu_seconds": cpu,
        "process_cpu_share": cpu / seconds,
        "longest_stall_ms": 1e3 * worst[0],
        **workload.own_figures(load.records, args),
    }
    notes = [how, *scene.remarks()]
    if failed:
        notes.append(f"{len(failed)} of the warm-up requests failed")
    notes += stall_note(worst[0])
    return figures, [*notes, *_failures([*failed, *load.records])]


def _failures(records: Sequence[Record]) -> list[str]:
    """The first message of each kind of error."""
    found = {record.error: record.message for record in reversed(records) if record.error}
    return [f"{kind}: {' '.join(message.split())}" for kind, message in found.items() if message]


async def _drive(load: Load, workload: Workload, sessions: Sequence[Session], scene: Scene) -> str:
    """Run all sessions in the loop that the flags or the workload ask for; what it was."""
    args = scene.args
    cap = f", at most {args.concurrency} at a time" if args.concurrency else ""
    if workload.has_loop:
        await load.closed(sessions, 1)
        return "closed loop, one round after the other; times are from sending"
    if args.request_rate is None and workload.has_schedule:
        await load.open(sessions, [session.at or 0.0 for session in sessions], args.concurrency)
        return f"open loop by the trace's timestamps{cap}; times are from the scheduled arrival"
    rate = args.request_rate or (None if args.concurrency else workload.request_rate)
    if rate is None:
        concurrency = min(args.concurrency or workload.concurrency, len(sessions))
        await load.closed(sessions, concurrency)
        return f"closed loop, {concurrency} sessions at a time; times are from sending"
    times = arrivals(len(sessions), rate, scene.rng("arrivals"), args.burstiness)
    await load.open(sessions, times, args.concurrency)
    if rate == float("inf"):
        return f"open loop, all sessions at once{cap}; times are from then"
    kind = "Poisson" if args.burstiness == 1 else f"gamma, burstiness {args.burstiness:g}"
    return f"open loop, {rate:g} sessions/s, {kind}{cap}; times are from the scheduled arrival"
