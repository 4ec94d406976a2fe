"""A soak: a real server, real sockets, for an hour, under everything that clients do to servers.

``make soak MINUTES=60``, or ``python -m soak`` with ``tests`` on the path; arguments behind ``--``
go to the server. The same seed asks the same things. Every answer whose words are known is compared
with those of the idle server. Exit status 1: something that must hold did not.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from foretoken.api.cli.flags import Parser
from foretoken.bench.common.report import heading, table, write_json
from foretoken.bench.load.figures import distribution
from foretoken.bench.load.workloads import above_zero

from .book import Book
from .leaks import MAX_DRIFT, drifts, growth
from .plan import ACTORS, LEVEL_WAVES, WAVES, Turn, Wave, num_cycles, schedule
from .requests import Texts
from .restart import kill, terminate, unix
from .server import Server
from .verdicts import judge_trends, latency_rows, verdict_rows, verdicts
from .watch import Watch
from .world import World

KEY = "soak-key"
# A cache in which not all fits that is asked for, and a queue that a flood overruns.
SERVER_ARGS = ("--kv-tokens", "4096", "--max-running", "16", "--max-queued", "48",
               "--api-key", KEY, "--log-level", "warning")  # fmt: skip
OUT = Path("bench/results/soak.json")
FACTS = {  # what a soak must have made happen to mean anything, by the server's metrics
    "preemptions": "foretoken:num_preemptions_total",
    "prompt tokens from the cache": "foretoken:prefix_cache_hits_total",
    "draft tokens accepted": "foretoken:spec_decode_num_accepted_tokens_total",
    "tokens served": "foretoken:generation_tokens_total",
}


class Soak:
    """One run."""

    def __init__(
        self,
        seconds: float,
        seed: int,
        *,
        waves: Sequence[Wave] = WAVES,
        restarts: bool = True,
        server_args: Sequence[str] = (),
    ) -> None:
        self.book = Book()
        self._seconds, self._seed, self._restarts, self._waves = seconds, seed, restarts, waves
        self._args = [*SERVER_ARGS, *server_args]
        self._server = Server(self._args)
        self._rng = random.Random(f"{seed}/soak")

    async def run(self) -> Watch:
        """All of it; raises SystemExit where the server does not even start."""
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        loop.add_signal_handler(signal.SIGTERM, task.cancel)  # else the server would outlive us
        try:
            await self._server.start()
            world = World(self._server.address, KEY, self.book, Texts(self._seed))
            await world.learn()
            watch = Watch(world, self._server, self._seed)
            watch.start()
            await watch.settle()
            await self._all_waves(world, watch)
            await watch.end()
            watch.new_process()
            world.drop_links()
        finally:
            await self._server.kill()
        self._check_log(self._server)
        return watch

    async def _all_waves(self, world: World, watch: Watch) -> None:
        cycles = num_cycles(self._seconds)
        for turn in schedule(self._seconds, self._seed, self._waves):
            if turn.wave is self._waves[0]:
                if self._restarts and turn.cycle == cycles // 2:
                    await self._restart(world, watch)
                await watch.flush()
            self.book.wave, self.book.cycle = turn.wave.name, turn.cycle
            await self._wave(world, turn)
            code = self._server.code
            if not self.book.check("engine", code is None, f"the process ended: {code}"):
                return
            await watch.settle()
            _say(self.book, turn, watch)

    async def _wave(self, world: World, turn: Turn) -> None:
        """Run the crew until the time is over; each of them finishes what it began."""
        loop = asyncio.get_running_loop()
        world.until = loop.time() + turn.seconds

        async def client(name: str, index: int) -> None:
            rng = random.Random(f"{self._seed}/{turn.cycle}/{turn.wave.name}/{name}/{index}")
            while world.left > 0:
                try:
                    await ACTORS[name](world, rng)
                except Exception as error:  # an answer that nobody can read, or a fault of ours
                    self.book.check("status", False, f"{name}: {error!r}")
                await asyncio.sleep(0)

        async with asyncio.TaskGroup() as group:
            for name, count in turn.wave.crew.items():
                for index in range(count):
                    group.create_task(client(name, index))
            group.create_task(asyncio.sleep(turn.seconds))

    async def _restart(self, world: World, watch: Watch) -> None:
        self.book.wave = "restart"
        await watch.pause()
        for end in (terminate, kill):
            watch.new_process()
            await end(world, self._server, self._rng)
        await unix(world, self._args, self._rng)
        watch.new_process()
        await watch.settle()

    def _check_log(self, server: Server) -> None:
        troubles = server.troubles
        self.book.check("log", not troubles, f"{len(troubles)} lines: {troubles[:5]}")


def _say(book: Book, turn: Turn, watch: Watch) -> None:
    now, life = watch.idle[-1][-1], time.monotonic() - book.begin
    print(
        f"{life:6.0f} s  {turn.cycle:2} {turn.wave.name:9} {book.num_answers:7} answers"
        f"  {now.memory / 2**20:6.1f} MiB {now.descriptors:3} fd {now.threads:2} threads"
        f"  {book.wrongs.total()} violations",
        flush=True,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Soak, print the verdicts, write the JSON; 1 where something was violated."""
    given = list(argv or [])
    at = given.index("--") if "--" in given else len(given)
    args = _parsed(given[:at])
    begun = heading()
    print(*(f"{key}: {value}" for key, value in begun.items()), sep="\n", flush=True)
    soak = Soak(
        60 * args.minutes,
        args.seed,
        waves=[wave for wave in WAVES if not args.only or wave.name in args.only],
        restarts=args.restarts,
        server_args=given[at + 1 :],
    )
    watch = asyncio.run(soak.run())
    report = {**begun, **_report(soak.book, watch, args)}
    write_json(args.out, report)
    return 1 if soak.book.wrongs else 0


def _parsed(argv: Sequence[str]) -> argparse.Namespace:
    parser = Parser(prog="python -m soak", description=__doc__)
    parser.add_argument("--minutes", type=above_zero, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=OUT, metavar="FILE")
    names = [wave.name for wave in WAVES]
    parser.add_argument("--only", action="append", choices=names, help="these waves; repeatable")
    parser.add_argument("--no-restarts", dest="restarts", action="store_false")
    parser.add_argument(
        "--max-drift", type=above_zero, default=MAX_DRIFT, metavar="X", help="inf on a busy machine"
    )
    return parser.parse_args(argv)


def _report(book: Book, watch: Watch, args: argparse.Namespace) -> dict[str, object]:
    """Judge the trends, print the tables; what goes into the file."""
    lives = [growth(idle) for idle in watch.idle]
    drifted = drifts(book.latencies, LEVEL_WAVES, num_cycles(60 * args.minutes))
    judge_trends(book, lives, drifted, args.max_drift)
    found, canaries = verdicts(book), latency_rows(book.latencies)
    facts = {name: int(watch.metrics.get(key, 0)) for name, key in FACTS.items()}
    facts |= book.facts
    print(f"\n{table(verdict_rows(found))}\n")
    if canaries:
        print(f"{table(canaries)}\n")
    print(f"answers: {dict(book.by_status)}\nfacts: {facts}", flush=True)
    for each in book.violations:
        print(f"{each.kind} at {each.at} s in {each.wave}: {each.what[:300]}")
    return {
        "minutes": args.minutes, "seed": args.seed, "seconds": time.monotonic() - book.begin,
        "verdicts": found, "violations": book.violations,
        "answers": {who: dict(how) for who, how in book.answers.items()},
        "num_answers": book.num_answers, "facts": facts, "has_audit": watch.has_audit,
        "growth": lives, "drift": drifted, "canaries": canaries,
        "health_ms": distribution(book.probes, 1e3), "worst_lag_ms": 1e3 * watch.worst_lag,
        "idle": watch.idle, "timeline": watch.timeline[:: max(1, len(watch.timeline) // 200)],
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
