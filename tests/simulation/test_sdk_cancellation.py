"""Callers of AsyncLLM that are cancelled at any await: the SDK over the real engine."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from pathlib import Path

import pytest

from foretoken import AsyncLLM, SamplingParams
from foretoken.api.build import model_files
from foretoken.api.build.built import Built
from foretoken.api.text.tokenizer import Tokenizer

from .asks import Ask
from .loop import SimulatedLoop
from .model import VOCAB_SIZE, solo
from .strike import Strike, struck
from .test_cancellation import make_world, strike_everywhere
from .verdict import check_end
from .world import World

PROMPTS = [[1, 2, 3, 4, 5, 1], [1, 2, 3], [5, 5]]
PARAMS = SamplingParams(max_tokens=5, seed=0, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module", autouse=True)
def _one_tokenizer():
    """Loading one takes longer than a whole scenario."""
    loaded = Tokenizer.load(Path(model_files.BUILTIN) / "target", max_model_len=32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tokenizer, "load", lambda *args, **options: loaded)
        close = loaded.close
        patch.setattr(loaded, "close", lambda: None)
        yield
    close()


def make_llm(loop: SimulatedLoop) -> tuple[AsyncLLM, World]:
    """Over a world's engine; every request that it gets is watched."""
    world = make_world(loop)
    engine, submit, abort = world.engine, world.engine.submit, world.engine.abort

    def submit_watched(request):
        stream = submit(request)
        prompt = tuple(request.tokens[: request.prompt_len])
        ask = Ask(prompt=prompt, max_tokens=request.sampling.params.max_tokens)
        world.watch(stream, ask)
        return stream

    def abort_watched(request_id):
        for told in world.told:
            if told.request.request_id == request_id:
                told.is_aborted = told.is_aborted or told.last is None
        abort(request_id)

    engine.submit, engine.abort = submit_watched, abort_watched
    capacity = world.scheduler.capacity
    built = Built(
        engine=engine, path=Path(), name="hashes", vocab_size=VOCAB_SIZE,
        max_model_len=capacity, eos_token_ids=frozenset(),
    )  # fmt: skip
    return AsyncLLM.from_built(built), world


def strike_calls(call) -> int:
    """Strike a call of the SDK everywhere; afterwards all is as if nobody had called."""

    async def scenario(loop: SimulatedLoop, strike: Strike) -> None:
        llm, world = make_llm(loop)
        other = asyncio.create_task(llm.generate(PROMPTS[1], PARAMS))
        await asyncio.wait([asyncio.create_task(struck(call(llm), strike)), other])
        assert tuple(other.result().token_ids) == solo(tuple(PROMPTS[1]), 0, 5)
        assert not llm._answers, "an answer is kept whose caller is gone"
        again = await llm.generate(PROMPTS[0], PARAMS)
        assert tuple(again.token_ids) == solo(tuple(PROMPTS[0]), 0, 5)
        await llm.close()
        world.closed_at = world.closed_at or loop.time()
        await check_end(world)

    return strike_everywhere(scenario)


def test_a_caller_of_generate_may_be_cancelled_anywhere() -> None:
    assert strike_calls(lambda llm: llm.generate(PROMPTS[0], PARAMS)) >= 8


def test_a_caller_of_generate_with_many_prompts_may_be_cancelled_anywhere() -> None:
    assert strike_calls(lambda llm: llm.generate(PROMPTS, PARAMS)) >= 4


def test_a_reader_of_a_stream_may_be_cancelled_anywhere() -> None:
    async def read(llm: AsyncLLM) -> None:
        async with aclosing(llm.stream(PROMPTS[0], PARAMS, request_id="mine")) as deltas:
            async for _ in deltas:
                await asyncio.sleep(0)

    assert strike_calls(read) >= 8


def test_whoever_starts_may_be_cancelled_anywhere() -> None:
    assert strike_calls(lambda llm: llm.start()) >= 2


def test_whoever_closes_may_be_cancelled_anywhere() -> None:
    async def scenario(loop: SimulatedLoop, strike: Strike) -> None:
        llm, world = make_llm(loop)
        await llm.start()
        other = asyncio.create_task(llm.generate(PROMPTS[1], PARAMS))
        await asyncio.sleep(0.02)
        world.closed_at = loop.time()
        await asyncio.wait([asyncio.create_task(struck(llm.close(drain_seconds=1), strike)), other])
        await llm.close()
        await check_end(world)

    assert strike_everywhere(scenario) >= 1
