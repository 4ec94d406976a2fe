"""Prefill and decode apart, beside one server: `python -m foretoken.bench.lab.apart`.

A mixed load: streams of short prompts and long answers run all the time, and long prompts arrive at
random and want a few tokens. It is served by one server with all cores, and by two servers with
half of them each, one of which computes the long prompts. Both have the same seeds, prompts and
times of arrival, and their texts must be equal. Compared are the first token of long prompts and
the gaps between tokens of the streams. Needs the extra pd.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path

import msgspec

from ..common.report import RESULTS, Spread, heading, table, write_json
from ..load.figures import percentile
from ..load.http import Http
from ..load.server import own_server
from ..load.workloads import above_zero, positive

NOTES = (
    "together: one server, a thread for each core; apart: two servers with half of the threads",
    "one machine gains nothing by splitting itself but steadier gaps: its cores are the same",
    "gaps: between the chunks of a stream, as its reader sees them",
    "spread: median [lowest .. highest] of the rounds",
)
WANTED = {"do_remote_decode": True, "do_remote_prefill": False}
ANSWER_LEN = 4  # tokens that a long prompt wants
Body = dict[str, object]


@dataclass(slots=True)
class Seen:
    """Texts and times of one round; seconds."""

    firsts: list[float] = field(default_factory=list)  # of long prompts
    gaps: list[float] = field(default_factory=list)  # of streams
    texts: dict[str, str] = field(default_factory=dict)
    loaded: int = 0  # tokens of long prompts that D read
    prompted: int = 0  # tokens of long prompts


def long_prompts(count: int, chars: int, seed: int) -> list[str]:
    """Pieces of the standard library, no two of which begin alike."""
    text = "".join(Path(each.__file__ or "").read_text("utf-8") for each in (argparse, random, re))
    rng = random.Random(seed)
    starts = (rng.randrange(len(text) - chars) for _ in range(count))
    return [f"# {seed} {number}\n{text[at : at + chars]}" for number, at in enumerate(starts)]


class Load:
    """The requests of a round, sent to one server, or to P and D."""

    def __init__(self, urls: Sequence[str], args: argparse.Namespace, seed: int) -> None:
        self._prefill = Http(urls[0]) if len(urls) > 1 else None
        self._decode = Http(urls[-1])
        self._args, self._seed = args, seed
        self.seen = Seen()

    async def run(self) -> Seen:
        """Send all of them."""
        args = self._args
        prompts = long_prompts(args.prompts, args.chars, self._seed)
        streams = [asyncio.create_task(self._stream(number)) for number in range(args.streams)]
        rng, tasks = random.Random(self._seed), []
        for number, prompt in enumerate(prompts):
            await asyncio.sleep(rng.expovariate(args.rate))
            tasks.append(asyncio.create_task(self._long(number, prompt)))
        await asyncio.gather(*tasks)
        for stream in streams:
            stream.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
        for http in (self._prefill, self._decode):
            if http is not None:
                http.close()
        return self.seen

    async def _stream(self, number: int) -> None:
        """Answers one after the other; a chunk's time counts."""
        for turn in range(10_000):
            prompt = f"def f{self._seed}_{number}_{turn}(x):\n"
            body: Body = {"prompt": prompt, "max_tokens": 256, "stream": True}
            times: list[float] = []
            await self._decode.post("/v1/completions", encoded(body), partial(_note_time, times))
            self.seen.gaps += [later - now for now, later in pairwise(times)]

    async def _long(self, number: int, prompt: str) -> None:
        body: Body = {"prompt": prompt, "max_tokens": ANSWER_LEN, "seed": number}
        began, first = time.perf_counter(), 0.0
        params = None
        if self._prefill is not None:
            asked = {**body, "max_tokens": 1, "kv_transfer_params": WANTED}
            params = (await whole(self._prefill, asked))["kv_transfer_params"]
        pieces: list[bytes] = []

        def read(_: float, piece: bytes) -> None:
            nonlocal first
            first = first or time.perf_counter()
            pieces.append(piece)

        usage = {"include_usage": True}
        asked = {**body, "kv_transfer_params": params, "stream": True, "stream_options": usage}
        await self._decode.post("/v1/completions", encoded(asked), read)
        self.seen.firsts.append(first - began)
        self._note(str(number), b"".join(pieces))

    def _note(self, name: str, stream: bytes) -> None:
        lines = (line[6:] for line in stream.splitlines() if line.startswith(b"data: {"))
        chunks = [msgspec.json.decode(line) for line in lines]
        texts = [choice["text"] for chunk in chunks for choice in chunk["choices"]]
        self.seen.texts[name] = "".join(texts)
        usage = chunks[-1]["usage"]
        self.seen.prompted += usage["prompt_tokens"]
        self.seen.loaded += usage["prompt_tokens_details"]["loaded_tokens"]


def _note_time(times: list[float], now: float, _: bytes) -> None:
    times.append(now)


def encoded(body: Body) -> bytes:
    """A body as JSON; answers do not end by themselves."""
    return msgspec.json.encode({"temperature": 0.8, "ignore_eos": True, **body})


async def whole(http: Http, body: Body) -> Mapping[str, object]:
    """The answer to a body; ends the program if it is an error."""
    status, answer = await http.post_whole("/v1/completions", encoded(body))
    if status != 200:
        raise SystemExit(f"{status}: {answer.decode(errors='replace')}")
    found: Mapping[str, object] = msgspec.json.decode(answer)
    return found


@contextlib.contextmanager
def servers(name: str, args: argparse.Namespace) -> Iterator[list[str]]:
    """The addresses of a setting: one server's, or those of P and D."""
    cores = len(os.sched_getaffinity(0))
    flags = [args.model, "--kv-tokens", str(args.kv_tokens), "--log-level", "warning"]
    with contextlib.ExitStack() as stack:
        if name == "together":
            yield [stack.enter_context(own_server([*flags, "--threads", str(cores)]))]
            return
        flags += ["--threads", str(max(1, cores // 2)), "--kv-transfer", "nixl"]
        roles = ("prefill", "decode")
        yield [stack.enter_context(own_server([*flags, "--role", role])) for role in roles]


def row(name: str, rounds: Sequence[Seen]) -> dict[str, object]:
    """The line of a setting."""

    def spread(pick: str, share: float) -> str:
        values = [percentile(sorted(getattr(seen, pick)), share) for seen in rounds]
        return str(Spread.of(values).scaled(1000))

    prompted = sum(seen.prompted for seen in rounds)
    return {
        "setting": name,
        "first token p50 ms": spread("firsts", 0.5),
        "first token p99 ms": spread("firsts", 0.99),
        "gap p50 ms": spread("gaps", 0.5),
        "gap p99 ms": spread("gaps", 0.99),
        "prompt tokens read": round(sum(seen.loaded for seen in rounds) / prompted, 3),
    }


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(prog="foretoken.bench.lab.apart", description=__doc__)
    add = parser.add_argument
    add("--model", default="builtin")
    add("--kv-tokens", type=positive, default=32768)
    add("--streams", type=positive, default=4, help="streams that run all the time")
    add("--prompts", type=positive, default=24, help="long prompts of a round")
    add("--chars", type=positive, default=6000, help="characters of a long prompt")
    add("--rate", type=above_zero, default=1.5, help="long prompts a second")
    add("--rounds", type=positive, default=3)
    add("--seed", type=int, default=0)
    add("--out", type=Path, default=RESULTS / "apart.json")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure both settings, print a table, write the JSON."""
    args = parsed(argv)
    os.environ.setdefault("FORETOKEN_CLUSTER_KEY", "of this benchmark")
    load = {name: value for name, value in vars(args).items() if name != "out"}
    report = heading() | {"notes": NOTES, "load": load}
    print(*(f"{key}: {value}" for key, value in report.items()), sep="\n", flush=True)
    seen: dict[str, list[Seen]] = {}
    for name in ("together", "apart"):
        with servers(name, args) as urls:
            asyncio.run(Load(urls, args, args.seed - 1).run())  # connects, and measures costs
            seen[name] = [
                asyncio.run(Load(urls, args, args.seed + at).run()) for at in range(args.rounds)
            ]
    together, apart = seen.values()
    if [each.texts for each in together] != [each.texts for each in apart]:
        raise SystemExit("the texts differ")
    report["rows"] = rows = [row(name, rounds) for name, rounds in seen.items()]
    print(table(rows))
    write_json(args.out, report)


if __name__ == "__main__":
    main()
