"""Bodies of /v1/responses. Decoding validates them; see `api.serving.sampling`."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from ...media.sources import Detail
from ...serving.caching.fields import PromptCacheBreakpoint
from ...serving.peers import Absent, Empty, Off
from ...serving.sampling import Guess, NumTop, One, Positive, Prediction
from ...types.fields import SameAs
from ..openai.bodies import OpenAISampling, StreamOptions

MAX_METADATA = 16
ROLES = ("user", "assistant", "system", "developer")
TEXT_PARTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")
LOGPROBS = "message.output_text.logprobs"  # value of ``include``

MetadataKey = Annotated[str, Meta(max_length=64)]
MetadataValue = Annotated[str, Meta(max_length=512)]
Metadata = Annotated[dict[MetadataKey, MetadataValue], Meta(max_length=MAX_METADATA)]


class CustomFormat(Struct, kw_only=True, omit_defaults=True):
    """``format`` of a custom tool: the grammar of its input."""

    type: str | None = None
    syntax: str | None = None
    definition: str | None = None


class FlatTool(Struct, kw_only=True):
    """An entry of ``tools``: a function, a custom tool, a namespace of tools, or the tool search.

    Other types are tools of a provider and are ignored.
    """

    known_kinds: ClassVar[frozenset[str]] = frozenset(
        {"function", "custom", "namespace", "tool_search"}
    )
    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    format: CustomFormat | UnsetType | None = UNSET  # only for custom tools
    tools: list[FlatTool] | UnsetType = UNSET  # only for namespaces
    execution: str | UnsetType | None = UNSET  # only for ``tool_search``: "client"


class ItemPart(Struct, kw_only=True, omit_defaults=True):
    """A part of a message, a tool output or reasoning. ``type`` decides which field it has."""

    known_kinds: ClassVar[frozenset[str]] = frozenset(
        {*TEXT_PARTS, "refusal", "input_image", "input_file"}
    )
    type: str
    text: str | None = None
    image_url: str | None = None  # a data URL, or a file in --media-dir
    detail: Detail | None = None
    refusal: str | None = None
    file_data: str | None = None  # a data URL
    filename: str | None = None
    prompt_cache_breakpoint: PromptCacheBreakpoint | None = None
    annotations: Any = None  # ignored, like ``logprobs``
    logprobs: Any = None


Parts = str | list[ItemPart]


class Item(Struct, kw_only=True, omit_defaults=True):
    """One input item. ``type`` decides which other fields it has, and their types.

    This is not a tagged union, since clients may leave ``type`` out and send unknown types. It has
    all fields of output items, which are the input of the next turn.
    """

    known_kinds: ClassVar[frozenset[str]] = frozenset(
        {"message", "reasoning", "item_reference", "agent_message", "additional_tools",
         "function_call", "function_call_output", "custom_tool_call", "custom_tool_call_output",
         "tool_search_call", "tool_search_output", "compaction", "compaction_trigger"}
    )  # fmt: skip
    type: str | None = None  # default: message, or a reference if only an id is given
    id: str | None = None
    status: str | None = None
    role: str | None = None
    author: str | None = None
    recipient: str | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None  # namespace of the called function
    content: Any = None
    arguments: Any = None
    input: Any = None  # input of a custom tool's call
    action: Any = None  # like ``operation`` and ``code``: the payload of another call type
    operation: Any = None
    code: Any = None
    output: Any = None
    outputs: Any = None
    error: Any = None
    summary: Any = None
    encrypted_content: Any = None  # only read in compaction items
    execution: str | None = None
    tools: list[FlatTool] | None = None
    token_ids: Any = None  # a field of other APIs; rejected here


class AnswerItem(Item, kw_only=True, omit_defaults=True):
    """The first item of a stored answer, with the token ids of the whole answer."""

    answer_ids: list[int]


class ToolName(Struct, kw_only=True):
    """A tool that a ``tool_choice`` allows."""

    type: str = "function"
    name: str | None = None
    namespace: str | None = None


class FlatChoice(Struct, kw_only=True, omit_defaults=True):
    """``tool_choice`` that names one function or lists the allowed tools."""

    type: str
    name: str | None = None
    namespace: str | None = None
    mode: Literal["auto", "required"] | None = None
    tools: list[ToolName] | None = None


class TextFormat(Struct, kw_only=True, omit_defaults=True):
    """``text.format``: the output format. A JSON schema and its name are fields of this object."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class TextOptions(Struct, kw_only=True):
    """``text``. Its verbosity is ignored."""

    format: TextFormat | None = None


class ReasoningOptions(Struct, kw_only=True):
    """``reasoning``: the reasoning effort, if the chat template supports it."""

    effort: str | None = None


class ContextManagement(Struct, kw_only=True):
    """An entry of ``context_management``. ``compact_threshold``: number of prompt tokens."""

    type: Literal["compaction"]
    compact_threshold: Positive | None = None


class EventOptions(StreamOptions):
    """``stream_options``. The last event always has the usage."""

    continuous_usage_stats: Off = None
    include_ready_calls: Off = None  # events of items say when a call is complete


class ResponsesRequest(OpenAISampling, kw_only=True):
    """Body of /v1/responses, and of /v1/responses/input_tokens."""

    stream_options: EventOptions | None = None
    n: One | None = None
    input: str | list[Item] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None  # true by default
    tools: list[FlatTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | FlatChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    max_output_tokens: Positive | None = None
    top_logprobs: NumTop | None = None
    include: list[str] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    context_management: Annotated[list[ContextManagement], Meta(max_length=1)] | None = None
    metadata: Metadata | None = None
    user: str | None = None
    safety_identifier: str | None = None
    # extensions of OpenAI's API
    prediction: Prediction | Guess | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    enable_thinking: bool | None = None
    # aliases of other fields
    max_completion_tokens: Annotated[Positive | None, SameAs("max_output_tokens")] = None
    # recognised but not supported
    background: Off = None
    conversation: Empty = None
    prompt: Absent = None
    logprobs: Off = None
    return_token_ids: Off = None
