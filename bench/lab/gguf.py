"""One GGUF file on two servers, ours and llama.cpp's: `python -m foretoken.bench.lab.gguf FILE`.

Every server is started alone for the seconds until it is ready, with the file in the page cache.
Then all of them stay up, and each row of the table is measured on one server after the other, in
rotating order, as often as ``--turns`` says; a server that waits takes no processor time.

Rows: *ready*, seconds from the start of the process to its first healthy answer. *Prompt of N*,
tokens of a fresh prompt a second, until the first token of its answer. *Decode xN*, tokens a second
of N requests at once that continue fresh text at temperature 1, where nothing can be looked up.
*Edit, quote, agent, chat*, answers to the tasks of bench/common/real_tasks.py at temperature 0, one
at a time, and *four at once*, one of each; from an answer's first token to its last, prompts
not counted. *Resident* and *peak* are gigabytes at the end of all rows.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import random
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import msgspec

from ..common.real_tasks import KINDS, prompts
from ..common.report import Spread, heading, table, write_json
from ..load.figures import Record
from ..load.http import Failure, Http
from ..load.openai import Answer
from ..load.server import environment

START_SECONDS = 300.0
ANSWER_TOKENS = 128
CONTEXT = 8192  # tokens of a request, on every server
NUM_TASKS = 4  # of a kind, in each turn
PROMPTS = (700, 2900)  # tokens, nearly
_WORDS = (  # a token each in common vocabularies
    "river", "stone", "garden", "letter", "window", "market", "winter", "yellow", "engine",
    "number", "planet", "bridge", "silver", "forest", "doctor", "ticket", "mirror", "basket",
    "summer", "orange", "copper", "little", "second", "travel",
)  # fmt: skip


@dataclass(slots=True)
class Server:
    """A running server. ``url`` is on the loopback interface."""

    name: str
    process: subprocess.Popen[bytes]
    url: str
    ready: list[float] = field(default_factory=list)

    def memory(self) -> tuple[float, float]:
        """Gigabytes that are resident, and the most that ever were."""
        status = Path(f"/proc/{self.process.pid}/status").read_text(encoding="utf-8")
        kib = dict(line.split(":", 1) for line in status.splitlines())
        resident, peak = (int(kib[name].split()[0]) * 1024 / 1e9 for name in ("VmRSS", "VmHWM"))
        return resident, peak


def commands(args: argparse.Namespace) -> dict[str, list[str]]:
    """Command lines of the servers, by the name of their column; each lacks its port."""
    threads, file = str(args.threads), str(args.file)
    own = [sys.executable, "-m", "foretoken", "serve", file, "--max-model-len", str(CONTEXT)]
    own += ["--threads", threads, "--log-level", "error"]
    made = {"foretoken": own, "plain": [*own, "--speculation", "off"]}
    if args.draft is not None:
        made["foretoken, draft"] = [*own, "--draft", f"auto,{args.draft}"]
    if args.llama_server is not None:
        seats = 4
        peer = [str(args.llama_server), "-m", file, "-t", threads, "-np", str(seats)]
        peer += ["-c", str(CONTEXT * seats), "--host", "127.0.0.1"]
        made["llama.cpp"] = peer
        made["llama.cpp, n-gram"] = [*peer, "--spec-type", "ngram-simple"]
        if args.draft is not None:
            made["llama.cpp, draft"] = [*peer, "-md", str(args.draft)]
    return {name: made[name] for name in args.only or made}


@contextlib.contextmanager
def started(name: str, command: Sequence[str]) -> Iterator[Server]:
    """Start a server, and wait until it answers."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    began = time.perf_counter()
    process = subprocess.Popen(
        [*command, "--port", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=environment(),
    )
    try:
        server = Server(name, process, f"http://127.0.0.1:{port}")
        asyncio.run(_healthy(server))
        server.ready.append(time.perf_counter() - began)
        yield server
    finally:
        process.terminate()
        process.wait()


async def _healthy(server: Server) -> None:
    async with asyncio.timeout(START_SECONDS):
        while True:
            if server.process.poll() is not None:
                raise SystemExit(f"{server.name}: the server ended at its start")
            with contextlib.suppress(Failure), contextlib.closing(Http(server.url)) as http:
                if (await http.get("/health"))[0] == 200:
                    return
            await asyncio.sleep(0.02)


# -- requests -------------------------------------------------------------------------------------


async def ask(server: Server, path: str, body: dict[str, object]) -> Record:
    """Stream one answer. Raises SystemExit where it fails."""
    record = Record(server.name, due=time.perf_counter())
    answer = Answer(record)
    options = {"stream": True, "stream_options": {"include_usage": True}}
    try:
        with contextlib.closing(Http(server.url)) as http:
            status = await http.post(path, msgspec.json.encode(options | body), answer.feed)
        if status != 200:
            raise Failure(f"HTTP {status}", answer.raw.decode("utf-8", "replace")[:200])
        answer.finish()
    except Failure as failure:
        raise SystemExit(f"{server.name}: {path}: {failure}") from None
    return record


async def chat(server: Server, text: str) -> Record:
    """Answer a message at temperature 0."""
    message = {"role": "user", "content": text}
    body = {"messages": [message], "temperature": 0, "max_tokens": ANSWER_TOKENS}
    return await ask(server, "/v1/chat/completions", body)


async def decode(server: Server, seed: int) -> Record:
    """Continue a text of random words at temperature 1, to full length."""
    body = {"prompt": _text(12, seed), "temperature": 1, "seed": seed, "ignore_eos": True}
    return await ask(server, "/v1/completions", body | {"max_tokens": ANSWER_TOKENS})


async def rate(records: Sequence[Awaitable[Record]]) -> float:
    """Tokens a second of requests that run at once, from the first of all tokens to the last."""
    done = await asyncio.gather(*records)
    seconds = max(each.times[-1] for each in done) - min(each.times[0] for each in done)
    return sum(each.num_tokens - each.counts[0] for each in done) / seconds


def _text(num_words: int, seed: int) -> str:
    return " ".join(random.Random(seed).choices(_WORDS, k=num_words))


# -- rows -----------------------------------------------------------------------------------------


Row = Callable[[Server, int], Awaitable[float]]
"""Measures tokens a second of a server in a turn."""


async def prompt_rate(num_tokens: int, server: Server, turn: int) -> float:
    """Tokens of a fresh prompt a second."""
    body = {"prompt": _text(num_tokens, turn), "temperature": 0, "max_tokens": 1}
    record = await ask(server, "/v1/completions", body)
    return (record.prompt_tokens or 0) / record.ttft


async def decode_rate(count: int, server: Server, turn: int) -> float:
    """Tokens of fresh text a second, of so many requests at once."""
    return await rate([decode(server, 100 * turn + seat) for seat in range(count)])


async def task_rate(kind: str, server: Server, turn: int) -> float:
    """Tokens a second of answers one after another."""
    done = [await chat(server, text) for text in _tasks(kind, turn)]
    tokens = sum(each.num_tokens - each.counts[0] for each in done)
    return tokens / sum(each.decode_time for each in done)


async def mixed_rate(server: Server, turn: int) -> float:
    """Tokens a second of a task of each kind at once."""
    return await rate([chat(server, _tasks(kind, turn)[-1]) for kind in KINDS])


ROWS: dict[str, Row] = {
    **{f"prompt of {size / 1000:.1f}k": partial(prompt_rate, size) for size in PROMPTS},
    **{f"decode x{count}": partial(decode_rate, count) for count in (1, 4)},
    **{kind: partial(task_rate, kind) for kind in KINDS},
    "four at once": mixed_rate,
}


def _tasks(kind: str, turn: int) -> list[str]:
    """Messages of a turn: others in each, as long as there are others."""
    texts = itertools.cycle(prompts(kind, "show"))
    return list(itertools.islice(texts, turn * NUM_TASKS, (turn + 1) * NUM_TASKS))


async def measure(servers: Sequence[Server], turns: int) -> dict[str, dict[str, Spread]]:
    """Figures by row and server."""
    found: dict[str, dict[str, Spread]] = {}
    for name, row in ROWS.items():
        values: dict[str, list[float]] = {server.name: [] for server in servers}
        for turn in range(turns):
            first = turn % len(servers)
            for server in (*servers[first:], *servers[:first]):
                values[server.name].append(await row(server, turn))
        found[name] = {server: Spread.of(each) for server, each in values.items()}
        print(name, {server: str(each) for server, each in found[name].items()}, file=sys.stderr)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Run `python -m foretoken.bench.lab.gguf`; the exit code."""
    args = _parsed(argv)
    found: dict[str, dict[str, object]] = {"ready, s": {}}
    for name, command in commands(args).items():
        with started(name, command):  # once, so that the file and what is kept of it are warm
            pass
        seconds = []
        for _ in range(args.turns):
            with started(name, command) as server:
                seconds += server.ready
        found["ready, s"][name] = Spread.of(seconds)
    with contextlib.ExitStack() as stack:
        servers = [
            stack.enter_context(started(name, command)) for name, command in commands(args).items()
        ]
        for row, figures in asyncio.run(measure(servers, args.turns)).items():
            found[row] = dict(figures)
        memory = {server.name: server.memory() for server in servers}
    for index, row in enumerate(("resident, GB", "peak, GB")):
        found[row] = {name: each[index] for name, each in memory.items()}
    report = heading() | {"file_gb": args.file.stat().st_size / 1e9, "rows": found}
    print(msgspec.json.encode(heading()).decode())
    print(f"\n{args.file.name}, {report['file_gb']:.2f} GB; median [lowest .. highest]\n")
    print(table([{"": row} | figures for row, figures in found.items()]))
    if args.out is not None:
        write_json(args.out, report)
    return 0


def _parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m foretoken.bench.lab.gguf", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("file", type=Path, help="GGUF file that every server loads")
    parser.add_argument("--llama-server", type=Path, help="llama.cpp's server, for comparison")
    parser.add_argument("--draft", type=Path, help="GGUF file of a draft model, for two columns")
    parser.add_argument("--only", action="append", help="column to measure; may be repeated")
    parser.add_argument("--threads", type=int, default=2, help="threads of each server")
    parser.add_argument("--turns", type=int, default=3, help="measurements of each cell")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
