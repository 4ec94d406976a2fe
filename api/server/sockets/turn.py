"""Turn: one request of a WebSocket, which runs through the application as an HTTP request."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import urlencode

import msgspec
from starlette.types import ASGIApp, Message, Scope

from ...types.request_context import CANCELLED, header
from .events import Create, Resume, cancelled, error_frame, event_data, in_lane

PATH = "/v1/responses"
OWN_HEADERS = frozenset(
    {b"connection", b"upgrade", b"content-type", b"content-length", b"content-encoding",
     b"transfer-encoding", b"last-event-id", b"x-request-id", b"accept-encoding"}
)  # fmt: skip
"""Headers of the handshake that do not apply to a turn."""
WEBSOCKET = b"sec-websocket-"
ERROR_HEADERS = (b"retry-after", b"x-request-id")
FIRST, LAST = b'{"type":"response.created"', b'{"type":"response.'
ENDINGS = tuple(LAST + name for name in (b"completed", b"incomplete", b"failed"))
SendFrame = Callable[[bytes], Awaitable[None]]


class Turn:
    """One response: the HTTP request that asks for it, and the frames of its events.

    All layers of the server treat it as a request of its own: keys, limits, logs and metrics apply
    as over HTTP.
    """

    def __init__(self, scope: Scope, event: Create | Resume, send_frame: SendFrame) -> None:
        self._body = event.body if isinstance(event, Create) else b""
        self.lane, self.num_bytes = event.lane, len(self._body)
        # the id of a new response is known once it has begun
        self.response_id = event.response_id if isinstance(event, Resume) else None
        self._scope, self._send_frame = http_scope(scope, event), send_frame
        self._gone = asyncio.Event()
        self._is_cancelled = False
        self.has_ended = False  # whether the last event was sent
        self._began: dict[str, Any] = {}  # the response as it began
        # number of the next event
        self._num_events = event.starting_after + 1 if isinstance(event, Resume) else 0
        self._status, self._error = 0, bytearray()
        self._headers: dict[str, str] = {}  # headers of the HTTP answer to repeat in error events

    @property
    def is_ending(self) -> bool:
        """Whether the response was cancelled, or its last event was sent."""
        return self._is_cancelled or self.has_ended

    def cancel(self) -> None:
        """End the response. The client gets a last event."""
        self._is_cancelled = self._scope["state"][CANCELLED] = True
        self.leave()

    def leave(self) -> None:
        """End the request as if its client had left."""
        self._gone.set()

    async def run(self, app: ASGIApp) -> None:
        """Run the request and send its events as frames."""
        if not self._gone.is_set():
            await app(self._scope, self._receive, self._send)
        if self._is_cancelled and not self.has_ended:
            response = self._began or {"id": self.response_id}
            await self._send_frame(cancelled(response, self._num_events, self.lane))

    async def _receive(self) -> Message:
        if self._body:
            body, self._body = self._body, b""
            return {"type": "http.request", "body": body, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
            found = {name: header(message, name) for name in ERROR_HEADERS}
            self._headers = {name.decode(): value for name, value in found.items() if value}
            return
        if self._gone.is_set():
            return
        body = message.get("body", b"")
        if self._status == 200:
            for data in event_data(body):
                await self._send_event(data)
            return
        self._error += body
        if not message.get("more_body", False):
            frame = error_frame(self._status, bytes(self._error), self.lane, self._headers)
            self.has_ended = True
            await self._send_frame(frame)

    async def _send_event(self, data: bytes) -> None:
        if data.startswith(b'{"error"'):
            frame = error_frame(500, data, self.lane)
            self.has_ended = True
            await self._send_frame(frame)
            return
        if data.startswith(FIRST):
            self._began = msgspec.json.decode(data)["response"]
            self.response_id = self._began["id"]
        self.has_ended = self.has_ended or data.startswith(ENDINGS)
        self._num_events += 1
        await self._send_frame(in_lane(data, self.lane))


def http_scope(scope: Scope, event: Create | Resume) -> Scope:
    """Return the scope of the HTTP request for an event of a WebSocket's client."""
    headers = [
        (name, value)
        for name, value in scope["headers"]
        if name not in OWN_HEADERS and not name.startswith(WEBSOCKET)
    ]
    method, path, query = "POST", PATH, {}
    if isinstance(event, Create):
        size = str(len(event.body)).encode()
        headers += [(b"content-type", b"application/json"), (b"content-length", size)]
    else:
        method, path = "GET", f"{PATH}/{event.response_id}"
        query = {"stream": "true", "starting_after": str(event.starting_after)}
        query |= {} if event.cache_salt is None else {"cache_salt": event.cache_salt}
    return {
        "type": "http",
        "asgi": scope["asgi"],
        "http_version": "1.1",
        "method": method,
        "scheme": "https" if scope["scheme"] == "wss" else "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": urlencode(query).encode(),
        "root_path": "",
        "headers": headers,
        "client": scope.get("client"),
        "server": scope.get("server"),
        "state": dict(scope["state"]),
    }
