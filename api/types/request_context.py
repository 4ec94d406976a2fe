"""The HTTP request being served: its caller, its timing and its outcome."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Sequence
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
    """Return the seconds left of the shortest of the ``limits``; None if all of them are None.

    The limits are in seconds and count from ``since``, a time of `time.monotonic`. Raises
    `DeadlineExceeded` if no time is left.
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
NOBODY = b""  # owner of requests without an API key and of requests from the SDK
METHODS = frozenset({"GET", "POST", "DELETE", "HEAD", "OPTIONS", "PUT", "PATCH"})


class KnownError(Protocol):
    """Fields of an error answer that logs, metrics and traces read."""

    @property
    def status(self) -> int:
        """HTTP status."""

    @property
    def code(self) -> str | None:
        """OpenAI's error code, if there is one."""

    @property
    def kind(self) -> str:
        """OpenAI's error type."""


class EngineAnswer(Protocol):
    """Fields of an engine's answer that logs read."""

    @property
    def request_id(self) -> str:
        """The engine's id for the request."""

    @property
    def usage(self) -> Usage:
        """The usage so far."""

    @property
    def finish_reasons(self) -> Sequence[str | None]:
        """The finish reason of each generation; None while it runs."""


@dataclass(frozen=True, slots=True)
class EndedAnswer:
    """An `EngineAnswer` that no longer refers to its request, so that the request can be freed."""

    request_id: str
    usage: Usage
    finish_reasons: Sequence[str | None]


@dataclass(slots=True, eq=False)
class RequestContext:
    """The state of one HTTP request. It never contains prompt or answer text."""

    scope: Scope
    caller: bytes = NOBODY  # hash of the API key; set by the auth middleware
    arrived: float | None = None  # time.monotonic() when the whole body had arrived
    num_bytes: int = 0  # size of the body
    in_batch: bool = False  # requests of a batch run at low priority
    request_id: str = ""
    trace_id: str = ""  # empty without tracing
    status: int = 0  # HTTP status; 0 before the response starts
    streams: bool = False  # the answer is an event stream
    adapter: str | None = None  # LoRA adapter named by the body's ``model``
    error: KnownError | None = None  # error sent to the client, possibly inside a stream
    answers: list[EngineAnswer] = field(default_factory=list)  # generations submitted to the engine
    answered_ns: int = 0  # wall-clock time when the last generation ended; set only with tracing

    @property
    def method(self) -> str:
        """The HTTP method, or "other": it is a metrics label, so its values must be few."""
        method: str = self.scope["method"]
        return method if method in METHODS else "other"

    @property
    def route(self) -> str:
        """The route's path template. The path itself could contain anything."""
        route = self.scope.get("route")
        return UNKNOWN_ROUTE if route is None else str(route.path)

    @property
    def is_probe(self) -> bool:
        """Whether this is a health check or a scrape that was not rejected for its API key."""
        return self.scope["path"] in PROBES and self.status not in NO_KEY


CONTEXT: ContextVar[RequestContext | None] = ContextVar("request", default=None)
"""The HTTP request being served; None in the SDK.

A context variable, because code deep below the routes reads it and no route can forget to pass it
on.
"""


AT_CLOSE = "at_close"
"""Key in a scope's state: functions to call when the connection of the request ends."""


def at_close(action: Callable[[], None]) -> bool:
    """Call ``action`` when the connection of the present request ends.

    Return False without a connection that outlives its requests.
    """
    context = CONTEXT.get()
    actions = None if context is None else context.scope["state"].get(AT_CLOSE)
    if actions is None:
        return False
    actions.append(action)
    return True


CANCELLED = "cancelled"
"""Key in a scope's state: set when the client cancels the answer of the request."""


def is_cancelled() -> bool:
    """Whether the client has cancelled the answer of the present request, rather than left."""
    context = CONTEXT.get()
    return context is not None and CANCELLED in context.scope["state"]


def random_id() -> str:
    """Return a new random id of 32 hexadecimal digits."""
    return os.urandom(16).hex()


def header(scope: Scope, name: bytes) -> str:
    """Return the first header with this lower-case name, "" if it is missing."""
    for key, value in scope["headers"]:
        if key == name:
            return str(value, "latin-1")
    return ""


def session_id() -> str | None:
    """Return the session id in the request's ``x-session-id`` header; None in the SDK.

    The header is UTF-8, like the path of the route that ends a session.
    """
    context = CONTEXT.get()
    if context is None:
        return None
    given = header(context.scope, SESSION_ID)
    if not given:
        return None
    try:
        return given.encode("latin-1").decode()
    except UnicodeDecodeError:  # the client sent Latin-1
        return given


def session_key(name: str | None) -> str | None:
    """Return the caller's session key, from the ``x-session-id`` header or else from ``name``.

    None if neither is given. The key includes the caller, so two callers with the same name have
    separate sessions.
    """
    named = session_id() or name
    return caller_key(named) if named else None


def caller_key(name: str) -> str:
    """Return the key of a name that the caller gave. Other callers have other keys for it."""
    return hashlib.sha256(caller() + name.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def note_arrival(num_bytes: int) -> None:
    """Record that the body has arrived. The request's deadlines count from now."""
    context = CONTEXT.get()
    if context is not None:
        context.arrived, context.num_bytes = time.monotonic(), num_bytes


def arrival() -> float:
    """Return the request's arrival time, from `time.monotonic`; in the SDK, the present time."""
    context = CONTEXT.get()
    known = None if context is None else context.arrived
    return time.monotonic() if known is None else known


def caller() -> bytes:
    """Return the caller of the present request: the hash of its API key, or `NOBODY`."""
    context = CONTEXT.get()
    return NOBODY if context is None else context.caller


def origin() -> Origin:
    """Return the caller and the body size of the present request."""
    context = CONTEXT.get()
    return NO_ORIGIN if context is None else Origin(context.caller, context.num_bytes)


def in_batch() -> bool:
    """Whether the present request belongs to a batch."""
    context = CONTEXT.get()
    return context is not None and context.in_batch


def note_adapter(name: str | None) -> None:
    """Record which adapter this request names as its model; None if it names the base model."""
    context = CONTEXT.get()
    if context is not None:
        context.adapter = name


def adapter_name() -> str | None:
    """Return the adapter that the present HTTP request names as its model, or None."""
    context = CONTEXT.get()
    return None if context is None else context.adapter


def note_error(error: KnownError) -> None:
    """Record the error sent to the client."""
    context = CONTEXT.get()
    if context is not None:
        context.error = error


def note_answer(answer: EngineAnswer) -> None:
    """Record a generation that was submitted to the engine."""
    context = CONTEXT.get()
    if context is not None:
        context.answers.append(answer)


def caller_of(key: str | bytes) -> bytes:
    """Return the caller that an API key identifies: a hash of the key."""
    # starlette decodes headers as latin-1
    given = key if isinstance(key, bytes) else key.encode("latin-1")
    return hashlib.sha256(given).digest() if given else NOBODY


def owner_of(cache_salt: str | None) -> Owner:
    """Return the owner of stored responses and prompts: a hash of the caller and the cache salt."""
    return _owner_of(caller(), cache_salt)


@lru_cache(maxsize=1024)
def _owner_of(caller: bytes, cache_salt: str | None) -> Owner:
    return hashlib.sha256(msgspec.json.encode((caller.hex(), cache_salt))).digest()


def tenant_of(cache_salt: str | None) -> str | None:
    """Return the tenant that the scheduler charges for a request.

    It is the cache salt, else a short hash of the API key, else None.
    """
    if cache_salt is not None:
        return cache_salt
    return f"key-{caller().hex()[:16]}" if caller() else None


class Origin(NamedTuple):
    """The caller of a job and the size of its request body in bytes."""

    caller: bytes = NOBODY
    num_bytes: int = 0


NO_ORIGIN = Origin()
