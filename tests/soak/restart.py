"""Kill and restart: under load, by SIGTERM and SIGKILL, on a port and on a Unix socket."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import random
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Sequence

from .clients import feature, leaver, steady
from .server import Server
from .wire import request_bytes
from .world import UNAVAILABLE, World

LOAD_SECONDS = 2.0  # before the signal
DRAIN_SECONDS = 60.0  # what the server may take with all it has to finish
AT_ONCE_SECONDS = 5.0
NUM_STEADY, NUM_LEAVING, NUM_FEATURES = 8, 2, 2


async def terminate(world: World, server: Server, rng: random.Random) -> None:
    """SIGTERM under load: what runs is finished, new work refused, the exit status 0."""
    async with _load(world, rng):
        begin = time.monotonic()
        world.phase = "draining"
        server.signal(signal.SIGTERM)
        late = asyncio.create_task(_late(world, rng))
        code = await server.ended(DRAIN_SECONDS)
        late.cancel()
        await asyncio.gather(late, return_exceptions=True)
        took = time.monotonic() - begin
        world.book.check("restart", code == 0, f"SIGTERM under load: status {code} in {took:.1f} s")
    await _again(world, server, rng)


async def kill(world: World, server: Server, rng: random.Random) -> None:
    """SIGKILL under load: nobody is left waiting, and the port binds again."""
    async with _load(world, rng):
        world.phase = "killed"
        server.signal(signal.SIGKILL)
        await server.ended(AT_ONCE_SECONDS)
    await _again(world, server, rng)


async def unix(world: World, args: Sequence[str], rng: random.Random) -> None:
    """The same on a Unix socket: a stale one is replaced, a second SIGTERM ends at once."""
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/soak.sock"
        server = Server(args, uds=path)
        own = dataclasses.replace(world, address=path, phase="up")
        try:
            await server.start()
            await _canaries(own, rng)
            await kill(own, server, rng)
            server.signal(signal.SIGTERM)
            code = await server.ended(DRAIN_SECONDS)
            gone = "soak.sock" not in os.listdir(folder)
            world.book.check("restart", code == 0 and gone, f"idle: {code}, socket gone: {gone}")
            await server.start()
            await _twice(own, server, rng)
        finally:
            await server.kill()
            own.drop_links()


async def _twice(world: World, server: Server, rng: random.Random) -> None:
    """Two SIGTERMs: it does not wait for what runs."""
    async with _load(world, rng, endless=True):
        world.phase = "killed"
        server.signal(signal.SIGTERM)
        await asyncio.sleep(0.3)
        server.signal(signal.SIGTERM)
        code = await server.ended(AT_ONCE_SECONDS)
        world.book.check("restart", code is not None, f"two SIGTERMs: status {code}")


@contextlib.asynccontextmanager
async def _load(world: World, rng: random.Random, *, endless: bool = False) -> AsyncIterator[None]:
    """Clients before, during and after what happens inside; each of them has its end."""
    world.until = asyncio.get_running_loop().time() + 3600
    actors = [steady] * NUM_STEADY + [leaver] * NUM_LEAVING + [feature] * NUM_FEATURES

    async def again(work: asyncio.Event, own: random.Random, index: int) -> None:
        while not work.is_set():
            await actors[index](world, own)
            await asyncio.sleep(0.05 if world.phase == "up" else 0.2)

    over = asyncio.Event()
    tasks = [
        asyncio.create_task(again(over, random.Random(rng.random()), index))
        for index in range(len(actors))
    ]
    if endless:
        tasks += [asyncio.create_task(_endless(world)) for _ in range(4)]
    await asyncio.sleep(LOAD_SECONDS)
    try:
        yield
    finally:
        over.set()
        await asyncio.gather(*tasks)
        world.drop_links()


async def _endless(world: World) -> None:
    """An answer that takes far longer than the signal."""
    body = {"prompt": "def f(", "max_tokens": 3000, "ignore_eos": True, "stream": True}
    reply = await world.send(world.request("POST", "/v1/completions", body))
    world.judge("endless", reply, "up")


async def _late(world: World, rng: random.Random) -> None:
    """New work after the signal: a 503 with Retry-After, or no connection; /ready says so too."""
    while True:
        await world.ask_known("late", rng.choice(world.canaries), rng)
        reply = await world.send(request_bytes("GET", "/ready", key=world.key))
        if reply.ended == "whole":
            told = f"/ready while draining: {reply.status}"
            world.book.check("restart", reply.status == UNAVAILABLE, told)
        await asyncio.sleep(0.02)


async def _again(world: World, server: Server, rng: random.Random) -> None:
    """The next process at the same address says the same words."""
    address = server.address
    seconds = await server.start()
    told = f"bound {server.address}, was {address}, in {seconds:.1f} s"
    world.book.check("restart", server.address == address, told)
    world.phase = "up"
    await _canaries(world, rng)


async def _canaries(world: World, rng: random.Random) -> None:
    for known in world.canaries:
        await world.ask_known("canary", known, rng)
