"""Several choices of an answer read as one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest

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
