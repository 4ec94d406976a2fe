"""A real server under 200 streams of the official client, some of which leave midway."""

from __future__ import annotations

import asyncio
import json
import random
import urllib.request
from collections.abc import Iterator

import pytest
from openai import AsyncOpenAI, OpenAI

from support.plain_http import metrics
from support.server_process import Server, running

MODEL = "foretoken-builtin"
NUM_STREAMS = 200
NUM_TOKENS = 24
SHARED = "import collections\nimport functools\n\n\nclass Queue:\n    def __init__(self):\n"
PROMPTS = [SHARED + f"        self.items_{i} = []\n" for i in range(8)] + ["def f(x):", "class A"]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running(["--kv-tokens", "4096", "--max-running", "24"]) as server:
        yield server


def parameters(index: int) -> dict[str, object]:
    return {
        "model": MODEL,
        "prompt": PROMPTS[index % len(PROMPTS)],
        "max_tokens": NUM_TOKENS,
        "seed": index % 3,
        "temperature": (0.0, 0.8)[index % 2],
    }


async def one(client: AsyncOpenAI, index: int, leave_after: int | None) -> str | None:
    """The text of a stream, or None when it left early."""
    stream = await client.completions.create(stream=True, **parameters(index))  # type: ignore[call-overload]
    text, chunks = "", 0
    async with stream:
        async for chunk in stream:
            text += chunk.choices[0].text
            chunks += 1
            if chunks == leave_after:
                return None
    return text


async def storm(url: str) -> list[str | None]:
    rng = random.Random(0)
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0)
    leaving = [rng.randrange(1, 4) if rng.random() < 0.35 else None for _ in range(NUM_STREAMS)]
    async with client, asyncio.timeout(240):
        return await asyncio.gather(*(one(client, i, leave) for i, leave in enumerate(leaving)))


def get(server: Server, path: str) -> str:
    with urllib.request.urlopen(server.url + path, timeout=10) as answer:
        return str(answer.read().decode())


async def until_idle(server: Server) -> None:
    """Requests whose clients left end at the next commit, not before."""
    async with asyncio.timeout(60):
        while "foretoken:num_requests_running 0.0" not in metrics(server.url):  # noqa: ASYNC110
            await asyncio.sleep(0.05)


def test_two_hundred_streams_with_disconnects_leak_nothing_and_change_no_text(server) -> None:
    client = OpenAI(base_url=f"{server.url}/v1", api_key="-")
    with client:
        alone = [
            client.completions.create(**parameters(index)).choices[0].text  # type: ignore[call-overload]
            for index in range(len(PROMPTS) * 6)
        ]
    texts = asyncio.run(storm(server.url))
    left = texts.count(None)
    assert 40 < left < 120
    for index, text in enumerate(texts):
        assert text is None or text == alone[index % len(alone)]
    asyncio.run(until_idle(server))
    cache = json.loads(get(server, "/cache"))
    assert cache["free_pages"] + cache["evictable_pages"] == cache["total_pages"]
    assert cache["hit_tokens"] > 0


def test_sigterm_ends_an_idle_server_with_status_zero(server) -> None:
    assert server.stop() == 0
