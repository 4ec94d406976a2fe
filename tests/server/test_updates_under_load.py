"""Updates while 16 streams run: what each kind of pause does to them, token by token."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from foretoken import AsyncLLM, SamplingParams
from foretoken.api.build.model_files import BUILTIN
from foretoken.api.types.results import TextDelta
from foretoken.core.engine.rollouts.updatable_engine import PauseMode
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


class Stream:
    """A stream that has its first token, and the task that reads the rest."""

    def __init__(self, deltas: AsyncGenerator[TextDelta], first: TextDelta) -> None:
        self.tokens = [*first.token_ids]
        self.rest = asyncio.create_task(self._read(deltas))

    async def _read(self, deltas: AsyncGenerator[TextDelta]) -> str | None:
        reason = None
        async for delta in deltas:
            self.tokens += delta.token_ids
            reason = delta.finish_reason
        return reason


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


async def begun(llm: AsyncLLM, number: int) -> Stream:
    deltas = llm.stream(PROMPTS[number], PARAMS[number])
    return Stream(deltas, await anext(deltas))


@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
def test_sixteen_streams_end_as_the_mode_says_and_later_ones_have_the_new_weights(
    loop: asyncio.Runner, llm: AsyncLLM, new: Path, mode: PauseMode
) -> None:
    async def run() -> None:
        await llm.update_weights(TARGET)
        old = await alone(llm)
        earlier = [await begun(llm, number) for number in range(NUM_STREAMS)]
        await llm.pause(mode)
        num_old = [len(stream.tokens) for stream in earlier]
        later = [asyncio.create_task(begun(llm, number)) for number in range(NUM_STREAMS)]
        await llm.update_weights(new)
        await llm.resume()
        reasons = [await stream.rest for stream in earlier]
        found = [stream.tokens for stream in earlier]
        for tokens, number, expected in zip(found, num_old, old, strict=True):
            assert number > 0
            assert tokens[:number] == expected[:number]
        if mode == "abort":
            assert set(reasons) <= {"abort", "length"}
            assert "abort" in reasons
            assert all(tokens == old[index][: len(tokens)] for index, tokens in enumerate(found))
        else:
            assert reasons == ["length"] * NUM_STREAMS
            assert [len(tokens) for tokens in found] == [MAX_TOKENS] * NUM_STREAMS
            assert (found == old) is (mode == "wait"), "a kept stream goes on with the new weights"
        streams = [await each for each in later]
        assert [await each.rest for each in streams] == ["length"] * NUM_STREAMS
        assert [each.tokens for each in streams] == await alone(llm) != old

    loop.run(run())
