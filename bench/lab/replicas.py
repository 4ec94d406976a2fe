"""Replicas behind a front, beside one engine: `python -m foretoken.bench.lab.replicas`.

Requests begin with one of a few long texts that the pool of one replica cannot hold. The same
requests are served by one engine with the pool of one replica, by a front whose replicas take turns
by load alone (`even`), and by one that routes by cached prefixes (`kv`): hit rate and time to the
first token. Then what the front adds: first token and its own processor time for each token, one
replica beside the same engine without a front. And the seconds from the kill of a replica to the
next token of its streams.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from ..common.report import RESULTS, heading, table, write_json
from ..load.http import Http
from ..load.server import START_SECONDS, own_server
from ..serve import main as bench_serve

COMMAND = (sys.executable, "-m", "foretoken.api.cli.commands")
NUM_GROUPS, PREFIX_LEN = 8, 512
STOP_SECONDS = 30.0
NUM_STREAMS, STREAM_TOKENS = 8, 600
STREAM_KV = "16384"  # tokens: all streams fit one replica


@dataclass(frozen=True, slots=True)
class Place:
    """A server under test, and the processes behind it."""

    url: str
    front: int  # process id of what answers HTTP; 0: unknown
    replicas: Sequence[subprocess.Popen[bytes]] = ()


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@contextlib.contextmanager
def fronted(model: str, number: int, route: str, flags: Sequence[str]) -> Iterator[Place]:
    """A front with so many replicas, which have these engine flags."""
    address = f"tcp://127.0.0.1:{free_port()}"
    replicas = [
        subprocess.Popen([*COMMAND, "replica", model, "--front", address, *flags])
        for _ in range(number)
    ]
    front = ["--front", address, "--replicas", str(number), "--route", route]
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


async def until_ready(url: str) -> None:
    """Wait until all replicas have come."""
    http = Http(url)
    async with asyncio.timeout(START_SECONDS):
        while (await http.get("/ready"))[0] != 200:  # noqa: ASYNC110 - nobody tells us
            await asyncio.sleep(0.1)
    http.close()


@contextlib.contextmanager
def alone(model: str, flags: Sequence[str]) -> Iterator[Place]:
    """One engine in the server's own process."""
    with own_server([model, "--log-level", "warning", *flags]) as url:
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
    return 0


def cpu_seconds(pid: int) -> float:
    """Processor time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def shared(place: Place, args: argparse.Namespace) -> dict[str, Any]:
    """Figures of shared beginnings at an open loop."""
    return figures_of(
        place, args.seed, "shared-prefix", "--requests", str(args.requests),
        "--groups", str(NUM_GROUPS), "--prefix-len", str(args.prefix_len),
        "--request-rate", str(args.rate),
    )  # fmt: skip


def figures_of(place: Place, seed: int, *load: str) -> dict[str, Any]:
    """Figures of a load of `foretoken bench serve`."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "figures.json")
        if bench_serve([*load, "--url", place.url, "--seed", str(seed), "--out", str(out)]):
            raise SystemExit("nothing was served")
        found: dict[str, Any] = json.loads(out.read_text())
        return found


def row(name: str, figures: dict[str, Any]) -> dict[str, object]:
    """A line of the table."""
    first = figures["ttft_ms"]
    return {
        "setting": name,
        "hit rate": figures["prefix_hit_rate"],
        "first token p50, ms": first["p50"],
        "first token p99, ms": first["p99"],
        "tokens/s": figures["output_tokens_per_s"],
    }


# -- what the front adds ---------------------------------------------------------------------------


def added(model: str, args: argparse.Namespace, flags: Sequence[str]) -> list[dict[str, object]]:
    """One request at a time, then many at once: one engine, and a front with one replica."""
    lines = []
    for name in ("one engine", "front and replica"):
        place = alone(model, flags) if name == "one engine" else fronted(model, 1, "even", flags)
        with place as found:
            single = mixed(found, concurrency=1, seed=args.seed)
            before = cpu_seconds(found.front)
            many = mixed(found, concurrency=16, seed=args.seed + 1)
            seconds = cpu_seconds(found.front) - before
            first = single["ttft_ms"]
            lines.append(
                {
                    "setting": name,
                    "first token p50, ms": first["p50"],
                    "first token p99, ms": first["p99"],
                    "tokens/s at 16": many["output_tokens_per_s"],
                    "its CPU a token, us": 1e6 * seconds / many["output_tokens"],
                }
            )
            print(table(lines[-1:]), flush=True)
    return lines


def mixed(place: Place, *, concurrency: int, seed: int) -> dict[str, Any]:
    """Figures of short prompts with nothing in common."""
    return figures_of(
        place, seed, "mixed", "--requests", "64", "--input-len", "32:64", "--output-len", "64",
        "--concurrency", str(concurrency),
    )  # fmt: skip


# -- a replica is killed ---------------------------------------------------------------------------


async def until_next(place: Place, model: str) -> tuple[float, float]:
    """Seconds from a replica's kill until all streams have gone on, and the longest gap before."""
    http, times = Http(place.url), [list[float]() for _ in range(NUM_STREAMS)]

    def body(index: int) -> bytes:
        prompt = [100 + 10 * index + each for each in range(64)]
        return msgspec.json.encode(
            {
                "model": model, "prompt": prompt, "max_tokens": STREAM_TOKENS, "temperature": 0,
                "stream": True, "ignore_eos": True, "speculation": "off",
            }
        )  # fmt: skip

    async def read(index: int) -> int:
        return await http.post(
            "/v1/completions", body(index), lambda at, _: times[index].append(at)
        )

    streams = [asyncio.create_task(read(index)) for index in range(NUM_STREAMS)]
    while not all(len(each) > 3 for each in times):
        if any(each.done() for each in streams):
            raise SystemExit("a stream ended before a replica could be killed")
        await asyncio.sleep(0.002)
    killed = time.perf_counter()
    place.replicas[0].kill()
    statuses = await asyncio.gather(*streams)
    http.close()
    if statuses != [200] * NUM_STREAMS:
        raise SystemExit(f"streams ended with {statuses}")
    nexts = [min(at for at in each if at > killed + 0.001) for each in times]
    gaps = [b - a for each in times for a, b in pairwise(each) if b < killed]
    return max(nexts) - killed, max(gaps)


def lost(model: str, args: argparse.Namespace) -> list[dict[str, object]]:
    """Kills of one of two replicas under streams, each with a new front."""
    lines: list[dict[str, object]] = []
    for _ in range(args.kills):
        with fronted(model, 2, "even", ["--kv-tokens", STREAM_KV, "--threads", "1"]) as place:
            longest, before = asyncio.run(until_next(place, model))
        lines.append({"until all streams go on, s": longest, "longest gap before, s": before})
        print(table(lines[-1:]), flush=True)
    return lines


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print the tables, write the JSON."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--model", default="builtin")
    parser.add_argument("--kv-tokens", default="3072", help="KV pool of each replica")
    parser.add_argument("--prefix-len", type=int, default=PREFIX_LEN)
    parser.add_argument("--requests", type=int, default=120)
    parser.add_argument("--rate", type=float, default=8.0, help="requests a second")
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS / "replicas.json")
    args = parser.parse_args(argv)
    flags = ["--kv-tokens", args.kv_tokens, "--threads", "1"]
    report: dict[str, object] = heading()
    print(*(f"{key}: {value}" for key, value in report.items()), sep="\n", flush=True)
    lines = []
    for name in ("one engine", "even", "kv"):
        is_alone = name == "one engine"
        place = alone(args.model, flags) if is_alone else fronted(args.model, 2, name, flags)
        with place as found:
            lines.append(row(name, shared(found, args)))
            print(table(lines[-1:]), flush=True)
    report["routing"] = lines
    report["front"] = added(args.model, args, flags)
    report["kills"] = lost(args.model, args)
    print(*(table(report[part]) for part in ("routing", "front", "kills")), sep="\n\n")  # type: ignore[arg-type] # tables
    write_json(args.out, report)


if __name__ == "__main__":
    main()
