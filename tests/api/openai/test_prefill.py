"""Prompts for another server: what may pass is 503; pages of an answer that is lost are free."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from functools import wraps
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import Struct

from foretoken.api.dialects.openai.bodies import CompletionRequest
from foretoken.api.dialects.openai.prefill import handing_over, transfer_of
from foretoken.api.serving.answers import AnswerReply
from foretoken.api.serving.errors import ApiError
from foretoken.core.errors import (
    DeadlineExceeded,
    EngineDead,
    ForetokenError,
    InvalidRequest,
    QueueFull,
)

WANTED = {"do_remote_decode": True}


def in_a_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a test on an event loop of its own."""

    @wraps(test)
    def run(*args: Any, **options: Any) -> None:
        asyncio.run(test(*args, **options))

    return run


class Body(Struct):
    """A whole answer."""

    kv_transfer_params: dict[str, Any] | None = None


class Known(AnswerReply[Any]):
    """A reply of which a test says what it brings."""

    request = SimpleNamespace(request_id="cmpl-1")  # type: ignore[assignment]

    def __init__(self, outcome: object) -> None:
        self._outcome = outcome
        self.is_closed = False

    async def whole(self) -> object:
        if isinstance(self._outcome, Exception):
            raise self._outcome
        return self._outcome

    async def events(self) -> AsyncGenerator[bytes]:
        yield b"x"

    def close(self) -> None:
        self.is_closed = True


class Transfers:
    """`TransferParams` of which a test says whether there is room."""

    def __init__(self) -> None:
        self.is_full = False
        self.dropped: list[object] = []

    def is_prefill(self, params: Any) -> bool:
        return params == WANTED

    def write(self, request: Any) -> dict[str, Any]:
        return {"remote_request_id": request.request_id}

    def drop(self, request: object) -> None:
        self.dropped.append(request)


async def opened(outcome: object, transfer: Any = WANTED) -> tuple[Any, Transfers, Known]:
    transfers, known = Transfers(), Known(outcome)
    service = SimpleNamespace(llm=SimpleNamespace(built=SimpleNamespace(transfers=transfers)))

    async def open_reply() -> AnswerReply[Any]:
        return known

    return await handing_over(service, transfer, open_reply), transfers, known  # type: ignore[arg-type]


@in_a_loop
async def test_a_whole_answer_has_parameters_and_its_pages_stay() -> None:
    reply, transfers, known = await opened(Body())
    assert (await reply.whole()).kv_transfer_params == {"remote_request_id": "cmpl-1"}
    reply.close()
    assert known.is_closed
    assert transfers.dropped == []


@in_a_loop
async def test_pages_of_an_answer_that_was_not_made_are_free() -> None:
    reply, transfers, known = await opened(Body())
    reply.close()
    assert (known.is_closed, transfers.dropped) == (True, [known.request])


@in_a_loop
async def test_a_plain_request_gets_its_own_reply() -> None:
    reply, _, known = await opened(Body(), None)
    assert reply is known


@pytest.mark.parametrize("error", [QueueFull("full"), ForetokenError("a step failed")], ids=repr)
@in_a_loop
async def test_what_may_pass_is_503_with_retry_after(error: Exception) -> None:
    reply, transfers, known = await opened(error)
    with pytest.raises(ApiError) as caught:
        await reply.whole()
    assert caught.value.status == 503
    assert caught.value.headers == {"retry-after": "1"}
    reply.close()
    assert transfers.dropped == [known.request]


@pytest.mark.parametrize(
    "error",
    [InvalidRequest("bad", param="n"), EngineDead("dead"), DeadlineExceeded("late")],
    ids=repr,
)
@in_a_loop
async def test_what_has_its_own_answer_keeps_it(error: Exception) -> None:
    reply, _, _ = await opened(error)
    with pytest.raises(type(error)):
        await reply.whole()


@in_a_loop
async def test_without_room_nothing_is_begun() -> None:
    transfers = Transfers()
    transfers.is_full = True
    service = SimpleNamespace(llm=SimpleNamespace(built=SimpleNamespace(transfers=transfers)))

    async def open_reply() -> AnswerReply[Any]:
        raise AssertionError("it was begun")

    with pytest.raises(ApiError, match="waiting to be read") as caught:
        await handing_over(service, WANTED, open_reply)  # type: ignore[arg-type]
    assert caught.value.status == 503
    transfers.is_full = False

    async def refused() -> AnswerReply[Any]:
        raise QueueFull("full", retry_after=7.0)

    with pytest.raises(ApiError) as caught:
        await handing_over(service, WANTED, refused)  # type: ignore[arg-type]
    assert caught.value.status == 503


def test_parameters_are_for_one_prompt_and_those_of_p_for_whole_answers() -> None:
    def body(**options: Any) -> CompletionRequest:
        return CompletionRequest(prompt="x", **options)

    taken = {"do_remote_prefill": True}
    assert transfer_of(body()) is None
    assert transfer_of(body(kv_transfer_params=WANTED)) == WANTED
    assert transfer_of(body(kv_transfer_params=WANTED), num_prompts=2) is None
    assert transfer_of(body(kv_transfer_params=WANTED, stream=True)) is None
    assert transfer_of(body(kv_transfer_params=taken, stream=True)) == taken
