"""Servers without a model, for `bench/lab/http.py`: ours on a null engine, and bare starlette.

Both answer whole requests at once. Streams get a token at each tick of a clock that starts when all
of them are there; GET /ticks tells when that was.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import socket
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from ...api.runtime.engine_client import EngineClient
from ...api.server.process import uvicorn_config
from ...api.serving.settings import Listen
from ...api.text.tokenizer import Tokenizer
from ...api.types.sampling_params import NO_DEFAULTS
from ...core.engine.inbox import TokenStream
from ...core.interface.request import Delta, FinishReason, Request
from ...draft.training import __file__ as _training

FOLDER = Path(_training).parent / "builtin" / "target"
WORD = "a"  # all that is ever said
REPLY_TOKENS = 16  # of a whole answer
NUM_TICKS = 200  # tokens of a streamed one
TICK_SECONDS = 0.005  # a step of a small model


class Clock:
    """Ticks for a number of streams at once, from when the last of them has come."""

    def __init__(self, num_streams: int) -> None:
        self.times: list[float] = []  # of the ticks, by the machine's monotonic clock
        self._num_streams = num_streams
        self._waiting: list[Callable[[int], None]] = []
        self._task: asyncio.Task[None] | None = None

    def join(self, on_tick: Callable[[int], None]) -> None:
        """Call this at each tick, with the number of the tick."""
        self._waiting.append(on_tick)
        if len(self._waiting) == self._num_streams:
            joined, self._waiting = self._waiting, []
            self._task = asyncio.create_task(self._run(joined))

    async def _run(self, joined: Sequence[Callable[[int], None]]) -> None:
        self.times = []
        for number in range(NUM_TICKS):
            await asyncio.sleep(TICK_SECONDS)
            self.times.append(time.monotonic())
            for on_tick in joined:
                on_tick(number)

    def before(self, app: ASGIApp) -> ASGIApp:
        """The app with one more route."""

        async def routed(scope: Scope, receive: Receive, send: Send) -> None:
            ticks = Response(msgspec.json.encode(self.times))
            await (ticks if scope["path"] == "/ticks" else app)(scope, receive, send)

        return routed


class NullEngine:
    """An engine that repeats one word and computes nothing, complete enough for `EngineClient`."""

    def __init__(self, clock: Clock, token_id: int) -> None:
        self.alive = True
        self.draining = False
        limits = SimpleNamespace(max_running=1024, max_queued=1024)
        self.scheduler = SimpleNamespace(limits=limits, cache=SimpleNamespace(page_size=16))
        self._clock = clock
        self._token_id = token_id

    @property
    def now(self) -> float:
        """Seconds."""
        return time.monotonic()

    async def start(self) -> None:
        """Do nothing."""

    async def close(self, *, drain_seconds: float = 0.0) -> None:
        """Do nothing."""

    def submit(self, request: Request) -> TokenStream:
        """Answer at the next turn of the loop, or with the ticks."""
        stream = TokenStream(request)
        request.usage.prompt_tokens = request.prompt_len
        if request.sampling.params.max_tokens == NUM_TICKS:
            self._clock.join(lambda number: self._say(stream, 1, is_last=number == NUM_TICKS - 1))
        else:
            loop = asyncio.get_running_loop()
            loop.call_soon(lambda: self._say(stream, REPLY_TOKENS, is_last=True))
        return stream

    def abort(self, request_id: str) -> None:
        """Do nothing: the answer is already sent."""

    def _say(self, stream: TokenStream, count: int, *, is_last: bool) -> None:
        request = stream.request
        for _ in range(count):
            request.tokens.append(self._token_id)
            if request.on_token is not None:
                request.on_token(self._token_id)
        request.usage.completion_tokens += count
        delta = Delta(token_ids=[self._token_id] * count, token_sources=[""] * count)
        delta.finish_reason = FinishReason.LENGTH if is_last else None
        stream.push(delta)


async def serve_ours(sock: socket.socket, num_streams: int) -> None:
    """foretoken's whole HTTP side."""
    clock = Clock(num_streams)
    tokenizer = Tokenizer.load(FOLDER, max_model_len=4096)
    (token_id,) = tokenizer.encode_word(WORD)
    built = SimpleNamespace(
        engine=NullEngine(clock, token_id),
        path=FOLDER,
        name="null",
        aliases=(),
        vocab_size=len(tokenizer.vocab),
        max_model_len=4096,
        eos_token_ids=frozenset({0}),
        sampling_defaults=NO_DEFAULTS,
    )
    llm = EngineClient.from_built(cast("Any", built))
    await llm.start()
    gc.freeze()  # as the server does
    config = uvicorn_config(llm, Listen(log_level="warning"))
    config.app = clock.before(cast("ASGIApp", config.app))
    await uvicorn.Server(config).serve([sock])


async def serve_bare(
    sock: socket.socket, num_streams: int, wholes: Mapping[str, bytes], chunk: bytes
) -> None:
    """starlette on uvicorn and nothing else; sends the bytes that it was given, by path."""
    clock = Clock(num_streams)

    async def answer(request: HttpRequest) -> Response:
        body = msgspec.json.decode(await request.body())
        if not body.get("stream"):
            return Response(wholes[request.url.path], media_type="application/json")
        return StreamingResponse(chunks(), media_type="text/event-stream")

    async def chunks() -> AsyncGenerator[bytes]:
        ticks: asyncio.Queue[int] = asyncio.Queue()
        clock.join(ticks.put_nowait)
        for _ in itertools.repeat(None, NUM_TICKS):
            await ticks.get()
            yield chunk
        yield b"data: [DONE]\n\n"

    app = Starlette(routes=[Route(path, answer, methods=["POST"]) for path in wholes])
    config = uvicorn.Config(
        clock.before(app), http="h11", lifespan="off", log_level="warning", access_log=False
    )
    await uvicorn.Server(config).serve([sock])
