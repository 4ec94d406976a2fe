"""Whoever waits may be cancelled at any of its awaits: nothing is lost, nobody else notices."""

from __future__ import annotations

import asyncio
import contextlib
import random

import pytest

from foretoken.core.errors import EngineDead

from .asks import Ask
from .clients import Client
from .faults import Faults
from .loop import SimulatedLoop
from .strike import Strike, by_name, every_suspension, struck
from .verdict import check_end
from .world import Shape, World

VICTIM = Ask(prompt=(1, 2, 3, 4, 5, 1), max_tokens=6)
BYSTANDERS = (Ask(prompt=(1, 2, 3, 4), max_tokens=9), Ask(prompt=(5, 5), max_tokens=4, salt=1))


def make_world(loop: SimulatedLoop, speculator: str = "fixed") -> World:
    shape = Shape(
        num_pages=16, page_size=2, max_batch_tokens=5, max_running=2, max_queued=9,
        max_model_len=1000, max_slowdown=2.0, speculator=speculator, depth=3,
    )  # fmt: skip
    return World(loop, 0, shape=shape, faults=Faults(random.Random(0), frozenset()))


def client(world: World) -> Client:
    return Client(world, "client", random.Random(1))


@contextlib.asynccontextmanager
async def company(world: World):
    """Others who are served meanwhile; their answers are looked at in the end."""
    others = [
        asyncio.create_task(client(world).fast(ask, f"bystander-{index}"))
        for index, ask in enumerate(BYSTANDERS)
    ]
    yield
    await asyncio.gather(*others)


def _expect_refusal_or_end(world: World) -> None:
    """An engine at rest may not have met its end yet; who comes now is told of it."""
    with contextlib.nullcontext() if world.engine.alive else pytest.raises(EngineDead):
        world.submit(VICTIM, "late")


def strike_everywhere(scenario) -> int:
    """Returns how often it struck."""
    return sum(1 for _ in every_suspension(scenario))


@pytest.mark.parametrize("speculator", ["off", "fixed", "auto"])
def test_a_client_that_is_cancelled_at_any_await_leaves_nothing_behind(speculator) -> None:
    async def scenario(loop: SimulatedLoop, strike: Strike) -> None:
        world = make_world(loop, speculator)
        await world.engine.start()
        async with company(world):
            victim = struck(client(world).guarded(VICTIM, "victim"), strike)
            await asyncio.wait([asyncio.create_task(victim)])
        await check_end(world)

    assert strike_everywhere(scenario) >= 6


def test_a_client_that_asks_again_under_its_id_may_be_cancelled_anywhere() -> None:
    async def scenario(loop: SimulatedLoop, strike: Strike) -> None:
        world = make_world(loop)
        await world.engine.start()
        async with company(world):
            await asyncio.wait([asyncio.create_task(client(world).guarded(VICTIM, "victim"))])
            first = asyncio.create_task(struck(client(world).guarded(VICTIM, "victim"), strike))
            await asyncio.wait([first])
            await client(world).again(VICTIM, "victim-again")
        await check_end(world)

    assert strike_everywhere(scenario) >= 6


def test_an_engine_whose_task_is_cancelled_at_any_await_ends_every_stream() -> None:
    async def scenario(loop: SimulatedLoop, strike: Strike) -> None:
        world = make_world(loop)
        loop.wrap = by_name("Engine._run", strike)
        await world.engine.start()
        async with company(world):
            await client(world).fast(VICTIM, "victim")
        if strike.has_struck:
            world.closed_at = 0.0
            _expect_refusal_or_end(world)
        await check_end(world)

    assert strike_everywhere(scenario) >= 10


@pytest.mark.parametrize("drain_seconds", [0.0, 0.01, 100.0])
def test_who_closes_may_be_cancelled_at_any_await(drain_seconds) -> None:
    async def scenario(loop: SimulatedLoop, strike: Strike) -> None:
        world = make_world(loop)
        await world.engine.start()
        async with company(world):
            await asyncio.sleep(0.01)
            closing = struck(world.close(drain_seconds), strike)
            await asyncio.wait([asyncio.create_task(closing)])
            await world.close()
        await check_end(world)

    assert strike_everywhere(scenario) >= 2


@pytest.mark.parametrize("doomed", ["Engine._run", "Engine._close"])
def test_a_loop_that_is_torn_down_at_any_await_ends_every_stream(doomed) -> None:
    """`asyncio.run` tears down so: all tasks are cancelled at once, and waited for."""

    async def scenario(loop: SimulatedLoop, strike: Strike) -> None:
        world = make_world(loop)
        loop.wrap, strike.spare = by_name(doomed, strike), asyncio.current_task()
        await world.engine.start()
        clients = [client(world).guarded(ask, f"client-{i}") for i, ask in enumerate(BYSTANDERS)]
        await asyncio.wait([asyncio.create_task(each) for each in (*clients, _closing_soon(world))])
        world.closed_at = 0.0
        if others := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.wait(others)
        assert all(told.last is not None for told in world.told), "a stream was never ended"
        world.scheduler.audit()
        assert world.scheduler.num_requests == 0

    assert strike_everywhere(scenario) >= 2


async def _closing_soon(world: World) -> None:
    await asyncio.sleep(0.02)
    await world.close(0.01)


def test_a_start_that_is_cancelled_can_be_made_again() -> None:
    async def scenario(loop: SimulatedLoop, strike: Strike) -> None:
        world = make_world(loop)
        await asyncio.wait([asyncio.create_task(struck(world.engine.start(), strike))])
        await world.engine.start()
        async with company(world):
            await client(world).fast(VICTIM, "victim")
        await check_end(world)

    assert strike_everywhere(scenario) >= 2
