"""Read request bodies, within limits on each body and on all bodies together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from starlette.requests import Request

from ..types.request_context import header
from .content_coding import TooLarge, decode_body
from .errors import MIN_RETRY_SECONDS, ApiError, ClientGone
from .limits import Limits


async def chunks(request: Request, limits: Limits, name: str) -> AsyncGenerator[bytes]:
    """Yield a body in chunks. Raises `ApiError` 413 above the limit ``name``, and `ClientGone`.

    After a refusal the connection discards the rest of the body.
    """
    limit, size, has_more = _limit(request, limits, name), 0, True
    while has_more:
        chunk, has_more = await _next_chunk(request)
        size += len(chunk)
        if size > limit:
            raise _too_large(limits, name)
        yield chunk


def _limit(request: Request, limits: Limits, name: str) -> int:
    """Return the limit ``name``. Raises `ApiError` 413 for a body that announces more bytes."""
    limit = int(getattr(limits, name))
    if int(header(request.scope, b"content-length") or 0) > limit:
        raise _too_large(limits, name)
    return limit


async def _next_chunk(request: Request) -> tuple[bytes, bool]:
    """Return a chunk of a body, and whether more follow. Raises `ClientGone`."""
    message = await request.receive()
    if message["type"] == "http.disconnect":
        raise ClientGone
    return message.get("body", b""), message.get("more_body", False)


def content_coding(request: Request) -> str:
    """Return the Content-Encoding of a request's body, "" without one."""
    given = [each for name, each in request.scope["headers"] if name == b"content-encoding"]
    return b",".join(given).decode("latin-1") if given else ""


class BodyReader:
    """Reads bodies into memory and limits the total size of bodies in transit."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._num_held = 0  # bytes received of incomplete bodies

    async def read(self, request: Request) -> bytes:
        """Return a body, decompressed if it has a Content-Encoding.

        Raises `ClientGone` and `ApiError`: 400 and 415 if the body cannot be decompressed, 413 if
        it is too large, 503 if all bodies in transit together are too large.
        """
        # Unlike `chunks`, this creates no generator: most bodies are a single chunk.
        limit = _limit(request, self._limits, "max_body_bytes")
        parts, num_bytes, has_more = [], 0, True
        try:
            while has_more:
                chunk, has_more = await _next_chunk(request)
                parts.append(chunk)
                num_bytes += len(chunk)
                self._num_held += len(chunk)
                if num_bytes > limit:
                    raise _too_large(self._limits, "max_body_bytes")
                if self._num_held > self._limits.max_bodies_bytes:
                    raise self._full()
            return await self._decoded(b"".join(parts), content_coding(request))
        finally:
            self._num_held -= num_bytes

    async def _decoded(self, data: bytes, coding: str) -> bytes:
        if not coding:
            return data
        try:
            return await asyncio.to_thread(decode_body, data, coding, self._limits.max_body_bytes)
        except TooLarge:
            raise _too_large(self._limits, "max_body_bytes") from None

    def _full(self) -> ApiError:
        most = self._limits.named("max_bodies_bytes")
        return ApiError(
            503,
            f"request bodies in transit exceed {most} bytes in total; retry later",
            kind="server_error",
            code="too_many_bodies",
            headers={"retry-after": str(MIN_RETRY_SECONDS)},
        )


def _too_large(limits: Limits, name: str) -> ApiError:
    message = f"the body is larger than {limits.named(name)} bytes"
    return ApiError(413, message, code="body_too_large")
