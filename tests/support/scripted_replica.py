"""A replica without an engine: it says what a test tells it to say, over a real socket."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from typing import Any, TypeVar

import msgspec

from foretoken.api.cluster.front.replicas import Replicas
from foretoken.api.cluster.front.routing import Route
from foretoken.api.cluster.wire.forms import usage_form
from foretoken.api.cluster.wire.messages import (
    Answer,
    Beat,
    Call,
    FromFront,
    FromReplica,
    Hello,
    Leaving,
    Load,
    Step,
    Submit,
    body_form,
)
from foretoken.api.cluster.wire.transport import ReplicaSocket
from foretoken.api.runtime.preprocess import Prepared, PromptTokens, make_request
from foretoken.api.types.sampling_params import SamplingParams
from foretoken.core.errors import ForetokenError
from foretoken.core.interface.request import Delta, FinishReason, Request, Usage
from foretoken.core.interface.sampling import Pooling
from support.wire_samples import hello as any_hello

TOKENIZER = "0a1b"
EOS = 1
SECONDS = 20.0
NEVER = 1e6  # seconds between two beats
M = TypeVar("M", bound=FromFront)


def greeting(**changes: Any) -> Hello:
    """The greeting of a replica with a vocabulary of 100 tokens."""
    return msgspec.structs.replace(any_hello(), **({"tokenizer": TOKENIZER} | changes))


@contextlib.asynccontextmanager
async def front_of(wanted: int = 1, **options: Any) -> AsyncIterator[Replicas]:
    """A front that listens, without beats."""
    given = {"key": None, "tokenizer": TOKENIZER, "route": Route.EVEN, "beat_seconds": NEVER}
    front = Replicas("tcp://127.0.0.1:0", wanted=wanted, **(given | options))
    await front.start()
    try:
        yield front
    finally:
        await front.close()


class ScriptedReplica:
    """One replica of a front. It sends no beats of its own."""

    def __init__(self, front: Replicas, **changes: Any) -> None:
        self.hello = greeting(**changes)
        self.socket = ReplicaSocket(front.address, None)
        self.is_dead = False

    async def join(self) -> ScriptedReplica:
        """Greet, and wait until the front has taken it."""
        self.send(self.hello)
        await self.next(Beat)
        return self

    def send(self, *messages: FromReplica) -> None:
        for message in messages:
            assert self.socket.send(message)

    async def next(self, kind: type[M]) -> M:
        """The next message of this kind; those before it are dropped."""
        while True:
            message = await asyncio.wait_for(self.socket.receive(), SECONDS)
            assert message is not None, "the front closed the connection"
            if isinstance(message, kind):
                return message

    async def submitted(self) -> Submit:
        """The next request."""
        return await self.next(Submit)

    async def refusal(self) -> str:
        """Why the front parted with it."""
        return (await self.next(Leaving)).reason

    async def answer(self, result: Any) -> Call:
        """Answer the next call."""
        call = await self.next(Call)
        body = body_form(result) if isinstance(result, dict) else result
        self.send(Answer(call_id=call.call_id, result=body))
        return call

    def say(
        self, request_id: str, *token_ids: int, usage: Usage | None = None, **fields: Any
    ) -> None:
        """Send tokens of a request as one step, with the fields of a `Delta`."""
        self.send(step(request_id, token_ids, usage, **fields))

    def finish(self, request_id: str, *token_ids: int, **fields: Any) -> None:
        """Send its last tokens."""
        self.say(request_id, *token_ids, **({"finish_reason": FinishReason.LENGTH} | fields))

    async def answer_error(self, error: ForetokenError) -> None:
        """Answer the next call by an error."""
        self.send(Answer(call_id=(await self.next(Call)).call_id, error=error))

    def send_bytes(self, data: bytes) -> None:
        """Send what may be no message."""
        assert self.socket._link.send((data,))

    async def beat(self) -> None:
        """Send beats for ever."""
        while True:
            self.send(Beat())
            await asyncio.sleep(0.005)

    def die(self) -> None:
        """Close the connection without a word."""
        if not self.is_dead:
            self.is_dead = True
            self.socket.close()


def step(
    request_id: str,
    token_ids: Sequence[int] = (),
    usage: Usage | None = None,
    *,
    load: Load | None = None,
    **fields: Any,
) -> Step:
    """The message of a step of one request."""
    sources = {"token_sources": [""] * len(token_ids)}
    delta = Delta(token_ids=list(token_ids), **(sources | fields))
    return Step(
        deltas=[(request_id, delta)],
        usages={} if usage is None else {request_id: usage_form(usage, 0.0)},
        load=load or Load(running=1, waiting=0, kv_usage=0.5),
    )


@contextlib.asynccontextmanager
async def replicas_of(
    front: Replicas, count: int = 1, **changes: Any
) -> AsyncIterator[list[ScriptedReplica]]:
    """Replicas that have joined."""
    replicas = [ScriptedReplica(front, **changes) for _ in range(count)]
    try:
        for each in replicas:
            await each.join()
        yield replicas
    finally:
        for each in replicas:
            each.die()


def request(
    request_id: str = "r",
    prompt: Iterable[int] = (5, 6, 7),
    *,
    pooling: Pooling | None = None,
    **params: Any,
) -> Request:
    """A request as the client makes it; its answer has at most 8 tokens."""
    given = SamplingParams(**({"max_tokens": 8, "seed": 3} | params))
    prepared = Prepared(prompt=PromptTokens(list(prompt)), params=given, pooling=pooling)
    return make_request(request_id, prepared, seed=3, eos_token_ids=frozenset({EOS}))


def in_idle_time(prompt: Iterable[int]) -> Request:
    """The request "idle" for a part of a next turn's prompt."""
    made = request("idle", prompt, prompt_only=True)
    made.tenant = None
    made.extras = msgspec.structs.replace(made.extras, is_idle_prefill=True)
    return made


async def read(stream: AsyncIterator[Delta]) -> Delta:
    """All that a stream has, merged; its error is raised."""
    async with asyncio.timeout(SECONDS):
        whole = Delta()
        async for delta in stream:
            whole.merge(delta)
        return whole


async def until(holds: Callable[[], bool]) -> None:
    """Let others run until something holds."""
    async with asyncio.timeout(SECONDS):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


def run(body: Coroutine[Any, Any, None]) -> None:
    """Run the body of a test."""
    asyncio.run(asyncio.wait_for(body, SECONDS))
