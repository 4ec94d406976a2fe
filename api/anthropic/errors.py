"""Errors in the form of Anthropic's API."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..serving.errors import ApiError
from ..types.request_context import header
from .protocol import MessageError, MessageErrorParts

if TYPE_CHECKING:
    from starlette.types import Scope

PATH = "/v1/messages"
VERSION = b"anthropic-version"  # a header that its clients send with every request
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


def is_for_anthropic(scope: Scope) -> bool:
    """Whether a request is for Anthropic's API: by its path, or by a header of its clients."""
    return is_messages(scope["path"]) or bool(header(scope, VERSION))


def error_body(error: ApiError, request_id: str | None) -> MessageError:
    """Anthropic's error object: the kind follows from the status."""
    kind = KINDS.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    parts = MessageErrorParts(type=kind, message=str(error))
    return MessageError(error=parts, request_id=request_id)
