"""Gain of common seeds in comparisons: `python -m foretoken.bench.lab.compare_variance`.

Both variants of a change answer the same tasks, each task with the same `--samples` seeds. From
these answers come the variances of three differences of scores: with the same task and the same
seed (the pairs of one seed), with the same task and other seeds (all other pairs of a task), and
with another task. A ratio of two variances is the ratio of the numbers of tasks that a test with
the same power needs. Its interval is from 1,000 bootstrap samples of the tasks. The last columns
are the tasks, of one answer each, with which a test at 95% finds a difference of 5 points with a
power of 80%. `base` answers only once for all changes of a model.
"""

from __future__ import annotations

import argparse
import asyncio
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from ...api.compare.answering import Access, Answering, opened
from ...api.compare.scorers import Scorers
from ...api.compare.tasks import Task, seeds_of
from ...api.compare.variants import Variant
from ..common.report import RESULTS, heading, table, write_json
from .compare_tasks import DESCRIBED, KINDS, make_tasks, tools

CHANGES: Mapping[str, Mapping[str, Any]] = {
    "nothing (A/A)": {},
    "a prompt line": {"system": "You are a helpful assistant. Answer briefly."},
    "temperature 0.7, not 0.8": {"sampling": {"temperature": 0.7}},
    "temperature 0.3, not 0.8": {"sampling": {"temperature": 0.3}},
    "weights in bf16": {"engine": {"quantize": "none", "dtype": "bfloat16"}},
    "weights in int8": {"engine": {"quantize": "int8"}},
    "weights in int4": {"engine": {"quantize": "int4"}},
    "KV in int8": {"engine": {"kv_cache_dtype": "int8"}},
    "tool descriptions": {"tools": tools(DESCRIBED)},
}
"""Changes against the base, whose temperature is 0.8."""
BOOTSTRAPS = 1_000
TASKS = (1.960 + 0.842) ** 2 / 0.05**2  # tasks for 80% power at 5 points, by unit of variance
Scores = NDArray[np.float64]
_OUT = RESULTS / "compare_variance.json"


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print, and write JSON to ``--out``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2", help="folder or file of the model (smollm2)")
    parser.add_argument("--other", help="another model, as one more change (none)")
    kinds = [each for each in KINDS if each != "coding"]
    parser.add_argument("--kinds", nargs="+", default=kinds, choices=KINDS, help="kinds of tasks")
    parser.add_argument("--changes", nargs="+", default=[*CHANGES], choices=CHANGES)
    parser.add_argument("--num", type=int, default=20, help="tasks of each kind (20)")
    parser.add_argument("--samples", type=int, default=4, help="seeds of each task (4)")
    parser.add_argument("--max-tokens", type=int, default=32, help="limit of an answer (32)")
    parser.add_argument("--temperature", type=float, default=0.8, help="of the base (0.8)")
    parser.add_argument("--out", type=Path, default=_OUT, help="file to write")
    options = parser.parse_args(argv)
    print(*(f"{key}: {value}" for key, value in heading().items()), sep="\n", flush=True)
    rows = asyncio.run(measured(options))
    print(table(rows))
    write_json(options.out, {**heading(), "rows": rows})


async def measured(options: argparse.Namespace) -> list[dict[str, object]]:
    """Return a row for each change."""
    plain = make_tasks(options.kinds, options.num, seed=1)
    tasks = [msgspec.convert(each, Task) for each in plain]
    sampling = {"temperature": options.temperature, "max_tokens": options.max_tokens}
    base = Variant(model=options.model, sampling=sampling)
    changes: dict[str, Variant] = {}
    for name in options.changes:
        fields: dict[str, Any] = dict(CHANGES[name])
        fields["sampling"] = {**sampling, **fields.get("sampling", {})}
        changes[name] = Variant(model=options.model, **fields)
    if options.other is not None:
        changes["another model"] = Variant(model=options.other, sampling=sampling)
    ours = await scores(base, tasks, options.samples)
    rows = []
    for name, variant in changes.items():
        theirs = ours if variant == base else await scores(variant, tasks, options.samples)
        rows.append(row(name, ours, theirs))
        print(rows[-1], flush=True)
    return rows


async def scores(variant: Variant, tasks: Sequence[Task], num_samples: int) -> Scores:
    """Return the scores of a variant: [num_tasks, num_samples]."""
    scorers = Scorers(tasks, "exact", seconds=10, has_judge=False)
    room = asyncio.Semaphore(32)

    async def one(answering: Answering, task: Task, seed: int) -> float:
        async with room:
            return await scorers.score(task, await answering.answer(task, seed), None)

    async with opened([variant, variant], None, Access()) as both:
        found = await asyncio.gather(
            *(one(both.a, task, seed) for task in tasks for seed in seeds_of(0, task, num_samples))
        )
    return np.array(found).reshape(len(tasks), num_samples)


def row(name: str, ours: Scores, theirs: Scores) -> dict[str, object]:
    """Return the row of a change: scores in points, variances, and their ratios."""
    same, other, unrelated = variances(ours, theirs)
    rng = np.random.default_rng(0)
    ratios = []
    for _ in range(BOOTSTRAPS):
        drawn = rng.integers(0, len(ours), len(ours))
        own_same, own_other, _ = variances(ours[drawn], theirs[drawn])
        ratios.append(_ratio(own_other, own_same))
    low, high = np.quantile(ratios, (0.025, 0.975), method="nearest")  # some may be infinite
    return {
        "change": name,
        "A": round(100 * float(ours.mean()), 1),
        "B": round(100 * float(theirs.mean()), 1),
        "same seeds": round(same, 3),
        "other seeds": round(other, 3),
        "other tasks": round(unrelated, 3),
        "other seeds / same": f"{_ratio(other, same):.2f}",
        "95%": f"{low:.2f} to {high:.2f}",
        "other tasks / same": f"{_ratio(unrelated, same):.2f}",
        "tasks, same seeds": math.ceil(TASKS * same),
        "tasks, other seeds": math.ceil(TASKS * other),
    }


def variances(ours: Scores, theirs: Scores) -> tuple[float, float, float]:
    """Return the variances of a difference with the same seed, other seeds, and another task.

    Scores are [num_tasks, num_samples]; the seeds of a column are the same in both.
    """
    differences = theirs[:, None, :] - ours[:, :, None]  # [tasks, seed of A, seed of B]
    num = ours.shape[1]
    is_same = np.eye(num, dtype=bool)
    same, other = differences[:, is_same], differences[:, ~is_same]
    return float(same.var()), float(other.var()), float(ours.var() + theirs.var())


def _ratio(above: float, below: float) -> float:
    return above / below if below else (1.0 if not above else float("inf"))


if __name__ == "__main__":
    main()
