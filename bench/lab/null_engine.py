"""Servers without a model: foretoken on a null engine, bare starlette, and a replica.

They answer at once unless the request asks for a stream. Streams get a token at each tick of a
clock that starts when all streams have arrived; GET /ticks returns the times of the ticks. The seed
of a streamed request sets the time between two ticks in microseconds.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import socket
import time
from array import array
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple, cast

import msgspec
import uvicorn
from prometheus_client import CollectorRegistry
from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from ...api.build.built import Built
from ...api.build.model_files import BUILTIN
from ...api.runtime.engine_client import EngineClient
from ...api.server.process import uvicorn_config
from ...api.serving.settings import Listen
from ...api.text.tokenizer import Tokenizer
from ...api.types.results import Body
from ...api.types.sampling_params import SamplingParams
from ...core.config import EngineConfig
from ...core.engine.inbox import TokenStream
from ...core.interface.request import Delta, FinishReason, Request
from ...core.telemetry.observers import EngineObserver
from ...core.telemetry.overview import RecentRequest
from ...core.telemetry.spec_decode_stats import Load

FOLDER = BUILTIN / "target"
WORD = "a"  # The only word of all answers.
REPLY_TOKENS = 16  # Tokens of a complete answer.
NUM_TICKS = 200  # Tokens of a streamed answer.
TICK_SECONDS = 0.005  # Step time of a small model, for streams without a seed.
MAX_MODEL_LEN = 4096


class Clock:
    """Ticks for all streams at once, which begin when the last of ``num_streams`` has arrived."""

    def __init__(self, num_streams: int) -> None:
        self.times: list[float] = []  # Times of the ticks on the machine's monotonic clock.
        self._num_streams = num_streams
        self._waiting: list[Callable[[int], None]] = []
        self._task: asyncio.Task[None] | None = None

    def join(self, on_tick: Callable[[int], None], tick_seconds: float = TICK_SECONDS) -> None:
        """Call a function at each tick with the tick's number.

        The last stream to join sets the pace.
        """
        self._waiting.append(on_tick)
        if len(self._waiting) == self._num_streams:
            joined, self._waiting = self._waiting, []
            self._task = asyncio.create_task(self._run(joined, tick_seconds))

    async def _run(self, joined: Sequence[Callable[[int], None]], tick_seconds: float) -> None:
        self.times, began = [], time.monotonic()
        for number in range(NUM_TICKS):
            await asyncio.sleep(began + (number + 1) * tick_seconds - time.monotonic())
            self.times.append(time.monotonic())
            for on_tick in joined:
                on_tick(number)

    def with_ticks(self, app: ASGIApp) -> ASGIApp:
        """Return the app with the route /ticks added."""

        async def routed(scope: Scope, receive: Receive, send: Send) -> None:
            ticks = Response(msgspec.json.encode(self.times))
            await (ticks if scope.get("path") == "/ticks" else app)(scope, receive, send)

        return routed


class Limits(NamedTuple):
    """Limits on the requests that the null engine accepts."""

    max_running: int = 1024
    max_queued: int = 1024


class NullMetrics:
    """Metrics without content."""

    def __init__(self) -> None:
        self.observers: list[EngineObserver] = []
        self.registry = CollectorRegistry()

    async def refresh(self) -> None:
        """Do nothing."""

    def render(self) -> tuple[bytes, str]:
        """Return no metrics."""
        return b"", "text/plain"


class NullEngine:
    """A `LocalEngine` that repeats one word and computes nothing."""

    def __init__(self, clock: Clock, token_id: int) -> None:
        self.alive = True
        self.hung = self.draining = False
        self.failure: BaseException | None = None
        self.readiness: str | None = None
        self.limits = Limits()
        self.page_size, self.num_pages = 16, 4096
        self.metrics = NullMetrics()
        self.load = Load()
        self._clock = clock
        self._token_id = token_id

    @property
    def now(self) -> float:
        """Seconds on the engine's clock."""
        return time.monotonic()

    async def start(self) -> None:
        """Do nothing."""

    async def close(self, *, drain_seconds: float = 0.0) -> None:
        """Do nothing."""

    def check(self, request: Request) -> None:
        """Accept every request."""

    def fetch(self, request: Request) -> None:
        """Do nothing: there are no pages."""

    def submit(self, request: Request) -> TokenStream:
        """Answer in the next turn of the loop, or with the ticks."""
        stream = TokenStream(request)
        request.usage.prompt_tokens = request.prompt_len
        params = request.sampling.params
        if params.max_tokens == NUM_TICKS:
            seed = params.seed if isinstance(params, SamplingParams) else None
            self._clock.join(
                lambda number: self._say(stream, 1, is_last=number == NUM_TICKS - 1),
                TICK_SECONDS if seed is None else seed / 1e6,
            )
        else:
            loop = asyncio.get_running_loop()
            loop.call_soon(lambda: self._say(stream, REPLY_TOKENS, is_last=True))
        return stream

    def abort(self, request_id: str) -> None:
        """Do nothing: the answer is already sent."""

    def expect_turn(self, session: str, label: str, namespace: str | None = None) -> None:
        """Do nothing: there is no cache."""

    async def end_session(self, session: str) -> bool:  # noqa: ARG002 - a protocol's
        """Return False: there is no cache."""
        return False

    async def flush_cache(self, *namespaces: str | None) -> int:  # noqa: ARG002 - a protocol's
        """Free nothing."""
        return 0

    async def flush_prefix(self, tokens: array[int], namespace: str | None = None) -> int:  # noqa: ARG002 - a protocol's
        """Free nothing."""
        return 0

    async def room_for(self, request: Request) -> int:  # noqa: ARG002 - a protocol's
        """Return 0: there is no cache."""
        return 0

    async def cache_info(self, namespace: str | None = None) -> Body:  # noqa: ARG002 - a protocol's
        """Return no figures."""
        return {}

    async def overview(self, finished: Iterable[RecentRequest] = ()) -> Body:  # noqa: ARG002 - a protocol's
        """Return no figures."""
        return {}

    async def audit(self) -> Body:
        """Report a sound state."""
        return {"ok": True}

    def report(self, reason: str) -> Body:
        """Return a crash report that contains only its reason."""
        return {"reason": reason}

    def dump(self, report: Body) -> None:
        """Write nothing."""

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


def null_model(clock: Clock) -> tuple[Built[NullEngine], Tokenizer]:
    """Return a null engine with the tokenizer of the built-in pair."""
    tokenizer = Tokenizer.load(FOLDER, max_model_len=MAX_MODEL_LEN)
    (token_id,) = tokenizer.encode_word(WORD)
    built = Built(
        engine=NullEngine(clock, token_id),
        path=FOLDER,
        name="null",
        vocab_size=len(tokenizer.vocab),
        max_model_len=MAX_MODEL_LEN,
        eos_token_ids=frozenset({0}),
    )
    return built, tokenizer


async def serve_ours(sock: socket.socket, num_streams: int) -> None:
    """Serve foretoken's complete HTTP side."""
    clock = Clock(num_streams)
    llm = EngineClient.from_built(null_model(clock)[0])
    await llm.start()
    gc.freeze()  # The real server calls this, too.
    config = uvicorn_config(llm, Listen(log_level="warning"))
    config.app = clock.with_ticks(cast("ASGIApp", config.app))
    await uvicorn.Server(config).serve([sock])


async def serve_replica(address: str, num_streams: int) -> None:
    """Serve as a replica of the front at ``address`` until the front ends."""
    from ...api.cluster.replica.engine_host import EngineHost  # Needs an extra.
    from ...api.cluster.wire.transport import ReplicaSocket

    built, tokenizer = null_model(Clock(num_streams))
    dial = partial(ReplicaSocket, address, None)
    host = EngineHost(built, tokenizer, dial, address=address, config=EngineConfig())
    await host.start()
    gc.freeze()
    await host.run()


async def serve_bare(
    sock: socket.socket, num_streams: int, wholes: Mapping[str, bytes], chunk: bytes
) -> None:
    """Serve bare starlette on uvicorn, which answers each path with the given bytes."""
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
        clock.with_ticks(app), http="h11", lifespan="off", log_level="warning", access_log=False
    )
    await uvicorn.Server(config).serve([sock])
