"""Several servers on one machine, measured in turn over HTTP: the rows of `gguf` and of `peers`.

All servers stay up, and each row is measured on one server after another, in rotating order. A
server whose turn has not come is stopped by a signal, because spinning threads would slow the
others.

Rows: *ready* is the time from the start of the process to its first healthy answer, in seconds.
*Prompt of N* is the tokens per second of a new prompt until the first token of its answer. *Decode
xN* is the tokens per second of N requests at once that continue new text at temperature 1, where
lookups find nothing. *Edit, quote, agent, chat* are answers to the tasks of
bench/common/real_tasks.py at temperature 0, one at a time, and *four at once* is one task of each
kind; they are timed from an answer's first token to its last, without prompts. *Resident* and
*peak* are gigabytes after all rows.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO

import msgspec

from ..common.real_tasks import KINDS, prompts
from ..common.report import Spread, heading, table, write_json
from ..load.figures import Record
from ..load.http import Failure, Http
from ..load.openai import Answer
from ..load.server import environment, first_model

START_SECONDS = 900.0  # vLLM compiles at its start.
ANSWER_TOKENS = 128
NUM_TASKS = 4  # Tasks of a kind in each turn.
PROMPTS = (700, 2900)  # Approximate lengths in tokens.
BATCHES = (1, 4)
_WORDS = (  # Each word is one token in common vocabularies.
    "river", "stone", "garden", "letter", "window", "market", "winter", "yellow", "engine",
    "number", "planet", "bridge", "silver", "forest", "doctor", "ticket", "mirror", "basket",
    "summer", "orange", "copper", "little", "second", "travel",
)  # fmt: skip
Prompt = Callable[[int, int], "str | list[int]"]
"""Makes a prompt of about a given number of tokens from a seed."""
Cells = dict[str, dict[str, object]]
"""Measurements by row and server."""


class StartError(Exception):
    """A server did not start. The message is one line."""


@dataclass(slots=True)
class Server:
    """A server under test. Without a process it runs elsewhere, and its memory is not measured."""

    name: str
    url: str
    process: subprocess.Popen[bytes] | None = None
    model: str = ""
    ready: list[float] = field(default_factory=list)

    @contextlib.contextmanager
    def awake(self) -> Iterator[None]:
        """Let the processes of the server run inside the block."""
        self._signal(signal.SIGCONT)
        try:
            yield
        finally:
            self._signal(signal.SIGSTOP)

    def _signal(self, number: int) -> None:
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)

    def close(self) -> None:
        """End the server's processes."""
        if self.process is not None:
            self._signal(signal.SIGCONT)
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(30)
            self._signal(signal.SIGKILL)
            self.process.wait()

    def memory(self) -> tuple[float, float] | None:
        """Return the first process's resident memory and its peak in gigabytes."""
        if self.process is None:
            return None
        status = Path(f"/proc/{self.process.pid}/status").read_text(encoding="utf-8")
        kib = dict(line.split(":", 1) for line in status.splitlines())
        resident, peak = (int(kib[name].split()[0]) * 1024 / 1e9 for name in ("VmRSS", "VmHWM"))
        return resident, peak


@contextlib.contextmanager
def started(name: str, command: Sequence[str] | str) -> Iterator[Server]:
    """Start a server and wait until it answers; a string is the address of a running server.

    Raises `StartError`.
    """
    if isinstance(command, str):
        server = Server(name, command)
        asyncio.run(_healthy(server))
        yield server
        return
    with tempfile.TemporaryFile() as log:
        try:
            with _process(name, command, log) as server:
                yield server
        except StartError:
            log.seek(0)
            *_, last = log.read().decode("utf-8", "replace").splitlines() or [""]
            raise StartError(f"the server ended: {last[:160]}") from None


@contextlib.contextmanager
def _process(name: str, command: Sequence[str], log: IO[bytes]) -> Iterator[Server]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    began = time.perf_counter()
    process = subprocess.Popen(
        [*command, "--port", str(port)],
        stdout=log,
        stderr=log,
        start_new_session=True,
        env=environment(),
    )
    server = Server(name, f"http://127.0.0.1:{port}", process)
    try:
        asyncio.run(_healthy(server))
        server.ready.append(time.perf_counter() - began)
        with server.awake():
            pass  # Leaving the block stops the server until its turn.
        yield server
    finally:
        server.close()


async def _healthy(server: Server) -> None:
    async with asyncio.timeout(START_SECONDS):
        while True:
            if server.process is not None and server.process.poll() is not None:
                raise StartError
            with contextlib.suppress(Failure), contextlib.closing(Http(server.url)) as http:
                # A server may have no such route (404).
                if (await http.get("/health"))[0] in (200, 404):
                    server.model = (await first_model(http, None))[0]
                    return
            await asyncio.sleep(0.02)


# -- requests -------------------------------------------------------------------------------------


async def ask(server: Server, path: str, body: Mapping[str, object]) -> Record:
    """Stream one answer. Raises `Failure`."""
    record = Record(server.name, due=time.perf_counter(), times=[], counts=[])
    answer = Answer(record)
    options = {"model": server.model, "stream": True, "stream_options": {"include_usage": True}}
    with contextlib.closing(Http(server.url)) as http:
        status = await http.post(path, msgspec.json.encode({**options, **body}), answer.feed)
    if status != 200:
        raise Failure(f"HTTP {status}", answer.raw.decode("utf-8", "replace")[:200])
    answer.finish()
    if not record.times:
        raise Failure("empty answer")
    return record


async def chat(server: Server, text: str) -> Record:
    """Answer a message at temperature 0."""
    message = {"role": "user", "content": text}
    body = {"messages": [message], "temperature": 0, "max_tokens": ANSWER_TOKENS}
    return await ask(server, "/v1/chat/completions", body)


async def rate(records: Sequence[Awaitable[Record]]) -> float:
    """Return the tokens per second of concurrent requests, from the first token to the last."""
    done = await asyncio.gather(*records)
    seconds = max(each.times[-1] for each in done) - min(each.times[0] for each in done)
    return sum(each.num_tokens - each.counts[0] for each in done) / seconds


def words(num_tokens: int, seed: int) -> str:
    """Return a prompt of random words."""
    return " ".join(random.Random(seed).choices(_WORDS, k=num_tokens))


# -- rows -----------------------------------------------------------------------------------------


Row = Callable[[Server, int], Awaitable[float]]
"""Measures the tokens per second of a server in a turn."""


async def prompt_rate(num_tokens: int, prompt: Prompt, server: Server, turn: int) -> float:
    """Return the tokens per second of a new prompt."""
    body = {"prompt": prompt(num_tokens, turn), "temperature": 0, "max_tokens": 1}
    record = await ask(server, "/v1/completions", body)
    return (record.prompt_tokens or 0) / record.ttft


async def decode_rate(count: int, prompt: Prompt, server: Server, turn: int) -> float:
    """Return the tokens per second of ``count`` concurrent requests that continue new text."""
    more = {"temperature": 1, "ignore_eos": True, "max_tokens": ANSWER_TOKENS}
    bodies = (
        {"prompt": prompt(12, seed), "seed": seed, **more}
        # These seeds occur in no other row.
        for seed in range(1000 * count + 100 * turn, 1001 * count + 100 * turn)
    )
    return await rate([ask(server, "/v1/completions", body) for body in bodies])


async def task_rate(kind: str, server: Server, turn: int) -> float:
    """Return the tokens per second of a kind's answers, one after another."""
    done = [await chat(server, text) for text in _tasks(kind, turn)]
    tokens = sum(each.num_tokens - each.counts[0] for each in done)
    return tokens / sum(each.decode_time for each in done)


async def mixed_rate(server: Server, turn: int) -> float:
    """Return the tokens per second of one task of each kind at once."""
    return await rate([chat(server, _tasks(kind, turn)[-1]) for kind in KINDS])


def token_rows(prompt: Prompt) -> dict[str, Row]:
    """Return the rows that any model can be measured by, by name."""
    return {
        **{f"prompt of {n / 1000:.1f}k": partial(prompt_rate, n, prompt) for n in PROMPTS},
        **{f"decode x{count}": partial(decode_rate, count, prompt) for count in BATCHES},
    }


TASK_ROWS: dict[str, Row] = {
    **{kind: partial(task_rate, kind) for kind in KINDS},
    "four at once": mixed_rate,
}
"""Rows of a model whose answers are meaningful."""


def _tasks(kind: str, turn: int) -> list[str]:
    """Return the messages of a turn; they repeat when all have been used."""
    texts = itertools.cycle(prompts(kind, "show"))
    return list(itertools.islice(texts, turn * NUM_TASKS, (turn + 1) * NUM_TASKS))


async def measure(servers: Sequence[Server], rows: Mapping[str, Row], turns: int) -> Cells:
    """Return spreads by row and server, or the reason if a server fails in a row."""
    found: Cells = {}
    for name, row in rows.items():
        values: dict[str, list[float]] = {server.name: [] for server in servers}
        failed: dict[str, object] = {}
        for turn in range(turns):
            first = turn % len(servers)
            for server in (*servers[first:], *servers[:first]):
                try:
                    with server.awake():
                        values[server.name].append(await row(server, turn))
                except Failure as failure:
                    failed[server.name] = f"failed: {failure}"
        found[name] = {n: failed.get(n) or Spread.of(each) for n, each in values.items()}
        print(name, {n: str(each) for n, each in found[name].items()}, file=sys.stderr)
    return found


def compare(
    commands: Mapping[str, Sequence[str] | str], rows: Mapping[str, Row], turns: int, starts: int
) -> Cells:
    """Start all servers and measure all rows.

    ``starts``: number of starts of each server to time.
    """
    found: Cells = {"ready, s": {}}
    for name, command in commands.items():
        found["ready, s"][name] = _start_seconds(name, command, starts)
    with contextlib.ExitStack() as stack:
        servers = []
        for name, command in commands.items():
            try:
                servers.append(stack.enter_context(started(name, command)))
            except StartError as error:
                print(f"{name}: {error}", file=sys.stderr)
                found["ready, s"][name] = f"failed: {error}"
        found |= asyncio.run(measure(servers, rows, turns))
        memory = {server.name: server.memory() for server in servers}
    for index, row in enumerate(("resident, GB", "peak, GB")):
        found[row] = {name: each[index] if each else "-" for name, each in memory.items()}
    return {row: {name: cells.get(name, "-") for name in commands} for row, cells in found.items()}


def _start_seconds(name: str, command: Sequence[str] | str, starts: int) -> Spread | str:
    """Time some starts; an additional first one fills the caches."""
    seconds = []
    try:
        for _ in range(starts + 1 if starts else 0):
            with started(name, command) as server:
                seconds += server.ready
    except StartError as error:
        return f"failed: {error}"
    return Spread.of(seconds[1:]) if seconds else "-"


def show(title: str, found: Cells, out: Path | None, **more: object) -> None:
    """Print the table, and write it as JSON to ``out`` if given."""
    report = heading() | more | {"rows": found}
    print(msgspec.json.encode(heading()).decode())
    print(f"\n{title}; median [lowest .. highest]\n")
    print(table([{"": row} | figures for row, figures in found.items()]))
    if out is not None:
        write_json(out, report)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of both benchmarks."""
    add = parser.add_argument
    add("--only", action="append", metavar="COLUMN", help="column to measure; may be repeated")
    add("--threads", type=int, default=2, help="threads of each server (%(default)s)")
    add("--turns", type=int, default=3, help="measurements of each cell (%(default)s)")
    add("--out", type=Path, help="JSON file to write")
