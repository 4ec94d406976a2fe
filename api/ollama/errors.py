"""Errors in the form of Ollama's API."""

from __future__ import annotations

from ..serving.errors import ApiError
from ..serving.sse import encode
from .protocol import OllamaError

PATH = "/api/"


def is_ollama(path: str) -> bool:
    """Whether the path belongs to Ollama's API."""
    return path.startswith(PATH)


def error_body(error: ApiError) -> OllamaError:
    """Ollama's error object: a text."""
    return OllamaError(error=str(error))


def error_line(error: ApiError) -> bytes:
    """An error inside a stream."""
    return encode(error_body(error)) + b"\n"
