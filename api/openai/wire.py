"""The answers of the HTTP API as they are written on the wire; /openapi.json describes them so.

Every field has a default: an answer of an older or a newer server is read, too.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct, field


class ErrorParts(Struct, kw_only=True):
    """What went wrong; ``param`` names the field that did."""

    message: str = ""
    type: str | None = None
    param: str | None = None
    code: str | None = None


class ErrorBody(Struct, kw_only=True):
    """The body of every answer with a status of 400 or more."""

    error: ErrorParts


class PromptDetails(Struct, kw_only=True):
    """``usage.prompt_tokens_details``."""

    cached_tokens: int = 0
    cache_write_tokens: int = 0


class CompletionDetails(Struct, kw_only=True):
    """``usage.completion_tokens_details``: of the prediction, those in the answer."""

    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0


class SpeculationUsage(Struct, kw_only=True):
    """``usage.speculation``: what was guessed, and what of it was right."""

    proposed_tokens: int = 0
    accepted_tokens: int = 0
    verify_steps: int = 0
    accepted_by_source: dict[str, int] = field(default_factory=dict)
    proposed_by_source: dict[str, int] = field(default_factory=dict)
    steps_by_accepted: dict[int, int] = field(default_factory=dict)


class UsageBody(Struct, kw_only=True):
    """``usage``."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    total_tokens: int = 0
    prompt_tokens_details: PromptDetails | None = None
    completion_tokens_details: CompletionDetails | None = None
    closed_early: bool = False  # the form had fewer ways to go on, to end within its tokens
    speculation: SpeculationUsage | None = None


class FunctionBody(Struct, kw_only=True):
    """The function of a call; ``arguments`` are JSON text."""

    name: str | None = None
    arguments: str | None = None


class CallBody(Struct, kw_only=True):
    """A call of a tool, or in a chunk what is added to one; ``index`` is there in chunks."""

    id: str | None = None
    type: str | None = None
    index: int = 0
    function: FunctionBody | None = None


class MessageBody(Struct, kw_only=True):
    """A message, or in a chunk what is added to it."""

    role: str | None = None
    content: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[CallBody] | None = None


class ChatChoiceBody(Struct, kw_only=True):
    """One of the n answers."""

    index: int = 0
    message: MessageBody = field(default_factory=MessageBody)
    logprobs: dict[str, Any] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class ChunkChoiceBody(Struct, kw_only=True):
    """What a step adds to one of the n answers."""

    index: int = 0
    delta: MessageBody = field(default_factory=MessageBody)
    logprobs: dict[str, Any] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_sources: list[list[str]] | None = None  # text and drafter of each token, if asked


class TextChoiceBody(Struct, kw_only=True):
    """One of the continuations of a text, or what a step adds to it."""

    index: int = 0
    text: str = ""
    logprobs: dict[str, Any] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class Head(Struct, kw_only=True):
    """What every answer and every chunk begins with."""

    id: str = ""
    object: str = ""
    created: int = 0
    model: str = ""
    system_fingerprint: str | None = None
    usage: UsageBody | None = None


class BranchBody(ChatChoiceBody, kw_only=True):
    """One branch, with what it cost."""

    usage: UsageBody | None = None


class BranchesBody(Head, kw_only=True):
    """Answer of /v1/branches."""

    branches: list[BranchBody] = field(default_factory=list)


class ChatBody(Head, kw_only=True):
    """Answer of /v1/chat/completions."""

    choices: list[ChatChoiceBody] = field(default_factory=list)


class ChunkBody(Head, kw_only=True):
    """One event of a streamed /v1/chat/completions."""

    choices: list[ChunkChoiceBody] = field(default_factory=list)
    error: ErrorParts | None = None  # in place of everything else


class TextBody(Head, kw_only=True):
    """Answer of /v1/completions, and one event of it when it is streamed."""

    choices: list[TextChoiceBody] = field(default_factory=list)
    error: ErrorParts | None = None  # in place of everything else


class Model(Struct, kw_only=True):
    """A model that is served; ``max_model_len`` tokens fit prompt and answer together.

    ``exact``: whether an answer's bits are the same in any batch. ``model_path``: what computes
    its layers, ``own`` or ``transformers``.
    """

    id: str = ""
    object: str = "model"
    created: int = 0
    owned_by: str = ""
    max_model_len: int = 0
    exact: bool = True
    model_path: str = "own"
    type: str = "model"
    display_name: str = ""
    created_at: str = ""
    lifecycle: str = ""
    tool_parser: str = ""  # how the model writes calls: one of `--tool-parser`


class ModelList(Struct, kw_only=True):
    """Answer of GET /v1/models."""

    object: str = "list"
    data: list[Model] = field(default_factory=list)
    has_more: bool = False
    first_id: str | None = None
    last_id: str | None = None


class Tokens(Struct, kw_only=True):
    """Answer of /tokenize."""

    count: int = 0
    max_model_len: int = 0
    tokens: list[int] = field(default_factory=list)
    token_strs: list[str] | None = None


class Detokenized(Struct, kw_only=True):
    """Answer of /detokenize."""

    prompt: str = ""


class Flushed(Struct, kw_only=True):
    """Answer of /cache/flush."""

    flushed_pages: int = 0


class Status(Struct, kw_only=True):
    """Answer of /health and /ready."""

    status: str = ""


class Audit(Struct, kw_only=True, omit_defaults=True):
    """Answer of /debug/audit: what is where, or what is wrong."""

    ok: bool
    pages: dict[str, int] = {}
    requests: dict[str, int] = {}
    violation: str = ""


class Version(Struct, kw_only=True):
    """Answer of /version."""

    version: str = ""
