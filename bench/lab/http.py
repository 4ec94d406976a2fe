"""Cost of the HTTP side without a model: `python -m foretoken.bench.lab.http`.

It measures requests per second of short complete chats, and the time that HTTP adds to a token when
many answers are streamed. Both are compared with bare starlette on the same uvicorn, which returns
the same bytes. The client runs in a process of its own. Rounds alternate, so that other load on the
machine affects both servers.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Any

import msgspec

from ..common.report import Spread, command, machine, table, write_json
from ..load.http import Http

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
NUM_STREAMS = 32
CONNECTIONS = 16
MESSAGES = [{"role": "user", "content": "Say a word."}]
TOKEN_IDS = list(range(100, 108))
AIMS = {"added_chat_cpu_ms": " (aim: at most 0.35)", "added_token_cpu_us": " (aim: at most 25)"}


@dataclass(frozen=True, slots=True)
class Target:
    """A running server."""

    port: int
    pid: int

    @property
    def url(self) -> str:
        """Address of the server."""
        return f"http://127.0.0.1:{self.port}"

    def cpu_seconds(self) -> float:
        """Return the CPU time that the server has used, on all its threads."""
        fields = Path(f"/proc/{self.pid}/stat").read_text("utf-8").rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def server(kind: str, *args: str) -> Iterator[Target]:
    """Start a server in a process of its own, and yield it."""
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as sock:
        port: int = sock.getsockname()[1]
        child = [sys.executable, "-m", __spec__.name, "--serve", kind, "--fd", str(sock.fileno())]
        with subprocess.Popen([*child, *args], pass_fds=[sock.fileno()]) as process:
            try:
                yield Target(port, process.pid)
            finally:
                process.kill()


def serve(options: argparse.Namespace) -> None:
    """Run as one of the two servers, until killed."""
    import uvloop

    from .null_engine import serve_bare, serve_ours

    sock = socket.socket(fileno=options.fd)
    work: Coroutine[Any, Any, None]
    if options.serve == "ours":
        work = serve_ours(sock, options.streams or NUM_STREAMS)
    else:
        chat, text, chunk = options.bytes.read_bytes().split(b"\0")
        work = serve_bare(sock, NUM_STREAMS, {CHAT: chat, TEXT: text}, chunk)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(work)


def requests() -> dict[str, bytes]:
    """Return request bodies by path: a chat with messages, and a completion with token ids."""
    from .null_engine import REPLY_TOKENS

    rest = {"max_tokens": REPLY_TOKENS, "temperature": 0}
    return {
        CHAT: msgspec.json.encode({"messages": MESSAGES, **rest}),
        TEXT: msgspec.json.encode({"prompt": TOKEN_IDS, **rest}),
    }


def streamed() -> bytes:
    """Return the body of a streamed chat."""
    from .null_engine import NUM_TICKS

    rest = {"max_tokens": NUM_TICKS, "temperature": 0, "stream": True}
    return msgspec.json.encode({"messages": MESSAGES, **rest})


async def recorded(target: Target, mark: bytes) -> bytes:
    """Record foretoken's answers and one chunk of a stream, for the bare server to repeat."""
    http = Http(target.url)
    wholes = [await _whole(http, path, body) for path, body in requests().items()]
    http.close()
    _, text = await stream_times(target, mark)
    chunk = next(event for event in text.split(b"\n\n") if mark in event)
    return b"\0".join([*wholes, chunk + b"\n\n"])


async def _whole(http: Http, path: str, body: bytes) -> bytes:
    status, answer = await http.post_whole(path, body)
    if status != HTTPStatus.OK:
        raise RuntimeError(f"the server rejected a request: {status} {answer[:300]!r}")
    return answer


async def answers(target: Target, path: str, body: bytes, seconds: float) -> tuple[int, float]:
    """Return the number of answers and the seconds that they took.

    Each of several connections is kept alive and sends one request after another.
    """
    http = Http(target.url)
    await _whole(http, path, body)  # The server may still be starting.
    start = time.monotonic()

    async def ask_on() -> int:
        count = 0
        while time.monotonic() - start < seconds:
            await _whole(http, path, body)
            count += 1
        return count

    counts = await asyncio.gather(*(ask_on() for _ in range(CONNECTIONS)))
    http.close()
    return sum(counts), time.monotonic() - start


async def stream_times(target: Target, mark: bytes) -> tuple[Sequence[Sequence[float]], bytes]:
    """Return the arrival times of the tokens of each stream, and the text of the first stream."""
    http, body = Http(target.url), streamed()
    times: list[list[float]] = [[] for _ in range(NUM_STREAMS)]
    text = bytearray()

    async def listen(index: int) -> None:
        # The server writes whole chunks, so no mark is split between pieces.
        def arrived(_: float, piece: bytes) -> None:
            times[index] += [time.monotonic()] * piece.count(mark)
            if index == 0:
                text.extend(piece)

        await http.post(CHAT, body, arrived)

    await asyncio.gather(*(listen(index) for index in range(NUM_STREAMS)))
    http.close()
    return times, bytes(text)


@dataclass(slots=True)
class Rounds:
    """Measurements of one server, round by round."""

    rates: dict[str, list[float]] = field(default_factory=lambda: {CHAT: [], TEXT: []})
    # Milliseconds.
    cpu: dict[str, list[float]] = field(default_factory=lambda: {CHAT: [], TEXT: []})
    token_cpu: list[float] = field(default_factory=list)  # Microseconds.
    medians: list[float] = field(default_factory=list)  # Milliseconds.
    slowest: list[float] = field(default_factory=list)  # The 99th percentile in milliseconds.

    def row(self, name: str) -> dict[str, object]:
        """Return a row of the table."""
        return {
            "server": name,
            "chats/s": Spread.of(self.rates[CHAT]),
            "cpu ms": Spread.of(self.cpu[CHAT]),
            "token-id requests/s": Spread.of(self.rates[TEXT]),
            "their cpu ms": Spread.of(self.cpu[TEXT]),
            "streamed token ms, median": Spread.of(self.medians),
            "99%": Spread.of(self.slowest),
            "its cpu us": Spread.of(self.token_cpu),
        }


async def measure(
    targets: Sequence[Target], options: argparse.Namespace, mark: bytes
) -> list[Rounds]:
    """Measure all rounds, the servers in turn."""
    rounds = [Rounds() for _ in targets]
    for _ in range(options.repeats):
        for path, request in requests().items():
            for target, own in zip(targets, rounds, strict=True):
                await measure_rate(target, path, request, options.seconds, own)
        for target, own in zip(targets, rounds, strict=True):
            await measure_tokens(target, mark, own)
    return rounds


async def measure_rate(
    target: Target, path: str, request: bytes, seconds: float, rounds: Rounds
) -> None:
    """Measure one round of complete answers."""
    before = target.cpu_seconds()
    count, took = await answers(target, path, request, seconds)
    rounds.rates[path].append(count / took)
    rounds.cpu[path].append(1e3 * (target.cpu_seconds() - before) / count)


async def measure_tokens(target: Target, mark: bytes, rounds: Rounds) -> None:
    """Measure one round of streams: the time from a server tick to the token's arrival."""
    before = target.cpu_seconds()
    streams, _ = await stream_times(target, mark)
    used = target.cpu_seconds() - before
    http = Http(target.url)
    ticks = msgspec.json.decode((await http.get("/ticks"))[1], type=list[float])
    http.close()
    times = [
        1e3 * (arrived - ticked)
        for stream in streams
        for ticked, arrived in zip(ticks, stream, strict=True)
    ]
    rounds.medians.append(statistics.median(times))
    rounds.slowest.append(statistics.quantiles(times, n=100)[98])
    rounds.token_cpu.append(1e6 * used / len(times))


def ratio(ours: Sequence[float], bare: Sequence[float]) -> Spread:
    """Return the first server's figure divided by the second's, round by round."""
    return Spread.of([one / other for one, other in zip(ours, bare, strict=True)])


def added(ours: Sequence[float], bare: Sequence[float]) -> Spread:
    """Return the first server's figure minus the second's, round by round."""
    return Spread.of([one - other for one, other in zip(ours, bare, strict=True)])


def summary(ours: Rounds, bare: Rounds) -> dict[str, Spread]:
    """Return the main figures, also by CPU time, which other load on the machine affects less."""
    return {
        "chats_per_second_ratio": ratio(ours.rates[CHAT], bare.rates[CHAT]),
        "chats_per_cpu_second_ratio": ratio(bare.cpu[CHAT], ours.cpu[CHAT]),
        "token_id_requests_per_second_ratio": ratio(ours.rates[TEXT], bare.rates[TEXT]),
        "token_id_requests_per_cpu_second_ratio": ratio(bare.cpu[TEXT], ours.cpu[TEXT]),
        "added_chat_cpu_ms": added(ours.cpu[CHAT], bare.cpu[CHAT]),
        "added_token_cpu_us": added(ours.token_cpu, bare.token_cpu),
        "added_token_ms": added(ours.medians, bare.medians),
    }


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line, including the flags with which the program starts its servers."""
    parser = argparse.ArgumentParser(prog="python -m foretoken.bench.lab.http")
    parser.add_argument("--out", type=Path, default=Path("bench/results/http.json"))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--seconds", type=float, default=2.0, help="seconds of one round of requests (2)"
    )
    for name, kind in (("--serve", str), ("--fd", int), ("--bytes", Path), ("--streams", int)):
        parser.add_argument(name, type=kind, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print, and write JSON to ``--out``."""
    options = parsed(argv)
    if options.serve:
        serve(options)
        return
    from .null_engine import NUM_TICKS, TICK_SECONDS, WORD

    mark = f'"content":"{WORD}"'.encode()
    with tempfile.TemporaryDirectory() as folder, server("ours") as ours:
        said = Path(folder, "said")
        said.write_bytes(asyncio.run(recorded(ours, mark)))
        with server("bare", "--bytes", os.fspath(said)) as bare:
            ours_rounds, bare_rounds = asyncio.run(measure((ours, bare), options, mark))
    host, found = machine(), summary(ours_rounds, bare_rounds)
    rows = [ours_rounds.row("ours"), bare_rounds.row("bare")]
    print(command(), *(f"{key}: {value}" for key, value in host.items()), "", sep="\n")
    print(table(rows), "", sep="\n")
    print(*(f"{name}: {spread}{AIMS.get(name, '')}" for name, spread in found.items()), sep="\n")
    report = {
        "command": command(),
        "machine": host,
        "num_streams": NUM_STREAMS,
        "num_tokens": NUM_TICKS,
        "tick_seconds": TICK_SECONDS,
        "connections": CONNECTIONS,
        "rows": rows,
        **found,
    }
    write_json(options.out, report)


if __name__ == "__main__":
    main()
