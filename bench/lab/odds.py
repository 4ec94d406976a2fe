"""``python -m foretoken.bench.lab.odds``: how often look-ups come true on real text, to begin with.

SmolLM2 answers the tuning half of real_tasks.py, greedily and at temperature 1. Every answer is
read token by token, and each guess of the suffix source is scored at every place, whether a draft
would have been made there or not. What is printed is the table `PRIORS` of draft/sources/suffix.py.
"""

from __future__ import annotations

import argparse
import asyncio
from array import array
from collections.abc import Sequence
from pathlib import Path

from ...api.build.engine_builder import build
from ...api.types.sampling_params import SamplingParams
from ...core.config import EngineConfig
from ...core.interface.request import Request
from ...core.interface.sampling import SamplingMetadata
from ...draft.sources.merge import common_len
from ...draft.sources.source import BUCKETS
from ...draft.sources.suffix import FIRST_ORDERS, NUM_SHARED, ORDERS, SuffixSource
from ..real import Bench, Cell, Figures, streams
from ..real_tasks import KINDS, PER_HALF
from ..report import command, machine, write_json

LONGEST = 32  # tokens of a guess that are scored
SMOOTHING = 1.0  # trials of chance one half that each class begins with


class Counts:
    """Hits and trials by kind of guess and class of positions."""

    def __init__(self) -> None:
        self.num_kinds = len(ORDERS) + len(FIRST_ORDERS) + NUM_SHARED
        self.hits = [[SMOOTHING / 2] * len(BUCKETS) for _ in range(self.num_kinds)]
        self.trials = [[SMOOTHING] * len(BUCKETS) for _ in range(self.num_kinds)]

    def count(self, kind: int, num_hits: int, *, missed: bool) -> None:
        """One guess: so many leading tokens were right, the next one was not if ``missed``."""
        for position in range(num_hits + missed):
            bucket = sum(first <= position for first in BUCKETS) - 1
            self.hits[kind][bucket] += position < num_hits
            self.trials[kind][bucket] += 1

    def odds(self) -> list[list[float]]:
        """[num_kinds][len(BUCKETS)]; classes that were hardly seen take the chance before them."""
        table = []
        for hits, trials in zip(self.hits, self.trials, strict=True):
            row: list[float] = []
            for hit, tried in zip(hits, trials, strict=True):
                row.append(round(hit / tried, 2) if tried > 20 or not row else row[-1])
            table.append(row)
        return table


def score(source: SuffixSource, counts: Counts, name: str, tokens: list[int], length: int) -> None:
    """Walk through one answer, whose prompt has ``length`` tokens."""
    known = array("q", tokens[: length + 1])
    params = SamplingParams()
    sampling = SamplingMetadata(params=params, seed=0, prompt_len=length)
    request = Request(request_id=name, tokens=known, sampling=sampling)
    for at in range(length + 1, len(tokens)):
        while source.index(request):
            pass
        rest = array("q", tokens[at : at + LONGEST])
        for guess in source.propose(request, LONGEST):
            hits = common_len(guess.token_ids, rest)
            counts.count(guess.kind, hits, missed=hits < min(len(guess.token_ids), len(rest)))
        known.append(tokens[at])
    source.leave(request)


async def _answers(temperature: float, max_tokens: int) -> list[tuple[list[int], int]]:
    config = EngineConfig(device="cpu", dtype="bfloat16", kv_tokens=32768, max_model_len=2048)
    built = build("smollm2", config)
    await built.engine.start()
    found = []
    for kind in KINDS:
        asked = await streams(built, kind, "tune", PER_HALF)
        cell = Cell(kind, 1, temperature)
        said = await Bench(built, max_tokens, None).group(cell, asked, "off", Figures())
        found += [(prompt + one, len(prompt)) for prompt, one in zip(asked, said, strict=True)]
    await built.engine.close()
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print the tables, write the JSON."""
    parser = argparse.ArgumentParser(prog="python -m foretoken.bench.lab.odds", description=__doc__)
    parser.add_argument("--max-tokens", type=int, default=160)
    parser.add_argument("--out", type=Path, default=Path("bench/results/odds.json"))
    args = parser.parse_args(argv)
    report: dict[str, object] = {"command": command(), "machine": machine()}
    for name, temperature in (("greedy", 0.0), ("sampled", 1.0)):
        counts, source = Counts(), SuffixSource()
        for number, (tokens, length) in enumerate(
            asyncio.run(_answers(temperature, args.max_tokens))
        ):
            score(source, counts, f"{name}-{number}", tokens, length)
        report[name] = counts.odds()
        print(name, *(tuple(row) for row in counts.odds()), sep="\n")
        print("trials", *([round(each) for each in row] for row in counts.trials), sep="\n")
    write_json(args.out, report)


if __name__ == "__main__":
    main()
