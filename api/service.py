"""What every route needs: the model, its names, and how to read a body."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from starlette.requests import ClientDisconnect, Request

from ..core.errors import InvalidRequest
from .connection import HEADER_SECONDS, WRITE_SECONDS
from .errors import ApiError, ClientGone, unavailable, unknown_model
from .host import Host
from .messages.normalize import SteadyTurns
from .turn import Turns

T = TypeVar("T")
MAX_BODY_BYTES = 4 * 2**20
MAX_DRAIN_BYTES = 64 * 2**20
BODY_SECONDS = 30.0
SHUTTING_DOWN = "the server is shutting down"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Options of the HTTP side. Without ``api_keys`` every caller is served."""

    api_keys: tuple[str, ...] = ()
    served_name: str | None = None  # None: the model's own
    tool_parser: str = "auto"  # by the model's chat template, or one of `TOOL_PARSERS`
    reasoning_parser: str = "auto"
    normalize: bool = False  # leave out what clients change in their system text, see its rules
    cors_origins: tuple[str, ...] = ()  # of pages that may call; "*" is any
    max_body_bytes: int = MAX_BODY_BYTES
    ping_seconds: float = 10.0  # between signs of life of a stream that has nothing to say
    header_seconds: float = HEADER_SECONDS  # for a header to arrive
    write_seconds: float = WRITE_SECONDS  # for a client that reads nothing of what it is sent


class Service:
    """The model behind the routes."""

    def __init__(self, llm: Host, settings: Settings) -> None:
        self.llm = llm
        make_turns = SteadyTurns if settings.normalize else Turns
        self.turns = make_turns(
            llm, tool_parser=settings.tool_parser, reasoning_parser=settings.reasoning_parser
        )
        self.settings = settings

    @property
    def model(self) -> str:
        """The name that answers carry."""
        return self.settings.served_name or self.llm.built.name

    def check_model(self, name: str | None) -> None:
        """Raise 404 for a model that is not here; a body without one means the one that is."""
        built = self.llm.built
        if name is not None and name not in {self.model, built.name, built.folder.name}:
            raise unknown_model(name)

    @property
    def draining(self) -> bool:
        """Whether the server was told to end."""
        return self.llm.draining or self.llm.engine.draining

    @property
    def outage(self) -> str | None:
        """Why nothing new is served, if so."""
        if self.draining:
            return SHUTTING_DOWN
        return None if self.llm.ready else "the engine is not running"

    def check_ready(self) -> None:
        """Raise 503 before any work is done for a request that cannot be served."""
        if self.outage is not None:
            raise unavailable(self.outage)

    def check_room(self, num_prompts: int, n: int) -> None:
        """Raise `InvalidRequest` for more requests in one body than even an idle engine takes."""
        limits = self.llm.engine.scheduler.limits
        room = limits.max_queued + limits.max_running
        if num_prompts * n > room:
            message = f"{num_prompts} prompts with n = {n} exceed the {room} requests that fit"
            raise InvalidRequest(message, param="prompt" if num_prompts > 1 else "n")

    async def read(self, request: Request, decode: Callable[[bytes], T]) -> T:
        """The body, whole and checked."""
        self.check_ready()
        return decode(await read_body(request, self.settings.max_body_bytes))


async def read_body(request: Request, limit: int) -> bytes:
    """The body's bytes; raises 413 for more than ``limit``, 408 for one that does not come."""
    try:
        async with asyncio.timeout(BODY_SECONDS):
            return await _read(request, limit)
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive in {BODY_SECONDS:.0f} s") from None
    except ClientDisconnect:
        raise ClientGone from None


async def _read(request: Request, limit: int) -> bytes:
    announced = int(request.headers.get("content-length", "0"))
    if announced > limit and ("expect" in request.headers or announced > MAX_DRAIN_BYTES):
        raise _too_large(limit)
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        # A client that is still sending would see a reset instead of the answer: hear it out.
        if size > MAX_DRAIN_BYTES:
            break
        if size <= limit:
            chunks.append(chunk)
        else:
            chunks.clear()
    if size > limit:
        raise _too_large(limit)
    return b"".join(chunks)


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"the body exceeds {limit} bytes", code="body_too_large")
