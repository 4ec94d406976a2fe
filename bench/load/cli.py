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
    """A help formatter that shows the default of each flag that has one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default in (None, False, {}):
            return action.help
        return super()._get_help_string(action)


def parsed(
    prog: str, about: str, argv: Sequence[str], add_own: Callable[[Parser], None]
) -> list[argparse.Namespace]:
    """Parse the command line into one namespace per workload; "all" gives several."""
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
        ALL, help="all workloads, with their default settings", formatter_class=_WithDefaults
    )
    _add_common(every)
    add_own(every)
    args = parser.parse_args(argv)
    if args.workload != ALL:
        if WORKLOADS[args.workload].has_loop and (args.request_rate or args.concurrency):
            parser.error(
                f"{args.workload} sets its own load: leave out --request-rate and --concurrency"
            )
        if recorded(args) is not None and (args.request_rate or args.concurrency):
            parser.error(
                "--record sends one session at a time: leave out --request-rate and --concurrency"
            )
        return [_settled(args)]
    if args.out is not None:
        parser.error("--out cannot be combined with all: each workload writes its own file")
    at = list(argv).index(ALL)
    rest = [*argv[:at], *argv[at + 1 :]]
    return [_settled(parser.parse_args([name, *rest])) for name in WORKLOADS]


def _settled(args: argparse.Namespace) -> argparse.Namespace:
    """Complete the options with the workload's own values."""
    workload = WORKLOADS[args.workload]
    if args.temperature is None and recorded(args) is None:
        args.temperature = workload.temperature
    if workload.has_loop:
        args.request_rate = args.concurrency = None
    return args


def recorded(args: argparse.Namespace) -> Path | None:
    """Return the path of the recorded sessions to send, or None."""
    found: Path | None = getattr(args, "record", None)
    return found


def _add_common(parser: Parser) -> None:
    add = parser.add_argument_group("load").add_argument
    add("--seed", type=int, default=0, help="seed of prompts, lengths and arrivals")
    add(
        "--concurrency",
        "--max-concurrency",
        type=positive,
        help="sessions at a time (closed loop); with --request-rate, their maximum number",
    )
    add(
        "--request-rate",
        type=above_zero,
        metavar="R",
        help="sessions started per second (open loop); inf: all at once",
    )
    add(
        "--burstiness",
        type=above_zero,
        default=1.0,
        metavar="B",
        help="shape of the gamma-distributed gaps between arrivals; 1: Poisson; lower: burstier",
    )
    add(
        "--slo",
        type=_slo,
        default={},
        help=f"latency limits for goodput in ms: {','.join(f'{n}=N' for n in SLO_MEASURES)}",
    )
    add(
        "--warmup",
        type=natural,
        default=4,
        metavar="N",
        help="number of warm-up requests",
    )
    add(
        "--temperature",
        type=float,
        help="sampling temperature (0; noisy-neighbour: 1; --record: as recorded)",
    )
    add(
        "--progress",
        action="store_true",
        help="show progress on stderr even if it is not a terminal",
    )
    add(
        "--out",
        type=Path,
        metavar="FILE",
        help="JSON file to write (one per workload in bench/results/)",
    )
    add("--save-requests", action="store_true", help="also write every request to the JSON file")


def _slo(text: str) -> dict[str, float]:
    try:
        return parse_slo(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


# -- one run ------------------------------------------------------------------------------------


async def run(load: Load, scene: Scene) -> tuple[dict[str, object], list[str]]:
    """Run one workload after its warm-up; return its figures and notes."""
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
    """Return the first message of each kind of error."""
    found = {record.error: record.message for record in reversed(records) if record.error}
    return [f"{kind}: {' '.join(message.split())}" for kind, message in found.items() if message]


async def _drive(load: Load, workload: Workload, sessions: Sequence[Session], scene: Scene) -> str:
    """Run all sessions in the loop that the flags or the workload ask for.

    Returns a description of the loop.
    """
    args = scene.args
    cap = f", at most {args.concurrency} at a time" if args.concurrency else ""
    if workload.has_loop:
        await load.closed(sessions, 1)
        return "closed loop, one round after another; times start when a request is sent"
    if args.request_rate is None and workload.has_schedule:
        await load.open(sessions, [session.at or 0.0 for session in sessions], args.concurrency)
        return f"open loop by the trace's timestamps{cap}; times start at the scheduled arrival"
    rate = args.request_rate or (None if args.concurrency else workload.request_rate)
    if rate is None:
        concurrency = min(args.concurrency or workload.concurrency, len(sessions))
        await load.closed(sessions, concurrency)
        return f"closed loop, {concurrency} sessions at a time; times start when a request is sent"
    times = arrivals(len(sessions), rate, scene.rng("arrivals"), args.burstiness)
    await load.open(sessions, times, args.concurrency)
    if rate == float("inf"):
        return f"open loop, all sessions at once{cap}; times start then"
    kind = "Poisson" if args.burstiness == 1 else f"gamma, burstiness {args.burstiness:g}"
    return f"open loop, {rate:g} sessions/s, {kind}{cap}; times start at the scheduled arrival"
