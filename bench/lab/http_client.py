"""A client of nothing but sockets, so that it costs less than the servers it measures."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import msgspec

HEAD_END = b"\r\n\r\n"
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def http_request(path: str, body: object) -> bytes:
    """A POST, as it goes over the wire."""
    data = msgspec.json.encode(body)
    lines = [f"POST {path} HTTP/1.1", "host: bench", "content-type: application/json",
             f"content-length: {len(data)}", "", ""]  # fmt: skip
    return "\r\n".join(lines).encode() + data


class _Asker(asyncio.Protocol):
    """Asks the same again as soon as it is answered, until told to end."""

    def __init__(self, request: bytes) -> None:
        self.num_answers = 0
        self.body = b""
        self._request = request
        self._seen = b""
        self._ends = False
        self.ended = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._seen += data
        head, found, body = self._seen.partition(HEAD_END)
        if not found or len(body) < _length(head):
            return
        if b" 200 " not in head[:16]:
            raise RuntimeError(f"refused: {self._seen[:300]!r}")
        self.num_answers, self.body, self._seen = self.num_answers + 1, body, b""
        if self._ends:
            self._transport.close()
            self.ended.set_result(None)
        else:
            self._transport.write(self._request)

    def end(self) -> None:
        """After the answer that is on its way."""
        self._ends = True


def _length(head: bytes) -> int:
    after = head.lower().partition(b"content-length:")[2]
    return int(after.partition(b"\r\n")[0])


async def requests_per_second(port: int, request: bytes, connections: int, seconds: float) -> float:
    """Answers per second on connections that are kept alive, each asking one after the other."""
    loop = asyncio.get_running_loop()
    askers = [
        (await loop.create_connection(lambda: _Asker(request), "127.0.0.1", port))[1]
        for _ in range(connections)
    ]
    before, start = sum(asker.num_answers for asker in askers), time.monotonic()
    await asyncio.sleep(seconds)
    answered, took = sum(asker.num_answers for asker in askers) - before, time.monotonic() - start
    for asker in askers:
        asker.end()
    await asyncio.gather(*[asker.ended for asker in askers])
    return answered / took


async def one_answer(port: int, request: bytes) -> bytes:
    """The body of one whole answer."""
    loop = asyncio.get_running_loop()
    _, asker = await loop.create_connection(lambda: _Asker(request), "127.0.0.1", port)
    asker.end()
    await asker.ended
    return asker.body


async def get(port: int, path: str) -> bytes:
    """The body of a small answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET {path} HTTP/1.1\r\nhost: bench\r\nconnection: close\r\n\r\n".encode())
    answer = await reader.read()
    writer.close()
    await writer.wait_closed()
    return answer.partition(HEAD_END)[2]


class _Listener(asyncio.Protocol):
    """Notes when each token of a stream arrives."""

    def __init__(self, request: bytes, mark: bytes) -> None:
        self.times: list[float] = []
        self.text = b""
        self._request = request
        self._mark = mark
        self.ended = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        now = time.monotonic()
        self.text += data
        for _ in range(self.text.count(self._mark) - len(self.times)):
            self.times.append(now)
        if data.endswith(b"0\r\n\r\n"):
            self._transport.close()
            self.ended.set_result(None)


async def stream_times(
    port: int, request: bytes, num_streams: int, mark: bytes
) -> tuple[Sequence[Sequence[float]], bytes]:
    """When the tokens of each stream arrived, and the whole text of one stream."""
    loop = asyncio.get_running_loop()
    listeners = [
        (await loop.create_connection(lambda: _Listener(request, mark), "127.0.0.1", port))[1]
        for _ in range(num_streams)
    ]
    await asyncio.gather(*[listener.ended for listener in listeners])
    return [listener.times for listener in listeners], listeners[0].text
