"""uvicorn's protocol of WebSocket connections, but it drops clients that do not answer."""

from __future__ import annotations

from typing import Any

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from ...serving.limits import Limits


class SocketProtocol(WebSocketsSansIOProtocol):
    """A WebSocket connection whose client must answer pings within ``--write-seconds``.

    A client that does not read answers no ping, because a ping is sent after all earlier data.
    """

    def keepalive_timeout(self) -> None:
        """Abort the connection: closing it would wait until the client has read the buffer."""
        super().keepalive_timeout()
        self.transport.abort()


def socket_options(limits: Limits) -> dict[str, Any]:
    """Return uvicorn's options of WebSockets: the limits, and no compression of messages."""
    return {
        "ws": SocketProtocol,
        "ws_max_size": limits.max_body_bytes,
        "ws_ping_interval": limits.ping_seconds,
        "ws_ping_timeout": limits.write_seconds,
        "ws_per_message_deflate": False,
    }
