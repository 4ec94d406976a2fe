"""A client that says what no HTTP library would, byte for byte."""

from __future__ import annotations

import contextlib
import socket
from dataclasses import dataclass
from urllib.parse import urlsplit

import msgspec

SECONDS = 20.0  # far beyond every deadline of the servers under test


@dataclass
class Answer:
    """One answer with a length."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> dict:
        return msgspec.json.decode(self.body)

    @property
    def message(self) -> str:
        return self.json["error"]["message"]


class RawClient(contextlib.AbstractContextManager):
    """A socket to a server, and what of its answers was not looked at yet."""

    def __init__(self, url: str, *, receive_buffer: int = 0) -> None:
        self.socket = socket.socket()
        if receive_buffer:  # before it connects: the window follows from it
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.socket.settimeout(SECONDS)
        place = urlsplit(url)
        self.socket.connect((place.hostname, place.port))
        self._seen = b""

    def __exit__(self, *_args: object) -> None:
        self.socket.close()

    def send(self, data: bytes) -> RawClient:
        """All of it; a server that has closed is no error, its answer tells why."""
        with contextlib.suppress(ConnectionError):
            self.socket.sendall(data)
        return self

    def answer(self, *, is_head: bool = False) -> Answer:
        """The next answer; one to HEAD has no body, whatever its length says."""
        while b"\r\n\r\n" not in self._seen:
            self._receive()
        head, _, self._seen = self._seen.partition(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in lines)
        length = 0 if is_head else int(headers.get("content-length", 0))
        while len(self._seen) < length:
            self._receive()
        body, self._seen = self._seen[:length], self._seen[length:]
        return Answer(int(first.split()[1]), headers, body)

    def _receive(self) -> None:
        data = self.socket.recv(2**16)
        assert data, f"closed behind {self._seen!r}"
        self._seen += data

    def rest(self) -> bytes:
        """All until the server closes, which it must."""
        with contextlib.suppress(ConnectionResetError):
            while data := self.socket.recv(2**16):
                self._seen += data
        rest, self._seen = self._seen, b""
        return rest


def head(target: str = "/version", *lines: str, method: str = "GET", key: str = "k") -> bytes:
    """A request line and a header."""
    keys = [f"x-api-key: {key}"] if key else []
    return "\r\n".join([f"{method} {target} HTTP/1.1", "Host: x", *keys, *lines, "", ""]).encode()


def post(target: str, body: bytes, *lines: str, key: str = "k") -> bytes:
    """A request with a body."""
    return head(target, f"Content-Length: {len(body)}", *lines, method="POST", key=key) + body
