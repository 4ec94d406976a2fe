"""Launches on the event loop, by the engine's own runner and backend on a simulated device.

Whatever happens while such a launch is in flight, the answers are those of steps that the model
thread launches one after the other.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Collection, Sequence
from typing import Any

import pytest

pytest.importorskip("triton")

from foretoken.bench.lab.simulated_device import (
    CYCLE,
    VOCAB_SIZE,
    FormulaOps,
    SimulatedDevice,
    formula_decoder,
    simulated,
)
from foretoken.core.engine.engine import Engine
from foretoken.core.engine.model_thread import Job
from foretoken.core.errors import EngineDead, ForetokenError
from foretoken.core.execution.model_runner import LaunchedStep, ModelRunner
from foretoken.core.interface.draft import Draft, DraftPlan
from foretoken.core.interface.output import StepOutput
from foretoken.core.interface.plan import StepPlan
from foretoken.core.interface.protocols import (
    NO_SPECULATION,
    OnKernelsStarted,
    Pending,
    Speculator,
    ignore_kernels,
)
from foretoken.core.interface.request import Delta, FinishReason, OnToken, Request
from foretoken.core.interface.sampling import SamplingMetadata, TokenSamplingParams
from foretoken.core.scheduling.request_table import SchedulerLimits
from foretoken.core.scheduling.scheduler import Scheduler
from foretoken.radix_cache import PrefixCache
from support.overlap_fixture import come_to_rest, run, stop_at

PAGE_SIZE, MAX_LEN, PROMPT_LEN, NUM_TOKENS = 16, 256, 24, 40
SECONDS = {1: 1e-3, 512: 2e-3}  # of a pass, by its rows
NUM_TURNS = 8  # of the event loop, until a call of the thread ends
FAILED = RuntimeError("the launch failed")
_PLACES = {token_id: at for at, token_id in enumerate(CYCLE.tolist())}


class LoopThread:
    """A `StepThread` whose calls begin and end some turns of the event loop later, in order."""

    def __init__(self, name: str, on_start: Callable[[], None]) -> None:
        self.is_inside = False
        on_start()

    def start(self, work: Callable[[], Any]) -> Job[Any]:
        job = Job(work)
        job.loop.call_soon(self._turn, job, NUM_TURNS)
        return job

    def close(self) -> None: ...

    def _turn(self, job: Job[Any], num_left: int) -> None:
        if num_left:
            job.loop.call_soon(self._turn, job, num_left - 1)
            return
        self.is_inside = True
        try:
            job.end(job.work(), None)
        except BaseException as failure:
            job.end(None, failure)
        finally:
            self.is_inside = False


class Runner(ModelRunner):
    """Counts the launches on the event loop; ``on_launch`` is called in each of them.

    ``fails_late``: numbers of the steps whose outputs cannot be read, counted from 0.
    """

    on_launch: Callable[[int, StepPlan], None] = staticmethod(lambda number, plan: None)
    thread: LoopThread
    num_here = num_ahead = num_finished = num_prepared = 0
    fails_late: Collection[int] = ()

    def prepare_thread(self) -> None:
        self.num_prepared += 1
        assert not self.thread.is_inside, "the model thread has its own warm-up"
        super().prepare_thread()

    def launch(
        self,
        plan: StepPlan,
        after: Pending | None = None,
        on_kernels_started: OnKernelsStarted = ignore_kernels,
    ) -> Pending:
        if not self.thread.is_inside:
            self.num_here += 1
            self.num_ahead += after is not None
            self.on_launch(self.num_here, plan)
        return super().launch(plan, after, on_kernels_started)

    def _finish(self, work: LaunchedStep) -> StepOutput:
        number, self.num_finished = self.num_finished, self.num_finished + 1
        if number in self.fails_late:
            raise FAILED
        return super()._finish(work)


class Lookups(Speculator):
    """Drafts four tokens for every request; the third is wrong in every other step of a request."""

    def drafts_nothing(self, requests: Sequence[Request], *, num_new_tokens: int = 0) -> bool:
        return False

    def plan(
        self, requests: Sequence[Request], limits: Sequence[int], *, budget: int, num_prefill: int
    ) -> Sequence[DraftPlan]:
        return [self._plan(*each) for each in zip(requests, limits, strict=True)]

    def _plan(self, request: Request, limit: int) -> DraftPlan:
        ids = expected(request.tokens[-1], 4)
        if len(request.tokens) % 2:
            ids[2] = (ids[2] + 1) % VOCAB_SIZE
        ids = ids[: max(0, limit)]
        return DraftPlan(Draft.of(array("q", ids), "suffix")) if ids else DraftPlan()


SPECULATORS: dict[str, Callable[[], Speculator]] = {"plain": lambda: NO_SPECULATION}
SPECULATORS["lookups"] = Lookups
both = pytest.mark.parametrize("make_speculator", SPECULATORS.values(), ids=SPECULATORS)


def expected(token_id: int, count: int) -> list[int]:
    """The tokens after a token."""
    at = _PLACES[token_id] + 1
    return [int(CYCLE[(at + index) % VOCAB_SIZE]) for index in range(count)]


class World:
    """An engine on a simulated device, and its readers."""

    def __init__(
        self, speculator: Speculator, *, num_pages: int = 200, overlap: bool = True
    ) -> None:
        device = SimulatedDevice(sleeps=False)
        decoder = formula_decoder(FormulaOps(device, SECONDS), MAX_LEN)
        self.runner = Runner(decoder, decoder.make_pool(num_pages, page_size=PAGE_SIZE))
        limits = SchedulerLimits(
            max_batch_tokens=512, max_running=8, max_queued=8, max_model_len=MAX_LEN,
            vocab_size=VOCAB_SIZE,
        )  # fmt: skip
        self.engine = Engine(
            Scheduler(PrefixCache(num_pages, PAGE_SIZE), limits, speculator),
            self.runner,
            clock=device.now,
            make_thread=self._thread,
            overlap=overlap,
        )
        self.requests: list[Request] = []
        self.tokens: list[list[int]] = []
        self.ends: list[Delta | ForetokenError | None] = []
        self.tasks: list[asyncio.Task[None]] = []

    def _thread(self, name: str, on_start: Callable[[], None]) -> LoopThread:
        self.runner.thread = LoopThread(name, on_start)
        return self.runner.thread

    def ask(self, on_token: OnToken | None = None) -> None:
        """Submit the next request, and read its answer."""
        index = len(self.requests)
        start = 97 * index
        self.requests.append(
            Request(
                request_id=str(index),
                tokens=array("q", CYCLE[start : start + PROMPT_LEN].tolist()),
                sampling=SamplingMetadata(
                    params=TokenSamplingParams(temperature=0.0, max_tokens=NUM_TOKENS),
                    seed=index,
                    prompt_len=PROMPT_LEN,
                ),
                on_token=on_token,
            )
        )
        self.tokens.append([])
        self.ends.append(None)
        self.tasks.append(asyncio.create_task(self._read(index)))

    async def _read(self, index: int) -> None:
        try:
            async for delta in self.engine.submit(self.requests[index]):
                self.tokens[index] += delta.token_ids
                self.ends[index] = delta
        except ForetokenError as error:
            self.ends[index] = error
        finally:
            self.engine.abort(str(index))

    async def finish(self) -> None:
        """Wait for all readers, and for the engine to come to rest with no page lost."""
        await asyncio.gather(*self.tasks, return_exceptions=True)
        await come_to_rest(self.engine)

    def answer(self, index: int) -> list[int]:
        """The whole answer of a request."""
        return expected(int(CYCLE[97 * index + PROMPT_LEN - 1]), NUM_TOKENS)

    def reason(self, index: int) -> FinishReason | None:
        end = self.ends[index]
        assert isinstance(end, Delta), end
        return end.finish_reason

    def check_others(self, *but: int) -> None:
        """All requests but these have their whole answers."""
        for index in {*range(len(self.requests))} - {*but}:
            assert self.tokens[index] == self.answer(index)
            assert self.reason(index) is FinishReason.LENGTH


def simulate(scenario: Callable[[], Any]) -> Any:
    with simulated(SimulatedDevice(sleeps=False)):
        return run(scenario)


@both
def test_tokens_are_those_of_launches_in_the_thread(make_speculator) -> None:
    async def scenario(overlap: bool) -> World:
        world = World(make_speculator(), overlap=overlap)
        await world.engine.start()
        assert world.runner.num_prepared == int(overlap)
        for _ in range(3):
            world.ask()
        await world.finish()
        return world

    here, there = (simulate(lambda each=each: scenario(each)) for each in (True, False))
    assert here.tokens == there.tokens
    here.check_others()
    assert there.runner.num_here == there.runner.num_prepared == 0
    assert here.runner.num_prepared == 1
    assert here.runner.num_here > 5
    assert (here.runner.num_ahead > 5) == (make_speculator is not Lookups)


def soon(number: int, call: Callable[[], object]) -> Callable[[int, StepPlan], None]:
    """The event loop makes a call while the launch of that number is in flight."""

    def on_launch(launch: int, _: StepPlan) -> None:
        if launch == number:
            asyncio.get_running_loop().call_soon(call)

    return on_launch


@both
@pytest.mark.parametrize("number", [1, 2, 5])
@pytest.mark.parametrize("leaves", [False, True], ids=["abort", "client leaves"])
def test_who_ends_while_a_launch_is_in_flight_takes_nothing_from_others(
    make_speculator, number: int, leaves: bool
) -> None:
    async def scenario() -> None:
        world = World(make_speculator())
        await world.engine.start()
        for _ in range(3):
            world.ask()

        in_flight: list[bool] = []

        def end() -> None:
            in_flight.append(world.engine._watchdog.seconds_under_way(1e9) > 0)
            if leaves:
                world.tasks[1].cancel()
            else:
                world.engine.abort("1")

        world.runner.on_launch = soon(number, end)
        await world.finish()
        assert in_flight == [True]
        assert len(world.tokens[1]) < NUM_TOKENS
        assert world.tokens[1] == world.answer(1)[: len(world.tokens[1])]
        assert leaves or world.reason(1) is FinishReason.ABORT
        world.check_others(1)
        assert world.runner.num_here > number

    simulate(scenario)


@both
@pytest.mark.parametrize("count", range(2, 9))
def test_a_stop_in_a_step_whose_successor_may_be_in_flight_ends_the_answer_there(
    make_speculator, count: int
) -> None:
    async def scenario() -> None:
        world = World(make_speculator())
        await world.engine.start()
        world.ask()
        world.ask(stop_at(count))
        world.ask()
        await world.finish()
        assert world.tokens[1] == world.answer(1)[:count]
        assert world.reason(1) is FinishReason.STOP
        world.check_others(1)
        assert world.runner.num_here > 5

    simulate(scenario)


@both
@pytest.mark.parametrize("numbers", [(1,), (2,), (3,), (2, 12), (3, 9)])
def test_a_launch_that_raises_costs_nobody_a_token_or_a_page(make_speculator, numbers) -> None:
    async def scenario() -> None:
        world = World(make_speculator())
        await world.engine.start()
        for _ in range(3):
            world.ask()

        def on_launch(launch: int, _: StepPlan) -> None:
            if launch in numbers:
                raise FAILED

        world.runner.on_launch = on_launch
        await world.finish()
        world.check_others()
        assert world.engine.num_bisections == len(numbers)

    simulate(scenario)


@both
@pytest.mark.parametrize("numbers", [(1,), (2,), (3,), (2, 9)])
def test_an_output_that_cannot_be_read_costs_nobody_a_token_or_a_page(
    make_speculator, numbers
) -> None:
    async def scenario() -> None:
        world = World(make_speculator())
        await world.engine.start()
        for _ in range(3):
            world.ask()
        world.runner.fails_late = numbers
        await world.finish()
        world.check_others()
        assert world.engine.num_bisections == len(numbers)
        assert world.runner.num_here > 5

    simulate(scenario)


@both
def test_a_request_whose_launches_raise_ends_alone(make_speculator) -> None:
    async def scenario() -> None:
        world = World(make_speculator())
        await world.engine.start()
        for _ in range(3):
            world.ask()

        def on_launch(_: int, plan: StepPlan) -> None:
            if any(row.request_id == "1" and row.stop > PROMPT_LEN + 10 for row in plan.requests):
                raise FAILED

        world.runner.on_launch = on_launch
        await world.finish()
        assert isinstance(world.ends[1], ForetokenError)
        assert not isinstance(world.ends[1], EngineDead)
        assert len(world.tokens[1]) >= 10
        assert world.tokens[1] == world.answer(1)[: len(world.tokens[1])]
        world.check_others(1)

    simulate(scenario)


def test_an_engine_whose_launches_all_raise_ends_every_answer() -> None:
    async def scenario() -> None:
        world = World(NO_SPECULATION)
        await world.engine.start()
        for _ in range(3):
            world.ask()

        def on_launch(launch: int, _: StepPlan) -> None:
            if launch > 3:
                raise FAILED

        world.runner.on_launch = on_launch
        await asyncio.gather(*world.tasks)
        failed = [end for end in world.ends if isinstance(end, ForetokenError)]
        assert len(failed) == 3
        for index in range(3):
            assert world.tokens[index] == world.answer(index)[: len(world.tokens[index])]
        world.engine.scheduler.audit()
        cache = world.engine.scheduler.cache
        assert cache.num_free_pages + cache.num_evictable_pages == cache.num_total_pages
        await world.engine.close()

    simulate(scenario)


@both
def test_preemption_between_launches_changes_no_token(make_speculator) -> None:
    async def scenario() -> None:
        world = World(make_speculator(), num_pages=9)  # three answers need four pages each
        await world.engine.start()
        for _ in range(3):
            world.ask()
        await world.finish()
        world.check_others()
        assert sum(each.num_preemptions for each in world.requests) > 0
        assert world.runner.num_here > 5

    simulate(scenario)
