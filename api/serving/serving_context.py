"""The context of all routes: the model, its name, the settings, and reading bodies."""

from __future__ import annotations

import asyncio
from codecs import BOM_UTF8
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from functools import partial
from typing import Any, TypeVar

from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.types import Receive

from ...core.errors import InvalidRequest
from ...core.interface.request import Usage
from ..runtime.chat import ChatClient
from ..runtime.conversation.normalize import Normalizer
from ..runtime.conversation.token_history import TokenHistory
from ..runtime.engine_client import EngineClient
from ..types.request_context import (
    adapter_name,
    arrival,
    note_adapter,
    note_arrival,
    origin,
    seconds_left,
)
from .bodies import BodyReader
from .errors import ApiError, unavailable, unknown_model
from .json_depth import Excess, find_excess
from .metrics import ServerMetrics
from .prices import Prices
from .resume import ResumableStreams
from .settings import Settings
from .sse import UnlessGone

T = TypeVar("T")
OPENAI_TEMPERATURE, ANTHROPIC_TEMPERATURE = 2.0, 1.0  # the maxima of the providers' own APIs
QUICK_BYTES = 2**18  # larger bodies are scanned in a thread
EXCESS: Mapping[Excess, str] = {
    "max_json_depth": "the body is nested more deeply than",
    "max_json_containers": "the body has more arrays and objects than",
    "max_json_values": "the body has more values than",
}
SHUTTING_DOWN = "the server is shutting down"


def chat_client(llm: EngineClient, settings: Settings) -> ChatClient:
    """Return a client that renders and parses conversations according to the settings."""
    history = TokenHistory(max_bytes=settings.token_history_bytes)
    return ChatClient(
        llm,
        tool_parser=settings.tool_parser,
        reasoning_parser=settings.reasoning_parser,
        history=history if settings.token_history else None,
        normalizer=Normalizer(settings.normalize),
        idle_prefill=settings.idle_prefill == "on",
    )


class Service:
    """The model that the routes serve, and the state that they share."""

    def __init__(
        self, llm: EngineClient, settings: Settings, metrics: ServerMetrics | None = None
    ) -> None:
        self.llm = llm
        self.metrics = metrics or ServerMetrics()
        self.metrics.causes = llm.miss_causes.counts
        self.metrics.adapters = lambda: llm.adapters
        self.chat = chat_client(llm, settings)
        self.metrics.registry.register(self.chat.next_turns.collector())
        self.settings = settings
        self._bodies = BodyReader(settings.limits)
        # Background work of the running server; the application sets it.
        self.background: AbstractAsyncContextManager[None] = nullcontext()
        self._prices = None if settings.prices is None else Prices.read(settings.prices)
        seconds = settings.limits.resume_seconds
        self.streams = ResumableStreams(seconds) if seconds else None
        self.shared: dict[type, Any] = {}  # state shared by several routes, by its class

    @property
    def model(self) -> str:
        """The name in answers: the adapter that the request names, else the model's first name."""
        return adapter_name() or self.names[0]

    @property
    def names(self) -> tuple[str, ...]:
        """The names under which the model is listed."""
        return self.settings.served_names or (self.llm.built.name,)

    def cost(self, usage: Usage, num_written: int | None = None) -> float | UnsetType:
        """Return ``usage.cost`` of a request; UNSET without prices.

        ``num_written``: tokens written to the cache, if the API counts them in its own way.
        """
        return UNSET if self._prices is None else self._prices.cost(usage, num_written)

    def check_model(self, name: str | None) -> None:
        """Raise `ApiError` 404 for an unknown model. A body without a model uses the served one.

        If the name is an adapter's, the present request is computed with that adapter.
        """
        built = self.llm.built
        if name is None or name in {*self.names, built.name, *built.aliases}:
            note_adapter(None)
        elif name in self.llm.adapters:
            note_adapter(name)
        else:
            raise unknown_model(name, self.model)

    @property
    def draining(self) -> bool:
        """Whether the server is shutting down."""
        return self.llm.draining or self.llm.engine.draining

    @property
    def outage(self) -> str | None:
        """Why new requests are refused; None if they are accepted."""
        if self.draining:
            return SHUTTING_DOWN
        if self.llm.ready:
            return None
        return self.llm.engine.readiness or "the engine is not running"

    @property
    def unready(self) -> str | None:
        """Why /ready returns 503; None if it returns 200."""
        return self.outage or self.llm.engine.readiness

    def check_range(self, body: object, *, most_temperature: float) -> None:
        """Raise `InvalidRequest` for a temperature that the dialect's original API rejects.

        Checked only with ``strict``: for some models higher temperatures are useful.
        """
        given = getattr(body, "temperature", None)
        if self.settings.strict and given is not None and given > most_temperature:
            message = f"temperature must be from 0 to {most_temperature:g} (--strict)"
            raise InvalidRequest(message, param="temperature")

    def check_ready(self) -> None:
        """Raise `ApiError` 503 if the server refuses new requests."""
        if self.outage is not None:
            raise unavailable(self.outage)

    def check_room(self, num_prompts: int, n: int) -> None:
        """Raise `InvalidRequest` if a body holds more requests than an idle engine accepts."""
        limits = self.llm.engine.limits
        room = limits.max_queued + limits.max_running
        if num_prompts * n > room:
            message = f"{num_prompts} prompts with n = {n} exceed the server's {room} requests"
            raise InvalidRequest(message, param="prompt" if num_prompts > 1 else "n")

    async def read(self, request: Request, decode: Callable[[bytes], T]) -> T:
        """Return the decoded body, checked against the limits."""
        self.check_ready()
        body = decode(await self.read_bytes(request))
        self.settings.limits.check_body(body)
        return body

    async def read_bytes(self, request: Request) -> bytes:
        """Return the bytes of the body. Raises `ApiError` 413, 503, and 400 for too much nesting.

        The connection enforces the time limit for the body.
        """
        data = await self._bodies.read(request)
        data = data.removeprefix(BOM_UTF8)  # some clients send a BOM, which JSON does not allow
        note_arrival(len(data))
        await self.check_json(data)
        return data

    async def check_json(self, data: bytes) -> None:
        """Raise `ApiError` 400 for too much nesting, too many containers or too many values."""
        limits = self.settings.limits
        look = partial(
            find_excess,
            data,
            depth=limits.max_json_depth,
            containers=limits.max_json_containers,
            values=limits.max_json_values,
        )
        excess = look() if len(data) <= QUICK_BYTES else await asyncio.to_thread(look)
        if excess is not None:
            raise ApiError(400, f"{EXCESS[excess]} the limit of {limits.named(excess)}")

    async def apart(self, job: Callable[[], T]) -> T:
        """Run a job on the body, in a thread if the body is large."""
        return await self.llm.tokenizer.apart(origin().num_bytes, job)

    def wanted(self, receive: Receive, deadline_ms: float | None = None) -> UnlessGone:
        """Return a context manager that cancels its block if the client leaves or time is over.

        The time limit is the shorter of the caller's and the server's. Raises `DeadlineExceeded` if
        it has passed already.
        """
        asked = None if deadline_ms is None else deadline_ms / 1000
        left = seconds_left(arrival(), asked, self.llm.max_request_seconds)
        return UnlessGone(receive, left)
