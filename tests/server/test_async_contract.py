"""Promises of docs/sdk.md about `AsyncLLM`."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

import pytest

from foretoken import (
    AsyncLLM,
    Completion,
    ForetokenError,
    InvalidRequest,
    PromptTooLong,
    QueueFull,
    SamplingParams,
)

OPTIONS = {"kv_tokens": 4096, "max_model_len": 512, "threads": 1, "max_running": 2, "max_queued": 4}
PROMPT = "class Stack:\n    def push("


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def llm(loop: asyncio.Runner) -> Iterator[AsyncLLM]:
    stack = contextlib.AsyncExitStack()
    yield loop.run(stack.enter_async_context(AsyncLLM("builtin", **OPTIONS)))
    loop.run(stack.aclose())


def long(**fields: object) -> SamplingParams:
    return SamplingParams(**{"seed": 1, "max_tokens": 400, "ignore_eos": True, **fields})


def short(**fields: object) -> SamplingParams:
    return long(**{"max_tokens": 12, **fields})


async def collected(llm: AsyncLLM, params: SamplingParams) -> tuple[str, list[int], str]:
    text, ids, reasons = "", [], []
    async for delta in llm.stream(PROMPT, params):
        assert not reasons, "a delta after the last"
        text += delta.text
        ids += delta.token_ids
        if delta.finish_reason is not None:
            reasons.append(delta.finish_reason)
    return text, ids, reasons[0]


@pytest.mark.parametrize(
    "fields",
    [{}, {"temperature": 0}, {"max_tokens": 24, "stop": ["e", "x"]}, {"speculation": "off"}],
    ids=str,
)
def test_the_deltas_of_a_stream_are_the_whole(
    loop: asyncio.Runner, llm: AsyncLLM, fields: dict[str, object]
) -> None:
    async def main() -> None:
        whole = await llm.generate(PROMPT, short(**fields))
        assert isinstance(whole, Completion)
        expected = (whole.text, whole.token_ids, whole.finish_reason)
        assert await collected(llm, short(**fields)) == expected

    loop.run(main())


def test_streams_beside_one_another_say_what_each_says_alone(
    loop: asyncio.Runner, llm: AsyncLLM
) -> None:
    async def main() -> None:
        kinds = [short(seed=seed) for seed in range(4)]
        alone = [await collected(llm, params) for params in kinds]
        assert await asyncio.gather(*(collected(llm, params) for params in kinds)) == alone

    loop.run(main())


def test_a_list_is_awaited_in_order_and_chat_too(loop: asyncio.Runner, llm: AsyncLLM) -> None:
    outs = loop.run(llm.generate([PROMPT, [5, 6]], [short(), short(max_tokens=2)]))
    assert [len(out.token_ids) for out in outs] == [12, 2]
    chat = loop.run(llm.chat([{"role": "user", "content": "hi"}], short()))
    assert chat.usage.completion_tokens == 12


def test_abort_ends_a_stream_with_the_reason_abort(loop: asyncio.Runner, llm: AsyncLLM) -> None:
    async def main() -> list[str | None]:
        reasons = []
        async for delta in llm.stream(PROMPT, long(), request_id="mine"):
            llm.abort("mine")
            reasons.append(delta.finish_reason)
        return reasons

    reasons = loop.run(main())
    assert reasons[-1] == "abort"
    assert set(reasons[:-1]) <= {None}


def test_abort_gives_an_awaited_completion_what_there_was(
    loop: asyncio.Runner, llm: AsyncLLM
) -> None:
    async def main() -> Completion | list[Completion]:
        task = asyncio.create_task(llm.generate(PROMPT, long(), request_id="awaited"))
        await llm.generate(PROMPT, short())
        llm.abort("awaited")
        return await task

    out = loop.run(main())
    assert isinstance(out, Completion)
    assert (out.request_id, out.finish_reason) == ("awaited", "abort")
    assert 0 < len(out.token_ids) == out.usage.completion_tokens < 400


def test_streams_that_are_left_give_their_places_back(loop: asyncio.Runner, llm: AsyncLLM) -> None:
    async def main() -> None:
        for _ in range(4):  # more than may run and wait together
            async with contextlib.AsyncExitStack() as stack:
                for _ in range(2):
                    stream = contextlib.aclosing(llm.stream(PROMPT, long()))
                    await anext(await stack.enter_async_context(stream))
        assert len((await llm.generate(PROMPT, short())).token_ids) == 12

    loop.run(main())


def test_cancelling_the_tasks_that_wait_gives_their_places_back(
    loop: asyncio.Runner, llm: AsyncLLM
) -> None:
    async def main() -> None:
        for _ in range(3):
            tasks = [asyncio.create_task(llm.generate(PROMPT, long())) for _ in range(3)]
            async for _ in llm.stream(PROMPT, long(max_tokens=2)):
                for task in tasks:
                    task.cancel()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
            assert [type(end) for end in ended] == [asyncio.CancelledError] * 3

    loop.run(main())


def test_a_full_queue_refuses_with_queue_full_and_serves_the_others(
    loop: asyncio.Runner, llm: AsyncLLM
) -> None:
    async def main() -> list[object]:
        calls = (llm.generate(PROMPT, short(temperature=0)) for _ in range(12))
        return await asyncio.gather(*calls, return_exceptions=True)

    outs = loop.run(main())
    done = [out for out in outs if isinstance(out, Completion)]
    assert {type(out) for out in outs} == {Completion, QueueFull}
    assert len(done) >= 4
    assert len({tuple(out.token_ids) for out in done}) == 1


def test_a_bad_request_is_refused_before_it_streams(loop: asyncio.Runner, llm: AsyncLLM) -> None:
    async def main() -> None:
        with pytest.raises(InvalidRequest):
            await llm.generate("", short())
        with pytest.raises(PromptTooLong):
            async for _ in llm.stream([300] * 600, short()):
                pass

    loop.run(main())


def test_a_closed_async_llm_refuses_and_its_streams_end(loop: asyncio.Runner) -> None:
    async def main() -> None:
        async with AsyncLLM("builtin", **OPTIONS) as llm:
            stream = llm.stream(PROMPT, long())
            await anext(stream)
        with contextlib.suppress(ForetokenError):
            async for delta in stream:
                assert delta.finish_reason in (None, "abort")
        with pytest.raises(ForetokenError):
            await llm.generate(PROMPT, short())

    loop.run(main())
