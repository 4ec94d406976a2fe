"""What the server's errors are in Python: the engine's own, and those of a way that is too long.

ForetokenError
├── InvalidRequest, PromptTooLong   400, 404, 405, 413: as the engine raises them
├── QueueFull                       429
├── DeadlineExceeded                503: nothing was served before the request's deadline
├── EngineDead                      503: the server ends, or its engine has
├── KeyRefused                      401, 403
├── ServerFailed                    any other status, and an error in the middle of a stream
└── Unreachable                     no connection, a lost one, or no answer in time
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

import msgspec

from ...core.errors import (
    DeadlineExceeded,
    EngineDead,
    ForetokenError,
    InvalidRequest,
    PromptTooLong,
    QueueFull,
)
from ..openai.wire import ErrorBody, ErrorParts

DEFAULT_WAIT = 1.0  # seconds, where a full queue names none
_LENGTHS = re.compile(r"\b(\d{1,18}) tokens > (\d{1,18}) maximum")
_NOT_THE_REQUEST = (408, 409)  # below 500, and nothing is wrong with the request


class KeyRefused(ForetokenError):  # noqa: N818 - as the others are named
    """The API key is missing or wrong."""


class ServerFailed(ForetokenError):  # noqa: N818
    """The server failed; ``status`` is None for an error in the middle of a stream."""

    def __init__(self, message: str, *, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class Unreachable(ForetokenError):  # noqa: N818
    """There is no connection, it was lost, or the answer did not come in time."""


def error_of_answer(status: int, headers: Mapping[str, str], body: bytes) -> ForetokenError:
    """The error that an answer with a status other than 2xx stands for."""
    if status < 400:
        place = headers.get("location", "nowhere")
        return ServerFailed(f"the server sends us on to {place}: base_url is wrong", status=status)
    try:
        parts = msgspec.json.decode(body, type=ErrorBody).error
    except (msgspec.DecodeError, RecursionError):
        text = body[:200].decode("utf-8", "replace").strip()
        parts = ErrorParts(message=text or f"the server answered with status {status}")
    return _error(parts, status, retry_after(headers))


def error_of_event(parts: ErrorParts) -> ForetokenError:
    """The error that an event in a stream stands for."""
    return _error(parts, None, None)


def _error(parts: ErrorParts, status: int | None, wait: float | None) -> ForetokenError:
    message = parts.message
    if status == 429 or parts.code == "queue_full":
        return QueueFull(message, retry_after=DEFAULT_WAIT if wait is None else wait)
    if parts.code == "deadline_exceeded":
        return DeadlineExceeded(message, retry_after=DEFAULT_WAIT if wait is None else wait)
    if status == 503 or parts.code == "unavailable":
        return EngineDead(message)
    if status in (401, 403):
        return KeyRefused(message)
    if _is_about_the_request(parts, status):
        return _invalid(parts)
    return ServerFailed(message, status=status)


def _is_about_the_request(parts: ErrorParts, status: int | None) -> bool:
    if status is None:
        return parts.type == "invalid_request_error"
    return 400 <= status < 500 and status not in _NOT_THE_REQUEST


def _invalid(parts: ErrorParts) -> InvalidRequest:
    lengths = _LENGTHS.search(parts.message)
    if parts.code != "context_length_exceeded" or lengths is None:
        return InvalidRequest(parts.message, param=parts.param)
    error = PromptTooLong(int(lengths[1]), int(lengths[2]))
    error.param = parts.param
    return error


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds that the server asks to wait: a number or a date."""
    given = headers.get("retry-after", "")
    try:
        seconds = float(given)
    except ValueError:
        return _until(given)
    return seconds if math.isfinite(seconds) and seconds >= 0 else None


def _until(date: str) -> float | None:
    try:
        when = parsedate_to_datetime(date)
    except ValueError:
        return None
    return max(0.0, (when.replace(tzinfo=when.tzinfo or UTC) - datetime.now(UTC)).total_seconds())
