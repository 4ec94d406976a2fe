"""Answers of chat and text completions, for encoding and for /openapi.json.

An `UNSET` field is left out; None is encoded as null, as clients expect.
"""

from __future__ import annotations

from typing import Literal

from msgspec import UNSET, Struct, UnsetType

from ...receipts.receipt import Receipt
from ...serving.answers import Free, SpeculationUsage
from ...serving.caching.fields import CacheWriteDetails

Channel = Literal["reasoning", "content", "tool"]
TokenPiece = tuple[str, str | None, Channel]
"""A token's text, its draft source, and the part of the answer that it belongs to."""


class PromptDetails(Struct, kw_only=True):
    """``usage.prompt_tokens_details``."""

    cached_tokens: int
    loaded_tokens: int  # cached tokens that were loaded from a tier outside the KV pool
    cache_write_tokens: int
    # only for requests with options of the prompt cache or breakpoints
    cache_write_tokens_details: CacheWriteDetails | UnsetType = UNSET
    image_tokens: int | UnsetType = UNSET  # only for prompts with images
    spliced_tokens: int  # tokens that are original ids of earlier answers, not encoded text
    normalized: list[str] | UnsetType = UNSET  # --normalize rules that changed the prompt


class CompletionDetails(Struct, kw_only=True):
    """``usage.completion_tokens_details``: how much of the prediction is in the answer."""

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class UsageBody(Struct, kw_only=True):
    """``usage``."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails
    closed_early: bool  # structured output was closed early to fit into the token limit
    moves: int  # number of times the request moved to another replica after its own was lost
    # tokens of the answer whose KV was evicted (--kv-evict)
    evicted_tokens: int | UnsetType = UNSET
    speculation: SpeculationUsage
    cost: float | UnsetType = UNSET  # only with --prices
    cache_explanation: Free | UnsetType = UNSET  # the cause of a cache miss, if requested
    # one explanation per prompt, if a request has several
    cache_explanations: list[Free | None] | UnsetType = UNSET


class SpeculationMetrics(Struct, kw_only=True):
    """``metrics.speculative_decoding`` in vLLM's form, over the steps with a draft.

    ``num_spec_tokens``: the draft depth if it is fixed, else the most tokens accepted in a step.
    """

    mean_acceptance_length: float  # accepted tokens per step, plus the target's own token
    draft_acceptance_rate: float
    acceptance_histogram: list[int]  # number of steps by number of accepted draft tokens
    num_spec_steps: int
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    num_spec_tokens: int


class MetricsBody(Struct, kw_only=True):
    """``metrics``."""

    speculative_decoding: SpeculationMetrics


class TokenInfoTop(Struct, kw_only=True):
    """A token with its log-probability and its bytes, which may be part of a character."""

    token: str
    logprob: float
    bytes: list[int]


class TokenInfo(TokenInfoTop, kw_only=True):
    """A token of an answer, and the most likely tokens at its position."""

    top_logprobs: list[TokenInfoTop] = []


class ChatLogprobs(Struct, kw_only=True):
    """``logprobs`` of a chat choice, one entry per token."""

    content: list[TokenInfo]
    refusal: str | None = None


class TextLogprobs(Struct, kw_only=True):
    """``logprobs`` of a text completion: lists with one entry per token.

    The first token of an echoed prompt has no log-probability.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class FunctionBody(Struct, kw_only=True):
    """The function of a call. ``arguments`` is JSON text; a chunk has a part of it."""

    name: str | UnsetType = UNSET
    arguments: str = ""


class CustomBody(Struct, kw_only=True):
    """The custom tool of a call. ``input`` is its text; a chunk has a part of it."""

    name: str | UnsetType = UNSET
    input: str = ""


class CallBody(Struct, kw_only=True):
    """A tool call; in a chunk, the next part of one, with an ``index``.

    Clients concatenate all fields, so only the first chunk of a call has id, type and name.
    """

    index: int | UnsetType = UNSET
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    function: FunctionBody | UnsetType = UNSET
    custom: CustomBody | UnsetType = UNSET


class MessageBody(Struct, kw_only=True):
    """The message of an answer."""

    role: str = "assistant"
    content: str | None
    refusal: str | None = None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[CallBody] | UnsetType = UNSET
    # only sent if requested: token ids that the client sends back with the message later
    token_ids: list[int] | UnsetType = UNSET


class DeltaBody(Struct, kw_only=True):
    """The text, reasoning and calls that a chunk adds to a message."""

    role: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    # never empty, since clients test whether it is present
    tool_calls: list[CallBody] | UnsetType = UNSET
    # ids of the whole message in its last delta, only sent if requested
    token_ids: list[int] | UnsetType = UNSET


class ChatChoiceBody(Struct, kw_only=True):
    """One of the ``n`` answers to a conversation."""

    index: int
    message: MessageBody
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET  # all generated tokens, only sent if requested


class ChunkChoiceBody(Struct, kw_only=True):
    """The part of one of the ``n`` answers that a chunk adds."""

    index: int
    delta: DeltaBody
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType = UNSET
    token_sources: list[TokenPiece] | UnsetType = UNSET  # if requested: the source of each token
    token_ids: list[int] | UnsetType = UNSET  # tokens of this step, only sent if requested


class TextChoiceBody(Struct, kw_only=True):
    """One completion of a text; in an event, only the new part of it."""

    index: int
    text: str
    logprobs: TextLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET  # generated tokens, only sent if requested
    prompt_token_ids: list[int] | UnsetType = UNSET  # only sent if requested, once in a stream


class AnswerHead(Struct, kw_only=True):
    """Fields that every answer and every chunk have."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str


class ChatBody(AnswerHead, kw_only=True):
    """Answer of /v1/chat/completions."""

    choices: list[ChatChoiceBody]
    usage: UsageBody
    metrics: MetricsBody | UnsetType = UNSET  # only if a single answer was requested, with drafts
    receipts: list[Receipt] | UnsetType = UNSET  # only with --receipts; last in a stream
    prompt_token_ids: list[int] | UnsetType = UNSET  # token ids of the prompt, only if requested
    kv_transfer_params: Free | UnsetType = UNSET  # only if another server continues the prompt


class ChunkBody(AnswerHead, kw_only=True):
    """One event of a streamed /v1/chat/completions. An `ErrorBody` may replace it."""

    choices: list[ChunkChoiceBody]
    usage: UsageBody | UnsetType | None = UNSET
    metrics: MetricsBody | UnsetType = UNSET  # only in the chunk with the final usage
    receipts: list[Receipt] | UnsetType = UNSET  # only with --receipts; last in a stream
    prompt_token_ids: list[int] | UnsetType = UNSET  # only in the first chunk, if requested


class TextBody(AnswerHead, kw_only=True):
    """Answer of /v1/completions, or one event of a streamed answer."""

    choices: list[TextChoiceBody]
    usage: UsageBody | UnsetType | None = UNSET
    # only if a single answer was requested, with drafts; in the last event of a stream
    metrics: MetricsBody | UnsetType = UNSET
    receipts: list[Receipt] | UnsetType = UNSET  # only with --receipts; last in a stream
    kv_transfer_params: Free | UnsetType = UNSET  # only if another server continues the prompt
