"""One client's connection: uvicorn's HTTP protocol, with deadlines on what the client owes."""

from __future__ import annotations

import asyncio
import logging
from typing import ClassVar

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

logger = logging.getLogger(__name__)
HEADER_SECONDS = 10.0
WRITE_SECONDS = 30.0


class Connection(H11Protocol):
    """Aborts its transport when a header does not come, or when the client stops reading.

    ``close`` would wait for the client to read the buffer. An abort is a disconnect to whatever
    works for this client, so that its requests are aborted too.
    """

    header_seconds: ClassVar[float] = HEADER_SECONDS
    write_seconds: ClassVar[float] = WRITE_SECONDS
    _header_timer: asyncio.TimerHandle | None = None
    _write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """The first header is due."""
        super().connection_made(transport)
        # Else up to 64 KiB that nobody reads would pass for written, and keep a closing socket.
        transport.set_write_buffer_limits(0)
        self._expect_header()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing is due any more."""
        self._forget_header()
        self.resume_writing()
        super().connection_lost(exc)

    # -- the client's header --------------------------------------------------------------------

    def handle_events(self) -> None:
        """Half a header is due too; silence between requests is uvicorn's to end."""
        super().handle_events()
        if self.conn.their_state is not h11.IDLE:
            self._forget_header()
        elif self._header_timer is None and self.conn.trailing_data[0]:
            self._expect_header()

    def _expect_header(self) -> None:
        self._header_timer = self.loop.call_later(self.header_seconds, self.transport.abort)

    def _forget_header(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    # -- the client's reading -------------------------------------------------------------------

    def pause_writing(self) -> None:
        """Something waits to be read."""
        super().pause_writing()
        self._expect_reading()

    def resume_writing(self) -> None:
        """All is read."""
        super().resume_writing()
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _expect_reading(self) -> None:
        size = self.transport.get_write_buffer_size()
        self._write_timer = self.loop.call_later(self.write_seconds, self._check_reading, size)

    def _check_reading(self, size_before: int) -> None:
        """A slow reader is served on; nothing is added to the buffer while it waits."""
        if self.transport.get_write_buffer_size() < size_before:
            self._expect_reading()
            return
        logger.warning("a client read nothing for %s s and was dropped", self.write_seconds)
        self.transport.abort()


def connection_class(*, header_seconds: float, write_seconds: float) -> type[Connection]:
    """`Connection` with these deadlines: uvicorn makes the instances itself."""
    values = {"header_seconds": header_seconds, "write_seconds": write_seconds}
    return type("Connection", (Connection,), values)
