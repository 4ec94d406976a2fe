"""Several choices of an answer read as one; answers that are not read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Any

import pytest

from foretoken import AsyncLLM, SamplingParams
from foretoken.api.runtime.generation import merge


@pytest.mark.parametrize("names", ["a", "ab", "abc"])
def test_who_stops_reading_closes_every_source(names: str) -> None:
    closed: list[str] = []

    async def source(name: str) -> AsyncGenerator[str]:
        try:
            while True:
                yield name
        finally:
            closed.append(name)

    async def scenario() -> None:
        merged = merge([source(name) for name in names])
        await anext(merged)
        await merged.aclose()
        assert sorted(closed) == list(names)

    asyncio.run(scenario())


def test_the_engine_is_idle_although_a_client_does_not_read_its_answer(
    run: Callable[..., Any],
) -> None:
    async def body(llm: AsyncLLM) -> None:
        assert llm.is_idle
        answer = await llm.open("words", SamplingParams(max_tokens=2))
        assert not llm.is_idle
        while not answer.ended:  # noqa: ASYNC110
            await asyncio.sleep(0)
        assert llm.is_idle
        llm.forget(answer)

    run(body)
