"""The audit that an engine makes at rest: in slices, so that a large pool holds nobody up."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Iterator
from itertools import pairwise

import pytest

from foretoken.core.engine import audit
from foretoken.core.engine.engine import Engine
from foretoken.core.interface.request import Delta
from support.fake_model import FakeRunner, answer, make_request, make_scheduler

SLICE = 10
NUM_PROMPTS = 40


class Rest:
    """An engine with a filled cache, and how far its audits have come."""

    def __init__(self) -> None:
        scheduler = make_scheduler(num_pages=4 * NUM_PROMPTS)
        self.engine = Engine(scheduler, FakeRunner(scheduler.cache.page_size))
        self.num_begun = self.num_steps = 0
        self.is_over = asyncio.Event()
        self._checks = scheduler.checks
        scheduler.checks = self._counted  # type: ignore[method-assign]
        for number in range(NUM_PROMPTS):
            fill(self.engine, number)

    def _counted(self) -> Iterator[None]:
        self.num_begun += 1
        for step in self._checks():
            self.num_steps += 1
            yield step
        self.is_over.set()

    async def reaches(self, num_steps: int) -> None:
        while self.num_steps < num_steps:  # noqa: ASYNC110
            await asyncio.sleep(0)


def fill(engine: Engine, number: int) -> None:
    cache = engine.scheduler.cache
    tokens = array("q", [number] * cache.page_size)
    lease = cache.acquire(tokens)
    assert cache.extend(lease, len(tokens))
    cache.release(lease, tokens, len(tokens))


def run(scenario: Callable[[Rest], object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "SLICE", SLICE)
    monkeypatch.setattr(audit, "QUIET", 0.0)

    async def bounded() -> None:
        async with asyncio.timeout(30):
            rest = Rest()
            await rest.engine.start()
            await scenario(rest)
            await rest.engine.close()

    asyncio.run(bounded())


def test_others_have_their_turns_between_the_slices_of_an_audit(monkeypatch) -> None:
    async def scenario(rest: Rest) -> None:
        seen = [0]
        while not rest.is_over.is_set():
            await asyncio.sleep(0)
            seen.append(rest.num_steps)
        assert seen[-1] > NUM_PROMPTS
        assert max(b - a for a, b in pairwise(seen)) <= SLICE
        assert rest.engine.num_audit_failures == 0

    run(scenario, monkeypatch)


def test_an_audit_that_a_flush_comes_between_begins_anew(monkeypatch) -> None:
    async def scenario(rest: Rest) -> None:
        await rest.reaches(3 * SLICE)
        assert await rest.engine.flush_cache() == NUM_PROMPTS
        await rest.is_over.wait()
        assert rest.num_begun == 2
        assert rest.engine.num_audit_failures == 0

    run(scenario, monkeypatch)


def test_a_request_that_comes_into_an_audit_is_served_and_the_next_rest_begins_anew(
    monkeypatch,
) -> None:
    async def scenario(rest: Rest) -> None:
        await rest.reaches(3 * SLICE)
        tokens, last = [], Delta()
        async for last in rest.engine.submit(make_request("a", [1, 2])):
            tokens += last.token_ids
        assert tokens == answer([1, 2], 8)
        assert last.terminal
        await rest.is_over.wait()
        assert rest.num_begun == 2
        assert rest.engine.num_audit_failures == 0

    run(scenario, monkeypatch)


def test_an_audit_that_was_cut_short_is_begun_again_only_when_it_is_quiet(monkeypatch) -> None:
    """Else who asks now and then has each of its pauses filled with an audit that never ends."""

    async def ask(rest: Rest, name: str) -> None:
        async for _ in rest.engine.submit(make_request(name, [1, 2])):
            pass
        await rest.engine._inbox.idle.wait()

    async def scenario(rest: Rest) -> None:
        monkeypatch.setattr(audit, "QUIET", 3600.0)
        await rest.reaches(SLICE)
        for name in "abc":
            await ask(rest, name)
        assert rest.num_begun == 1
        monkeypatch.setattr(audit, "QUIET", 0.0)
        await ask(rest, "d")
        await rest.is_over.wait()
        assert rest.num_begun == 2

    run(scenario, monkeypatch)


def test_an_audit_at_rest_finds_a_page_that_was_lost(monkeypatch, caplog) -> None:
    async def scenario(rest: Rest) -> None:
        await rest.reaches(SLICE)
        rest.engine.scheduler.cache._free.pop()
        while not rest.engine.num_audit_failures:  # noqa: ASYNC110
            await asyncio.sleep(0)
        assert "159 pages have an owner, but the pool has 160" in caplog.text

    run(scenario, monkeypatch)
