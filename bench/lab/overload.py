"""Highest load that a server holds: the offered rate rises until the queue refuses, and beyond.

``python -m foretoken.bench.lab.overload``; arguments behind ``--`` go to the server. Requests
come by a Poisson process that the server cannot slow down; each is timed from the moment it was
due. All the while /health and /ready are asked. A rate is *held* while nothing is refused and the
first tokens come in time; beyond it the server must refuse at once, with Retry-After, and go on
serving what it took.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import sys
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from ...api.cli.flags import Parser
from ..common.report import heading, table, write_json
from ..load.corpus import TextCorpus, id_corpus
from ..load.figures import Record, percentile, summary
from ..load.generator import Ask, Job, Load, Piece, Session, arrivals
from ..load.http import Failure, Http
from ..load.openai import OpenAIDriver
from ..load.report import busy_note, stall_note, stalls
from ..load.server import first_model, own_server, server_encode
from ..load.workloads import above_zero, positive

OUT = Path("bench/results/overload.json")
REFUSED = "HTTP 429"
SHARED_LEN, OWN_LEN, OUTPUT_LEN = 128, 32, 32  # tokens
NUM_GROUPS = 8  # of requests that share a prefix
PROBE_SECONDS = 0.1
TIMEOUT_SECONDS = 120.0


class Overload:
    """One server, one rate after the other."""

    def __init__(self, http: Http, args: argparse.Namespace) -> None:
        self._http, self._args = http, args
        self._probes: list[float] = []  # seconds of /health and /ready
        self._not_ready = 0

    async def run(self) -> tuple[list[dict[str, object]], list[str]]:
        """Rows of the table and notes; ends after the second rate that was refused."""
        model, _ = await first_model(self._http, None)
        encode = await server_encode(self._http, model)
        self._corpus = await id_corpus(encode, 1000, self._args.seed)
        driver = OpenAIDriver(self._http, model, "completions", corpus=self._corpus,
                              encode=encode, timeout=TIMEOUT_SECONDS)  # fmt: skip
        await driver.probe(_job(self._corpus, "probe", 0))
        rows: list[dict[str, object]] = []
        notes: list[str] = []
        rate, num_refused = self._args.rate, 0
        while num_refused < 2 and len(rows) < self._args.max_steps:
            row, remarks = await self._step(driver, rate)
            rows.append(row)
            notes += remarks
            num_refused += row["refused"] != 0
            rate *= self._args.factor
        return rows, list(dict.fromkeys(notes))

    async def _step(self, driver: OpenAIDriver, rate: float) -> tuple[dict[str, object], list[str]]:
        """One rate for so many seconds, and until all of it is answered."""
        rng = random.Random(f"{self._args.seed}/{rate:.3f}")
        count = max(1, round(rate * self._args.seconds))
        sessions = [self._session(f"{rate:.3f}/{index}", rng) for index in range(count)]
        load, cpu, begin = Load(driver), time.process_time(), time.perf_counter()
        self._probes, self._not_ready = [], 0
        async with stalls() as worst, self._probed():
            await load.open(sessions, arrivals(count, rate, rng))
        share = (time.process_time() - cpu) / (time.perf_counter() - begin)
        row = self._row(rate, load.records)
        row |= {"client": share}
        print(f"{rate:8.3g}/s: {row['goodput /s']:.3g}/s good, {row['refused']:.0%} refused, "
              f"{row['failed']} failed", flush=True)  # fmt: skip
        return row, [*stall_note(worst[0]), *busy_note(share)]

    def _session(self, key: str, rng: random.Random) -> Session:
        job = _job(self._corpus, key, rng.randrange(NUM_GROUPS))

        async def run(ask: Ask) -> None:
            await ask(job)

        return Session(run)

    def _row(self, rate: float, records: Sequence[Record]) -> dict[str, object]:
        """Row of the table: results of the clients, failures apart from refusals."""
        figures = summary(records, self._args.slo)
        served = [record for record in records if record.error is None]
        refused = sum(record.error == REFUSED for record in records)
        good = figures["goodput"]
        assert isinstance(good, dict)
        probes = sorted(self._probes)
        return {
            "offered /s": rate,
            "requests": len(records),
            "goodput /s": good["requests_per_s"] or 0.0,
            "refused": refused / len(records),
            "failed": len(records) - len(served) - refused,
            **_columns("TTFT", figures["ttft_ms"], "p50", "p99"),
            **_columns("ITL", figures["itl_ms"], "p99"),
            "refusal p99 ms": 1e3 * percentile(_refusal_times(records), 0.99),
            "health p99 ms": 1e3 * percentile(probes, 0.99),
            "health max ms": 1e3 * max(probes, default=0.0),
            "not ready": self._not_ready,
        }

    @contextlib.asynccontextmanager
    async def _probed(self) -> AsyncIterator[None]:
        """Ask for health and readiness inside the block."""
        task = asyncio.create_task(self._probe())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _probe(self) -> None:
        while True:
            for path in ("/health", "/ready"):
                await asyncio.sleep(PROBE_SECONDS)
                begin = time.perf_counter()
                try:
                    status, _ = await self._http.get(path)
                except Failure:
                    status = 0
                self._probes.append(time.perf_counter() - begin)
                self._not_ready += status != 200


def _job(corpus: TextCorpus, key: str, group: int) -> Job:
    shared, own = corpus.cut(("group", group), SHARED_LEN), corpus.cut(key, OWN_LEN)
    return Job(name=key, prompt=[Piece("user", shared), Piece("user", own)], output_len=OUTPUT_LEN)


def _columns(name: str, found: object, *wanted: str) -> dict[str, object]:
    values = found if isinstance(found, dict) else {}
    return {f"{name} {which} ms": values.get(which, float("nan")) for which in wanted}


def _refusal_times(records: Sequence[Record]) -> list[float]:
    """Seconds from due to refusal, sorted."""
    return sorted(record.ended - record.due for record in records if record.error == REFUSED)


def held(rows: Sequence[dict[str, object]]) -> dict[str, object] | None:
    """The highest rate before the first refusal or failure."""
    found = None
    for row in rows:
        if row["refused"] or row["failed"]:
            break
        found = row
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Raise the rate; print the table, write the JSON. Returns 1 where a request failed."""
    given = list(argv or [])
    at = given.index("--") if "--" in given else len(given)
    args = _parsed(given[:at])
    begun = heading()
    print(*(f"{key}: {value}" for key, value in begun.items()), sep="\n", flush=True)
    with own_server(["--log-level", "error", *given[at + 1 :]]) as url:
        rows, notes = asyncio.run(_measured(url, args))
    most = held(rows)
    print(f"\n{table(rows)}\n", *(f"- {note}" for note in notes), sep="\n")
    if most is not None:
        print(f"held: {most['offered /s']:.3g}/s at TTFT p99 {most['TTFT p99 ms']:.3g} ms")
    write_json(args.out, {**begun, "seed": args.seed, "slo_ms": args.slo, "rows": rows,
                          "held": most, "notes": notes})  # fmt: skip
    return 1 if any(row["failed"] or row["not ready"] for row in rows) else 0


async def _measured(
    url: str, args: argparse.Namespace
) -> tuple[list[dict[str, object]], list[str]]:
    http = Http(url)
    try:
        return await Overload(http, args).run()
    finally:
        http.close()


def _parsed(argv: Sequence[str]) -> argparse.Namespace:
    parser = Parser(prog="python -m foretoken.bench.lab.overload", description=__doc__)
    add = parser.add_argument
    add("--seed", type=int, default=0)
    add("--rate", type=above_zero, default=8.0, metavar="R", help="first rate, in requests/s")
    add("--factor", type=above_zero, default=1.5, metavar="X", help="factor between rates")
    add("--seconds", type=above_zero, default=10.0, metavar="S", help="seconds of each rate")
    add("--max-steps", type=positive, default=12, metavar="N")
    add("--out", type=Path, default=OUT, metavar="FILE")
    args = parser.parse_args(argv)
    args.slo = {"ttft": 1000.0, "itl": 100.0}
    return args


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
