"""Answers of Ollama's routes. Durations are in nanoseconds."""

from __future__ import annotations

from typing import Any

from msgspec import UNSET, Struct, UnsetType

from ...serving.dialect import ErrorForm
from ...serving.errors import ApiError
from ...serving.sse import encode

Unset = UnsetType


class AnsweredFunction(Struct, kw_only=True):
    """The function of a call by the model."""

    name: str
    arguments: dict[str, Any]


class AnsweredCall(Struct, kw_only=True):
    """A tool call by the model."""

    function: AnsweredFunction


class AnswerMessage(Struct, kw_only=True):
    """The message of an answer; in a line of a stream, only the new text and calls."""

    role: str = "assistant"
    content: str = ""
    thinking: str | Unset = UNSET
    tool_calls: list[AnsweredCall] | Unset = UNSET


class AnswerPart(Struct, kw_only=True):
    """A line of a stream, or a whole answer. Only the last line has counts and durations."""

    model: str
    created_at: str
    done: bool = False
    done_reason: str | Unset = UNSET
    total_duration: int | Unset = UNSET
    load_duration: int | Unset = UNSET
    prompt_eval_count: int | Unset = UNSET
    prompt_eval_duration: int | Unset = UNSET
    eval_count: int | Unset = UNSET
    eval_duration: int | Unset = UNSET


class ChatPart(AnswerPart, kw_only=True):
    """A line of /api/chat."""

    message: AnswerMessage


class GeneratePart(AnswerPart, kw_only=True):
    """A line of /api/generate."""

    response: str = ""
    thinking: str | Unset = UNSET


class Details(Struct, kw_only=True):
    """Format, family and size of a model, for display."""

    parent_model: str = ""
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class Tag(Struct, kw_only=True):
    """A model in /api/tags. ``expires_at`` and ``size_vram`` are set in /api/ps."""

    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: Details
    expires_at: str | Unset = UNSET
    size_vram: int | Unset = UNSET


class TagList(Struct, kw_only=True):
    """The models of the server."""

    models: list[Tag]


class Shown(Struct, kw_only=True):
    """The answer of /api/show."""

    modelfile: str
    parameters: str
    template: str
    details: Details
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str


class Embedded(Struct, kw_only=True):
    """The answer of /api/embed: a unit vector for each text."""

    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int = 0
    prompt_eval_count: int


class EmbeddedOne(Struct, kw_only=True):
    """The answer of /api/embeddings: a unit vector."""

    embedding: list[float]


class OllamaVersion(Struct, kw_only=True):
    """The answer of /api/version: the version of Ollama's API, and foretoken's version."""

    version: str
    foretoken: str


class OllamaError(Struct, kw_only=True):
    """The body of an error."""

    error: str


def error_body(error: ApiError, _request_id: str | None) -> OllamaError:
    """Return Ollama's error object, which has only a message."""
    return OllamaError(error=str(error))


def error_line(error: ApiError, request_id: str | None) -> bytes:
    """Return the line for an error inside a stream."""
    return encode(error_body(error, request_id)) + b"\n"


ERRORS = ErrorForm(struct=OllamaError, body=error_body, event=error_line)
