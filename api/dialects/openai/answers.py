"""Answers of the chat and text completions: the server encodes them, /openapi.json describes them.

An `UNSET` field is left out; None is null, as clients expect.
"""

from __future__ import annotations

from typing import Literal

from msgspec import UNSET, Struct, UnsetType

from ...serving.answers import Free, SpeculationUsage

Channel = Literal["reasoning", "content", "tool"]
TokenPiece = tuple[str, str | None, Channel]
"""The text of a token, its drafter and the part of the answer that it belongs to."""


class PromptDetails(Struct, kw_only=True):
    """``usage.prompt_tokens_details``."""

    cached_tokens: int
    loaded_tokens: int  # of the cached ones: from a tier beyond the KV pool
    cache_write_tokens: int
    image_tokens: int | UnsetType = UNSET  # of a prompt with images
    spliced_tokens: int  # those of earlier answers, not encoded from text
    normalized: list[str] | UnsetType = UNSET  # rules of --normalize that changed the prompt


class CompletionDetails(Struct, kw_only=True):
    """``usage.completion_tokens_details``: of the prediction, those in the answer."""

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class UsageBody(Struct, kw_only=True):
    """``usage``."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails
    closed_early: bool  # structured output was closed to end within its tokens
    moves: int  # times that it went on in another replica, because its own was lost
    evicted_tokens: int | UnsetType = UNSET  # of the answer: their KV was given up (--kv-evict)
    speculation: SpeculationUsage
    cache_explanation: Free | UnsetType = UNSET  # if asked for and known
    cache_explanations: list[Free | None] | UnsetType = UNSET  # of several prompts


class SpeculationMetrics(Struct, kw_only=True):
    """``metrics.speculative_decoding``, as vLLM has it: of the steps that had a draft.

    ``num_spec_tokens``: the depth where it is fixed, else the most that a step accepted.
    """

    mean_acceptance_length: float  # tokens per step: accepted ones, and the target's own
    draft_acceptance_rate: float
    acceptance_histogram: list[int]  # steps by how many draft tokens each accepted
    num_spec_steps: int
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    num_spec_tokens: int


class MetricsBody(Struct, kw_only=True):
    """``metrics``."""

    speculative_decoding: SpeculationMetrics


class TokenInfoTop(Struct, kw_only=True):
    """A token, its log-probability, and its bytes: it may be a part of a character."""

    token: str
    logprob: float
    bytes: list[int]


class TokenInfo(TokenInfoTop, kw_only=True):
    """A token of an answer, and the likeliest ones at its place."""

    top_logprobs: list[TokenInfoTop] = []


class ChatLogprobs(Struct, kw_only=True):
    """``logprobs`` of a chat choice: one entry per token."""

    content: list[TokenInfo]
    refusal: str | None = None


class TextLogprobs(Struct, kw_only=True):
    """``logprobs`` of a text completion: lists with an entry per token.

    The first token of an echoed prompt has no log-probability.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class FunctionBody(Struct, kw_only=True):
    """The function of a call; ``arguments`` is JSON text, in a chunk a part of it."""

    name: str | UnsetType = UNSET
    arguments: str = ""


class CallBody(Struct, kw_only=True):
    """A tool call, or in a chunk an addition to one; chunks have an ``index``.

    Clients concatenate all fields, so only the first chunk has id, type and name.
    """

    index: int | UnsetType = UNSET
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    function: FunctionBody


class MessageBody(Struct, kw_only=True):
    """A message."""

    role: str = "assistant"
    content: str | None
    refusal: str | None = None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[CallBody] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET  # if asked for: sent back, they render the message


class DeltaBody(Struct, kw_only=True):
    """The addition of a chunk to a message."""

    role: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    tool_calls: list[CallBody] | UnsetType = UNSET  # never an empty list: clients count on it
    token_ids: list[int] | UnsetType = UNSET  # of the whole message, at its end, if asked for


class ChatChoiceBody(Struct, kw_only=True):
    """One of the n answers."""

    index: int
    message: MessageBody
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET  # all that were generated, if asked for


class ChunkChoiceBody(Struct, kw_only=True):
    """The addition of a step to one of the n answers."""

    index: int
    delta: DeltaBody
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType = UNSET
    token_sources: list[TokenPiece] | UnsetType = UNSET  # of each token, if asked for
    token_ids: list[int] | UnsetType = UNSET  # generated in this step, if asked for


class TextChoiceBody(Struct, kw_only=True):
    """One completion of a text, or the addition of a step to it."""

    index: int
    text: str
    logprobs: TextLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET  # generated, if asked for
    prompt_token_ids: list[int] | UnsetType = UNSET  # if asked for; when streamed once


class AnswerHead(Struct, kw_only=True):
    """The fields that every answer and every chunk begins with."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str


class ChatBody(AnswerHead, kw_only=True):
    """Answer of /v1/chat/completions."""

    choices: list[ChatChoiceBody]
    usage: UsageBody
    metrics: MetricsBody | UnsetType = UNSET  # of one answer that had drafts
    prompt_token_ids: list[int] | UnsetType = UNSET  # if asked for
    kv_transfer_params: Free | UnsetType = UNSET  # of a prompt that another server goes on with


class ChunkBody(AnswerHead, kw_only=True):
    """One event of a streamed /v1/chat/completions; or an `ErrorBody` instead."""

    choices: list[ChunkChoiceBody]
    usage: UsageBody | UnsetType | None = UNSET
    metrics: MetricsBody | UnsetType = UNSET  # beside the usage at the end
    prompt_token_ids: list[int] | UnsetType = UNSET  # in the first, if asked for


class TextBody(AnswerHead, kw_only=True):
    """Answer of /v1/completions, and one event of it when it is streamed."""

    choices: list[TextChoiceBody]
    usage: UsageBody | UnsetType | None = UNSET
    metrics: MetricsBody | UnsetType = UNSET  # of one answer that had drafts; streamed at the end
    kv_transfer_params: Free | UnsetType = UNSET  # of a prompt that another server goes on with
