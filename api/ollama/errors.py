"""Errors in the form of Ollama's API."""

from __future__ import annotations

from ..serving.dialect import ErrorForm
from ..serving.errors import ApiError
from ..serving.sse import encode
from .protocol import OllamaError


def error_body(error: ApiError, _request_id: str | None) -> OllamaError:
    """Ollama's error object: a text."""
    return OllamaError(error=str(error))


def error_line(error: ApiError, request_id: str | None) -> bytes:
    """An error inside a stream."""
    return encode(error_body(error, request_id)) + b"\n"


ERRORS = ErrorForm(struct=OllamaError, body=error_body, event=error_line)
