"""Structured output measured: is it valid, is it the same with speculation, and what does it cost.

First the engine: random schemas, plain and with speculation, each answer checked against its
schema and compared token by token. Then the grammar library alone, at the built-in vocabulary and
at one as wide as a big model's, beside xgrammar if that is installed. Run: ``foretoken bench
structured``.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from ...api.sdk.async_llm import AsyncLLM
from ...api.types.results import Completion
from ...api.types.sampling_params import SamplingParams
from ..report import command, machine, table, write_json
from .grammars import Guidance, Library, Ours, Peer, is_valid, measure, vocabularies
from .schemas import random_schema

MAX_TOKENS = 400
TEMPERATURES = (0.0, 0.7, 1.0)
LIBRARIES: tuple[Callable[..., Library], ...] = (Guidance, Ours)


# -- the engine ---------------------------------------------------------------------------------


def _requests(count: int) -> list[SamplingParams]:
    return [
        SamplingParams(
            json_schema=random_schema(index),
            temperature=TEMPERATURES[index % len(TEMPERATURES)],
            seed=index,
            max_tokens=MAX_TOKENS,
        )
        for index in range(count)
    ]


async def _generate(
    speculation: str, params: Sequence[SamplingParams], concurrency: int, threads: int
) -> tuple[list[Completion], float]:
    """All answers, and the seconds that they took."""
    async with AsyncLLM(
        "builtin", speculation=speculation, max_running=concurrency, threads=threads
    ) as llm:
        await llm.generate("x", SamplingParams(regex="x"))  # reads the vocabulary
        limit = asyncio.Semaphore(concurrency)

        async def one(index: int) -> Completion:
            async with limit:
                return await llm.generate(f"The record number {index}:\n", params[index])

        began = time.perf_counter()
        answers = await asyncio.gather(*map(one, range(len(params))))
        return answers, time.perf_counter() - began


def _row(
    name: str,
    concurrency: int,
    answers: Sequence[Completion],
    plain: Sequence[Completion],
    params: Sequence[SamplingParams],
    seconds: float,
) -> dict[str, object]:
    usages = [answer.usage for answer in answers]
    num_tokens = sum(usage.completion_tokens for usage in usages)
    proposed: Counter[str] = Counter()
    accepted: Counter[str] = Counter()
    for usage in usages:
        proposed.update(usage.proposed_by_source)
        accepted.update(usage.accepted_by_source)
    same = sum(a.token_ids == b.token_ids for a, b in zip(answers, plain, strict=True))
    pairs = zip(answers, params, strict=True)
    valid = sum(is_valid(a.text, p.json_schema) and a.finish_reason == "stop" for a, p in pairs)
    return {
        "speculation": name,
        "at once": concurrency,
        "answers": len(answers),
        "valid": valid / len(answers),
        "equal": same / len(answers),
        "tokens/step": num_tokens / sum(usage.verify_steps for usage in usages),
        "tokens/s": num_tokens / seconds,
        "forced share": accepted["grammar"] / num_tokens,
        "forced accepted": accepted["grammar"] / max(1, proposed["grammar"]),
    }


async def _measure_engine(args: argparse.Namespace) -> list[dict[str, object]]:
    rows = []
    for concurrency in args.concurrency:
        params = _requests(args.schemas if concurrency == max(args.concurrency) else args.few)
        plain: list[Completion] = []
        for name in ("off", "auto"):
            answers, seconds = await _generate(name, params, concurrency, args.threads)
            plain = plain or answers
            rows.append(_row(name, concurrency, answers, plain, params, seconds))
        print(table(rows[-2:]), flush=True)
    return rows


# -- the libraries ------------------------------------------------------------------------------


def _measure_libraries(args: argparse.Namespace) -> list[dict[str, object]]:
    schemas = [random_schema(index) for index in range(args.compiled)]
    rows = []
    for vocabulary in vocabularies(args.wide):
        began = time.perf_counter()
        libraries = [make(vocabulary) for make in LIBRARIES]
        print(f"{vocabulary.size} tokens read in {time.perf_counter() - began:.2f} s twice")
        if args.peer:
            libraries.append(Peer(vocabulary))
        rows += [measure(library, schemas, vocabulary) for library in libraries]
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print the tables, write the JSON."""
    parser = argparse.ArgumentParser(
        prog="python -m foretoken.bench.lab.structured", description=__doc__
    )
    parser.add_argument("--part", choices=["all", "engine", "libraries"], default="all")
    parser.add_argument(
        "--schemas", type=int, default=1000, help="number of schemas at the highest concurrency"
    )
    parser.add_argument("--few", type=int, default=50, help="number of schemas at the others")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 32])
    parser.add_argument(
        "--compiled", type=int, default=300, help="number of schemas to compile with the libraries"
    )
    parser.add_argument("--wide", type=int, default=128_000, help="size of the wide vocabulary")
    parser.add_argument("--peer", action="store_true", help="measure xgrammar, too")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("bench/results/structured.json"))
    args = parser.parse_args(argv)
    report: dict[str, object] = {"command": command(), "machine": machine()}
    print(*(f"{key}: {value}" for key, value in report.items()), sep="\n")
    if not args.peer:
        print("xgrammar is not measured: --peer, where it is installed")
    if args.part != "libraries":
        report["engine"] = rows = asyncio.run(_measure_engine(args))
        print(f"\nrandom schemas, built-in pair\n\n{table(rows)}", flush=True)
    if args.part != "engine":
        report["libraries"] = rows = _measure_libraries(args)
        print(f"\nlibraries, {args.compiled} schemas\n\n{table(rows)}", flush=True)
    write_json(args.out, report)


if __name__ == "__main__":
    main()
