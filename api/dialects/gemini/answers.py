"""Answers and errors of Gemini's routes."""

from __future__ import annotations

from typing import Any

from msgspec import UNSET, Struct, UnsetType

from ...serving.answers import SpeculationUsage
from ...serving.dialect import ErrorForm
from ...serving.errors import ApiError
from ...serving.sse import event

Unset = UnsetType
STATUSES = {
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    429: "RESOURCE_EXHAUSTED",
    503: "UNAVAILABLE",
}
METHODS = ("generateContent", "streamGenerateContent", "countTokens")
BAD_REQUEST = "type.googleapis.com/google.rpc.BadRequest"


class CallPart(Struct, kw_only=True, rename="camel"):
    """A function call by the model."""

    id: str
    name: str
    args: dict[str, Any]


class AnsweredPart(Struct, kw_only=True, rename="camel"):
    """A part of an answer: text, reasoning or a function call."""

    text: str | Unset = UNSET
    thought: bool | Unset = UNSET
    function_call: CallPart | Unset = UNSET


class AnsweredContent(Struct, kw_only=True, rename="camel"):
    """The content of a candidate; in an event, only its new parts."""

    parts: list[AnsweredPart] = []
    role: str = "model"


class ChosenToken(Struct, kw_only=True, rename="camel"):
    """A token with its log-probability."""

    token: str
    token_id: int
    log_probability: float


class TopTokens(Struct, kw_only=True, rename="camel"):
    """The most likely tokens at one position."""

    candidates: list[ChosenToken]


class LogprobsResult(Struct, kw_only=True, rename="camel"):
    """Log-probabilities of the tokens of a candidate."""

    chosen_candidates: list[ChosenToken]
    top_candidates: list[TopTokens]


class Candidate(Struct, kw_only=True, rename="camel"):
    """One of the answers to a request, or the next part of one in an event."""

    content: AnsweredContent
    index: int = 0
    finish_reason: str | Unset = UNSET
    logprobs_result: LogprobsResult | Unset = UNSET


class ModalityTokens(Struct, kw_only=True, rename="camel"):
    """Tokens of one kind: TEXT or IMAGE."""

    modality: str
    token_count: int


class UsageMetadata(Struct, kw_only=True, rename="camel"):
    """Token counts of an answer. ``speculation`` and ``cost`` are extensions."""

    prompt_token_count: int
    candidates_token_count: int
    total_token_count: int
    cached_content_token_count: int
    prompt_tokens_details: list[ModalityTokens]
    speculation: SpeculationUsage | Unset = UNSET
    cost: float | Unset = UNSET  # only with --prices


class GenerateAnswer(Struct, kw_only=True, rename="camel"):
    """The body of an answer, or one event of a stream."""

    candidates: list[Candidate]
    usage_metadata: UsageMetadata | Unset = UNSET
    model_version: str
    response_id: str


class TokensCounted(Struct, kw_only=True, rename="camel"):
    """Answer of countTokens."""

    total_tokens: int


class GeminiModel(Struct, kw_only=True, rename="camel"):
    """A served model."""

    name: str
    display_name: str
    version: str = "001"
    input_token_limit: int
    output_token_limit: int
    supported_generation_methods: tuple[str, ...] = METHODS


class GeminiModels(Struct, kw_only=True, rename="camel"):
    """Answer of GET /v1beta/models."""

    models: list[GeminiModel]


class FieldViolation(Struct, kw_only=True, rename="camel"):
    """An invalid field of a body, and the reason."""

    field: str
    description: str


class ErrorDetail(Struct, kw_only=True, rename={"kind": "@type", "violations": "fieldViolations"}):
    """The invalid fields of a body."""

    kind: str = BAD_REQUEST
    violations: list[FieldViolation]


class GeminiErrorParts(Struct, kw_only=True, rename="camel"):
    """The fields of an error."""

    code: int
    message: str
    status: str
    details: list[ErrorDetail] | Unset = UNSET


class GeminiError(Struct, kw_only=True):
    """The body of an error."""

    error: GeminiErrorParts


def error_body(error: ApiError, _request_id: str | None) -> GeminiError:
    """Return Google's error object. Its status follows from the HTTP status."""
    status = STATUSES.get(error.status, "INTERNAL" if error.status >= 500 else "INVALID_ARGUMENT")
    parts = GeminiErrorParts(code=error.status, message=str(error), status=status)
    if error.param is not None:
        violation = FieldViolation(field=error.param, description=str(error))
        parts.details = [ErrorDetail(violations=[violation])]
    return GeminiError(error=parts)


def error_event(error: ApiError, request_id: str | None) -> bytes:
    """Return the event for an error inside a stream."""
    return event(error_body(error, request_id))


ERRORS = ErrorForm(struct=GeminiError, body=error_body, event=error_event)
