"""Failures while two steps are under way: as if there had been one."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest

from foretoken.core.errors import EngineDead, ForetokenError
from foretoken.core.interface.output import RequestOutput, StepOutput
from foretoken.core.interface.plan import StepPlan
from foretoken.core.interface.protocols import OnKernelsStarted, Pending, ignore_kernels
from support.fake_model import answer
from support.overlap_fixture import (
    PROMPTS,
    Reader,
    come_to_rest,
    is_ahead,
    make_engine,
    read_all,
    run,
)
from support.virtual_thread import Ahead, Launching, Told

FAILED = RuntimeError("the forward pass failed")


def at(*numbers: int) -> Callable[[StepPlan], Exception | None]:
    """The steps of these numbers raise, counted from 0."""
    left = iter(range(10_000))
    return lambda plan: FAILED if next(left) in numbers else None


def always(name: str, length: int) -> Callable[[StepPlan], Exception | None]:
    """Every step of a request raises from that many tokens on."""

    def fault(plan: StepPlan) -> Exception | None:
        strikes = any(row.request_id == name and row.stop >= length for row in plan.requests)
        return FAILED if strikes else None

    return fault


RUNNERS: dict[str, Callable[..., Ahead]] = {
    "launches": Launching,
    "fails late": lambda fault: Launching(fault, is_late=True),
}
all_of_them = pytest.mark.parametrize("make_runner", RUNNERS.values(), ids=RUNNERS)


@all_of_them
@pytest.mark.parametrize("number", range(9))
def test_a_step_that_raises_once_is_noticed_by_nobody(make_runner, number: int) -> None:
    async def scenario() -> None:
        engine = make_engine(runner := make_runner(at(number)))
        await engine.start()
        readers = [Reader(engine, str(i), PROMPTS[i], max_tokens=12) for i in range(3)]
        await read_all(*readers)
        for reader, prompt in zip(readers, PROMPTS, strict=False):
            assert reader.tokens == answer(prompt, 12)
            assert reader.request.usage.verify_steps == 12
        assert engine.num_bisections == 1
        assert runner.num_ahead > 5
        await come_to_rest(engine)

    run(scenario)


@all_of_them
def test_nor_are_steps_that_raise_again_and_again(make_runner) -> None:
    async def scenario() -> None:
        engine = make_engine(make_runner(at(*range(3, 21, 3))))  # between them, two halves each
        await engine.start()
        readers = [Reader(engine, str(i), PROMPTS[i], max_tokens=12) for i in range(3)]
        await read_all(*readers)
        assert [r.tokens for r in readers] == [answer(prompt, 12) for prompt in PROMPTS[:3]]
        assert engine.num_bisections == 6
        await come_to_rest(engine)

    run(scenario)


@all_of_them
def test_who_fails_by_itself_ends_and_the_others_never_know(make_runner) -> None:
    async def scenario() -> None:
        engine = make_engine(runner := make_runner(always("1", 8)))
        await engine.start()
        readers = [Reader(engine, str(i), PROMPTS[i], max_tokens=20) for i in range(3)]
        await read_all(*readers)
        assert isinstance(readers[1].end, ForetokenError)
        assert not isinstance(readers[1].end, EngineDead)
        assert readers[1].tokens == answer(PROMPTS[1], 5)
        for index in (0, 2):
            assert readers[index].tokens == answer(PROMPTS[index], 20)
        assert runner.num_ahead > 10
        await come_to_rest(engine)

    run(scenario)


def test_nothing_is_run_again_before_what_followed_a_failure_is_over() -> None:
    async def scenario() -> None:
        engine = make_engine(runner := Launching(at(4), is_late=True))
        await engine.start()
        reader = Reader(engine, "a", PROMPTS[0])
        await read_all(reader)
        assert reader.tokens == answer(PROMPTS[0], 8)
        order = "".join(call[0] for call in runner.calls)
        assert order.startswith("lf" + "llflflflf" + "f" + "lf"), "failed, its follower, and again"
        await come_to_rest(engine)

    run(scenario)


def test_a_failure_charges_nobody_for_steps_that_were_not_made() -> None:
    def charged(runner: Ahead, *, overlap: bool) -> float:
        async def scenario() -> float:
            engine = make_engine(runner, overlap=overlap)
            await engine.start()
            await read_all(*(Reader(engine, str(i), PROMPTS[i]) for i in range(3)))
            counters = engine.scheduler.waiting.counters
            await come_to_rest(engine)
            return counters[None]

        found: float = run(scenario)
        return found

    assert charged(Launching(at(4)), overlap=True) == charged(Ahead(), overlap=False)


class NotFinite(Launching):
    """The logits of one request are no numbers, from its third token on."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name
        self.told: list[str] = []

    def step(self, plan: StepPlan) -> StepOutput:
        self.told += plan.released_request_ids
        output = super().step(plan)
        rows = [
            RequestOutput(request_id=out.request_id, error="not finite")
            if out.request_id == self._name and row.stop >= row.sampling.prompt_len + 2
            else out
            for row, out in zip(plan.requests, output.requests, strict=True)
        ]
        return StepOutput(requests=rows)


def test_a_row_that_fails_ends_its_request_and_is_not_computed_again() -> None:
    async def scenario() -> None:
        engine = make_engine(runner := NotFinite("bad"))
        await engine.start()
        bad, other = Reader(engine, "bad", PROMPTS[0]), Reader(engine, "other", PROMPTS[1])
        await read_all(bad, other)
        assert isinstance(bad.end, ForetokenError)
        assert bad.tokens == answer(PROMPTS[0], 2)
        assert other.tokens == answer(PROMPTS[1], 8)
        stops = [
            row.stop for plan in runner.plans for row in plan.requests if row.request_id == "bad"
        ]
        assert stops == [3, 4, 5]
        assert engine.num_failed_steps == engine.num_bisections == 0
        await come_to_rest(engine)

    run(scenario)


def test_the_draft_model_hears_of_who_left_even_if_a_step_ahead_has_nobody_left() -> None:
    async def scenario() -> None:
        engine = make_engine(runner := NotFinite("bad"))
        await engine.start()
        # "left" ends as the step begins behind which nobody is left to compute anything.
        readers = [
            Reader(engine, "left", PROMPTS[1], max_tokens=2),
            Reader(engine, "bad", PROMPTS[0]),
        ]
        await read_all(*readers)
        await read_all(Reader(engine, "next", PROMPTS[2]))
        assert sorted(runner.told) == ["bad", "left"]
        assert engine.num_failed_steps == engine.num_bisections == 0
        await come_to_rest(engine)

    run(scenario)


class Hoarder:
    """Object that the frames of a failed launch hold, as they hold tensors."""


class OutOfMemory(Launching):
    """Step 4 fails late, and the launch behind it for want of memory."""

    def __init__(self) -> None:
        super().__init__(at(4), is_late=True)
        self.held: list[weakref.ref[Hoarder]] = []
        self.num_held = 0

    def launch(
        self,
        plan: StepPlan,
        after: Pending | None = None,
        on_kernels_started: OnKernelsStarted = ignore_kernels,
    ) -> Told:
        self.num_held = sum(each() is not None for each in self.held)
        if isinstance(after, Told) and isinstance(after.outcome, Exception):
            hoarder = Hoarder()
            self.held.append(weakref.ref(hoarder))
            raise MemoryError
        return super().launch(plan, after, on_kernels_started)


def test_what_a_launch_that_nobody_looks_at_held_is_free_when_steps_are_run_again() -> None:
    async def scenario() -> None:
        engine = make_engine(runner := OutOfMemory())
        await engine.start()
        reader = Reader(engine, "a", PROMPTS[0])
        await read_all(reader)
        assert reader.tokens == answer(PROMPTS[0], 8)
        assert (len(runner.held), runner.num_held) == (1, 0)
        await come_to_rest(engine)

    gc.disable()  # it would hide what is kept for long
    try:
        run(scenario)
    finally:
        gc.enable()


@pytest.mark.parametrize("failing", [False, True])
def test_an_engine_of_which_every_step_fails_ends(failing) -> None:
    async def scenario() -> None:
        def fault(plan: StepPlan) -> Exception | None:
            return FAILED if is_ahead(plan) or failing else None

        engine = make_engine(Launching(fault), max_running=1)
        await engine.start()
        readers = [Reader(engine, str(i), PROMPTS[i]) for i in range(5)]
        await read_all(*readers)
        if failing:
            assert all(isinstance(reader.end, ForetokenError) for reader in readers)
            assert not engine.alive
            await engine.close()
            return
        assert [reader.tokens for reader in readers] == [answer(p, 8) for p in PROMPTS[:5]]
        await come_to_rest(engine)

    run(scenario)
