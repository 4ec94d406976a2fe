"""Errors in the form of Anthropic's API."""

from __future__ import annotations

from starlette.responses import Response
from starlette.types import Scope

from ..serving.errors import ApiError, JsonResponse
from ..types.request_context import note_error
from .protocol import MessageError, MessageErrorParts

PATH = "/v1/messages"
KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}


def is_messages(path: str) -> bool:
    """Whether the path belongs to Anthropic's API."""
    return path == PATH or path.startswith(f"{PATH}/")


def error_body(error: ApiError, request_id: str | None) -> MessageError:
    """Anthropic's error object: the kind follows from the status."""
    kind = KINDS.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    parts = MessageErrorParts(type=kind, message=str(error))
    return MessageError(error=parts, request_id=request_id)


def error_response(scope: Scope, error: ApiError) -> Response:
    """The error response, in the form of the API that the path belongs to."""
    note_error(error)
    if not is_messages(scope["path"]):
        return error.response()
    return JsonResponse(error_body(error, request_id(scope)), error.status, headers=error.headers)


def request_id(scope: Scope) -> str | None:
    """The request's id, as the ``request-id`` header has it."""
    found: str | None = scope.get("state", {}).get("request_id")
    return found
