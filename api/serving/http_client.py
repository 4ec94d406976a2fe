"""A client of an HTTP server whose errors have the form of OpenAI's."""

from __future__ import annotations

import asyncio
import json
import os
import re
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing
from http import HTTPStatus
from typing import Any
from urllib.parse import quote, urlsplit

import h11

from ...core.errors import ForetokenError, InvalidRequest

READ_BYTES = 2**16
_CREDENTIALS = re.compile(r"(?<=://)[^/?#\s]*@")


class HttpServer:
    """A server by its address, and the API key for it. Each request has a connection of its own.

    ``url``: the address without a user name and a password, which are not used.
    """

    def __init__(self, url: str, key: str | None = None, *, seconds: float | None = None) -> None:
        """Raise `ForetokenError` if the address is invalid.

        ``seconds``: limit of time for a whole response of `json`; None: no limit.
        """
        self.url = without_credentials(checked(url))
        self._key, self._seconds = key, seconds

    async def json(self, method: str, path: str, body: object = None) -> Any:  # noqa: ANN401
        """Return the JSON value of a response; None if it has another form.

        Raises `ForetokenError`, like `pieces`, and after the limit of time.
        """
        data = b"" if body is None else json.dumps(body).encode()
        try:
            async with (
                asyncio.timeout(self._seconds),
                aclosing(self.pieces(method, path, data)) as pieces,
            ):
                answer = b"".join([piece async for piece in pieces])
        except TimeoutError:
            limit = self._seconds or 0.0
            raise ForetokenError(f"{self.url} did not answer within {limit:g} s") from None
        try:
            return json.loads(answer)
        except (ValueError, RecursionError):
            return None

    async def models(self) -> list[dict[str, Any]]:
        """Return the entries of ``/v1/models``, at least one. Raises `ForetokenError`."""
        found = await self.json("GET", "/v1/models")
        match found:
            case {"data": [{"id": str()}, *_]}:
                models: list[dict[str, Any]] = found["data"]
                return models
        raise ForetokenError(f"{self.url} did not return a list of models at /v1/models")

    async def pieces(
        self, method: str, path: str, body: bytes = b""
    ) -> AsyncGenerator[bytes, None]:
        """Yield a response's body as it arrives.

        Raises `ForetokenError` with the server's error message.
        """
        target = urlsplit(self.url)
        http = h11.Connection(h11.CLIENT)
        headers = [(b"host", target.netloc.encode()), (b"content-length", b"%d" % len(body))]
        headers += [(b"content-type", b"application/json")] if body else []
        # servers hash keys as bytes, and a key from the command line may be invalid UTF-8
        if self._key:
            bearer = f"Bearer {self._key}".encode("utf-8", "surrogateescape")
            headers += [(b"authorization", bearer)]
        request = h11.Request(
            method=method, target=quote(target.path, safe="/%") + path, headers=headers
        )
        reader, writer = await self._connect()
        try:
            for event in (request, h11.Data(data=body), h11.EndOfMessage()):
                writer.write(http.send(event) or b"")
            async for piece in _received(http, reader):
                yield piece
        except (h11.RemoteProtocolError, OSError) as error:
            raise ForetokenError(f"{self.url} closed the connection: {error}") from None
        finally:
            writer.close()  # also after a stopped answer, which the server then aborts

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        target = urlsplit(self.url)
        is_tls = target.scheme == "https"
        port = target.port or (443 if is_tls else 80)
        try:
            return await asyncio.open_connection(target.hostname, port, ssl=is_tls or None)
        except ssl.SSLError as error:  # `errno` of an SSLError is not a system error code
            why = (error.reason or str(error)).lower().replace("_", " ")
            raise ForetokenError(f"{self.url} does not accept TLS connections ({why})") from None
        except OSError as error:
            # asyncio's text does not give the reason; the code of an unknown name is negative
            code = error.errno or 0
            reason = os.strerror(code) if code > 0 else error.strerror or error
            message = f"{self.url} does not answer ({reason}): is `foretoken serve` running there?"
            raise ForetokenError(message) from None


async def _received(http: h11.Connection, reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Yield the body of a response with status 200.

    Raises `ForetokenError` with the server's error message for any other status.
    """
    status, failure = 0, b""
    while not isinstance(event := http.next_event(), h11.EndOfMessage):
        if event is h11.NEED_DATA:
            if not (piece := await reader.read(READ_BYTES)) and not status:
                raise h11.RemoteProtocolError("the connection was closed before an answer")
            http.receive_data(piece)
        elif isinstance(event, h11.Response):
            status = event.status_code
        elif isinstance(event, h11.Data) and status == HTTPStatus.OK:
            yield bytes(event.data)
        elif isinstance(event, h11.Data):
            failure += event.data
    if status != HTTPStatus.OK:
        raise _failure(failure, status)


def checked(url: str) -> str:
    """Return the address of a server without /v1. Raises `ForetokenError` if it is invalid."""
    url = (url if "://" in url else f"http://{url}").rstrip("/").removesuffix("/v1")
    try:
        parts = urlsplit(url)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        is_address = is_address and parts.netloc.isascii()
    except ValueError:
        is_address = False
    if not is_address:
        shown = without_credentials(url)
        raise ForetokenError(
            f"{shown} is not the address of a server, such as http://127.0.0.1:8000"
        )
    return url


def without_credentials(text: str) -> str:
    """Return a text with addresses; their user names and passwords are left out."""
    return _CREDENTIALS.sub("", text)


def error_message(error: object) -> str:
    """Return the message of an error object as in OpenAI's API; other values become text."""
    return str(error.get("message", error) if isinstance(error, Mapping) else error)


def _failure(body: bytes, status: int) -> ForetokenError:
    """Return the error that a response reports.

    It is an `InvalidRequest` if the status is 400 and the response names a parameter.
    """
    try:
        error = json.loads(body)["error"]
        message, param = str(error["message"]), error.get("param")
    except (ValueError, LookupError, TypeError, AttributeError):
        return ForetokenError(f"the server answered with status {status}")
    if status == HTTPStatus.BAD_REQUEST and isinstance(param, str):
        return InvalidRequest(message, param=param)
    return ForetokenError(message)
