"""The I/O thread of the tiers, in virtual time: what goes first, what waits, and how it ends."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine
from functools import cache, partial
from typing import Any

import pytest

from foretoken.core.engine.engine import Engine
from foretoken.core.engine.extras.tier_io import CLOSE_SECONDS, RENEW_SECONDS
from foretoken.core.engine.model_thread import Job
from foretoken.core.interface.extras.request_extras import Transfer
from foretoken.core.interface.extras.transfers import PageOffer, PoolMemory
from foretoken.core.interface.request import Request
from foretoken.core.scheduling.page_loads import LATE_SECONDS, LOOKUP_SECONDS
from support import virtual_time
from support.fake_model import answer, make_request, make_scheduler
from support.fake_tiers import DictStore, TieredDriver, make_fake_tiers
from support.virtual_thread import Ahead, OneByOne

PROMPTS = [[1 + (i * j) % 6 for j in range(1, 83)] for i in range(1, 6)]  # 20 pages and 2 tokens
NUM_PAGES = 64
PIECE = NUM_PAGES // 16
STEP_SECONDS = 0.01


class HandThread:
    """A `StepThread` whose calls end when the test says so. ``begun`` names them, in turn."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.is_closed = False
        self._jobs: deque[Job[Any]] = deque()

    def start(self, work: Callable[[], Any]) -> Job[Any]:
        assert not self._jobs, "one call after the other"
        self.begun.append(getattr(work, "func", work).__name__)
        self._jobs.append(job := Job(work))
        return job

    def close(self) -> None:
        self.is_closed = True

    async def end(self, failure: Exception | None = None) -> None:
        """End the call under way, and let everybody go on until they wait."""
        job = self._jobs.popleft()
        job.end(None if failure else job.work(), failure)
        await settle()

    async def end_all(self) -> None:
        while self._jobs:
            await self.end()


async def settle() -> None:
    """Let everything run that takes no time."""
    for _ in range(20):
        await asyncio.sleep(0)


class Scene:
    """An engine whose steps take 10 ms, over a store with the pages of `PROMPTS`."""

    def __init__(self, thread: Any, store: DictStore | None = None, **options: Any) -> None:
        self.thread, self.store = thread, DictStore() if store is None else store
        self.store.pages |= pages_of_prompts()
        self.runner = Ahead()
        self.engine = Engine(
            make_scheduler(
                num_pages=NUM_PAGES,
                make_tiers=partial(make_fake_tiers, self.runner, [self.store], virtual_time.now),
                max_batch_tokens=100,
                **options,
            ),
            self.runner,
            clock=virtual_time.now,
            make_thread=lambda name, on_start: (
                OneByOne(lambda: STEP_SECONDS) if name == "foretoken-model" else thread
            ),
        )
        loads = self.engine.scheduler.page_loads
        assert loads is not None
        self.loads = loads

    async def __aenter__(self) -> Scene:
        await self.engine.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.engine.close()

    def submit(self, index: int, **options: Any) -> Reading:
        return Reading(self.engine, make_request(str(index), PROMPTS[index], **options))


class Reading:
    """A request, and a task that reads its answer."""

    def __init__(self, engine: Engine, request: Request) -> None:
        self.request = request
        self.prompt = list(request.tokens)
        self.began, self.ended = virtual_time.now(), 0.0
        self.task = asyncio.create_task(self._read(engine.submit(request)))

    async def _read(self, stream: Any) -> list[int]:
        tokens: list[int] = []
        async for delta in stream:
            tokens += delta.token_ids
        self.ended = virtual_time.now()
        return tokens

    async def check(self) -> Request:
        """Wait for the end: the tokens are the model's own, whatever came of the tiers."""
        assert await self.task == answer(self.prompt, 8)
        return self.request


@cache
def pages_of_prompts() -> dict[bytes, tuple[bytes, bytes]]:
    """The pages that a process leaves which served all prompts."""
    driver = TieredDriver(store := DictStore())
    driver.add(*(make_request(str(i), prompt) for i, prompt in enumerate(PROMPTS)))
    driver.run()
    return store.pages


def run(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(10_000):
            await scenario()

    virtual_time.run(bounded)


# -- the order ------------------------------------------------------------------------------------


def test_flushes_go_first_then_look_ups_then_loads_and_saves_last() -> None:
    async def scenario() -> None:
        thread = HandThread()
        async with Scene(thread) as scene:
            fresh = Reading(scene.engine, make_request("fresh", [5] * 82))
            await settle()
            await thread.end()
            await fresh.check()
            assert thread.begun == ["find", "save"]
            readings = [scene.submit(0)]
            await settle()
            await scene.engine.flush_cache("another salt")
            for _ in range(4):
                await thread.end()
            admitting = ["find", "save"]  # the engine admits the request while a page is saved
            assert thread.begun[2:] == ["flush", *admitting, "load"]
            readings.append(scene.submit(1))
            await settle()
            await scene.engine.flush_cache("another salt")
            for _ in range(4):
                await thread.end()
            assert thread.begun[6:] == ["flush", "find", "load", "load"]
            await thread.end_all()
            for each in readings:
                request = await each.check()
                assert request.usage.loaded_tokens == 80
            last_load = max(at for at, name in enumerate(thread.begun) if name == "load")
            assert set(thread.begun[last_load + 1 :]) == {"save"}
            assert "save" not in thread.begun[6:last_load]

    run(scenario)


def test_peers_are_met_first_asked_again_while_a_request_waits_and_notified_at_its_end() -> None:
    async def scenario() -> None:
        thread = HandThread()
        async with Scene(thread) as scene:
            request = make_request("offered", PROMPTS[0])
            memory = PoolMemory(b"", "DRAM", (), 0)
            request.transfer = Transfer(offer=PageOffer("name", memory, b"key", [1], 0, 1))
            scene.loads.meet(request)
            reading = scene.submit(1)
            await settle()
            await thread.end_all()
            assert thread.begun[:2] == ["meet", "find"]
            await reading.check()
            await thread.end_all()
            for count in (1, 2, 3):
                await asyncio.sleep(RENEW_SECONDS)
                await thread.end_all()
                assert thread.begun.count("renew_offers") == count
            scene.loads.forget(request)
            await settle()
            await thread.end_all()
            assert thread.begun[-1] == "end_offer"
            await asyncio.sleep(5 * RENEW_SECONDS)
            await thread.end_all()
            assert thread.begun[-1] == "end_offer", "nobody waits for anything"
            assert scene.loads.num_offers == 0

    run(scenario)


def test_pages_are_loaded_in_pieces_and_requests_take_turns() -> None:
    async def scenario() -> None:
        thread = HandThread()
        async with Scene(thread) as scene:
            readings = [scene.submit(0), scene.submit(1)]
            await settle()
            for _ in range(2):
                await thread.end()
            counts = []
            for _ in range(10):
                before = scene.store.calls.count("get")
                assert thread.begun[-1] == "load"
                await thread.end()
                counts.append(scene.store.calls.count("get") - before)
            assert counts == [PIECE] * 10
            for each in readings:
                request = await each.check()
                assert request.usage.loaded_tokens == 80

    run(scenario)


def test_an_idle_engine_goes_on_as_soon_as_pages_are_there() -> None:
    async def scenario() -> None:
        async with Scene(OneByOne(lambda: 0.01)) as scene:
            reading = scene.submit(0)
            request = await reading.check()
            assert request.usage.loaded_tokens == 80
            seconds = reading.ended - reading.began
            assert seconds == pytest.approx(6 * 0.01 + 8 * STEP_SECONDS)
            assert scene.runner.num_computed == 2 + 7

    run(scenario)


def test_what_is_served_is_saved_once_the_thread_has_nothing_else_to_do() -> None:
    async def scenario() -> None:
        scene = Scene(OneByOne(lambda: 0.001))
        scene.store.pages.clear()
        async with scene:
            await scene.submit(0).check()
            await asyncio.sleep(1.0)
            assert len(scene.store) == 90 // 4
            assert scene.engine.scheduler.cache.tree.num_pages == 90 // 4

    run(scenario)


# -- patience -------------------------------------------------------------------------------------


def test_a_thread_that_does_not_answer_delays_a_request_by_a_look_up_and_no_more() -> None:
    async def scenario() -> None:
        thread = HandThread()
        async with Scene(thread) as scene:
            reading = scene.submit(0)
            request = await reading.check()
            assert request.usage.loaded_tokens == 0
            waited = reading.ended - reading.began - 8 * STEP_SECONDS
            assert waited == pytest.approx(LOOKUP_SECONDS)
            await thread.end_all()
            assert thread.begun == ["find", *["save"] * (len(thread.begun) - 1)]

    run(scenario)


def test_a_thread_that_hangs_in_a_load_delays_a_request_by_its_patience_and_no_more() -> None:
    async def scenario() -> None:
        thread = HandThread()
        async with Scene(thread) as scene:
            reading = scene.submit(0)
            await settle()
            await thread.end()
            assert thread.begun[-1] == "load"
            request = await reading.check()
            waited = reading.ended - reading.began - 8 * STEP_SECONDS
            assert waited == pytest.approx(LATE_SECONDS)
            assert (request.usage.loaded_tokens, scene.loads.num_late) == (0, 1)
            assert len(scene.loads.leases) == 1
            assert (await scene.engine.audit())["ok"]
            await thread.end_all()
            assert scene.loads.leases == []
            assert (await scene.engine.audit())["ok"]

    run(scenario)


def test_a_step_planned_ahead_is_made_anew_for_who_was_loaded() -> None:
    async def scenario() -> None:
        async with Scene(OneByOne(lambda: 0.001)) as scene:
            stream = Reading(scene.engine, make_request("stream", [1, 2, 3], max_tokens=8))
            await asyncio.sleep(2.5 * STEP_SECONDS)
            loaded = scene.submit(0)
            await stream.check()
            await loaded.check()
            assert loaded.ended - loaded.began < 12 * STEP_SECONDS

    run(scenario)


def test_aborts_while_the_thread_is_busy_leave_nothing_behind() -> None:
    async def scenario() -> None:
        thread = HandThread()
        async with Scene(thread) as scene:
            readings = [scene.submit(index) for index in range(4)]
            await settle()
            await thread.end()
            await thread.end()
            scene.engine.abort("0")
            scene.engine.abort("3")
            await settle()
            await thread.end_all()
            for index in (1, 2):
                await readings[index].check()
            for index in (0, 3):
                assert await readings[index].task == []
            assert scene.loads.leases == []
            assert (await scene.engine.audit())["ok"]
            cache = scene.engine.scheduler.cache
            assert cache.num_free_pages + cache.num_evictable_pages == NUM_PAGES

    run(scenario)


# -- calls that fail ------------------------------------------------------------------------------


@pytest.mark.parametrize("fails", ["find", "load", "save", "flush"])
def test_a_call_that_raises_counts_as_nothing(fails: str, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        thread = HandThread()
        async with Scene(thread) as scene:
            if fails == "flush":
                await scene.engine.flush_cache("another salt")
            reading = scene.submit(0)
            await settle()
            has_failed = False
            for _ in range(40):
                if not thread._jobs:
                    await asyncio.sleep(STEP_SECONDS)
                    continue
                if thread.begun[-1] == fails and not has_failed:
                    has_failed = True
                    await thread.end(RuntimeError("a bug"))
                else:
                    await thread.end()
            assert has_failed
            request = await reading.check()
            expected = 0 if fails in ("find", "load") else 80
            assert request.usage.loaded_tokens == expected
            assert (await scene.engine.audit())["ok"]
            await thread.end_all()

    async def with_log() -> None:
        with caplog.at_level(logging.ERROR):
            await scenario()

    run(with_log)
    assert "a call to the KV tiers failed" in caplog.text


# -- the end --------------------------------------------------------------------------------------


async def served_without_saves(scene: Scene) -> None:
    """A request is answered; its pages wait to be saved."""
    scene.store.pages.clear()
    await scene.submit(0).check()


def test_closing_saves_what_waits() -> None:
    async def scenario() -> None:
        scene = Scene(OneByOne(lambda: 0.2))
        async with scene:
            await served_without_saves(scene)
            await scene.engine.close(drain_seconds=10.0)
            assert len(scene.store) == 22
            assert scene.store.is_closed
            assert scene.store.calls[-1] == "close"

    run(scenario)


def test_closing_saves_for_as_long_as_it_may_and_closes_the_store() -> None:
    async def scenario() -> None:
        scene = Scene(OneByOne(lambda: 1.0))
        async with scene:
            await served_without_saves(scene)
            began = virtual_time.now()
            await scene.engine.close(drain_seconds=3.0)
            assert virtual_time.now() - began <= 6.0
            assert PIECE * 2 <= len(scene.store) <= PIECE * 5
            assert scene.store.is_closed

    run(scenario)


def test_closing_at_once_still_saves_for_a_second() -> None:
    async def scenario() -> None:
        scene = Scene(OneByOne(lambda: 0.1))
        async with scene:
            await served_without_saves(scene)
            await scene.engine.close()
            assert len(scene.store) == 22
            assert scene.store.is_closed

    run(scenario)


@pytest.mark.parametrize("hangs_in", ["find", "load", "save"])
def test_a_store_that_never_answers_is_abandoned(
    hangs_in: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        thread = HandThread()
        scene = Scene(thread)
        await scene.engine.start()
        reading = scene.submit(0)
        await settle()
        while thread.begun[-1] != hangs_in:
            await thread.end()
            if not thread._jobs:
                await asyncio.sleep(STEP_SECONDS)
        began = virtual_time.now()
        with caplog.at_level(logging.WARNING):
            await scene.engine.close(drain_seconds=2.0)
        assert virtual_time.now() - began <= 2.0 + CLOSE_SECONDS + 0.1
        assert thread.is_closed
        assert not scene.store.is_closed, "another thread is in it"
        assert scene.loads.leases == []
        cache = scene.engine.scheduler.cache
        assert cache.num_free_pages + cache.num_evictable_pages == NUM_PAGES
        await reading.task

    run(scenario)
    assert "a KV tier did not answer in time" in caplog.text


def test_a_flush_is_made_though_the_engine_is_closing() -> None:
    async def scenario() -> None:
        thread = HandThread()
        scene = Scene(thread)
        await scene.engine.start()
        scene.submit(0)
        await settle()
        await scene.engine.flush_cache()
        closing = asyncio.create_task(scene.engine.close())
        await settle()
        await thread.end_all()
        await closing
        assert thread.begun[1] == "flush"
        assert len(scene.store) == 0
        assert scene.store.is_closed

    run(scenario)


def test_an_engine_that_never_started_closes_its_stores() -> None:
    """The folder would stay locked while the process lives."""

    async def scenario() -> None:
        scene = Scene(OneByOne(lambda: 0.0))
        await scene.engine.close()
        assert scene.store.is_closed

    run(scenario)
