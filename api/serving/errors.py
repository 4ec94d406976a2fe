"""Errors as HTTP answers: one JSON body, and one status per exception."""

from __future__ import annotations

import logging
import math
import re
from typing import Any

import msgspec
from msgspec import Struct
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from ...core.errors import (
    DeadlineExceeded,
    EngineDead,
    ForetokenError,
    InvalidRequest,
    PromptTooLong,
    QueueFull,
    Unavailable,
)
from ..runtime.adapters import UnknownAdapter

logger = logging.getLogger(__name__)
MIN_RETRY_SECONDS, MAX_RETRY_SECONDS = 1, 60
NO_ROUTE = (
    "no such route: /openapi.json lists all routes; the base URL of an OpenAI client ends in /v1"
)
INTERNAL = "internal error"
MAX_MESSAGE_CHARS = 1024  # a message may quote text from the request
_PATH = re.compile(r"`\$\.?(?P<path>[^`]*)`$")
_FIELD = re.compile(r"(missing required|unknown) field `(?P<name>[^`]{0,256})`")


class ErrorParts(Struct, kw_only=True):
    """An error. ``param`` names the invalid field."""

    message: str
    type: str | None = None
    param: str | None = None
    code: str | None = None


class ErrorBody(Struct, kw_only=True):
    """The body of every answer with a status of 400 or more."""

    error: ErrorParts


class JsonResponse(Response):
    """A response whose content is encoded by msgspec, or is already JSON bytes."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:  # noqa: ANN401 - starlette's signature
        """Encode the content."""
        return content if isinstance(content, bytes) else msgspec.json.encode(content)


class ClientGone(Exception):  # noqa: N818 - a disconnect of the client is not an error
    """Raised if the client closes its connection before the answer."""


class ApiError(Exception):
    """An error answer. ``headers`` are sent with it."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(clipped(message))
        self.status, self.kind, self.param, self.code = status, kind, param, code
        self.headers = headers

    @property
    def body(self) -> ErrorBody:
        """OpenAI's error object."""
        error = ErrorParts(message=str(self), type=self.kind, param=self.param, code=self.code)
        return ErrorBody(error=error)

    def response(self) -> JsonResponse:
        """Return the error as an HTTP response."""
        return JsonResponse(self.body, self.status, headers=self.headers)


def clipped(message: str) -> str:
    """Return the message, truncated to `MAX_MESSAGE_CHARS`."""
    if len(message) <= MAX_MESSAGE_CHARS:
        return message
    return f"{message[: MAX_MESSAGE_CHARS - 3]}..."


def to_api_error(error: BaseException) -> ApiError:
    """Return the error to send for an exception; for an unexpected one, without its text."""
    match error:
        case ApiError():
            return error
        case PromptTooLong():
            return ApiError(400, str(error), param=error.param, code="context_length_exceeded")
        case UnknownAdapter():  # the adapter was unloaded while the request was being read
            return ApiError(404, str(error), param="model", code="model_not_found")
        case InvalidRequest():
            return ApiError(400, str(error), param=error.param)
        case QueueFull():
            headers = {"retry-after": str(_retry_seconds(error.retry_after))}
            return ApiError(
                429, str(error), kind="rate_limit_error", code="queue_full", headers=headers
            )
        case DeadlineExceeded():
            return deadline_exceeded(str(error), error.retry_after)
        case Unavailable():
            return unavailable(str(error), error.retry_after)
        case EngineDead():
            return unavailable(str(error))
        case ForetokenError():
            return ApiError(500, str(error), kind="server_error")
        case HTTPException():
            return _from_starlette(error)
        case _:
            return ApiError(500, INTERNAL, kind="server_error", code="internal_error")


def unavailable(message: str, retry_after: float = MIN_RETRY_SECONDS) -> ApiError:
    """Return a 503 error: the server closes, has failed or has no replica. Clients may retry."""
    headers = {"retry-after": str(_retry_seconds(retry_after))}
    return ApiError(503, message, kind="server_error", code="unavailable", headers=headers)


def deadline_exceeded(message: str, retry_after: float = MIN_RETRY_SECONDS) -> ApiError:
    """Return a 503 error: the deadline passed before the first token. Clients may retry."""
    headers = {"retry-after": str(_retry_seconds(retry_after))}
    return ApiError(503, message, kind="server_error", code="deadline_exceeded", headers=headers)


def unknown_model(name: str, served: str) -> ApiError:
    """Return OpenAI's 404 error for an unknown model, with the name of the served model."""
    message = f"The model `{name}` does not exist; this server serves `{served}`"
    return ApiError(404, message, param="model", code="model_not_found")


def bad_json(error: Exception) -> ApiError:
    """Return a 400 error for a body that does not decode. ``param`` is the path of the bad
    field.
    """
    if isinstance(error, RecursionError):
        return ApiError(400, "the body is nested too deeply")
    if isinstance(error, msgspec.ValidationError):
        return ApiError(400, str(error), param=_param(str(error)))
    return ApiError(400, f"the body is not valid JSON: {error}")


def _param(message: str) -> str | None:
    path, field = _PATH.search(message), _FIELD.search(message)
    # msgspec writes [...] for a value of a mapping.
    place = path["path"].replace("[...]", "") if path else ""
    names = [place, field["name"]] if field else [place]
    return ".".join(name for name in names if name) or (None if field is None else "")


def _retry_seconds(seconds: float) -> int:
    return min(MAX_RETRY_SECONDS, max(MIN_RETRY_SECONDS, math.ceil(seconds)))


def _from_starlette(error: HTTPException) -> ApiError:
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
    headers = dict(error.headers) if error.headers else None
    known = {
        404: NO_ROUTE,
        405: f"this route only accepts {(headers or {}).get('Allow', 'another method')}",
    }
    message = known.get(error.status_code, error.detail)
    return ApiError(error.status_code, message, code=code, headers=headers)


def logged_api_error(request: Request, error: Exception) -> ApiError:
    """Return the error to send for an exception. An unexpected exception is logged."""
    answer = to_api_error(error)
    if answer.status == 500:
        logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return answer
