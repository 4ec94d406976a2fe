"""Bodies of Anthropic's Messages API. Unknown fields are ignored: clients send many."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from ..protocol.sampling import Count, Guess, One, Prediction, Sampling, StopTexts, TokenIds


class CacheControl(Struct, kw_only=True):
    """A cache breakpoint: the prompt up to and including its block is pinned in the cache."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class Block(Struct, kw_only=True):
    """Fields that every content block may have."""

    cache_control: CacheControl | None = None


class TextBlock(Block, tag="text", kw_only=True):
    """A text block."""

    text: str


class ImageFields(Struct, kw_only=True):
    """``source`` of an image: base64 data, or a URL, which must be a data URL or a file."""

    type: str
    media_type: str | None = None
    data: str | None = None
    url: str | None = None


class ImageBlock(Block, tag="image", kw_only=True):
    """An image."""

    source: ImageFields


class DocumentBlock(Block, tag="document", kw_only=True):
    """A document, which is refused."""


class ThinkingBlock(Block, tag="thinking", kw_only=True):
    """Earlier thinking of the model; the signature is not checked."""

    thinking: str


class RedactedThinkingBlock(Block, tag="redacted_thinking", kw_only=True):
    """Encrypted thinking, which is ignored."""


class ToolUseBlock(Block, tag="tool_use", kw_only=True):
    """A tool call by the model."""

    id: str
    name: str
    input: dict[str, Any]


class ToolResultBlock(Block, tag="tool_result", kw_only=True):
    """The result of a tool call."""

    tool_use_id: str
    content: str | list[TextBlock | ImageBlock | DocumentBlock] | None = None
    is_error: bool | None = None


AnyBlock = (
    TextBlock
    | ImageBlock
    | DocumentBlock
    | ThinkingBlock
    | RedactedThinkingBlock
    | ToolUseBlock
    | ToolResultBlock
)


class Message(Struct, kw_only=True):
    """One turn of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | list[AnyBlock]
    token_ids: TokenIds | None = None  # an extension: those of an answer, which render it


class ToolSpec(Struct, kw_only=True):
    """One of ``tools``. Tools with a type of Anthropic's own work with its models only."""

    type: str | None = None
    name: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    cache_control: CacheControl | None = None

    @property
    def is_custom(self) -> bool:
        """Whether the caller runs the tool."""
        return self.type in (None, "custom")


class AnyChoice(Struct, kw_only=True):
    """``tool_choice``; ``name`` with the type "tool"."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Struct, kw_only=True):
    """``thinking``. A budget is ignored: chat templates have no such option."""

    type: Literal["enabled", "adaptive", "between_tools", "disabled"]
    display: Literal["summarized", "omitted"] | None = None


class JsonFormat(Struct, kw_only=True):
    """Structured output: a JSON schema."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(Struct, kw_only=True):
    """``output_config``."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: JsonFormat | None = None


class Diagnostics(Struct, kw_only=True):
    """``diagnostics``: report why the prompt shares no more tokens with that message's prompt."""

    previous_message_id: str | None = None


class CountRequest(Sampling, kw_only=True):
    """Body of /v1/messages/count_tokens; the fields that both bodies share."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    system: str | list[TextBlock] | None = None
    tools: list[ToolSpec] | None = None
    tool_choice: AnyChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: JsonFormat | None = None  # where the first beta of it stood
    cache_control: CacheControl | None = None  # of the last block
    chat_template_kwargs: dict[str, Any] | None = None
    mcp_servers: list[Any] | None = None

    @property
    def format(self) -> JsonFormat | None:
        """The requested format of structured output, or None."""
        given = None if self.output_config is None else self.output_config.format
        return given or self.output_format


class MessagesRequest(CountRequest, kw_only=True):
    """Body of /v1/messages."""

    max_tokens: Count
    n: One | None = None
    stop_sequences: StopTexts | None = None
    diagnostics: Diagnostics | None = None
    prediction: Prediction | Guess | None = None  # an extension
