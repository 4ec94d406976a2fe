"""Runs over variants that answer as they are told: order, looks, verdicts, failures."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import pytest

from foretoken.api.compare.answer import Answer
from foretoken.api.compare.answering import Opened
from foretoken.api.compare.judging import Judge
from foretoken.api.compare.report import detail_lines, verdict_line
from foretoken.api.compare.runner import Found, Plan, run
from foretoken.api.compare.scorers import Scorers
from foretoken.api.compare.statistics import ConfidenceSequence
from foretoken.api.compare.tasks import Task
from foretoken.api.compare.variants import Variant
from foretoken.core.errors import ForetokenError

Says = Callable[[Task, int], str]


class Told:
    """A variant of which a function gives the answers, after a number of turns of the loop."""

    exact = True

    def __init__(self, says: Says, turns: random.Random | None = None) -> None:
        self.variant = Variant()
        self.asked: list[tuple[Any, int]] = []
        self.cancelled = 0
        self._says, self._turns = says, turns

    async def answer(self, task: Task, seed: int) -> Answer:
        self.asked.append((task.id, seed))
        try:
            for _ in range(self._turns.randrange(20) if self._turns else 0):
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return Answer(text=self._says(task, seed), is_cut=task.id == 3)


def compared(a: Told, b: Told, *, num: int = 200, **fields: Any) -> Found:
    tasks = [Task(id=at, prompt="?", expected="right") for at in range(num)]
    scorers = Scorers(tasks, "exact", seconds=1, has_judge=False)
    return asyncio.run(run(Opened(a, b, None), tasks, scorers, Plan(**fields)))


def right(share: float) -> Says:
    return lambda task, _: "right" if hash((task.id, share)) % 100 < 100 * share else "wrong"


def always(task: Task, seed: int) -> str:
    return "right"


def by_seed(task: Task, seed: int) -> str:
    return "right" if seed % 2 else "wrong"


def test_it_stops_at_the_first_look_that_excludes_0_whatever_answers_first() -> None:
    results = []
    for concurrency, turns in ((1, None), (16, random.Random(1)), (64, random.Random(2))):
        a, b = Told(right(0.3), turns), Told(always, turns)
        results.append(compared(a, b, concurrency=concurrency))
        assert len(a.asked) <= len(results[-1].pairs) + concurrency
    assert results[0] == results[1] == results[2]
    found = results[0]
    assert found.verdict == "B better"
    assert found.num_tasks > len(found.pairs)
    assert [each.task for each in found.pairs] == [*range(len(found.pairs))]
    sequence = ConfidenceSequence()
    for at, pair in enumerate(found.pairs, 1):
        sequence.add(pair.difference)
        assert sequence.refutes(0.0) == (at == len(found.pairs))
    assert found.interval == sequence.interval


def test_the_verdict_turns_with_the_variants() -> None:
    there, back = (compared(*each) for each in (
        (Told(right(0.3)), Told(always)), (Told(always), Told(right(0.3))),
    ))  # fmt: skip
    assert (there.verdict, back.verdict) == ("B better", "A better")
    line = verdict_line(there, Plan())
    assert verdict_line(back, Plan()) == line.replace("B better", "A better")
    assert line.startswith("B better by ")
    assert line.endswith(f"after {len(there.pairs)} of 200 tasks")


def test_all_tasks_are_answered_if_it_must_not_stop() -> None:
    found = compared(Told(right(0.3)), Told(always), stops=False)
    assert (len(found.pairs), found.verdict) == (200, "B better")


def test_both_variants_get_the_same_seeds_and_equal_ones_never_differ() -> None:
    a, b = Told(by_seed), Told(by_seed)
    found = compared(a, b, num_samples=3)
    assert sorted(a.asked) == sorted(b.asked)
    assert len({*a.asked}) == 600
    assert found.paired_variance == 0.0
    assert (found.verdict, found.difference) == ("undecided", 0.0)
    lines = detail_lines(found, Opened(a, b, None))
    assert "0 of 600 answers differ" in lines
    assert "answers that reached the limit on tokens: 3 of A, 3 of B" in lines
    apart = compared(a := Told(by_seed), b := Told(by_seed), pairs_seeds=False)
    assert not {*a.asked} & {*b.asked}
    assert (apart.paired_variance or 0) > 0.3


def test_a_margin_ends_a_comparison_of_equal_variants() -> None:
    found = compared(Told(always), Told(always), margin=0.1)
    assert found.verdict == "equivalent"
    assert len(found.pairs) < 100
    line = verdict_line(found, Plan(margin=0.1))
    assert line.startswith("no difference of more than 10.0 points: B - A is +0.0 points (95%: -")


def test_an_answer_that_fails_ends_the_run_and_names_the_task() -> None:
    def says(task: Task, seed: int) -> str:
        if task.id == 5:
            raise ForetokenError("prompt is too long")
        return "right"

    a, b = Told(always, random.Random(3)), Told(says, random.Random(4))
    with pytest.raises(ForetokenError, match=r"^B, task 5: prompt is too long$"):
        compared(a, b)
    assert len(a.asked) < 5 + 2 * 16
    assert a.cancelled > 0


class Failing(Scorers):
    """Scorers of which those of some tasks fail for the answer "no"."""

    def __init__(self, tasks: list[Task], failing: range) -> None:
        super().__init__(tasks, "exact", seconds=1, has_judge=False)
        self._failing = failing

    async def score(self, task: Task, answer: Answer, judge: Judge | None) -> float:
        if task.id in self._failing and answer.text == "no":
            raise ForetokenError("the scorer hangs")
        return await super().score(task, answer, judge)


def run_failing(failing: range, num: int = 40) -> Found:
    tasks = [Task(id=at, prompt="?", expected="right") for at in range(num)]
    opened = Opened(Told(always), Told(lambda *_: "no"), None)
    return asyncio.run(run(opened, tasks, Failing(tasks, failing), Plan(stops=False)))


def test_tasks_whose_scorers_fail_are_left_out_and_told() -> None:
    found = run_failing(range(3, 10))
    assert [each.task for each in found.pairs] == [*range(3), *range(10, 40)]
    assert [each.task for each in found.failed] == [*range(3, 10)]
    assert found.failed[0].why == "B, task 3: the scorer hangs"
    assert verdict_line(found, Plan()).endswith("after 33 of 40 tasks")
    lines = detail_lines(found, Opened(Told(always), Told(always), None))
    assert "7 tasks left out, whose scorers failed:" in lines
    assert lines[-1] == "  and 2 more"


def test_an_answer_that_fails_ends_the_run_although_a_scorer_failed_first() -> None:
    class Late(Told):
        async def answer(self, task: Task, seed: int) -> Answer:
            for _ in range(50):
                await asyncio.sleep(0)
            raise ForetokenError("too long")

    tasks = [Task(id=at, prompt="?", expected="right") for at in range(2)]
    opened = Opened(Told(lambda *_: "no"), Late(always), None)
    with pytest.raises(ForetokenError, match=r"^B, task 0: too long$"):
        asyncio.run(run(opened, tasks, Failing(tasks, range(1)), Plan()))


@pytest.mark.parametrize(("failing", "num"), [(range(5, 13), 40), (range(3), 3)])
def test_scorers_that_fail_again_and_again_end_the_run(failing: range, num: int) -> None:
    line = rf"{len(failing)} tasks in a row have no score: B, task {failing[-1]}: the scorer hangs"
    with pytest.raises(ForetokenError, match=line):
        run_failing(failing, num)


def test_nothing_runs_on_after_an_answer_that_fails() -> None:
    """The other variant and the other samples of the task are cancelled, not left running."""

    def fails(task: Task, seed: int) -> str:
        raise ForetokenError("no")

    async def left() -> int:
        class Slow(Told):
            async def answer(self, task: Task, seed: int) -> Answer:
                await asyncio.sleep(60)
                raise AssertionError

        tasks = [Task(id=0, prompt="?", expected="right")]
        scorers = Scorers(tasks, "exact", seconds=1, has_judge=False)
        opened = Opened(Told(fails), Slow(always), None)
        with pytest.raises(ForetokenError, match="A, task 0: no"):
            await run(opened, tasks, scorers, Plan(num_samples=2))
        return len(asyncio.all_tasks()) - 1

    assert asyncio.run(left()) == 0
