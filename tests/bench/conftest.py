"""A server with OpenAI's shape that does what a test says, behind a real socket."""

from __future__ import annotations

import asyncio
import threading

import pytest
import uvicorn

from support.fake_openai import FakeServer


@pytest.fixture(scope="session")
def _listening():
    fake = FakeServer()
    config = uvicorn.Config(fake.app, port=0, log_level="critical", loop="asyncio", ws="none")
    server, started = uvicorn.Server(config), threading.Event()

    async def serve() -> None:
        task = asyncio.create_task(server.serve())
        while not server.started:  # noqa: ASYNC110 - uvicorn has no event for it
            await asyncio.sleep(0.005)
        fake.port = server.servers[0].sockets[0].getsockname()[1]
        started.set()
        await task

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    assert started.wait(20)
    yield fake
    server.should_exit = True
    thread.join(20)


@pytest.fixture
def server(_listening: FakeServer) -> FakeServer:
    """Fake server without orders of an earlier test."""
    _listening.reset()
    return _listening
