"""The answers of the HTTP API: the server encodes them, /openapi.json describes them, tests decode
them.

An `UNSET` field is left out; None is null, as clients expect.
"""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

Free = dict[str, Any]
Channel = Literal["reasoning", "content", "tool"]
TokenPiece = tuple[str, str | None, Channel]
"""The text of a token, its drafter and the part of the answer that it belongs to."""


class ErrorParts(Struct, kw_only=True):
    """The error; ``param`` names the field that is wrong."""

    message: str
    type: str | None = None
    param: str | None = None
    code: str | None = None


class ErrorBody(Struct, kw_only=True):
    """The body of every answer with a status of 400 or more."""

    error: ErrorParts


class PromptDetails(Struct, kw_only=True):
    """``usage.prompt_tokens_details``."""

    cached_tokens: int
    cache_write_tokens: int


class CompletionDetails(Struct, kw_only=True):
    """``usage.completion_tokens_details``: of the prediction, those in the answer."""

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class SpeculationUsage(Struct, kw_only=True):
    """``usage.speculation``: draft tokens proposed and accepted."""

    proposed_tokens: int
    accepted_tokens: int
    verify_steps: int
    tree_steps: int
    accepted_by_source: dict[str, int]
    proposed_by_source: dict[str, int]
    steps_by_accepted: dict[int, int]


class UsageBody(Struct, kw_only=True):
    """``usage``."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails
    closed_early: bool  # structured output was closed to end within its tokens
    speculation: SpeculationUsage
    cache_explanation: Free | UnsetType = UNSET  # if asked for and known
    cache_explanations: list[Free | None] | UnsetType = UNSET  # of several prompts


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


class DeltaBody(Struct, kw_only=True):
    """The addition of a chunk to a message."""

    role: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    tool_calls: list[CallBody] | UnsetType = UNSET  # never an empty list: clients count on it


class ChatChoiceBody(Struct, kw_only=True):
    """One of the n answers."""

    index: int
    message: MessageBody
    logprobs: Free | None = None
    finish_reason: str | None
    stop_reason: int | str | None = None


class ChunkChoiceBody(Struct, kw_only=True):
    """The addition of a step to one of the n answers."""

    index: int
    delta: DeltaBody
    logprobs: Free | None = None
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType = UNSET
    token_sources: list[TokenPiece] | UnsetType = UNSET  # of each token, if asked for


class TextChoiceBody(Struct, kw_only=True):
    """One completion of a text, or the addition of a step to it."""

    index: int
    text: str
    logprobs: Free | None = None
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType | None = UNSET


class BranchBody(ChatChoiceBody, kw_only=True):
    """One branch with its usage."""

    usage: UsageBody


class AnswerHead(Struct, kw_only=True):
    """The fields that every answer and every chunk begins with."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str


class BranchesBody(AnswerHead, kw_only=True):
    """Answer of /v1/branches."""

    usage: UsageBody
    branches: list[BranchBody]


class ChatBody(AnswerHead, kw_only=True):
    """Answer of /v1/chat/completions."""

    choices: list[ChatChoiceBody]
    usage: UsageBody


class ChunkBody(AnswerHead, kw_only=True):
    """One event of a streamed /v1/chat/completions; or an `ErrorBody` instead."""

    choices: list[ChunkChoiceBody]
    usage: UsageBody | UnsetType | None = UNSET


class TextBody(AnswerHead, kw_only=True):
    """Answer of /v1/completions, and one event of it when it is streamed."""

    choices: list[TextChoiceBody]
    usage: UsageBody | UnsetType | None = UNSET


class SamplingValues(Struct, kw_only=True):
    """``default_sampling_params``: values of a request that leaves these fields out."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float


class Model(Struct, kw_only=True):
    """A served model; ``max_model_len``: limit on prompt and answer together, in tokens.

    ``exact``: whether logits have the same bits in any batch. ``model_path``: the implementation
    of the layers, ``own`` or ``transformers``.
    """

    id: str
    object: str = "model"
    created: int
    owned_by: str = "foretoken"
    max_model_len: int
    exact: bool
    model_path: str
    type: str = "model"
    display_name: str
    created_at: str
    lifecycle: str = "active"
    tool_parser: str  # how the model writes calls: one of `--tool-parser`
    default_sampling_params: SamplingValues


class ModelList(Struct, kw_only=True):
    """Answer of GET /v1/models."""

    object: str = "list"
    data: list[Model]
    has_more: bool = False
    first_id: str | None = None
    last_id: str | None = None


class Tokens(Struct, kw_only=True):
    """Answer of /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Detokenized(Struct, kw_only=True):
    """Answer of /detokenize."""

    prompt: str


class Flushed(Struct, kw_only=True):
    """Answer of /cache/flush."""

    flushed_pages: int


class Status(Struct, kw_only=True):
    """Answer of /health and /ready."""

    status: str


class Audit(Struct, kw_only=True, omit_defaults=True):
    """Answer of /debug/audit: owners of all KV pages, and the violated rule, if any."""

    ok: bool
    pages: dict[str, int] = {}
    requests: dict[str, int] = {}
    violation: str = ""


class ServerInfo(Struct, kw_only=True):
    """Answer of /server_info: the model, its sampling, and the settings in force.

    ``settings``: options of the engine, those left open as they were chosen, without paths of the
    server's machine. ``limits``: of connections and requests.
    """

    version: str
    model: str
    model_path: str
    max_model_len: int
    exact: bool
    default_sampling_params: SamplingValues
    settings: Free
    limits: Free


class Version(Struct, kw_only=True):
    """Answer of /version."""

    version: str
