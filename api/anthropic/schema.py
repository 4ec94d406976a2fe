"""Bodies of Anthropic's Messages API. Unknown fields are passed over, as clients send many."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from ..openai.schema import Count, Guess, One, Prediction, Sampling, StopTexts


class CacheControl(Struct, kw_only=True):
    """A breakpoint: what stands before it, and the block itself, is kept in the prefix cache."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class Block(Struct, kw_only=True):
    """What every block of content may carry."""

    cache_control: CacheControl | None = None


class TextBlock(Block, tag="text", kw_only=True):
    """Words."""

    text: str


class ImageBlock(Block, tag="image", kw_only=True):
    """Known and refused."""


class DocumentBlock(Block, tag="document", kw_only=True):
    """Known and refused."""


class ThinkingBlock(Block, tag="thinking", kw_only=True):
    """What the model thought before; its signature is not looked at."""

    thinking: str


class RedactedThinkingBlock(Block, tag="redacted_thinking", kw_only=True):
    """Thoughts that only their author can read."""


class ToolUseBlock(Block, tag="tool_use", kw_only=True):
    """A call that the model made."""

    id: str
    name: str
    input: dict[str, Any]


class ToolResultBlock(Block, tag="tool_result", kw_only=True):
    """What a call gave."""

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


class ToolSpec(Struct, kw_only=True):
    """One of ``tools``. Those with a type of their own are known to Anthropic's models alone."""

    type: str | None = None
    name: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    cache_control: CacheControl | None = None

    @property
    def is_custom(self) -> bool:
        """Whether the caller runs it."""
        return self.type in (None, "custom")


class AnyChoice(Struct, kw_only=True):
    """``tool_choice``; ``name`` with the type "tool"."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Struct, kw_only=True):
    """``thinking``. A budget is passed over: a template has no place for one."""

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
    """``diagnostics``: tell why the prompt shares no more with that message's."""

    previous_message_id: str | None = None


class CountRequest(Sampling, kw_only=True):
    """Body of /v1/messages/count_tokens, and what both bodies have in common."""

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
        """The structured output that is asked for, if any."""
        given = None if self.output_config is None else self.output_config.format
        return given or self.output_format


class MessagesRequest(CountRequest, kw_only=True):
    """Body of /v1/messages."""

    max_tokens: Count
    n: One | None = None
    stop_sequences: StopTexts | None = None
    diagnostics: Diagnostics | None = None
    prediction: Prediction | Guess | None = None  # an extension
