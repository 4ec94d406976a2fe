"""The HTTP request that is being served: its caller, its times, its outcome."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple, Protocol

import msgspec

from ...core.errors import DeadlineExceeded
from ...core.interface.request import Usage
from .shares import Owner

if TYPE_CHECKING:
    from starlette.types import Scope

TOO_LATE = "the deadline passed before the request could run"


def seconds_left(since: float, *limits: float | None) -> float | None:
    """Seconds left of the shortest of these times, which count from ``since``; None without any.

    Raises `DeadlineExceeded` where nothing is left.
    """
    given = [each for each in limits if each is not None]
    if not given:
        return None
    left = since + min(given) - time.monotonic()
    if left <= 0:
        raise DeadlineExceeded(TOO_LATE)
    return left


UNKNOWN_ROUTE = "unknown"
PROBES = frozenset({"/health", "/ready", "/metrics"})
NO_KEY = frozenset({401, 403})
SESSION_ID = b"x-session-id"
NOBODY = b""  # owner of requests without a key, and of the SDK's
METHODS = frozenset({"GET", "POST", "DELETE", "HEAD", "OPTIONS", "PUT", "PATCH"})


class KnownError(Protocol):
    """Fields of an error answer that logs, metrics and traces read."""

    @property
    def status(self) -> int:
        """HTTP status."""

    @property
    def code(self) -> str | None:
        """OpenAI's code, if it has one."""

    @property
    def kind(self) -> str:
        """OpenAI's type of error."""


class EngineAnswer(Protocol):
    """Fields of an engine's answer that logs read."""

    @property
    def request_id(self) -> str:
        """The engine's id of the request."""

    @property
    def usage(self) -> Usage:
        """The usage so far."""

    @property
    def finish_reasons(self) -> Sequence[str | None]:
        """Why each generation ended; None: it has not."""


@dataclass(frozen=True, slots=True)
class EndedAnswer:
    """An `EngineAnswer` without its request, which is free."""

    request_id: str
    usage: Usage
    finish_reasons: Sequence[str | None]


@dataclass(slots=True, eq=False)
class RequestContext:
    """The state of one HTTP request. Contains no text of prompts and answers."""

    scope: Scope
    caller: bytes = NOBODY  # a hash of its key; the auth middleware sets it
    arrived: float | None = None  # when its body was there, of `time.monotonic`
    num_bytes: int = 0  # of its body
    in_batch: bool = False  # no person waits for it
    request_id: str = ""
    trace_id: str = ""  # where it is traced
    status: int = 0  # 0: no answer began
    streams: bool = False  # the answer is an event stream
    adapter: str | None = None  # that its body names as the model
    error: KnownError | None = None  # that it was answered with, maybe inside a stream
    answers: list[EngineAnswer] = field(default_factory=list)  # of the engine
    answered_ns: int = 0  # time of day when the engine was done with the last of them; if traced

    @property
    def method(self) -> str:
        """The HTTP method, one of a few values: it becomes a metrics label."""
        method: str = self.scope["method"]
        return method if method in METHODS else "other"

    @property
    def route(self) -> str:
        """The template of the route; never the path, which may contain anything."""
        route = self.scope.get("route")
        return UNKNOWN_ROUTE if route is None else str(route.path)

    @property
    def is_probe(self) -> bool:
        """Whether this is a health check or a scrape; one refused for its key is not."""
        return self.scope["path"] in PROBES and self.status not in NO_KEY


CONTEXT: ContextVar[RequestContext | None] = ContextVar("request", default=None)
"""The HTTP request that is being served; None in the SDK.

It is no argument of the routes: what is asked of it happens deep inside, and none of them can
forget to pass it on.
"""


def random_id() -> str:
    """Return a new id of 32 hexadecimal digits."""
    return os.urandom(16).hex()


def header(scope: Scope, name: bytes) -> str:
    """Return the first header field of this name, which is in lower case; "" without one."""
    for key, value in scope["headers"]:
        if key == name:
            return str(value, "latin-1")
    return ""


def session_id() -> str | None:
    """Return the session that the present request belongs to by its header; None in the SDK."""
    context = CONTEXT.get()
    return None if context is None else header(context.scope, SESSION_ID) or None


def session_key(name: str | None) -> str | None:
    """Return the caller's session: of the present request's header, else of this name; None
    without.

    Callers that choose the same name have sessions of their own.
    """
    named = session_id() or name
    if not named:
        return None
    return hashlib.sha256(caller() + named.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def note_arrival(num_bytes: int) -> None:
    """The body of this request has arrived; its deadlines count from here."""
    context = CONTEXT.get()
    if context is not None:
        context.arrived, context.num_bytes = time.monotonic(), num_bytes


def arrival() -> float:
    """Arrival time of the present HTTP request; in the SDK, now."""
    context = CONTEXT.get()
    known = None if context is None else context.arrived
    return time.monotonic() if known is None else known


def caller() -> bytes:
    """Return the caller of the present request: a hash of its key, or `NOBODY`."""
    context = CONTEXT.get()
    return NOBODY if context is None else context.caller


def origin() -> Origin:
    """Return the tenant of the present work, and the size of its body."""
    context = CONTEXT.get()
    return NO_ORIGIN if context is None else Origin(context.caller, context.num_bytes)


def in_batch() -> bool:
    """Whether the present request is one of a batch, which no person waits for."""
    context = CONTEXT.get()
    return context is not None and context.in_batch


def note_adapter(name: str | None) -> None:
    """Note the adapter that this request names as its model; None: it names none."""
    context = CONTEXT.get()
    if context is not None:
        context.adapter = name


def adapter_name() -> str | None:
    """Return the adapter that the present request names as its model; None in the SDK."""
    context = CONTEXT.get()
    return None if context is None else context.adapter


def note_error(error: KnownError) -> None:
    """Note the error that answers the request."""
    context = CONTEXT.get()
    if context is not None:
        context.error = error


def note_answer(answer: EngineAnswer) -> None:
    """Note a generation that the engine was given."""
    context = CONTEXT.get()
    if context is not None:
        context.answers.append(answer)


def caller_of(key: str | bytes) -> bytes:
    """Return a caller by its key, which is not kept."""
    given = key if isinstance(key, bytes) else key.encode("latin-1")  # as starlette read it
    return hashlib.sha256(given).digest() if given else NOBODY


def owner_of(cache_salt: str | None) -> Owner:
    """Return the owner of responses and prompts that the caller may read: its key and this salt."""
    return _owner_of(caller(), cache_salt)


@lru_cache(maxsize=1024)
def _owner_of(caller: bytes, cache_salt: str | None) -> Owner:
    return hashlib.sha256(msgspec.json.encode((caller.hex(), cache_salt))).digest()


def tenant_of(cache_salt: str | None) -> str | None:
    """Return the tenant that the scheduler charges: the salt, else a short hash of the key,
    else none.
    """
    if cache_salt is not None:
        return cache_salt
    return f"key-{caller().hex()[:16]}" if caller() else None


class Origin(NamedTuple):
    """The tenant of a job, and the size of its body."""

    caller: bytes = NOBODY
    num_bytes: int = 0


NO_ORIGIN = Origin()
