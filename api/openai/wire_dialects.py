"""Answers of the Responses and the Messages API, for /openapi.json.

Items and blocks are not described: the SDKs of those APIs define them.
"""

from __future__ import annotations

from typing import Literal

from msgspec import UNSET, Struct, UnsetType, field

from ..protocol.answers import SpeculationUsage
from .wire import CompletionDetails, Free, PromptDetails


class OutputDetails(CompletionDetails, kw_only=True):
    """``usage.output_tokens_details``."""

    reasoning_tokens: int


class ResponseUsage(Struct, kw_only=True):
    """``usage`` of a response."""

    input_tokens: int
    input_tokens_details: PromptDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int
    closed_early: bool  # as in chat completions
    speculation: SpeculationUsage
    cache_explanation: Free | UnsetType = UNSET


class ResponseBody(Struct, kw_only=True):
    """Answer of /v1/responses; it repeats the fields of the request."""

    id: str = ""
    object: str = "response"
    created_at: int = 0
    completed_at: int | None = None
    model: str = ""
    status: Literal["completed", "incomplete", "failed", "in_progress"] = "completed"
    error: Free | None = None
    incomplete_details: Free | None = None
    output: list[Free] = field(default_factory=list)
    previous_response_id: str | None = None
    prompt_cache_diagnostics: Free | None = None
    store: bool = False
    usage: ResponseUsage | None = None


class ItemList(Struct, kw_only=True):
    """Answer of /v1/responses/{id}/input_items."""

    object: str = "list"
    data: list[Free] = field(default_factory=list)
    first_id: str | None = None
    last_id: str | None = None
    has_more: bool = False


class Deleted(Struct, kw_only=True):
    """Answer of DELETE /v1/responses/{id}."""

    id: str = ""
    object: str = "response"
    deleted: bool = True


class InputTokens(Struct, kw_only=True):
    """Answer of /v1/responses/input_tokens and of /v1/messages/count_tokens."""

    input_tokens: int = 0
    object: str | None = None


class MessageUsage(Struct, kw_only=True):
    """``usage`` of a message; ``input_tokens``: neither cached nor written."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    cache_creation: dict[str, int]
    output_tokens: int
    service_tier: str = "standard"
    closed_early: bool  # as in chat completions
    speculation: SpeculationUsage
    cache_explanation: Free | UnsetType = UNSET


class MessageAnswer(Struct, kw_only=True):
    """Answer of /v1/messages."""

    id: str = ""
    type: str = "message"
    role: str = "assistant"
    model: str = ""
    content: list[Free] = field(default_factory=list)
    stop_reason: str | None = None
    stop_sequence: str | None = None
    diagnostics: Free | None = None
    usage: MessageUsage | None = None


class MessageErrorParts(Struct, kw_only=True):
    """The error of /v1/messages."""

    type: str = ""
    message: str = ""


class MessageError(Struct, kw_only=True):
    """The body of an error of /v1/messages."""

    type: str = "error"
    error: MessageErrorParts = field(default_factory=MessageErrorParts)
    request_id: str | None = None


class CacheBody(Struct, kw_only=True):
    """Answer of /cache. Pages are of ``page_size`` tokens."""

    page_size: int = 0
    total_pages: int = 0
    free_pages: int = 0
    evictable_pages: int = 0
    pinned_pages: int = 0
    num_pins: int = 0
    pins: list[Free] = field(default_factory=list)
    usage: float = 0.0
    queried_tokens: int = 0
    hit_tokens: int = 0
