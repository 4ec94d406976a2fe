"""Replicas behind a front, beside one engine: `python -m foretoken.bench.lab.replicas`.

Four parts, each with its baseline in the same run. *routing*: requests at an open loop begin with
one of eight texts that the pool of one engine cannot hold; one engine, replicas that take turns by
load alone (`even`) and by cached prefixes (`kv`): hit rate, time to the first token. *front*: the
same engine in the server's process and behind a front, in turn: what the front adds to a first
token and to the processor time of a streamed token. *carry*: replicas without a model, ever faster:
streamed tokens a second that one front carries, beside one server on the same null engine. *kill*:
seconds from the kill of one of two replicas until its streams go on.

Each engine has one thread and the same pool. All processes share this machine with the client.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from ..common.report import RESULTS, Spread, heading, table, write_json
from ..load.figures import percentile
from ..load.http import Http
from ..load.server import START_SECONDS, own_server
from ..load.workloads import above_zero, positive
from ..serve import main as bench_serve

Row = dict[str, object]
COMMAND = (sys.executable, "-W", "ignore::RuntimeWarning:runpy", "-m", "foretoken.api.cli.commands")
NOTES = (
    "each engine has one thread; two replicas, front and client share the cores of this machine",
    "one engine has the pool of one replica, so two replicas have twice its memory and threads",
    "routing: seeds, and with them all texts, differ by round and are the same for each setting",
    "front: first tokens request by request and CPU by rounds, in turn; CPU of all processes",
    "front: a token's CPU holds that of requests, timers and the model, which varies: with a slow "
    "model the front's addition is less than that noise; carry shows it",
    "spread: median [lowest .. highest] of the rounds",
)
PARTS = ("routing", "front", "carry", "kill")
NUM_GROUPS = 8
STOP_SECONDS = 30.0
PROMPT_LEN = 48  # tokens of prompts that share nothing
AT_ONCE = 16  # streams of the front's part
KILLED_STREAMS = 8
KILLED_KV = "16384"  # tokens: all streams fit one replica
TICKS = (10_000, 5_000, 2_500, 1_250)  # microseconds between two tokens of a stream


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Sizes of the parts that suit a model."""

    kv_tokens: int  # pool of each engine; less than the eight beginnings
    prefix_len: int  # tokens
    requests: int  # of a round
    rate: float  # requests a second
    rounds: int
    firsts: int  # single requests of each kind
    output_len: int  # tokens of a stream of the front's part
    killed_len: int  # tokens of a stream whose replica may be killed


SIZES = {
    "builtin": Size(
        kv_tokens=3072, prefix_len=512, requests=96, rate=8.0, rounds=3,
        firsts=40, output_len=96, killed_len=600,
    )
}  # fmt: skip
ANY_SIZE = Size(
    kv_tokens=1536, prefix_len=256, requests=40, rate=1.5, rounds=2,
    firsts=16, output_len=24, killed_len=96,
)  # fmt: skip


# -- processes -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Place:
    """A server under test, and the processes behind it."""

    url: str
    server: int  # process id of what answers HTTP
    replicas: Sequence[subprocess.Popen[bytes]] = ()

    def cpu_seconds(self) -> tuple[float, float]:
        """Processor time so far of what answers HTTP, and of the replicas."""
        return cpu_seconds(self.server), sum(cpu_seconds(each.pid) for each in self.replicas)


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@contextlib.contextmanager
def fronted(model: str, route: str, make: Sequence[Callable[[str], list[str]]]) -> Iterator[Place]:
    """A front, and a replica for each function that returns its command by the front's address."""
    address = f"tcp://127.0.0.1:{free_port()}"
    replicas = [subprocess.Popen(each(address)) for each in make]
    front = ["--front", address, "--replicas", str(len(make)), "--route", route]
    try:
        with own_server([model, *front, "--log-level", "warning"]) as url:
            asyncio.run(until_ready(url))
            yield Place(url, _listener(url), replicas)
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
    """The command of a replica with a model, by the front's address."""

    def command(address: str) -> list[str]:
        return [*COMMAND, "replica", model, "--front", address, *engine_flags(kv_tokens)]

    return command


def null_replica(address: str) -> list[str]:
    """The command of a replica without a model."""
    return [sys.executable, "-m", __spec__.name, "--null-replica", address]


def engine_flags(kv_tokens: object) -> list[str]:
    """The flags of each engine."""
    return ["--kv-tokens", str(kv_tokens), "--threads", "1", "--log-level", "warning"]


async def until_ready(url: str) -> None:
    """Wait until all replicas have come."""
    http = Http(url)
    async with asyncio.timeout(START_SECONDS):
        while (await http.get("/ready"))[0] != 200:  # noqa: ASYNC110 - nobody tells us
            await asyncio.sleep(0.1)
    http.close()


@contextlib.contextmanager
def alone(model: str, kv_tokens: object) -> Iterator[Place]:
    """One engine in the server's own process."""
    with own_server([model, *engine_flags(kv_tokens)]) as url:
        yield Place(url, _listener(url))


def _listener(url: str) -> int:
    """Process among our children that listens on the port of an address."""
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
    raise SystemExit(f"no process of ours listens at {url}")


def cpu_seconds(pid: int) -> float:
    """Processor time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# -- routing: beginnings that one pool cannot hold -------------------------------------------------


def routing(model: str, size: Size, seed: int) -> list[Row]:
    """Shared beginnings on one engine and by both routes, in turn; all servers are up meanwhile."""
    replicas = [replica_of(model, size.kv_tokens)] * 2
    with contextlib.ExitStack() as stack:
        places = {"one engine": stack.enter_context(alone(model, size.kv_tokens))}
        for route in ("even", "kv"):
            places[route] = stack.enter_context(fronted(model, route, replicas))
        figures: dict[str, list[dict[str, Any]]] = {name: [] for name in places}
        for number in range(size.rounds):
            for name, place in places.items():
                figures[name].append(shared(place, size, seed + number))
                print(table([routing_row(name, figures[name][-1:])]), flush=True)
    return [routing_row(name, each) for name, each in figures.items()]


def shared(place: Place, size: Size, seed: int) -> dict[str, Any]:
    """Figures of `foretoken bench serve shared-prefix` at an open loop."""
    load = [
        "shared-prefix", "--requests", str(size.requests), "--groups", str(NUM_GROUPS),
        "--prefix-len", str(size.prefix_len), "--request-rate", str(size.rate),
        "--url", place.url, "--seed", str(seed),
    ]  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "figures.json")
        with contextlib.redirect_stdout(io.StringIO()):
            status = bench_serve([*load, "--out", str(out)])
        if status:
            raise SystemExit("nothing was served")
        found: dict[str, Any] = json.loads(out.read_text())
        return found


def routing_row(name: str, rounds: Sequence[dict[str, Any]]) -> Row:
    """A line of the table."""
    return {
        "setting": name,
        "served": f"{sum(each['served'] for each in rounds)} of "
        f"{sum(each['requests'] for each in rounds)}",
        "hit rate": Spread.of([each["prefix_hit_rate"] for each in rounds]),
        "first token p50, ms": Spread.of([each["ttft_ms"]["p50"] for each in rounds]),
        "first token p99, ms": Spread.of([each["ttft_ms"]["p99"] for each in rounds]),
        "tokens/s": Spread.of([each["output_tokens_per_s"] for each in rounds]),
    }


# -- front: what it adds ---------------------------------------------------------------------------


def added(model: str, size: Size, seed: int) -> list[Row]:
    """One engine, and the same behind a front, in turn: first tokens, and CPU of streamed ones."""
    with (
        alone(model, KILLED_KV) as one,
        fronted(model, "even", [replica_of(model, KILLED_KV)]) as front,
    ):
        places, rng = (one, front), random.Random(seed)
        firsts = asyncio.run(first_tokens(places, size.firsts, rng))
        cpu: list[list[tuple[float, float]]] = [[], []]
        for _ in range(size.rounds + 1):
            for place, rounds in zip(places, cpu, strict=True):
                rounds.append(asyncio.run(token_cpu(place, size.output_len, rng)))
    totals = [[sum(each) for each in rounds[1:]] for rounds in cpu]  # the first one warms up
    differences = sorted(b - a for a, b in zip(*firsts, strict=True))
    names = ("one engine", "front and replica")
    servers: tuple[list[float], ...] = ([], [each[0] for each in cpu[1][1:]])
    rows: list[Row] = [
        {
            "setting": name,
            "first token p50, ms": median(first),
            "first token p99, ms": percentile(sorted(first), 0.99),
            "CPU a token, us": Spread.of(total),
            "of it the front's": Spread.of(server) if server else "",
        }
        for name, first, total, server in zip(names, firsts, totals, servers, strict=True)
    ]
    rows.append(
        {
            "setting": "added",
            "first token p50, ms": median(differences),
            "first token p99, ms": percentile(differences, 0.99),
            "CPU a token, us": Spread.of([b - a for a, b in zip(*totals, strict=True)]),
            "of it the front's": "",
        }
    )
    return rows


def body_of(rng: random.Random, max_tokens: int) -> bytes:
    """A streamed completion of a prompt that nothing else begins with; a delta for each token."""
    return msgspec.json.encode(
        {
            "prompt": [rng.randrange(100, 1000) for _ in range(PROMPT_LEN)],
            "max_tokens": max_tokens, "temperature": 0, "stream": True, "ignore_eos": True,
            "speculation": "off", "stream_options": {"include_usage": True},
        }
    )  # fmt: skip


async def arrivals(http: Http, body: bytes) -> tuple[list[float], bytes]:
    """Times at which the pieces of a stream came, and its last bytes, which have the usage."""
    times, last = list[float](), bytearray()

    def note(at: float, piece: bytes) -> None:
        times.append(at)
        last[:] = last[-1000:] + piece

    status = await http.post("/v1/completions", body, note)
    if status != 200 or not last.endswith(b"data: [DONE]\n\n"):
        raise SystemExit(f"a stream ended with {status}: {bytes(last)[-300:]!r}")
    return times, bytes(last)


async def first_tokens(
    places: Sequence[Place], number: int, rng: random.Random
) -> list[list[float]]:
    """Milliseconds to the first tokens of single requests, by place; each asks both, in turn."""
    https = [Http(each.url) for each in places]
    found: list[list[float]] = [[] for _ in places]
    for index in range(number + 2):
        body, turn = body_of(rng, 4), list(range(len(places)))
        for place in turn if index % 2 else reversed(turn):
            began = time.perf_counter()
            times, _ = await arrivals(https[place], body)
            if index >= 2:  # the first ones warm up
                found[place].append(1e3 * (times[0] - began))
    for http in https:
        http.close()
    return found


async def token_cpu(place: Place, output_len: int, rng: random.Random) -> tuple[float, float]:
    """Microseconds of CPU for each streamed token: of what answers HTTP, and of its replicas."""
    http, before = Http(place.url), place.cpu_seconds()
    bodies = [body_of(rng, output_len) for _ in range(AT_ONCE)]
    await asyncio.gather(*(arrivals(http, each) for each in bodies))
    http.close()
    server, replicas = (
        1e6 * (b - a) / (AT_ONCE * output_len)
        for a, b in zip(before, place.cpu_seconds(), strict=True)
    )
    return server, replicas


# -- carry: tokens a second through one front ------------------------------------------------------


def carried(rounds: int) -> list[Row]:
    """Streams of a null engine, ever faster: through a front, and from one server, in turn."""
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
    """Tokens a second that arrived, and microseconds of CPU a token: server, replicas."""
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
    # Nothing but roles comes before the first tick, as long as a stream has not begun.
    seconds = max(times) - sorted(times)[NUM_STREAMS]
    server, replicas = (
        1e6 * (b - a) / number for a, b in zip(before, place.cpu_seconds(), strict=True)
    )
    return number / seconds, server, replicas


def carry_row(
    name: str, offered: float, rounds: Sequence[tuple[float, float, float]], base: Sequence[float]
) -> Row:
    """A line of the table; ``base``: CPU of a token on one server, round by round."""
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


def killed(model: str, size: Size, kills: int, seed: int) -> list[Row]:
    """Kills of one of two replicas under streams, each with a new front."""
    rows: list[Row] = []
    for number in range(kills):
        with fronted(model, "even", [replica_of(model, KILLED_KV)] * 2) as place:
            rows.append(asyncio.run(kill_one(place, size.killed_len, random.Random(seed + number))))
        print(table(rows[-1:]), flush=True)
    return rows


async def kill_one(place: Place, output_len: int, rng: random.Random) -> Row:
    """Seconds from a replica's kill to the next token of its streams, and gaps around it."""
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
    """A line of the table. The longest gap of a moved stream is where it moved."""
    if not any(moved):
        raise SystemExit("the killed replica had no stream")
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
    """The options."""
    parser = argparse.ArgumentParser(
        prog="python -m foretoken.bench.lab.replicas", description=str(__doc__).partition("\n")[0]
    )
    add = parser.add_argument
    add("--part", nargs="+", choices=list(PARTS), default=list(PARTS), help="default: all")
    add(
        "--model",
        nargs="+",
        default=["builtin", "smollm2"],
        help="models, named as for `foretoken serve`",
    )
    add("--kv-tokens", type=positive, help="KV pool of each engine in *routing*")
    add("--prefix-len", type=positive, help="tokens of a beginning in *routing*")
    add("--requests", type=positive, help="requests of a round of *routing*")
    add("--rate", type=above_zero, help="requests a second of *routing*")
    add("--rounds", type=positive, help="rounds of each setting")
    add("--kills", type=positive, default=3)
    add("--seed", type=int, default=0)
    add("--out", type=Path, default=RESULTS / "replicas.json")
    add("--null-replica", metavar="ADDRESS", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def size_of(model: str, args: argparse.Namespace) -> Size:
    """The size of a model's parts; options replace its numbers."""
    names = ("kv_tokens", "prefix_len", "requests", "rate", "rounds")
    given = {name: value for name in names if (value := getattr(args, name)) is not None}
    return replace(SIZES.get(model, ANY_SIZE), **given)


def part_of(part: str, model: str, args: argparse.Namespace) -> list[Row]:
    """The lines of a part on a model."""
    size = size_of(model, args)
    match part:
        case "routing":
            return routing(model, size, args.seed)
        case "front":
            return added(model, size, args.seed)
        case "carry":
            return carried(size.rounds)
        case _:
            return killed(model, size, args.kills, args.seed)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print the tables, write the JSON after each part."""
    args = parsed(argv)
    if args.null_replica:
        serve_null(args.null_replica)
        return
    report = heading()
    print(*(f"{key}: {value}" for key, value in report.items()), sep="\n")
    print(*(f"- {each}" for each in NOTES), "", sep="\n", flush=True)
    report["notes"] = NOTES
    began = time.perf_counter()
    for model in args.model:
        for part in args.part:
            if part == "carry" and model != args.model[0]:
                continue  # it has no model
            name = part if part == "carry" else f"{part}, {model}"
            rows = report[name] = part_of(part, model, args)
            print(f"\n{name}, {time.perf_counter() - began:.0f} s so far\n", flush=True)
            print(table(rows), "", sep="\n", flush=True)
            write_json(args.out, report)


def serve_null(address: str) -> None:
    """Be a replica without a model."""
    import uvloop

    from .http import NUM_STREAMS
    from .null_engine import serve_front

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve_front(address, NUM_STREAMS))


if __name__ == "__main__":
    main()
