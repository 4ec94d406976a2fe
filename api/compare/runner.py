"""Ask both variants, in order of the tasks, until the difference of their scores is certain."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Collection, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from statistics import mean, variance
from typing import Any, Literal, TypeVar

from msgspec import Struct

from ...core.errors import ForetokenError
from .answer import Answer
from .answering import Answering, Opened
from .judging import Judge
from .scorers import Scorers
from .statistics import ConfidenceSequence, Interval
from .tasks import Task, seeds_of

T = TypeVar("T")
Verdict = Literal["A better", "B better", "equivalent", "undecided"]
MOST_FAILED = 8  # tasks in a row whose scorers may fail


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Settings of a comparison.

    - ``seed``: the seeds of all answers are derived from it. ``num_samples``: answers of each
      variant to a task; the score of a task is the mean of their scores.
    - ``level``: confidence. ``margin``: a difference that does not matter, from 0 to 1; None: any
      difference matters. ``stops``: whether to stop as soon as the verdict is certain.
    - ``concurrency``: tasks that are answered at the same time. No result depends on it.
    - ``pairs_seeds``: whether both variants get the same seeds.
    """

    seed: int = 0
    num_samples: int = 1
    level: float = 0.95
    margin: float | None = None
    stops: bool = True
    concurrency: int = 16
    pairs_seeds: bool = True


class Scored(Struct, kw_only=True):
    """The answers of a variant to a task, and their mean score."""

    seeds: list[int]
    answers: list[Answer]
    scores: list[float]

    @property
    def score(self) -> float:
        """The mean score, from 0 to 1."""
        return mean(self.scores)


class Pair(Struct, kw_only=True):
    """A task with the answers of both variants."""

    task: str | int
    a: Scored
    b: Scored

    @property
    def difference(self) -> float:
        """Score of B minus score of A, from -1 to 1."""
        return self.b.score - self.a.score

    @property
    def num_differing(self) -> int:
        """Samples in which the texts or the calls of the two variants differ."""
        both = zip(self.a.answers, self.b.answers, strict=True)
        return sum((a.text, a.calls) != (b.text, b.calls) for a, b in both)


class Failed(Struct, kw_only=True):
    """A task without scores, because a scorer failed."""

    task: str | int
    why: str


class Found(Struct, kw_only=True):
    """The result of a comparison: all pairs that were looked at, in the order of the tasks.

    ``failed``: the tasks without scores, which count in neither variant.
    """

    verdict: Verdict
    interval: Interval
    difference: float
    pairs: list[Pair]
    failed: list[Failed]
    num_tasks: int  # number of tasks in the file

    @property
    def paired_variance(self) -> float | None:
        """The variance of a task's difference; None for fewer than two tasks."""
        return variance(each.difference for each in self.pairs) if len(self.pairs) > 1 else None

    @property
    def unpaired_variance(self) -> float | None:
        """The variance of a difference between two unrelated tasks with unrelated seeds."""
        if len(self.pairs) < 2:
            return None
        return variance(each.a.score for each in self.pairs) + variance(
            each.b.score for each in self.pairs
        )


async def run(
    opened: Opened,
    tasks: Sequence[Task],
    scorers: Scorers,
    plan: Plan,
    tell: Callable[[ConfidenceSequence], None] = lambda _: None,
) -> Found:
    """Compare two variants on the tasks.

    A look follows each task, in the order of the tasks, whatever is answered first, so the result
    does not depend on ``concurrency``; answers to later tasks are dropped. ``tell`` gets each look.
    A task whose scorer fails is left out. Raises `ForetokenError`, which names the task, if an
    answer fails, or the scorers of `MOST_FAILED` tasks in a row, or of all tasks.
    """

    async def ask(task: Task) -> Pair | Failed:
        own = seeds_of(plan.seed, task, plan.num_samples)
        other = own if plan.pairs_seeds else seeds_of(plan.seed + 1, task, plan.num_samples)
        a, b = await _together(
            _scored("A", opened.a, task, own, scorers, opened.judge),
            _scored("B", opened.b, task, other, scorers, opened.judge),
        )
        if isinstance(a, Failed):
            return a
        if isinstance(b, Failed):
            return b
        return Pair(task=task.id or 0, a=a, b=b)

    sequence = ConfidenceSequence(plan.level)
    pairs: list[Pair] = []
    failed: list[Failed] = []
    num_in_a_row = 0  # number of consecutive tasks without scores
    verdict: Verdict = "undecided"
    async with aclosing(_in_order(ask, tasks, plan.concurrency)) as answered:
        async for pair in answered:
            if isinstance(pair, Failed):
                failed.append(pair)
                num_in_a_row += 1
                if num_in_a_row == min(MOST_FAILED, len(tasks)):
                    raise ForetokenError(f"{num_in_a_row} tasks in a row have no score: {pair.why}")
                continue
            num_in_a_row = 0
            pairs.append(pair)
            sequence.add(pair.difference)
            tell(sequence)
            verdict = _verdict(sequence, plan.margin)
            if verdict != "undecided" and plan.stops:
                break
    return Found(
        verdict=verdict,
        interval=sequence.interval,
        difference=sequence.mean,
        pairs=pairs,
        failed=failed,
        num_tasks=len(tasks),
    )


def _verdict(sequence: ConfidenceSequence, margin: float | None) -> Verdict:
    if margin is not None and sequence.is_within(margin):
        return "equivalent"
    if sequence.refutes(0.0):
        return "B better" if sequence.mean > 0 else "A better"
    return "undecided"


async def _scored(
    name: str,
    variant: Answering,
    task: Task,
    seeds: Sequence[int],
    scorers: Scorers,
    judge: Judge | None,
) -> Scored | Failed:
    """Return the answers of a variant to a task and their scores, or why there are none.

    A scorer that fails does not stop the other variant, whose answer may fail: whether the run ends
    must not depend on which of them is first.
    """
    where = f"{name}, task {task.id!r}"
    try:
        answers = await _together(*(variant.answer(task, seed) for seed in seeds))
    except ForetokenError as error:
        raise ForetokenError(f"{where}: {error}") from None
    try:
        scores = await _together(*(scorers.score(task, each, judge) for each in answers))
    except ForetokenError as error:
        return Failed(task=task.id or 0, why=f"{where}: {error}")
    return Scored(seeds=list(seeds), answers=answers, scores=scores)


async def _together(*works: Coroutine[Any, Any, T]) -> list[T]:
    """Return the results of all works. If one fails, the others are cancelled and awaited."""
    running = [asyncio.create_task(each) for each in works]
    try:
        return await asyncio.gather(*running)
    finally:
        await _cancelled(running)


async def _cancelled(running: Collection[asyncio.Task[Any]]) -> None:
    """Cancel what still runs, and wait for its end.

    A second cancellation would end a task that is waiting for the end of a scorer's process.
    """
    for each in running:
        if not each.cancelling():
            each.cancel()
    await asyncio.gather(*running, return_exceptions=True)


async def _in_order(
    work: Callable[[Task], Coroutine[Any, Any, T]], tasks: Sequence[Task], width: int
) -> AsyncGenerator[T]:
    """Yield the results of ``work`` in the order of the tasks, of which ``width`` run at a time.

    Closing the generator cancels those that run.
    """
    waiting = deque(tasks)
    running: deque[asyncio.Task[T]] = deque()
    try:
        while waiting or running:
            while waiting and len(running) < width:
                running.append(asyncio.create_task(work(waiting.popleft())))
            yield await running[0]
            running.popleft()
    finally:
        await _cancelled(running)
