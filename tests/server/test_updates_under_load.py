"""Updates while 16 streams run: what each kind of pause does to them, token by token."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from foretoken import AsyncLLM, SamplingParams
from foretoken.api.build.model_files import BUILTIN
from support.new_weights import retrained

TARGET = BUILTIN / "target"
NUM_STREAMS = 16
MAX_TOKENS = 60
OPTIONS: dict[str, Any] = {
    "kv_tokens": 8192,
    "max_model_len": 512,
    "threads": 1,
    "allow_weight_updates": True,
}
PROMPTS = [f"def function_{number}(items, other):\n    return" for number in range(NUM_STREAMS)]
PARAMS = [
    SamplingParams(
        max_tokens=MAX_TOKENS, ignore_eos=True, seed=number, temperature=0.8 * (number % 2)
    )
    for number in range(NUM_STREAMS)
]


class Read(NamedTuple):
    """Tokens of a stream, its finish reason, and the versions that computed it."""

    tokens: list[int]
    reason: str | None
    spans: list[tuple[int, str]]


@pytest.fixture(scope="module")
def new(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return retrained(TARGET, tmp_path_factory.mktemp("weights") / "new")


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def llm(loop: asyncio.Runner) -> Iterator[AsyncLLM]:
    with ExitStack() as stack:
        llm = loop.run(AsyncLLM(TARGET, **OPTIONS).__aenter__())
        stack.callback(lambda: loop.run(llm.close()))
        yield llm


async def alone(llm: AsyncLLM) -> list[list[int]]:
    """The answers of the present weights."""
    found = await llm.generate(PROMPTS, PARAMS)
    return [each.token_ids for each in found]


async def begun(llm: AsyncLLM, number: int) -> asyncio.Task[Read]:
    """A stream that has its first token, and the task that reads the rest."""
    stream = llm.stream(PROMPTS[number], PARAMS[number])
    first = await anext(stream)

    async def rest() -> Read:
        tokens, last = [*first.token_ids], first
        async for last in stream:
            tokens += last.token_ids
        usage: Any = last.usage
        return Read(tokens, last.finish_reason, [*usage.weight_versions])

    return asyncio.create_task(rest())


async def loaded(llm: AsyncLLM, mode: Any, new: Path) -> tuple[list[Read], list[Read]]:
    """Streams before and after a pause in which the weights change."""
    tasks = [await begun(llm, number) for number in range(NUM_STREAMS)]
    await llm.pause(mode)
    later = [asyncio.create_task(begun(llm, number)) for number in range(NUM_STREAMS)]
    await llm.update_weights(new)
    await llm.resume()
    return [await task for task in tasks], [await (await each) for each in later]


@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
def test_sixteen_streams_end_as_the_mode_says_and_later_ones_have_the_new_weights(
    loop: asyncio.Runner, llm: AsyncLLM, new: Path, mode: str
) -> None:
    async def run() -> None:
        await llm.update_weights(TARGET)
        old, version = await alone(llm), llm.weight_version
        earlier, later = await loaded(llm, mode, new)
        updated = llm.weight_version
        for number, read in enumerate(earlier):
            num_old = len(read.tokens)
            if mode == "keep":
                assert (len(read.tokens), read.reason) == (MAX_TOKENS, "length")
                if len(read.spans) > 1:
                    assert [each for _, each in read.spans] == [version, updated]
                    num_old = read.spans[1][0]
            elif mode == "wait":
                assert read.reason == "length"
            else:
                assert read.reason in ("abort", "length")
            if mode != "keep":
                assert read.spans == [(0, version)]
            assert num_old > 0
            assert read.tokens[:num_old] == old[number][:num_old]
        assert [read.tokens for read in later] == await alone(llm)
        assert {read.reason for read in later} == {"length"}
        assert [read.spans for read in later] == [[(0, updated)]] * NUM_STREAMS
        if mode == "wait":
            assert [read.tokens for read in earlier] == old
        else:
            assert any(len(read.spans) > 1 or read.reason == "abort" for read in earlier)

    loop.run(run())
