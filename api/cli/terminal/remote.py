"""A running server as the partner of ``foretoken chat --url``."""

from __future__ import annotations

import asyncio
import json
import os
import ssl
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing
from http import HTTPStatus
from typing import Any, Self
from urllib.parse import quote, urlsplit

import h11

from ....core.errors import ForetokenError, InvalidRequest
from ...types.sampling_params import SamplingParams
from ..config import SAMPLING_FLAGS
from .terminal import PLAIN, Printer, Style

READ_BYTES = 2**16
# fields with these values are not sent, so that the server's defaults apply
LEFT_OUT = SamplingParams()


class ServerModel:
    """The first model of an OpenAI-compatible server."""

    def __init__(self, url: str, key: str | None, style: Style = PLAIN) -> None:
        self.name = ""
        self.context: int | None = None  # number of tokens, if the server reports it
        self.sampling: Mapping[str, Any] = {}
        self._takes_ids = False  # whether the server accepts token ids in messages
        self._url, self._key, self._style = url, key, style

    @classmethod
    async def connect(cls, url: str, key: str | None, style: Style = PLAIN) -> Self:
        """Return the server's first model. Raises `ForetokenError` if the server does not
        answer.
        """
        found = cls(checked(url), key, style)
        body = b"".join([piece async for piece in found._pieces("GET", "/v1/models")])
        try:
            model = json.loads(body)["data"][0]
            found.name = model["id"]
            context = model.get("max_model_len")  # vLLM and SGLang report it too
            found.context = context if isinstance(context, int) else None
            # only foretoken sends it
            found.sampling = dict(model.get("default_sampling_params") or {})
            found._takes_ids = bool(found.sampling)
        except (ValueError, LookupError, TypeError):
            raise ForetokenError(
                f"{found._url} did not return a list of models at /v1/models"
            ) from None
        return found

    async def answer(
        self, messages: list[dict[str, Any]], params: SamplingParams, texts: list[str]
    ) -> list[int] | None:
        """Print an answer as it arrives, then its statistics if requested."""
        body: dict[str, Any] = {
            "model": self.name,
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
            **_given(params),
        }
        if self._takes_ids:
            body["return_token_ids"] = True
        usage: Mapping[str, Any] = {}
        token_ids: list[int] = []
        has_thoughts, printer = False, Printer()
        try:
            async with aclosing(self._events("/v1/chat/completions", body)) as events:
                async for event in events:
                    if "error" in event:
                        raise ForetokenError(_message(event["error"]))
                    usage = event.get("usage") or usage
                    for choice in event.get("choices") or ():
                        delta = choice.get("delta") or {}
                        thought = delta.get("reasoning_content") or ""
                        has_thoughts |= bool(thought)
                        texts.append(delta.get("content") or "")
                        token_ids = delta.get("token_ids") or token_ids
                        printer.think(thought)
                        printer.write(texts[-1])
        finally:
            printer.end()
        if self._style.has_stats:
            print(_cost_line(usage), file=sys.stderr)
        return None if has_thoughts else token_ids  # later prompts leave reasoning out

    async def _events(
        self, path: str, body: Mapping[str, Any]
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the JSON objects of an event stream."""
        rest = b""
        async with aclosing(self._pieces("POST", path, json.dumps(body).encode())) as pieces:
            async for piece in pieces:
                *lines, rest = (rest + piece).split(b"\n")
                for line in lines:
                    data = line.removeprefix(b"data:").strip()
                    if line.startswith(b"data:") and data != b"[DONE]":
                        yield json.loads(data)

    async def _pieces(
        self, method: str, path: str, body: bytes = b""
    ) -> AsyncGenerator[bytes, None]:
        """Yield a response's body as it arrives.

        Raises `ForetokenError` with the server's error message.
        """
        target = urlsplit(self._url)
        http = h11.Connection(h11.CLIENT)
        host = target.netloc.rpartition("@")[2]
        headers = [(b"host", host.encode()), (b"content-length", b"%d" % len(body))]
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
            raise ForetokenError(f"{self._url} closed the connection: {error}") from None
        finally:
            writer.close()  # also after a stopped answer, which the server then aborts

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        target = urlsplit(self._url)
        is_tls = target.scheme == "https"
        port = target.port or (443 if is_tls else 80)
        try:
            return await asyncio.open_connection(target.hostname, port, ssl=is_tls or None)
        except ssl.SSLError as error:  # `errno` of an SSLError is not a system error code
            why = (error.reason or str(error)).lower().replace("_", " ")
            raise ForetokenError(f"{self._url} does not accept TLS connections ({why})") from None
        except OSError as error:
            # asyncio's text does not give the reason; the code of an unknown name is negative
            code = error.errno or 0
            reason = os.strerror(code) if code > 0 else error.strerror or error
            message = f"{self._url} does not answer ({reason}): is `foretoken serve` running there?"
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
        raise ForetokenError(f"{url} is not the address of a server, such as http://127.0.0.1:8000")
    return url


def _given(params: SamplingParams) -> dict[str, Any]:
    pairs = ((name, getattr(params, name)) for name in SAMPLING_FLAGS)
    return {name: value for name, value in pairs if value is not getattr(LEFT_OUT, name)}


def _message(error: object) -> str:
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


def _cost_line(usage: Mapping[str, Any]) -> str:
    parts = [f"{usage.get('completion_tokens', 0)} tokens"]
    if speculation := usage.get("speculation"):
        num_steps = max(1, speculation["verify_steps"])
        parts[0] += f" in {num_steps} steps"
        accepted, proposed = speculation["accepted_tokens"], speculation["proposed_tokens"]
        parts.append(f"{accepted} of {proposed} draft tokens accepted" if proposed else "no drafts")
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    parts.append(f"{cached} of {usage.get('prompt_tokens', 0)} prompt tokens cached")
    return f"[{', '.join(parts)}]"
