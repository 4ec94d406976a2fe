"""Bodies of the routes that verify answers: the body of the request, and its answer."""

from __future__ import annotations

from typing import Literal

from msgspec import UNSET, Struct, UnsetType

from ...serving.sampling import TokenIds
from ...types.verdict import Agreement, Difference
from ..openai.bodies import ChatRequest, CompletionRequest

FinishReason = Literal["stop", "length", "tool_calls", "abort"]


class GivenAnswer(Struct, kw_only=True, forbid_unknown_fields=True):
    """``answer``: either the token ids or the text of a choice, and its finish reason.

    In a conversation, ``text`` is the content of the message.
    """

    token_ids: TokenIds | None = None
    text: str | None = None
    finish_reason: FinishReason | None = None


class ChatVerifyRequest(ChatRequest, kw_only=True):
    """Body of /v1/chat/completions/verify. ``index``: number of the choice, if n is above 1.

    ``checked_from``: number of the answer's first tokens that are not compared.
    """

    answer: GivenAnswer
    index: int = 0
    checked_from: int = 0


class CompletionVerifyRequest(CompletionRequest, kw_only=True):
    """Body of /v1/completions/verify. ``index``: number of the choice, counted over all prompts.

    ``checked_from``: number of the answer's first tokens that are not compared.
    """

    answer: GivenAnswer
    index: int = 0
    checked_from: int = 0


class VerifyPromptDetails(Struct, kw_only=True):
    """``prompt_tokens_details``."""

    cached_tokens: int


class VerifyUsage(Struct, kw_only=True):
    """``usage``: tokens of the answer count as prompt tokens, since none is generated.

    ``verify_steps``: number of the steps that compared tokens.
    """

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: VerifyPromptDetails
    verify_steps: int
    cost: float | UnsetType = UNSET  # only with --prices


class VerdictBody(Struct, kw_only=True):
    """A verdict: whether the model gives the answer. `Verdict` describes the fields."""

    id: str
    object: Literal["verification"] = "verification"
    model: str
    verified: bool
    exact: bool
    checked_tokens: int
    checked_from: int
    different_tokens: int
    finish_reason: str | None
    first_difference: Difference | None
    agreement: Agreement
    token_ids: list[int] | UnsetType = UNSET  # the compared tokens, only sent if requested
    usage: VerifyUsage
