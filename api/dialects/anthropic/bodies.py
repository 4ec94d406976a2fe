"""Bodies of Anthropic's Messages API. Unknown fields are ignored: clients send many."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, get_args

import msgspec
from msgspec import Meta, Struct

from ...serving.peers import Absent, Empty, Off, Zero
from ...serving.sampling import (
    Count,
    Guess,
    One,
    Positive,
    Prediction,
    Sampling,
    Stop,
    StopTexts,
    TokenIds,
)
from ...types.fields import SameAs


class CacheControl(Struct, kw_only=True):
    """A cache breakpoint: the prompt is pinned in the cache up to the end of the marked block."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class Block(Struct, kw_only=True):
    """Fields that every content block may have."""

    cache_control: CacheControl | None = None


class TextBlock(Block, tag="text", kw_only=True):
    """A text block."""

    text: str


class ImageFields(Struct, kw_only=True):
    """``source`` of an image: base64 data, a data URL, or the URL of a file in --media-dir."""

    type: str
    media_type: str | None = None
    data: str | None = None
    url: str | None = None


class ImageBlock(Block, tag="image", kw_only=True):
    """An image."""

    source: ImageFields


class DocumentBlock(Block, tag="document", kw_only=True):
    """A document. The model reads its text, or only its title if the content is not text."""

    source: Any = None
    title: str | None = None
    context: str | None = None


class SearchResultBlock(Block, tag="search_result", kw_only=True):
    """A search result that the client provides."""

    source: Any = None
    title: str | None = None
    content: Any = None


class ToolReferenceBlock(Block, tag="tool_reference", kw_only=True):
    """A tool found by a tool search."""

    tool_name: str


class ThinkingBlock(Block, tag="thinking", kw_only=True):
    """Earlier reasoning of the model. The signature is not checked."""

    thinking: str


class RedactedThinkingBlock(Block, tag="redacted_thinking", kw_only=True):
    """Encrypted reasoning, which is ignored."""


class ToolUseBlock(Block, tag="tool_use", kw_only=True):
    """A tool call by the model."""

    id: str
    name: str
    input: Any = None


class ServerToolUseBlock(ToolUseBlock, tag="server_tool_use", kw_only=True):
    """A tool call that another model's provider executed."""


class McpToolUseBlock(ToolUseBlock, tag="mcp_tool_use", kw_only=True):
    """An MCP tool call that another model's provider executed."""


class ToolResultBlock(Block, tag="tool_result", kw_only=True):
    """The result of a tool call."""

    tool_use_id: str
    content: Any = None
    is_error: bool | None = None

    def __post_init__(self) -> None:
        """Decode the blocks of the content."""
        if isinstance(self.content, list):
            self.content = read_blocks(self.content)


class CompactionBlock(Block, tag="compaction", kw_only=True):
    """A summary that replaces all that precedes it. A block without content has no effect.

    ``encrypted_content`` or ``signature`` is the server's seal. Clients may leave both out.
    """

    content: Annotated[str, Meta(min_length=1)] | None = None
    encrypted_content: str | None = None
    signature: str | None = None


class OtherBlock(Block, kw_only=True):
    """A block of an unknown type. Only results of calls executed by a provider are used."""

    type: str
    tool_use_id: Any = None
    content: Any = None
    is_error: Any = None

    @property
    def is_result(self) -> bool:
        """Whether this is the result of a call that a provider executed."""
        return self.type.endswith("_tool_result") and isinstance(self.tool_use_id, str)


class SystemBlock(Block, kw_only=True):
    """A block of the system prompt. Only text blocks are used."""

    known_kinds: ClassVar[frozenset[str]] = frozenset({"text"})
    type: str
    text: str | None = None


AnyBlock = (
    TextBlock
    | ImageBlock
    | DocumentBlock
    | SearchResultBlock
    | ToolReferenceBlock
    | ThinkingBlock
    | RedactedThinkingBlock
    | ToolUseBlock
    | ServerToolUseBlock
    | McpToolUseBlock
    | ToolResultBlock
    | CompactionBlock
)
KNOWN = frozenset(str(each.__struct_config__.tag) for each in get_args(AnyBlock))


def read_blocks(given: Sequence[object]) -> list[Block]:
    """Decode content blocks; unknown types become `OtherBlock`. Raises ValueError."""
    blocks: list[Block] = []
    for index, each in enumerate(given):
        if isinstance(each, Block):
            blocks.append(each)
            continue
        kind = each.get("type") if isinstance(each, dict) else None
        is_known = kind in KNOWN or not isinstance(kind, str)
        try:
            blocks.append(msgspec.convert(each, AnyBlock if is_known else OtherBlock))
        except msgspec.ValidationError as error:
            raise ValueError(f"content[{index}]: {error}") from None
    return blocks


class Message(Struct, kw_only=True):
    """One turn of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Any]
    # an extension of Anthropic's API: token ids of an answer, rendered in place of its text
    token_ids: TokenIds | None = None

    def __post_init__(self) -> None:
        """Decode the blocks of the content."""
        if isinstance(self.content, list):
            self.content = read_blocks(self.content)

    def path(self, index: int) -> str:
        """Return the path of the message in the body. ``index``: its index in the conversation."""
        return f"messages[{index}]"


class PlacedMessage(Message, kw_only=True):
    """A message whose index in the conversation differs from its index in the body."""

    body_path: str

    def path(self, index: int) -> str:  # noqa: ARG002
        """Return the path of the message in the body."""
        return self.body_path


class ToolSpec(Struct, kw_only=True):
    """An entry of ``tools``. Anthropic's built-in tool types are not supported."""

    known_kinds: ClassVar[frozenset[str]] = frozenset({"custom"})
    type: str | None = None
    name: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: bool | None = None  # hidden until a tool search has found it
    cache_control: CacheControl | None = None

    @property
    def is_custom(self) -> bool:
        """Whether the tool is run by the caller."""
        return self.type in (None, "custom")


class AnyChoice(Struct, kw_only=True):
    """``tool_choice``. ``name`` is used with the type "tool"."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Struct, kw_only=True):
    """``thinking``. A budget is ignored, since chat templates have no such option."""

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
    """``diagnostics``: asks how the prompt differs from the prompt of an earlier message."""

    previous_message_id: str | None = None


class TokenAmount(Struct, kw_only=True):
    """A number of prompt tokens."""

    type: Literal["input_tokens"]
    value: Positive


class ToolUseAmount(Struct, kw_only=True):
    """A number of tool calls."""

    type: Literal["tool_uses"]
    value: Count


class Trigger(Struct, kw_only=True):
    """The number of prompt tokens or of tool calls above which an edit is made."""

    type: Literal["input_tokens", "tool_uses"]
    value: Positive


class ThinkingTurns(Struct, kw_only=True):
    """The number of the latest turns that keep their reasoning. ``value`` is 1 by default."""

    type: Literal["thinking_turns", "all"]
    value: Positive | None = None


class ClearToolUses(Struct, tag="clear_tool_uses_20250919", kw_only=True):
    """An edit that removes the results of old tool calls, and on request their arguments."""

    trigger: Trigger | None = None
    keep: ToolUseAmount | None = None
    clear_at_least: TokenAmount | None = None
    exclude_tools: list[str] | None = None
    clear_tool_inputs: bool | list[str] | None = None


class ClearThinking(Struct, tag="clear_thinking_20251015", kw_only=True):
    """An edit that removes the reasoning of earlier turns."""

    keep: ThinkingTurns | Literal["all"] | None = None


class Compact(Struct, tag="compact_20260112", kw_only=True):
    """An edit that replaces earlier turns by a summary.

    ``instructions`` are appended to the instructions for the summary.
    """

    trigger: TokenAmount | None = None
    pause_after_compaction: bool | None = None
    instructions: str | None = None


class ContextManagement(Struct, kw_only=True):
    """``context_management``: edits of the conversation, applied in order before it is rendered.

    Each type may occur once.
    """

    edits: Annotated[list[ClearToolUses | ClearThinking | Compact], Meta(max_length=3)] = []


class CompactionConfig(Struct, kw_only=True):
    """``compaction``: summarize the conversation instead of answering it.

    ``instructions`` replace the instructions for the summary.
    """

    type: Literal["summarize"]
    instructions: str | None = None


class CountRequest(Sampling, kw_only=True):
    """Body of /v1/messages/count_tokens. /v1/messages has these fields too."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    system: str | list[SystemBlock] | None = None
    tools: list[ToolSpec] | None = None
    tool_choice: AnyChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: JsonFormat | None = None  # older name of output_config.format
    cache_control: CacheControl | None = None  # applies to the last block
    chat_template_kwargs: dict[str, Any] | None = None
    context_management: ContextManagement | None = None
    compaction: CompactionConfig | None = None
    # recognised but not supported
    mcp_servers: Empty = None
    reasoning_effort: Absent = None
    logprobs: Off = None
    top_logprobs: Zero = None

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
    prediction: Prediction | Guess | None = None  # an extension of Anthropic's API
    stop: Annotated[Stop | None, SameAs("stop_sequences")] = None
