"""Errors in the form of Anthropic's API."""

from __future__ import annotations

from ..serving.dialect import ErrorForm
from ..serving.errors import ApiError
from ..serving.sse import named_event
from .protocol import MessageError, MessageErrorParts

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


def error_body(error: ApiError, request_id: str | None) -> MessageError:
    """Anthropic's error object: the kind follows from the status."""
    kind = KINDS.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    parts = MessageErrorParts(type=kind, message=str(error))
    return MessageError(error=parts, request_id=request_id)


def error_event(error: ApiError, request_id: str | None) -> bytes:
    """An error inside a stream."""
    return named_event(error_body(error, request_id))


ERRORS = ErrorForm(struct=MessageError, body=error_body, event=error_event)
