"""Bodies of /v1/responses. As in `api.protocol.sampling`, decoding is validation."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from ...media.sources import Detail
from ...protocol.sampling import Guess, NumTop, One, Positive, Prediction
from ..schema import OpenAISampling

MAX_METADATA = 16
TEXT_PARTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")
ITEM_TYPES = (
    "message", "reasoning", "item_reference", "function_call", "function_call_output",
    "custom_tool_call", "custom_tool_call_output",
)  # fmt: skip
# Strings with an error of our own for others: it names the item.
PART_TYPES = (*TEXT_PARTS, "input_image", "refusal")
PartType = Annotated[str, Meta(extra_json_schema={"enum": [*PART_TYPES]})]
ItemType = Annotated[str, Meta(extra_json_schema={"enum": [*ITEM_TYPES]})]
LOGPROBS = "message.output_text.logprobs"  # of ``include``

MetadataKey = Annotated[str, Meta(max_length=64)]
MetadataValue = Annotated[str, Meta(max_length=512)]
Metadata = Annotated[dict[MetadataKey, MetadataValue], Meta(max_length=MAX_METADATA)]


class ItemPart(Struct, kw_only=True, omit_defaults=True):
    """A part of a message, a tool output or reasoning: text, or an image of the first two."""

    type: PartType
    text: str | None = None
    image_url: str | None = None  # a data URL, or a file of --media-dir
    detail: Detail | None = None
    refusal: str | None = None
    annotations: Any = None  # of an earlier answer, as ``logprobs``
    logprobs: Any = None


class Item(Struct, kw_only=True, omit_defaults=True):
    """One input item. ``type`` decides which of the other fields it has.

    It is no union, since clients may leave ``type`` out. It has all fields of output items, which
    are the input of the next turn.
    """

    type: ItemType | None = None  # none: a message, or with an id alone a reference
    id: str | None = None
    status: str | None = None
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | list[ItemPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    input: str | None = None  # of a custom tool's call, as models elsewhere make them
    output: str | list[ItemPart] | None = None
    summary: list[ItemPart] | None = None
    token_ids: Any = None  # of other APIs' messages: refused


class AnswerItem(Item, kw_only=True, omit_defaults=True):
    """The first item of a stored answer, with the token ids of all of it."""

    answer_ids: list[int]


class FlatTool(Struct, kw_only=True):
    """One of ``tools``; only functions are used, others are ignored."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolName(Struct, kw_only=True):
    """One of the tools that a ``tool_choice`` allows."""

    type: str = "function"
    name: str | None = None


class FlatChoice(Struct, kw_only=True, omit_defaults=True):
    """``tool_choice`` that names a function, or lists those that may be called."""

    type: str
    name: str | None = None
    mode: Literal["auto", "required"] | None = None
    tools: list[ToolName] | None = None


class TextFormat(Struct, kw_only=True, omit_defaults=True):
    """``text.format``: what `ResponseFormat` is in chat completions, in one level."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class TextOptions(Struct, kw_only=True):
    """``text``; its verbosity is ignored."""

    format: TextFormat | None = None


class ReasoningOptions(Struct, kw_only=True):
    """``reasoning``: the reasoning effort, which the chat template may support."""

    effort: str | None = None


class ResponsesRequest(OpenAISampling, kw_only=True):
    """Body of /v1/responses, and of /v1/responses/input_tokens."""

    n: One | None = None
    input: str | list[Item] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None  # as a missing one: true
    tools: list[FlatTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | FlatChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    max_output_tokens: Positive | None = None
    top_logprobs: NumTop | None = None
    include: list[str] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    metadata: Metadata | None = None
    user: str | None = None
    safety_identifier: str | None = None
    # extensions
    prediction: Prediction | Guess | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    # known and refused
    background: Any = None
    conversation: Any = None
    prompt: Any = None
