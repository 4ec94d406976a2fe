"""uvicorn's protocol of WebSockets; it drops silent clients and logs no error of a client."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from ...serving.limits import Limits

if TYPE_CHECKING:
    from uvicorn._types import ASGISendEvent


class SocketProtocol(WebSocketsSansIOProtocol):
    """A WebSocket connection whose client must answer pings within ``--write-seconds``.

    A client that does not read answers no ping, because a ping is sent after all earlier data.
    """

    def keepalive_timeout(self) -> None:
        """Abort the connection: closing it would wait until the client has read the buffer."""
        super().keepalive_timeout()
        self.transport.abort()

    def send_receive_event_to_app(self) -> None:
        """Pass a message on; close the connection with code 1007 if its text is not UTF-8.

        uvicorn would also log a traceback, although the client is to blame. It drops messages that
        arrive after the connection was closed.
        """
        if self.curr_msg_data_type == "text" and not self.close_sent:
            try:
                b"".join(self.frames).decode()
            except UnicodeDecodeError:
                self.conn.send_close(1007)
                self.handle_parser_exception()
                return
        super().send_receive_event_to_app()

    async def send(self, message: ASGISendEvent) -> None:
        """Send a message of the application.

        A refused handshake is complete after its HTTP answer. uvicorn would report it as an error.
        """
        await super().send(message)
        if message["type"] == "websocket.http.response.body":
            self.handshake_complete |= not message.get("more_body", False)


def socket_options(limits: Limits) -> dict[str, Any]:
    """Return uvicorn's options of WebSockets: the limits, and no compression of messages."""
    return {
        "ws": SocketProtocol,
        "ws_max_size": limits.max_body_bytes,
        "ws_ping_interval": limits.ping_seconds,
        "ws_ping_timeout": limits.write_seconds,
        "ws_per_message_deflate": False,
    }
