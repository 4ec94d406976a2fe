"""Replicas behind a front: `python -m foretoken.bench.lab.replicas`.

There are two parts, each with its baseline in the same run. *carry* measures the streamed tokens
per second that one front carries from replicas without a model, at rising speeds, compared with one
server on the same null engine. *kill* measures the seconds from the kill of one of two replicas
until its streams continue.

Each engine has one thread. All processes share this machine with the client.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

import msgspec

from ..common.report import RESULTS, Spread, heading, table, write_json
from ..load.http import Http
from ..load.server import START_SECONDS, own_server
from ..load.workloads import positive

Row = dict[str, object]
COMMAND = (sys.executable, "-W", "ignore::RuntimeWarning:runpy", "-m", "foretoken.api.cli.commands")
NOTES = (
    "each engine has one thread; the replicas, the front and the client share this machine's cores",
    "figures: median [lowest .. highest] of the rounds",
)
PARTS = ("carry", "kill")
STOP_SECONDS = 30.0
PROMPT_LEN = 48  # Tokens of a prompt; prompts share no prefix.
KILLED_STREAMS = 8
KILLED_KV = "16384"  # KV tokens of a replica: one replica has room for all streams.
TICKS = (10_000, 5_000, 2_500, 1_250)  # Microseconds between two tokens of a stream.
KILLED_LEN = {"builtin": 600}  # Tokens of a stream whose replica may be killed.
ANY_LEN = 96


# -- processes -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Place:
    """A server under test, and the processes behind it."""

    url: str
    server: int  # Id of the process that answers HTTP.
    replicas: Sequence[subprocess.Popen[bytes]] = ()

    def cpu_seconds(self) -> tuple[float, float]:
        """Return the CPU time so far of the process that answers HTTP, and of the replicas."""
        return cpu_seconds(self.server), sum(cpu_seconds(each.pid) for each in self.replicas)


def free_port() -> int:
    """Return a port that no process is listening on."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@contextlib.contextmanager
def fronted(model: str, route: str, make: Sequence[Callable[[str], list[str]]]) -> Iterator[Place]:
    """Start a front and its replicas, whose commands ``make`` returns for the front's address."""
    address = f"tcp://127.0.0.1:{free_port()}"
    replicas = [subprocess.Popen(each(address)) for each in make]
    front = ["--front", address, "--replicas", str(len(make)), "--route", route]
    try:
        with own_server([model, *front, "--log-level", "warning"]) as url:
            asyncio.run(until_ready(url))
            yield Place(url, listener(url), replicas)
    finally:
        for process in replicas:
            process.send_signal(signal.SIGTERM)
        for process in replicas:
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def replica_of(model: str, kv_tokens: object) -> Callable[[str], list[str]]:
    """Return a function that makes the command of a replica with a model."""

    def command(address: str) -> list[str]:
        return [*COMMAND, "replica", model, "--front", address, *engine_flags(kv_tokens)]

    return command


def null_replica(address: str) -> list[str]:
    """Return the command of a replica without a model, for the front's address."""
    return [sys.executable, "-m", __spec__.name, "--null-replica", address]


def engine_flags(kv_tokens: object) -> list[str]:
    """Return the flags of each engine."""
    return ["--kv-tokens", str(kv_tokens), "--threads", "1", "--log-level", "warning"]


async def until_ready(url: str) -> None:
    """Wait until all replicas have joined."""
    http = Http(url)
    async with asyncio.timeout(START_SECONDS):
        while (await http.get("/ready"))[0] != 200:  # noqa: ASYNC110 - readiness can only be polled
            await asyncio.sleep(0.1)
    http.close()


def listener(url: str) -> int:
    """Return the child process that listens on the port of an address."""
    port = int(url.rpartition(":")[2])
    inodes = {
        fields[9]
        for fields in (line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:])
        if int(fields[1].rpartition(":")[2], 16) == port and fields[3] == "0A"
    }
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    for child in children:
        for entry in Path(f"/proc/{child}/fd").iterdir():
            with contextlib.suppress(OSError):
                if any(f"socket:[{inode}]" == os.readlink(entry) for inode in inodes):
                    return int(child)
    raise SystemExit(f"no child process listens at {url}")


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def body_of(rng: random.Random, max_tokens: int) -> bytes:
    """Return the body of a streamed completion with a new prompt, one delta per token."""
    return msgspec.json.encode(
        {
            "prompt": [rng.randrange(100, 1000) for _ in range(PROMPT_LEN)],
            "max_tokens": max_tokens, "temperature": 0, "stream": True, "ignore_eos": True,
            "speculation": "off", "stream_options": {"include_usage": True},
        }
    )  # fmt: skip


# -- carry: tokens a second through one front ------------------------------------------------------


def carried(rounds: int) -> list[Row]:
    """Measure null streams at rising speeds through a front and from one server, in turn."""
    from .http import NUM_STREAMS, server

    with server("ours") as target, fronted("builtin", "even", [null_replica]) as front:
        places = {"one server": Place(target.url, target.pid), "front": front}
        for place in places.values():
            asyncio.run(carry(place, TICKS[0]))
        rows = []
        for tick in TICKS:
            found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in places}
            for _ in range(rounds):
                for name, place in places.items():
                    found[name].append(asyncio.run(carry(place, tick)))
            offered = 1e6 * NUM_STREAMS / tick
            base = [server for _, server, _ in found["one server"]]
            rows += [carry_row(name, offered, each, base) for name, each in found.items()]
            print(table(rows[-2:]), flush=True)
    return rows


async def carry(place: Place, tick: int) -> tuple[float, float, float]:
    """Return the received tokens per second, and CPU us per token of server and replicas."""
    from .http import CHAT, MESSAGES, NUM_STREAMS
    from .null_engine import NUM_TICKS

    body = msgspec.json.encode(
        {"messages": MESSAGES, "max_tokens": NUM_TICKS, "seed": tick, "stream": True}
    )
    http, before, times = Http(place.url), place.cpu_seconds(), list[float]()
    streams = (http.post(CHAT, body, lambda at, _: times.append(at)) for _ in range(NUM_STREAMS))
    statuses = await asyncio.gather(*streams)
    http.close()
    if set(statuses) != {200}:
        raise SystemExit(f"streams ended with {statuses}")
    number = NUM_STREAMS * NUM_TICKS
    # Before the first tick only the role chunks arrive, one per stream.
    seconds = max(times) - sorted(times)[NUM_STREAMS]
    server, replicas = (
        1e6 * (b - a) / number for a, b in zip(before, place.cpu_seconds(), strict=True)
    )
    return number / seconds, server, replicas


def carry_row(
    name: str, offered: float, rounds: Sequence[tuple[float, float, float]], base: Sequence[float]
) -> Row:
    """Return a row of the table; ``base``: CPU us per token of one server alone, by round."""
    rates, servers, replicas = zip(*rounds, strict=True)
    return {
        "setting": name,
        "offered tokens/s": round(offered),
        "arrived tokens/s": Spread.of(rates),
        "its CPU a token, us": Spread.of(servers),
        "more than one server": Spread.of([a - b for a, b in zip(servers, base, strict=True)]),
        "the replica's": Spread.of(replicas),
        "tokens/s of a whole core": Spread.of([1e6 / each for each in servers]),
    }


# -- kill: a replica under its streams -------------------------------------------------------------


def killed(model: str, kills: int, seed: int) -> list[Row]:
    """Kill one of two replicas under streams, each time with a new front."""
    rows: list[Row] = []
    length = KILLED_LEN.get(model, ANY_LEN)
    for number in range(kills):
        with fronted(model, "even", [replica_of(model, KILLED_KV)] * 2) as place:
            rows.append(asyncio.run(kill_one(place, length, random.Random(seed + number))))
        print(table(rows[-1:]), flush=True)
    return rows


async def kill_one(place: Place, output_len: int, rng: random.Random) -> Row:
    """Measure the seconds from a replica's kill to its streams' next token, and other gaps."""
    http = Http(place.url)
    times: list[list[float]] = [[] for _ in range(KILLED_STREAMS)]
    ends = [bytearray() for _ in times]

    async def read(index: int) -> int:
        def note(at: float, piece: bytes) -> None:
            times[index].append(at)
            ends[index][:] = ends[index][-1000:] + piece

        return await http.post("/v1/completions", body_of(rng, output_len), note)

    streams = [asyncio.create_task(read(index)) for index in range(KILLED_STREAMS)]
    while not all(len(each) > 3 for each in times):
        if any(each.done() for each in streams):
            raise SystemExit("a stream ended before a replica could be killed")
        await asyncio.sleep(0.002)
    at = time.perf_counter()
    place.replicas[0].kill()
    statuses = await asyncio.gather(*streams)
    http.close()
    if statuses != [200] * KILLED_STREAMS or not all(b"[DONE]" in each for each in ends):
        raise SystemExit(f"streams ended with {statuses}: {ends}")
    return kill_row(at, times, [b'"moves":1' in each for each in ends])


def kill_row(at: float, times: Sequence[Sequence[float]], moved: Sequence[bool]) -> Row:
    """Return a row of the table.

    A moved stream is assumed to have moved in its longest gap after the kill.
    """
    if not any(moved):
        raise SystemExit("no stream ran on the killed replica")
    waits, others = list[float](), list[float]()
    for each, is_moved in zip(times, moved, strict=True):
        gap, end = max((b - a, b) for a, b in pairwise(each) if b > at)
        waits += [end - at] if is_moved else []
        others += [] if is_moved else [gap]
    return {
        "moved streams": f"{sum(moved)} of {len(moved)}",
        "until the first goes on, s": min(waits),
        "until the last, s": max(waits),
        "longest gap of the others, s": max(others, default=0.0),
        "longest gap before, s": max(b - a for x in times for a, b in pairwise(x) if b <= at),
    }


# -- all parts -------------------------------------------------------------------------------------


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the options."""
    parser = argparse.ArgumentParser(
        prog="python -m foretoken.bench.lab.replicas", description=str(__doc__).partition("\n")[0]
    )
    add = parser.add_argument
    add("--part", nargs="+", choices=list(PARTS), default=list(PARTS), help="default: all")
    add(
        "--model",
        nargs="+",
        default=["builtin", "smollm2"],
        help="models of the replicas to kill, as for `foretoken serve`",
    )
    add("--rounds", type=positive, default=3, help="rounds of each token rate (3)")
    add("--kills", type=positive, default=3)
    add("--seed", type=int, default=0)
    add("--out", type=Path, default=RESULTS / "replicas.json")
    add("--null-replica", metavar="ADDRESS", help=argparse.SUPPRESS)
    add("--streams", type=positive, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print the tables, and write the JSON after each part."""
    args = parsed(argv)
    if args.null_replica:
        serve_null(args.null_replica, args.streams)
        return
    report = heading()
    print(*(f"{key}: {value}" for key, value in report.items()), sep="\n")
    print(*(f"- {each}" for each in NOTES), "", sep="\n", flush=True)
    report["notes"] = NOTES
    parts: dict[str, Callable[[], list[Row]]] = {}
    if "carry" in args.part:
        parts["carry"] = partial(carried, args.rounds)
    if "kill" in args.part:
        for model in args.model:
            parts[f"kill, {model}"] = partial(killed, model, args.kills, args.seed)
    for name, measure in parts.items():
        rows = report[name] = measure()
        print(f"\n{name}\n\n{table(rows)}\n", flush=True)
        write_json(args.out, report)


def serve_null(address: str, num_streams: int | None) -> None:
    """Run as a replica without a model."""
    import uvloop

    from .http import NUM_STREAMS
    from .null_engine import serve_replica

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve_replica(address, num_streams or NUM_STREAMS))


if __name__ == "__main__":
    main()
