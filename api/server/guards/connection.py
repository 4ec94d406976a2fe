"""The connection of one client: uvicorn's HTTP protocol with limits on time, size and number."""

from __future__ import annotations

import asyncio
import logging
import re
import resource
import sys
from contextvars import Context
from typing import ClassVar, cast

import h11
from h11._writers import ChunkedWriter, ContentLengthWriter
from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from ...serving.errors import ApiError
from ...serving.limits import Limits
from ..observation.request_log import CONNECTION_ERROR, refusal_of
from .auth import IS_SPARE

logger = logging.getLogger(__name__)
NUM_OTHER_FILES = 128  # open files of the process besides connections
SOCKET_PATH = "/v1/responses"  # follows any --root-path
NUM_SPARE = 64  # connections above the limit that get a 503; further ones are dropped
SPARE_SECONDS = 1.0  # time limit for a connection above the limit to send its request
DRAIN_BYTES = 64 * 2**20  # maximum number of discarded bytes of an unread body
# time for a rejected client to read the answer, which closing at once would discard
LINGER_SECONDS = 2.0
_ABSOLUTE = re.compile(rb"https?://(?:[^/?#@]*@)?(?P<host>[^/?#@]*)", re.IGNORECASE)
# Invalid HTTP is not logged: any client could flood the log.
_http_logger = logging.getLogger("uvicorn.error.connection")
_http_logger.setLevel(logging.ERROR)


class QuickSends(h11.Connection):
    """h11's connection with less overhead for streams and short answers.

    It frames the chunks of a stream directly: chunks do not change the connection's state, and
    h11's state machine took a tenth of the time of a streamed token. The headers of an answer of
    known length are held back until its body, so that one system call sends both.
    """

    _header = b""  # encoded headers to be sent together with the body

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        """Return the next event. The target of a request is converted by `origin_form`."""
        event = super().next_event()
        # `isinstance` is slow here, because the classes of events are abstract.
        return origin_form(event) if type(event) is h11.Request else event

    def send(self, event: h11.Event) -> bytes | None:  # type: ignore[override] # deprecated ones
        """Return the bytes of an event, preceded by any headers that were held back."""
        if type(event) is h11.Data and event.data:
            is_chunked = isinstance(self._writer, ChunkedWriter)
            if is_chunked and self.our_state is h11.SEND_BODY:
                return b"%x\r\n%b\r\n" % (len(event.data), event.data)
        data = super().send(event)
        if type(event) is h11.Response and isinstance(self._writer, ContentLengthWriter):
            self._header = data or b""
            return b""
        if self._header and data is not None:
            data, self._header = self._header + data, b""
        return data


def origin_form(request: h11.Request) -> h11.Request:
    """Return the request with a path as its target. An absolute URL is split into host and path.

    Clients send URLs as targets to proxies, and servers must accept them. The host of the URL
    replaces the Host header, as HTTP requires, so all layers see the same name and path.
    """
    found = _ABSOLUTE.match(request.target)
    if found is None:
        return request
    target = request.target[found.end() :]
    headers = [
        (name, value) for name, value in request.headers.raw_items() if name.lower() != b"host"
    ]
    return h11.Request(
        method=request.method,
        target=target if target.startswith(b"/") else b"/" + target,
        headers=[(b"Host", found["host"]), *headers],
        http_version=request.http_version,
    )


class Connection(H11Protocol):
    """A connection with time limits for headers, bodies and reading.

    Connections beyond the limit on their number get a 503 or are dropped. The connection of a slow
    client is aborted: ``close`` would wait until the client has read the buffer. An abort counts as
    a disconnect, which aborts the client's requests.
    """

    limits: ClassVar[Limits] = Limits()
    _header_timer: asyncio.TimerHandle | None = None
    _body_timer: asyncio.TimerHandle | None = None
    _body_cycle: RequestResponseCycle | None = None  # the request whose body is still to arrive
    _write_timer: asyncio.TimerHandle | None = None
    _num_drained = 0
    _is_spare = False
    _is_refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the timer for the first headers."""
        super().connection_made(transport)
        self.conn = QuickSends(h11.SERVER, self.limits.max_header_bytes)
        self.logger = _http_logger
        self.timeout_keep_alive = self.limits.idle_seconds  # type: ignore[assignment]
        # With a larger buffer, up to 64 KiB of unread data would count as sent. (With TLS, they
        # still do.) The limit is not 0, since TLS would then pause when nothing is left to send.
        transport.set_write_buffer_limits(high=1, low=0)
        num_beyond = len(self.connections) - self.limits.max_connections
        if num_beyond > NUM_SPARE:
            transport.abort()
            return
        if num_beyond > 0:
            self._is_spare, self.app = True, self._refuse_spare
        self._expect_header()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop all timers."""
        self._forget_header()
        self._forget_body()
        self.resume_writing()
        super().connection_lost(exc)

    async def _refuse_spare(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request: health checks are served, others get 503 as the server is full."""
        scope["headers"] = [*scope["headers"], (b"connection", b"close")]
        scope["state"][IS_SPARE] = True
        await self.config.loaded_app(scope, receive, send)

    def _should_upgrade(self) -> bool:
        """Whether to accept an upgrade to a WebSocket; without it, the request is a plain GET."""
        is_served = cast("Scope", self.scope)["path"].endswith(SOCKET_PATH)
        return is_served and not self._is_spare and super()._should_upgrade()

    # -- receiving --------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        """Receive data. Discard the rest of a body that no route reads, up to a limit."""
        if self._is_answered_early:
            self._num_drained += len(data)
            if self._num_drained > DRAIN_BYTES:
                self.transport.abort()
        if not self._is_refused and not self.transport.is_closing():
            super().data_received(data)

    def handle_events(self) -> None:
        """Set the timer for the client's next data; no timer runs while the server works.

        A WebSocket has a protocol and limits of its own, so no timer outlasts the handshake.
        """
        super().handle_events()
        if self.transport.get_protocol() is not self:
            self._forget_header()
            self._forget_body()
            return
        if self._is_refused:  # the timer is already set
            return
        self._expect_body()
        if self.conn.their_state is not h11.IDLE:
            self._forget_header()
        elif self._header_timer is None:
            self._expect_next()
        if self.flow.read_paused and not self.cycle.more_body:
            self._listen_on()

    def _expect_body(self) -> None:
        """Set the timer for the rest of a body, whether or not a route reads it."""
        is_due = self.conn.their_state is h11.SEND_BODY
        if not is_due or self.cycle is not self._body_cycle:
            self._forget_body()
        if is_due and self._body_timer is None:
            self._body_cycle = self.cycle
            self._body_timer = self.loop.call_later(self.limits.body_seconds, self._end_body)

    def _end_body(self) -> None:
        """Answer 408 since the body is late; if an answer has begun, only close the connection."""
        seconds = self.limits.named("body_seconds")
        self._refuse(ApiError(408, f"the body did not arrive within {seconds} seconds"))

    def _expect_next(self) -> None:
        """Set the timer for the next request, or for the rest of its headers.

        uvicorn closes idle connections after an answer, but not after a body that ended later than
        its answer.
        """
        if self.conn.trailing_data[0]:
            self._expect_header()
        elif self.timeout_keep_alive_task is None and self.conn.our_state is h11.IDLE:
            self.timeout_keep_alive_task = self.loop.call_later(
                self.limits.idle_seconds, self.timeout_keep_alive_handler
            )

    def _listen_on(self) -> None:
        """Keep reading while a request is processed, even if another request was received.

        uvicorn would pause until the answer is complete. The disconnect of the client would go
        unnoticed, and its request would run to the end.
        """
        # `trailing_data` would copy the buffer for each packet
        num_waiting = len(self.conn._receive_buffer)
        if num_waiting > self.limits.max_header_bytes + self.limits.max_body_bytes:
            self.transport.abort()
        else:
            self.flow.resume_reading()

    @property
    def _is_answered_early(self) -> bool:
        """Whether the request was answered while its body is still being sent.

        False for the next request, whose body may arrive together with the end of this one.
        """
        is_sending = self.conn.their_state is h11.SEND_BODY
        return is_sending and self.cycle.response_complete

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002 - uvicorn's message is not used
        """Answer invalid HTTP with a JSON error. Data that follows is not read."""
        error = sys.exception()  # uvicorn calls this method in an exception handler
        if isinstance(error, h11.RemoteProtocolError) and error.error_status_hint == 431:
            refusal = ApiError(431, f"the request headers are longer than {self._max_header()}")
        elif isinstance(error, h11.RemoteProtocolError) and error.error_status_hint == 501:
            refusal = ApiError(501, "chunked is the only supported transfer coding")
        else:
            refusal = ApiError(400, "the request is not valid HTTP/1.1")
        self._refuse(refusal)

    def _refuse(self, refusal: ApiError) -> None:
        """Send an error and close the connection; if an answer has begun, only close it."""
        if self.cycle is not None:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.abort()
            return
        begun = self.conn.our_state is h11.SEND_RESPONSE  # request headers are complete
        answer = self._interrupted(refusal) if begun else refusal.response()
        headers = [*answer.raw_headers, (b"connection", b"close")]
        events = (
            h11.Response(status_code=refusal.status, headers=headers),
            h11.Data(data=bytes(answer.body)),
            h11.EndOfMessage(),
        )
        for event in events:
            self.transport.write(self.conn.send(event))
        if self.transport.can_write_eof():  # TLS does not support this
            self.transport.write_eof()
        self._is_refused = True
        self._forget_body()
        self._body_timer = self.loop.call_later(LINGER_SECONDS, self.transport.abort)

    def _interrupted(self, refusal: ApiError) -> Response:
        """Return the response for an incomplete request, and store the error for the log."""
        scope = cast("Scope", self.scope)
        scope["state"][CONNECTION_ERROR] = refusal
        # Run outside the current context, which may belong to the previous request.
        return Context().run(refusal_of, scope, refusal)

    def _max_header(self) -> str:
        return f"{self.limits.named('max_header_bytes')} bytes"

    def _expect_header(self) -> None:
        seconds = self.limits.header_seconds
        if self._is_spare:
            seconds = min(seconds, SPARE_SECONDS)
        self._header_timer = self.loop.call_later(seconds, self._end_header)

    def _end_header(self) -> None:
        """Answer 408 if a part of the headers has arrived; else close the connection."""
        self._header_timer = None
        if not self.conn.trailing_data[0]:
            self.transport.abort()
            return
        seconds = self.limits.named("header_seconds")
        self._refuse(ApiError(408, f"the request headers did not arrive within {seconds} seconds"))

    def _forget_header(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _forget_body(self) -> None:
        if self._body_timer is not None:
            self._body_timer.cancel()
            self._body_timer, self._body_cycle, self._num_drained = None, None, 0

    # -- sending -----------------------------------------------------------------------------------

    def pause_writing(self) -> None:
        """Start the timer of a client that does not read."""
        super().pause_writing()
        self._expect_reading()

    def resume_writing(self) -> None:
        """Stop the timer: the client has read everything."""
        super().resume_writing()
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _expect_reading(self) -> None:
        size = self.transport.get_write_buffer_size()
        seconds = self.limits.write_seconds
        self._write_timer = self.loop.call_later(seconds, self._check_reading, size)

    def _check_reading(self, size_before: int) -> None:
        """Close the connection if the client has read nothing since the last check."""
        if self.transport.get_write_buffer_size() < size_before:
            self._expect_reading()
            return
        logger.warning(
            "closing connection: the client read nothing for %s s (--write-seconds)",
            self.limits.write_seconds,
        )
        self.transport.abort()


def connection_class(limits: Limits) -> type[Connection]:
    """Return a `Connection` class with these limits, for uvicorn to instantiate."""
    return type("Connection", (Connection,), {"limits": limits})


def reserve_files(limits: Limits) -> None:
    """Raise the soft limit on open files to fit all connections, as far as the system allows."""
    wanted = limits.max_connections + NUM_SPARE + NUM_OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed < wanted:
        logger.warning(
            "the process may open at most %s files, too few for --max-connections: raise ulimit -n",
            allowed,
        )
