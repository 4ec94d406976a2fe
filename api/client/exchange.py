"""What both clients do around their I/O: headers, time limits, whether to try once more."""

from __future__ import annotations

import os
import random
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

import httpx

from ..._version import __version__
from ...core.errors import ForetokenError, InvalidRequest
from .calls import Call
from .errors import Unreachable, error_of_answer, retry_after
from .sse import EventParser

BASE_URL = "http://127.0.0.1:8000"
TIMEOUT = 600.0  # seconds, as other clients have it
MAX_TIMEOUT = 1e6  # what every system's sockets take
CONNECT_SECONDS = 5.0
FIRST_PAUSE = 0.5  # seconds; doubled each time
LONGEST_PAUSE = 60.0  # a server that asks for more is not waited for
BUSY = (429, 503)
DONE = "[DONE]"
_KEY = re.compile(r"[!-~](?:[ -~]*[!-~])?")
T = TypeVar("T")
LIMITS = httpx.Limits(max_connections=1024, max_keepalive_connections=100)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Where the server is and how patient the client."""

    base_url: str
    headers: dict[str, str]
    timeout: httpx.Timeout
    max_retries: int

    @classmethod
    def of(cls, base_url: str, api_key: str | None, timeout: float, max_retries: int) -> Settings:
        """Check them; without a key that of FORETOKEN_API_KEY is taken, if there is one."""
        if not base_url.startswith(("http://", "https://")):
            raise InvalidRequest("base_url must begin with http:// or https://", param="base_url")
        if not 0 < timeout <= MAX_TIMEOUT:
            message = f"timeout must be above 0 and at most {MAX_TIMEOUT:g} seconds"
            raise InvalidRequest(message, param="timeout")
        if max_retries < 0:
            raise InvalidRequest("max_retries must be at least 0", param="max_retries")
        key = os.environ.get("FORETOKEN_API_KEY") if api_key is None else api_key
        headers = {"user-agent": f"foretoken/{__version__}"}
        if key:
            if not _KEY.fullmatch(key):
                message = "api_key must be printable ASCII, as HTTP headers are"
                raise InvalidRequest(message, param="api_key")
            headers["authorization"] = f"Bearer {key}"
        return cls(
            # The routes bring their own /v1, users of other clients write it here.
            base_url=base_url.rstrip("/").removesuffix("/v1"),
            headers=headers,
            timeout=httpx.Timeout(timeout, connect=min(timeout, CONNECT_SECONDS)),
            max_retries=max_retries,
        )

    def request(self, http: httpx.Client | httpx.AsyncClient, call: Call[T]) -> httpx.Request:
        """The call as httpx sends it."""
        headers = self.headers
        if call.body is not None:
            headers = {**headers, "content-type": "application/json"}
        return http.build_request(
            call.method,
            self.base_url + call.path,
            params=dict(call.query) or None,
            content=call.content,
            headers=headers,
        )


class Attempts:
    """Counts the tries of one call. Its `pause` decides whether there is another one."""

    def __init__(self, max_retries: int) -> None:
        self._left = max_retries
        self._pause = FIRST_PAUSE

    @classmethod
    def of(cls, call: Call[T], settings: Settings) -> Attempts:
        """As many as the call and the settings allow."""
        return cls(settings.max_retries if call.retry else 0)

    def after_answer(self, response: httpx.Response) -> float:
        """Seconds to wait after this refusal, which has been read; raises it when it is final."""
        error = error_of_answer(response.status_code, response.headers, response.content)
        asked = retry_after(response.headers)
        if response.status_code not in BUSY or (asked or 0.0) > LONGEST_PAUSE:
            raise error
        return self._next(error, asked)

    def after_failure(self, failure: httpx.HTTPError) -> float:
        """Seconds to wait after this failure to get an answer; raises `Unreachable`."""
        error = as_unreachable(failure)
        if isinstance(failure, httpx.ReadTimeout | httpx.UnsupportedProtocol):
            raise error from failure  # the server may still be at it
        return self._next(error, None)

    def _next(self, error: ForetokenError, asked: float | None) -> float:
        if self._left == 0:
            raise error
        self._left -= 1
        pause, self._pause = self._pause, 2 * self._pause
        # Spread, so that the clients of a server that was away do not all come back at once.
        return pause * random.uniform(0.5, 1.0) if asked is None else asked


def as_unreachable(failure: httpx.HTTPError) -> Unreachable:
    """httpx's own errors in our words."""
    kind = "no answer in time" if isinstance(failure, httpx.TimeoutException) else "no connection"
    return Unreachable(f"{kind}: {failure or type(failure).__name__}")


@contextmanager
def in_our_words() -> Iterator[None]:
    """Errors of httpx while an answer is read become `Unreachable`: nothing is tried again."""
    try:
        yield
    except httpx.HTTPError as failure:
        raise as_unreachable(failure) from failure


class EventReader(Generic[T]):
    """The deltas of a streamed answer out of its bytes."""

    def __init__(self, call: Call[list[T]]) -> None:
        self._call = call
        self._parser = EventParser()
        self._is_done = False

    def feed(self, chunk: bytes) -> Iterator[T]:
        """What these bytes complete; raises the error that an event may carry."""
        for event in self._parser.feed(chunk):
            if event.data == DONE:
                self._is_done = True
            elif not self._is_done:
                yield from self._call.parsed(event.data.encode())

    def end(self) -> None:
        """Raise `Unreachable` for a stream that was cut off."""
        if not self._is_done:
            raise Unreachable("the stream ended before the answer did")
