"""Answers and events of the Messages API, for encoding and for /openapi.json.

An `UNSET` field is left out; None is encoded as null, as clients expect.
"""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

from ...serving.answers import Free, SpeculationUsage
from ...serving.dialect import ErrorForm
from ...serving.errors import ApiError
from ...serving.sse import named_event

# -- blocks -------------------------------------------------------------------------------------


class ThinkingContent(Struct, tag="thinking", kw_only=True):
    """A block of reasoning. Clients send it back only if it has a signature."""

    thinking: str = ""
    signature: str = ""


class TextContent(Struct, tag="text", kw_only=True):
    """A block of answer text."""

    text: str = ""


class ToolUseContent(Struct, tag="tool_use", kw_only=True):
    """A block with a tool call."""

    id: str
    name: str
    input: Any = {}  # an object; raw JSON if msgspec cannot decode it


class CompactionContent(Struct, tag="compaction", kw_only=True):
    """A summary of the conversation up to this block, and the content that the server sealed."""

    content: str | None = None
    encrypted_content: str | UnsetType = UNSET
    signature: str | UnsetType = UNSET


ContentBlock = ThinkingContent | TextContent | ToolUseContent | CompactionContent


class ThinkingAddition(Struct, tag="thinking_delta", kw_only=True):
    """A delta that appends text to a reasoning block."""

    thinking: str


class SignatureAddition(Struct, tag="signature_delta", kw_only=True):
    """A delta with the signature, which is the last delta of a reasoning block."""

    signature: str


class TextAddition(Struct, tag="text_delta", kw_only=True):
    """A delta that appends text to a text block."""

    text: str


class InputAddition(Struct, tag="input_json_delta", kw_only=True):
    """A delta that appends a fragment of JSON text to the input of a tool call."""

    partial_json: str


class CompactionAddition(Struct, tag="compaction_delta", kw_only=True):
    """A delta with the complete summary, since a compaction block has a single delta."""

    content: str | None
    encrypted_content: str | UnsetType = UNSET


Addition = ThinkingAddition | SignatureAddition | TextAddition | InputAddition | CompactionAddition

# -- context management -------------------------------------------------------------------------


class ClearedToolUses(Struct, tag="clear_tool_uses_20250919", kw_only=True):
    """The number of tool calls that an edit cleared, and by how much the prompt shrank."""

    cleared_tool_uses: int
    cleared_input_tokens: int


class ClearedThinking(Struct, tag="clear_thinking_20251015", kw_only=True):
    """The number of turns whose reasoning an edit cleared, and by how much the prompt shrank."""

    cleared_thinking_turns: int
    cleared_input_tokens: int


class Compacted(Struct, tag="compact_20260112", kw_only=True):
    """The number of prompt tokens that a compaction saved."""

    cleared_input_tokens: int


AppliedEdit = ClearedToolUses | ClearedThinking | Compacted


class ContextReport(Struct, kw_only=True):
    """``context_management`` of an answer: the edits that changed the conversation."""

    applied_edits: list[AppliedEdit] = []


class CountReport(Struct, kw_only=True):
    """``context_management`` of a token count: the number of prompt tokens before the edits."""

    original_input_tokens: int


class Iteration(Struct, kw_only=True):
    """An entry of ``usage.iterations``: one request to the model.

    ``type``: whether it wrote the summary or the message. ``input_tokens`` does not include tokens
    that were read from or written to the cache.
    """

    type: Literal["compaction", "message"]
    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


# -- the message --------------------------------------------------------------------------------


class MessageUsage(Struct, kw_only=True):
    """``usage`` of a message. ``input_tokens``: tokens neither read from nor written to the
    cache.
    """

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    cache_creation: dict[str, int]
    output_tokens: int
    service_tier: str = "standard"
    closed_early: bool  # structured output was ended early to fit the token limit
    moves: int  # number of times the request moved to another replica after its own was lost
    image_tokens: int | UnsetType = UNSET  # prompt tokens of images, if there are any
    spliced_tokens: int  # prompt tokens that are original ids of earlier answers, not encoded text
    normalized: list[str] | UnsetType = UNSET  # --normalize rules that changed the prompt
    evicted_tokens: int | UnsetType = UNSET  # answer tokens whose KV was evicted (--kv-evict)
    speculation: SpeculationUsage
    cost: float | UnsetType = UNSET  # only with --prices
    cache_explanation: Free | UnsetType = UNSET  # the cause of a cache miss, if requested
    iterations: list[Iteration] | UnsetType = UNSET  # if the conversation was compacted


class Ending(Struct, kw_only=True):
    """The stop reason and the stop sequence of an answer; both are None until it ends."""

    stop_reason: str | None = None
    stop_sequence: str | None = None


class MessageAnswer(Ending, tag="message", kw_only=True):
    """Answer of /v1/messages."""

    id: str
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[ContentBlock] = []
    diagnostics: Free | None = None
    usage: MessageUsage
    # only sent if requested: token ids that the client sends back with the message later
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET  # token ids of the prompt, only if requested
    context_management: ContextReport | UnsetType = UNSET  # if requested


class TokenCount(Struct, kw_only=True):
    """Answer of /v1/messages/count_tokens."""

    input_tokens: int
    context_management: CountReport | UnsetType = UNSET  # if requested


class ErrorDetails(Struct, kw_only=True):
    """``details`` of an error of compaction."""

    error_code: str


class MessageErrorParts(Struct, kw_only=True):
    """The type and the message of an error."""

    type: str
    message: str
    details: ErrorDetails | UnsetType = UNSET


class MessageError(Struct, tag="error", kw_only=True):
    """The body of an error answer; also the last event of a stream that failed."""

    error: MessageErrorParts
    request_id: str | None = None


# -- events -------------------------------------------------------------------------------------


class MessageStart(Struct, tag="message_start", kw_only=True):
    """The first event of a stream: the message without content."""

    message: MessageAnswer


class BlockStart(Struct, tag="content_block_start", kw_only=True):
    """The event that begins a content block, which is still empty."""

    index: int
    content_block: ContentBlock


class BlockDelta(Struct, tag="content_block_delta", kw_only=True):
    """The event with a delta of the content block that is being generated."""

    index: int
    delta: Addition


class BlockStop(Struct, tag="content_block_stop", kw_only=True):
    """The event that ends a content block."""

    index: int


class MessageDelta(Struct, tag="message_delta", kw_only=True):
    """The event with the stop reason and the usage, after the last content block."""

    delta: Ending
    usage: MessageUsage
    token_ids: list[int] | UnsetType = UNSET  # token ids of the message, if requested
    context_management: ContextReport | UnsetType = UNSET  # if requested


class MessageStop(Struct, tag="message_stop", kw_only=True):
    """The last event of a stream."""


class Ping(Struct, tag="ping", kw_only=True):
    """A keep-alive event."""


StreamEvent = (
    MessageStart
    | BlockStart
    | BlockDelta
    | BlockStop
    | MessageDelta
    | MessageStop
    | Ping
    | MessageError
)


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

COMPACTION_CODES = "compaction_"  # prefix of the error codes that clients know


def error_body(error: ApiError, request_id: str | None) -> MessageError:
    """Return Anthropic's error object. Its type follows from the HTTP status."""
    kind = KINDS.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    has_code = error.code is not None and error.code.startswith(COMPACTION_CODES)
    details = ErrorDetails(error_code=error.code or "") if has_code else UNSET
    parts = MessageErrorParts(type=kind, message=str(error), details=details)
    return MessageError(error=parts, request_id=request_id)


def error_event(error: ApiError, request_id: str | None) -> bytes:
    """Return the event for an error inside a stream."""
    return named_event(error_body(error, request_id))


ERRORS = ErrorForm(struct=MessageError, body=error_body, event=error_event)
