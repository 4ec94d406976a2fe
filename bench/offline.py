"""The workloads of ``bench serve`` on an engine in this process, without HTTP.

``foretoken bench offline WORKLOAD``; it takes the engine flags of ``foretoken serve``.
``--compare`` alternates runs without and with speculation, each from an empty cache. It reports
their ratio by wall time, and by CPU time, which other load on the machine affects less.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from typing import TYPE_CHECKING, cast

from ..api.cli.flags import Parser, add_engine_flags, engine_options
from ..api.types.sampling_params import SamplingParams
from ..core.errors import ForetokenError
from .common.report import Spread, heading, table, write_json
from .common.roofline import Roofline, measured_roofline
from .load.cli import parsed, recorded, run
from .load.corpus import TextCorpus, id_corpus
from .load.figures import Record
from .load.generator import Content, Job, Load
from .load.http import Failure
from .load.openai import joined
from .load.report import out_path, show
from .load.server import KvUsage
from .load.workloads import Scene, positive

if TYPE_CHECKING:
    from ..api.sdk.async_llm import AsyncLLM
    from ..core.engine.engine import Engine
    from ..core.execution.model_runner import ModelRunner
    from ..core.model.decoder import OwnDecoder

ABOUT = (
    "Measure the engine in this process, without HTTP, under the workloads of `foretoken bench "
    "serve`. --compare runs each workload without and with speculation and prints the ratio."
)
SAMPLE_SECONDS = 0.1


class OfflineDriver:
    """Sends jobs to an engine in this process."""

    def __init__(self, llm: AsyncLLM, temperature: float) -> None:
        self._llm, self._temperature = llm, temperature

    async def ask(self, job: Job, record: Record) -> Content:
        """Read one answer. Raises `Failure`, whose kind is the name of the engine's error."""
        try:
            return await self._ask(job, record)
        except ForetokenError as error:
            raise Failure(type(error).__name__, str(error)) from None

    async def settle(self) -> None:
        """Do nothing: all records are complete once their jobs have ended."""

    async def _ask(self, job: Job, record: Record) -> Content:
        params = SamplingParams(
            temperature=self._temperature,
            max_tokens=job.output_len,
            ignore_eos=True,
            seed=0,
            speculation=job.speculation,  # type: ignore[arg-type]
        )
        token_ids: list[int] = []
        answer = await self._llm.open(cast(list[int], joined(job.prompt)), params)
        try:
            async with aclosing(answer.deltas()) as deltas:
                async for delta in deltas:
                    if delta.token_ids:
                        record.times.append(time.perf_counter())
                        record.counts.append(len(delta.token_ids))
                        token_ids += delta.token_ids
                        if job.watch is not None:
                            job.watch(record)
        finally:
            self._llm.forget(answer)
            _note_usage(record, answer.usage)
        return token_ids


def _note_usage(record: Record, usage: object) -> None:
    for name in ("prompt_tokens", "cached_tokens", "proposed_tokens", "accepted_tokens",
                 "verify_steps"):  # fmt: skip
        setattr(record, name, getattr(usage, name))


# -- the engine ---------------------------------------------------------------------------------


def weight_bytes(llm: AsyncLLM) -> int:
    """Return the bytes of the target's matrices in memory, quantised or not."""
    runner = cast("ModelRunner", cast("Engine", llm.engine).runner)
    weights = cast("OwnDecoder", runner.decoder).weights
    linears = [linear for layer in weights.layers for linear in layer.linears]
    return sum(linear.weight.nbytes for linear in [*linears, weights.lm_head])


@asynccontextmanager
async def sampled(llm: AsyncLLM) -> AsyncIterator[KvUsage]:
    """Sample the share of the KV pool that requests hold, ten times a second."""
    usage, cache = KvUsage(), cast("Engine", llm.engine).scheduler.cache

    async def sample() -> None:
        while True:
            usage.shares.append(cache.usage)
            await asyncio.sleep(SAMPLE_SECONDS)

    task = asyncio.create_task(sample())
    try:
        yield usage
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


class Bench:
    """One engine, and the workloads on it."""

    def __init__(self, llm: AsyncLLM, corpus: TextCorpus, roofline: Roofline | None) -> None:
        self._llm, self._corpus, self._roofline = llm, corpus, roofline

    async def once(
        self, args: argparse.Namespace, speculation: str | int | None = None
    ) -> tuple[dict[str, object], list[str], list[Record]]:
        """Run once from an empty cache; return figures, notes and records."""
        await self._llm.engine.flush_cache()
        driver = OfflineDriver(self._llm, args.temperature)
        load = Load(driver, speculation=speculation)
        scene = Scene(args, self._corpus, self._llm.built.max_model_len, args.seed)
        async with sampled(self._llm) as kv_usage:
            figures, notes = await run(load, scene)
        figures["kv_usage"] = kv_usage.figures()
        figures["cpu_ms_per_token"] = _cpu_per_token(figures)
        if self._roofline is not None:
            figures["roofline"] = self._roofline.describe(figures)
        return figures, notes, load.records

    async def measure(self, args: argparse.Namespace) -> None:
        """Run one workload; print and write its figures."""
        report: dict[str, object] = heading()
        if args.compare:
            report |= await self._compare(args)
        else:
            figures, notes, records = await self.once(args)
            show(args.workload, figures, notes)
            report |= {**figures, "notes": notes}
            if args.save_requests:
                report["records"] = records
        write_json(out_path(args.out, "offline", args.workload), report)

    async def _compare(self, args: argparse.Namespace) -> dict[str, object]:
        """Alternate runs without and with speculation; the first pair warms up.

        The order changes from pair to pair.
        """
        setting = "auto" if args.speculation is None else args.speculation
        if setting == "off":
            raise SystemExit(
                "--compare needs --speculation auto or K; it always runs without speculation, too"
            )
        pairs: list[dict[str | int, dict[str, object]]] = []
        notes: list[str] = []
        for repeat in range(args.repeats + 1):
            pair = {}
            for each in ("off", setting) if repeat % 2 else (setting, "off"):
                pair[each], notes, _ = await self.once(args, each)
            pairs.append(pair)
        rows = [_row(name, [pair[name] for pair in pairs[1:]]) for name in ("off", setting)]
        ratios = _ratios([(pair["off"], pair[setting]) for pair in pairs[1:]])
        print(f"\n{args.workload}\n\n{table(rows)}\n")
        print(*(f"{name}: {spread}" for name, spread in ratios.items()), sep="\n")
        print(*(f"- {note}" for note in notes), sep="\n", flush=True)
        return {"rows": rows, **ratios, "notes": notes, "runs": pairs}


# -- comparison ---------------------------------------------------------------------------------


def _row(name: str | int, runs: Sequence[dict[str, object]]) -> dict[str, object]:
    """Return a row for one setting: median and range of its runs."""
    return {
        "speculation": name,
        "tok/s": _spread(runs, "output_tokens_per_s"),
        "TTFT ms p50": _spread(runs, "ttft_ms", "p50"),
        "ITL ms p50": _spread(runs, "itl_ms", "p50"),
        "ITL ms p99": _spread(runs, "itl_ms", "p99"),
        "CPU ms/token": _spread(runs, "cpu_ms_per_token"),
        "tokens/step": _spread(runs, "tokens_per_step"),
        "acceptance": _spread(runs, "acceptance_rate"),
        "prefix hits": _spread(runs, "prefix_hit_rate"),
        "errors": sum(len(cast(dict[str, int], run["errors"])) for run in runs),
    }


def _spread(runs: Sequence[dict[str, object]], name: str, part: str | None = None) -> object:
    found = [run[name] if part is None else _part(run[name], part) for run in runs]
    numbers = [value for value in found if isinstance(value, int | float)]
    return Spread.of(numbers) if numbers else "-"


def _part(figure: object, part: str) -> object:
    return figure[part] if isinstance(figure, dict) else None


def _ratios(
    pairs: Sequence[tuple[dict[str, object], dict[str, object]]],
) -> dict[str, Spread]:
    """Return the ratios of runs with speculation over runs without; above 1, it is faster."""
    rates = [(_number(on, "output_tokens_per_s"), _number(off, "output_tokens_per_s"))
             for off, on in pairs]  # fmt: skip
    costs = [(_number(off, "cpu_ms_per_token"), _number(on, "cpu_ms_per_token"))
             for off, on in pairs]  # fmt: skip
    return {
        "on / off, tok/s": Spread.of([on / off for on, off in rates]),
        "on / off, tokens per CPU second": Spread.of([off / on for off, on in costs]),
    }


def _number(figures: dict[str, object], name: str) -> float:
    value = figures[name]
    if not isinstance(value, float):
        raise SystemExit(f"a run served no tokens; its errors: {figures['errors']}")
    return value


def _cpu_per_token(figures: dict[str, object]) -> float | None:
    tokens, seconds = figures["output_tokens"], figures["process_cpu_seconds"]
    if not isinstance(tokens, int) or not isinstance(seconds, float) or not tokens:
        return None
    return 1e3 * seconds / tokens


# -- the command --------------------------------------------------------------------------------


def _own_flags(parser: Parser) -> None:
    parser.add_argument("--model", help="model, as for `foretoken serve`")
    add_engine_flags(parser)
    group = parser.add_argument_group("comparison")
    group.add_argument(
        "--compare", action="store_true", help="alternate runs without and with speculation"
    )
    group.add_argument(
        "--repeats",
        type=positive,
        default=3,
        help="number of pairs of runs, after a warm-up pair",
    )


async def _main(runs: Sequence[argparse.Namespace]) -> None:
    from ..api.sdk.async_llm import AsyncLLM

    async with AsyncLLM(runs[0].model, **engine_options(runs[0])) as llm:
        roofline = measured_roofline(llm.built.path, weight_bytes(llm))
        corpus = await id_corpus(llm.tokenizer.encode, llm.built.vocab_size, runs[0].seed)
        bench = Bench(llm, corpus, roofline)
        for args in runs:
            await bench.measure(args)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print the tables, and write the JSON."""
    runs = parsed("foretoken bench offline", ABOUT, list(argv or []), _own_flags)
    if recorded(runs[0]) is not None:
        raise SystemExit(
            "--record needs `foretoken bench serve agents`: recorded bodies are sent over HTTP"
        )
    print(*(f"{key}: {value}" for key, value in heading().items()), sep="\n", flush=True)
    asyncio.run(_main(runs))


if __name__ == "__main__":
    main(sys.argv[1:])
