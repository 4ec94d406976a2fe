"""The mailbox between the engine and one reader: nothing is lost, nothing follows the end."""

from __future__ import annotations

import asyncio

import pytest

from foretoken.core.engine.inbox import TokenStream
from foretoken.core.errors import ForetokenError
from foretoken.core.interface.output import TokenLogprob
from foretoken.core.interface.request import Delta, FinishReason
from support.fake_model import make_request


def make_stream() -> TokenStream:
    return TokenStream(make_request("a", [1, 2]))


def delta_of(token_id: int, **fields: object) -> Delta:
    """One token with all that a step may say of it."""
    return Delta(
        token_ids=[token_id],
        logprobs=[TokenLogprob(token_id, -0.5)],
        prompt_logprobs=[TokenLogprob(token_id, -1.5)],
        num_proposed=2,
        proposed_sources=["ngram", f"draft {token_id}"],
        accepted_sources=[f"draft {token_id}"],
        token_sources=[f"draft {token_id}"],
        **fields,  # type: ignore[arg-type]
    )


async def read(stream: TokenStream) -> list[Delta]:
    return [delta async for delta in stream]


async def test_what_a_slow_reader_missed_is_told_at_once_and_whole() -> None:
    stream = make_stream()
    stream.push(delta_of(7))
    stream.push(delta_of(8, finish_reason=FinishReason.STOP, stop_reason="\n"))
    both = Delta(
        token_ids=[7, 8],
        logprobs=[TokenLogprob(7, -0.5), TokenLogprob(8, -0.5)],
        prompt_logprobs=[TokenLogprob(7, -1.5), TokenLogprob(8, -1.5)],
        num_proposed=4,
        proposed_sources=["ngram", "draft 7", "ngram", "draft 8"],
        accepted_sources=["draft 7", "draft 8"],
        token_sources=["draft 7", "draft 8"],
        finish_reason=FinishReason.STOP,
        stop_reason="\n",
    )
    assert await read(stream) == [both]


async def begin_to_read(stream: TokenStream) -> asyncio.Task[Delta]:
    """Return a reader that waits for the next delta."""
    reader = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    assert not reader.done()
    return reader


async def test_a_reader_that_waits_is_told_by_the_next_push() -> None:
    stream = make_stream()
    for token_id in (7, 8):
        reader = await begin_to_read(stream)
        stream.push(delta_of(token_id))
        await asyncio.sleep(0)
        assert reader.done()
        assert (await reader).token_ids == [token_id]


async def test_what_comes_when_a_reader_has_given_up_is_kept_for_the_next_one() -> None:
    stream = make_stream()
    (await begin_to_read(stream)).cancel()
    await asyncio.sleep(0)
    stream.push(delta_of(7))
    assert (await anext(stream)).token_ids == [7]


@pytest.mark.parametrize("is_read", [False, True])
async def test_nothing_follows_the_end(is_read: bool) -> None:
    stream = make_stream()
    stream.push(delta_of(7, finish_reason=FinishReason.LENGTH))
    told = await read(stream) if is_read else []
    stream.push(delta_of(8, finish_reason=FinishReason.ABORT))
    told += await read(stream)
    assert [(delta.token_ids, delta.finish_reason) for delta in told] == [
        ([7], FinishReason.LENGTH)
    ]


async def test_a_failure_is_raised_once_behind_the_tokens_that_came_before_it() -> None:
    stream = make_stream()
    stream.push(delta_of(7))
    stream.push(Delta(error=ForetokenError("not finite")))
    assert (await anext(stream)).token_ids == [7]
    with pytest.raises(ForetokenError, match="not finite"):
        await anext(stream)
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


def test_the_end_is_reported_once_read_or_not() -> None:
    made, calls = make_stream(), list[str]()
    made.when_ended(lambda: calls.append("early"))
    made.push(delta_of(1))
    assert not calls
    made.push(Delta(finish_reason=FinishReason.ABORT))
    made.push(Delta(finish_reason=FinishReason.ABORT))
    assert calls == ["early"]
    made.when_ended(lambda: calls.append("late"))
    assert calls == ["early", "late"]
