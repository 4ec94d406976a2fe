"""HTTP in a process of its own, and in the engine's: `python -m foretoken.bench.lab.front`.

Streamed chats run together through a front with one replica, and through one server, in alternate
rounds: first without a model, at two speeds, then with a model. All processes share this machine
with the client.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import os
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from ..common.report import RESULTS, Spread, heading, table, write_json
from ..load.http import Http
from ..load.server import own_server
from ..load.workloads import positive
from .http import CHAT, MESSAGES, server
from .null_engine import NUM_TICKS
from .replicas import (
    Place,
    Row,
    engine_flags,
    fronted,
    listener,
    null_replica,
    replica_of,
    until_ready,
)  # fmt: skip

KV_TOKENS = 32768
TICKS = (20_000, 10_000)  # Microseconds between two tokens of a stream without a model.


@dataclass(slots=True)
class Rounds:
    """Measurements of one setting, round by round."""

    rates: list[float] = field(default_factory=list)  # Tokens per second.
    medians: list[float] = field(default_factory=list)  # Milliseconds between two tokens.
    slowest: list[float] = field(default_factory=list)  # Their 99th percentile.
    server: list[float] = field(default_factory=list)  # CPU us per token of the HTTP process.
    replica: list[float] = field(default_factory=list)  # CPU us per token of the replica.

    def row(self, name: str) -> Row:
        """Return a row of the table."""
        return {
            "setting": name,
            "tokens/s": Spread.of(self.rates),
            "ITL p50, ms": Spread.of(self.medians),
            "p99": Spread.of(self.slowest),
            "CPU us a token, HTTP's process": Spread.of(self.server),
            "the replica's": Spread.of(self.replica),
        }


async def measure(place: Place, num_streams: int, body: Mapping[str, object], to: Rounds) -> None:
    """Measure one round of streams, from the first token of each stream on."""
    http, before = Http(place.url), place.cpu_seconds()
    times: list[list[float]] = [[] for _ in range(num_streams)]

    async def listen(index: int) -> int:
        content = f"{MESSAGES[0]['content']} {index}"
        asked = {**body, "messages": [{"role": "user", "content": content}], "stream": True}

        def arrived(at: float, piece: bytes) -> None:
            times[index] += [at] * piece.count(b'"content":"')

        return await http.post(CHAT, msgspec.json.encode(asked), arrived)

    statuses = await asyncio.gather(*map(listen, range(num_streams)))
    http.close()
    if set(statuses) != {200}:
        raise SystemExit(f"streams ended with {statuses}")
    used = [b - a for a, b in zip(before, place.cpu_seconds(), strict=True)]
    tokens = [each[1:] for each in times]  # The first chunk has the role and an empty content.
    number = sum(map(len, tokens))
    gaps = [1e3 * (b - a) for each in tokens for a, b in itertools.pairwise(each)]
    ends = [at for each in tokens for at in each]
    to.rates.append(number / (max(ends) - min(ends)))
    to.medians.append(statistics.median(gaps))
    to.slowest.append(statistics.quantiles(gaps, n=100)[98])
    to.server.append(1e6 * used[0] / number)
    to.replica.append(1e6 * used[1] / number)


@contextlib.contextmanager
def one_server(model: str) -> Iterator[Place]:
    """Start one server with a model."""
    with own_server([model, *engine_flags(KV_TOKENS)]) as url:
        asyncio.run(until_ready(url))
        yield Place(url, listener(url))


def compared(
    places: Mapping[str, Place], num_streams: int, body: Mapping[str, object], rounds: int
) -> list[Row]:
    """Measure the settings in alternate rounds, after one round that does not count."""
    found = {name: Rounds() for name in places}
    for number in range(rounds + 1):
        for name, place in places.items():
            to = found[name] if number else Rounds()
            asyncio.run(measure(place, num_streams, body, to))
    return [each.row(name) for name, each in found.items()]


def without_model(num_streams: int, rounds: int) -> list[Row]:
    """Measure streams that cost no computation."""
    rows: list[Row] = []
    streams = str(num_streams)
    with (
        server("ours", "--streams", streams) as target,
        fronted("builtin", "even", [lambda at: [*null_replica(at), "--streams", streams]]) as front,
    ):
        places = {"one process": Place(target.url, target.pid), "front and replica": front}
        for tick in TICKS:
            body = {"max_tokens": NUM_TICKS, "seed": tick}
            for row in compared(places, num_streams, body, rounds):
                rows.append({"offered tokens/s": round(1e6 * num_streams / tick), **row})
    return rows


def with_model(model: str, num_streams: int, num_tokens: int, rounds: int) -> list[Row]:
    """Measure streams of a model. Each setting has an engine of one thread."""
    body = {"max_tokens": num_tokens, "temperature": 0, "ignore_eos": True, "speculation": "off"}
    with one_server(model) as one, fronted(model, "even", [replica_of(model, KV_TOKENS)]) as front:
        return compared({"one process": one, "front and replica": front}, num_streams, body, rounds)


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the options."""
    parser = argparse.ArgumentParser(
        prog="python -m foretoken.bench.lab.front", description=str(__doc__).partition("\n")[0]
    )
    parser.add_argument("--streams", type=positive, default=64, help="concurrent chats (64)")
    parser.add_argument("--tokens", type=positive, default=32, help="tokens of an answer (32)")
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--out", type=Path, default=RESULTS / "front.json")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print the tables, and write JSON to ``--out``."""
    args = parsed(argv)
    report = heading()
    print(*(f"{key}: {value}" for key, value in report.items()), sep="\n")
    print(f"load of the machine before: {os.getloadavg()[0]:.1f}", flush=True, file=sys.stderr)
    report["streams"] = args.streams
    rows = report["without a model"] = without_model(args.streams, args.rounds)
    print(f"\n{table(rows)}\n", flush=True)
    rows = report[args.model] = with_model(args.model, args.streams, args.tokens, args.rounds)
    print(f"\n{table(rows)}\n", flush=True)
    write_json(args.out, report)


if __name__ == "__main__":
    main()
