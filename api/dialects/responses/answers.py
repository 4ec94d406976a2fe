"""Answers and events of the Responses API, for encoding and for /openapi.json.

An `UNSET` field is left out; None is encoded as null, as clients expect.
"""

from __future__ import annotations

from typing import Literal

from msgspec import UNSET, Struct, UnsetType, field

from ...serving.answers import Free, SpeculationUsage
from ...serving.caching.fields import CacheClass
from ..openai.answers import CompletionDetails, PromptDetails, TokenInfo
from .bodies import FlatChoice, FlatTool, Item, Metadata, ReasoningOptions, TextOptions

Status = Literal["in_progress", "completed", "incomplete"]
ResponseStatus = Literal["in_progress", "completed", "incomplete", "failed"]


# -- items --------------------------------------------------------------------------------------


class OutputText(Struct, tag="output_text", kw_only=True):
    """The content part of a message."""

    text: str
    annotations: list[Free] = []
    logprobs: list[TokenInfo] = []


class ReasoningText(Struct, tag="reasoning_text", kw_only=True):
    """The content part of a reasoning item."""

    text: str


ContentPart = OutputText | ReasoningText


class MessageItem(Struct, tag="message", kw_only=True):
    """The text of an answer. ``content`` is empty until the text is complete."""

    id: str
    status: Status
    role: Literal["assistant"] = "assistant"
    content: list[OutputText] = []


class ReasoningItem(Struct, tag="reasoning", kw_only=True):
    """The reasoning before an answer, as text without a summary."""

    id: str
    status: Status
    summary: list[Free] = []
    content: list[ReasoningText] = []


class FunctionCallItem(Struct, tag="function_call", kw_only=True):
    """A function call. ``arguments`` is JSON text."""

    id: str
    status: Status
    call_id: str
    name: str
    arguments: str
    namespace: str | UnsetType = UNSET  # namespace of the function, if the request has one


class CustomCallItem(Struct, tag="custom_tool_call", kw_only=True):
    """A custom tool call."""

    id: str
    status: Status
    call_id: str
    name: str
    input: str
    namespace: str | UnsetType = UNSET


class SearchCallItem(Struct, tag="tool_search_call", kw_only=True):
    """A tool search, which the client executes."""

    id: str
    status: Status
    call_id: str
    execution: Literal["client"] = "client"
    arguments: Free = {}


class CompactionItem(Struct, tag="compaction", kw_only=True):
    """A compaction item. It replaces all items before it; only this server can read its content."""

    id: str
    encrypted_content: str = ""  # empty until the summary is complete


OutputItem = (
    MessageItem
    | ReasoningItem
    | FunctionCallItem
    | CustomCallItem
    | SearchCallItem
    | CompactionItem
)


# -- the response -------------------------------------------------------------------------------


class OutputDetails(CompletionDetails, kw_only=True):
    """``usage.output_tokens_details``."""

    reasoning_tokens: int


class CompactionUsage(Struct, kw_only=True):
    """``usage.compaction``: by how much a compaction shortened the prompt, and its cost.

    ``original_input_tokens`` and ``compacted_input_tokens`` are the numbers of prompt tokens before
    and after the compaction. The other fields are the usage of the request for the summary.
    """

    original_input_tokens: int
    compacted_input_tokens: int
    input_tokens: int
    cached_tokens: int
    output_tokens: int


class ResponseUsage(Struct, kw_only=True):
    """``usage`` of a response."""

    input_tokens: int
    input_tokens_details: PromptDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int
    closed_early: bool  # structured output was ended early to fit the token limit
    moves: int  # number of times the request moved to another replica after its own was lost
    evicted_tokens: int | UnsetType = UNSET  # answer tokens whose KV was evicted (--kv-evict)
    speculation: SpeculationUsage
    cost: float | UnsetType = UNSET  # only with --prices
    cache_explanation: Free | UnsetType = UNSET  # the cause of a cache miss, if requested
    compaction: CompactionUsage | UnsetType = UNSET  # if the conversation was compacted


class ResponseError(Struct, kw_only=True):
    """``error`` of a failed response. ``code`` is one of OpenAI's values."""

    code: str
    message: str
    type: str
    param: str | None = None


class IncompleteDetails(Struct, kw_only=True):
    """``incomplete_details``: why the answer was truncated."""

    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ReasoningSettings(ReasoningOptions, kw_only=True):
    """``reasoning``: the requested effort. Summaries are not supported."""

    summary: str | None = None


class AppliedCacheOptions(Struct, kw_only=True):
    """``prompt_cache_options`` of a response."""

    mode: Literal["implicit", "explicit"]
    ttl: CacheClass
    comparison_response_id: str | None = None


class ResponseBody(Struct, kw_only=True):
    """Answer of /v1/responses. It repeats fields of the request."""

    id: str
    object: Literal["response"] = "response"
    created_at: int = 0
    completed_at: int | None = None
    model: str = ""
    system_fingerprint: str = ""
    status: ResponseStatus = "in_progress"
    background: bool = False
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    output: list[OutputItem] = []
    usage: ResponseUsage | None = None
    stop_reason: int | str | UnsetType = UNSET  # the stop token id or the stop string
    prompt_cache_diagnostics: Free | UnsetType = UNSET
    # copied from the request
    instructions: str | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    metadata: Metadata = {}
    previous_response_id: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: AppliedCacheOptions | UnsetType = UNSET  # only if the request has them
    prompt_cache_retention: str | None = None
    reasoning: ReasoningSettings = field(default_factory=ReasoningSettings)
    safety_identifier: str | None = None
    store: bool = True
    tool_choice: Literal["none", "auto", "required"] | FlatChoice = "auto"
    user: str | None = None
    # effective values of parameters, which may differ from those in the request
    parallel_tool_calls: bool = True
    service_tier: str = "default"
    temperature: float = 1.0
    text: TextOptions = field(default_factory=TextOptions)
    tools: list[FlatTool] = []
    top_logprobs: int = 0
    top_p: float = 1.0
    truncation: str = "disabled"  # "auto", which drops what exceeds the context, is not supported


class CompactedResponse(Struct, kw_only=True):
    """Answer of /v1/responses/compact: the user's messages, followed by a compaction item."""

    id: str
    object: Literal["response.compaction"] = "response.compaction"
    created_at: int
    output: list[Item]
    usage: ResponseUsage


class ItemList(Struct, kw_only=True):
    """Answer of /v1/responses/{id}/input_items. Includes output items of earlier turns."""

    object: Literal["list"] = "list"
    data: list[Item]
    first_id: str | None = None
    last_id: str | None = None
    has_more: bool = False


class Deleted(Struct, kw_only=True):
    """Answer of DELETE /v1/responses/{id}."""

    id: str
    object: Literal["response"] = "response"
    deleted: bool = True


class InputTokens(Struct, kw_only=True):
    """Answer of /v1/responses/input_tokens."""

    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int


# -- events -------------------------------------------------------------------------------------


class Event(Struct, kw_only=True):
    """An event of a stream. The writer sets its sequence number, which counts from 0."""

    sequence_number: int = 0


class ResponseEvent(Event, kw_only=True):
    """An event about the whole response."""

    response: ResponseBody


class ResponseCreated(ResponseEvent, tag="response.created"):
    """The first event of a stream."""


class ResponseInProgress(ResponseEvent, tag="response.in_progress"):
    """The second event of a stream."""


class ResponseCompleted(ResponseEvent, tag="response.completed"):
    """The last event of an answer that the model ended."""


class ResponseIncomplete(ResponseEvent, tag="response.incomplete"):
    """The last event of an answer that a limit truncated."""


class ResponseFailed(ResponseEvent, tag="response.failed"):
    """The last event of an answer that failed."""


class OutputEvent(Event, kw_only=True):
    """An event about an output item."""

    output_index: int


class ItemAdded(OutputEvent, tag="response.output_item.added", kw_only=True):
    """The event that begins an output item."""

    item: OutputItem


class ItemDone(OutputEvent, tag="response.output_item.done", kw_only=True):
    """The event with a complete output item."""

    item: OutputItem


class ItemEvent(OutputEvent, kw_only=True):
    """An event about the content of an output item."""

    item_id: str


class Compacting(ItemEvent, tag="response.compaction.compacting", kw_only=True):
    """The event sent when the model begins the summary of a compaction item."""


class PartEvent(ItemEvent, kw_only=True):
    """An event about the content part of an item, which has only one."""

    content_index: int = 0


class PartAdded(PartEvent, tag="response.content_part.added", kw_only=True):
    """The event that begins a content part."""

    part: ContentPart


class PartDone(PartEvent, tag="response.content_part.done", kw_only=True):
    """The event with a complete content part."""

    part: ContentPart


class OutputTextDelta(PartEvent, tag="response.output_text.delta", kw_only=True):
    """The event with the next text of a message."""

    delta: str
    logprobs: list[TokenInfo]


class OutputTextDone(PartEvent, tag="response.output_text.done", kw_only=True):
    """The event with the whole text of a message."""

    text: str
    logprobs: list[TokenInfo]


class ReasoningTextDelta(PartEvent, tag="response.reasoning_text.delta", kw_only=True):
    """The event with the next text of the reasoning."""

    delta: str


class ReasoningTextDone(PartEvent, tag="response.reasoning_text.done", kw_only=True):
    """The event with the whole reasoning."""

    text: str


class ArgumentsDelta(ItemEvent, tag="response.function_call_arguments.delta", kw_only=True):
    """The event with the next part of the arguments of a function call."""

    delta: str


class ArgumentsDone(ItemEvent, tag="response.function_call_arguments.done", kw_only=True):
    """The event with the whole arguments of a function call."""

    arguments: str
    name: str


class InputDelta(ItemEvent, tag="response.custom_tool_call_input.delta", kw_only=True):
    """The event with the next part of the input of a custom tool call."""

    delta: str


class InputDone(ItemEvent, tag="response.custom_tool_call_input.done", kw_only=True):
    """The event that ends the input of a custom tool call."""

    input: str


ENDINGS: dict[str, type[ResponseEvent]] = {
    "completed": ResponseCompleted,
    "incomplete": ResponseIncomplete,
    "failed": ResponseFailed,
}
"""The last event of a stream by the status of its response."""

StreamEvent = (
    ResponseCreated
    | ResponseInProgress
    | ItemAdded
    | PartAdded
    | ReasoningTextDelta
    | ReasoningTextDone
    | OutputTextDelta
    | OutputTextDone
    | ArgumentsDelta
    | ArgumentsDone
    | InputDelta
    | InputDone
    | PartDone
    | ItemDone
    | Compacting
    | ResponseCompleted
    | ResponseIncomplete
    | ResponseFailed
)
