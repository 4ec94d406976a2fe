"""Forms: parameters, tokens, usage and errors as messages between front and replica carry them.

A form has the fields of its class. ``x_form`` makes one of an object, ``x_of`` makes an equal
object of a form. A form is decoded strictly: a field of another type or name is refused.
"""

from __future__ import annotations

import json
import sys
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from ....core.errors import (
    DeadlineExceeded,
    EngineDead,
    ForetokenError,
    InvalidRequest,
    ModelLoadError,
    PromptTooLong,
    QueueFull,
)
from ....core.interface.output import TokenLogprob
from ....core.interface.request import CacheOptions, Delta, FinishReason, Pin, Usage
from ....core.model.pooling import PoolingSpec
from ....core.validation import MAX_INT
from ....radix_cache import Eviction
from ...serving.errors import INTERNAL, ApiError
from ...types.sampling_params import SamplingDefaults, SamplingParams

TokenId = Annotated[int, Meta(ge=0, le=MAX_INT)]
Count = Annotated[int, Meta(ge=0)]
Seconds = Annotated[float, Meta(ge=-1e12, le=1e12)]  # finite: neither bound takes a nan


class WireError(ForetokenError):
    """Bytes that are no message of this protocol, or a message that means nothing."""


@contextmanager
def meaningful(what: str) -> Iterator[None]:
    """Turn the refusal of a value into a `WireError`."""
    try:
        yield
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise WireError(f"{what}: {error}") from None


# -- token ids -------------------------------------------------------------------------------------


def ids_form(token_ids: Sequence[int]) -> bytes:
    """Token ids as integers of 64 bits, the lowest byte first."""
    items = array("q", token_ids)
    if sys.byteorder == "big":
        items.byteswap()
    return items.tobytes()


def ids_of(data: bytes) -> array[int]:
    """The token ids of `ids_form`. Raises `WireError`."""
    items = array("q")
    with meaningful("token ids"):
        items.frombytes(data)
    if sys.byteorder == "big":
        items.byteswap()
    return items


# -- sampling parameters ---------------------------------------------------------------------------


class JsonObject(Struct, frozen=True, forbid_unknown_fields=True):
    """A JSON schema that was given as an object, as its text: its numbers may have any size."""

    text: str


class ParamsForm(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`SamplingParams`, without the fields that have their default value."""

    temperature: float | UnsetType = UNSET
    top_p: float | UnsetType = UNSET
    top_k: int | UnsetType = UNSET
    min_p: float | UnsetType = UNSET
    max_tokens: int | UnsetType | None = UNSET
    min_tokens: int | UnsetType = UNSET
    stop_token_ids: list[int] | UnsetType = UNSET
    logprobs: int | UnsetType | None = UNSET
    prompt_logprobs: int | UnsetType | None = UNSET
    presence_penalty: float | UnsetType = UNSET
    frequency_penalty: float | UnsetType = UNSET
    repetition_penalty: float | UnsetType = UNSET
    logit_bias: dict[int, float] | UnsetType | None = UNSET
    allowed_token_ids: list[int] | UnsetType | None = UNSET
    kv_budget: int | UnsetType | None = UNSET
    prompt_only: bool | UnsetType = UNSET
    n: int | UnsetType = UNSET
    stop: list[str] | UnsetType = UNSET
    ignore_eos: bool | UnsetType = UNSET
    seed: int | UnsetType | None = UNSET
    bad_words: list[str] | UnsetType = UNSET
    json_schema: JsonObject | str | UnsetType | None = UNSET
    regex: str | UnsetType | None = UNSET
    grammar: str | UnsetType | None = UNSET
    choice: list[str] | UnsetType | None = UNSET
    close_early: bool | UnsetType = UNSET
    prediction: str | list[int] | UnsetType | None = UNSET
    speculation: Literal["auto", "off"] | int | UnsetType | None = UNSET
    cache_salt: str | UnsetType | None = UNSET
    lora: str | UnsetType | None = UNSET
    priority: int | UnsetType = UNSET
    deadline: float | UnsetType | None = UNSET


_DEFAULTS: Mapping[str, object] = {each.name: each.default for each in fields(SamplingParams)}


def params_form(params: SamplingParams) -> ParamsForm:
    """The parameters that were given: a default that marks itself as left out stays left out."""
    values = {name: getattr(params, name) for name in ParamsForm.__struct_fields__}
    given: dict[str, Any] = {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in values.items()
        if value is not _DEFAULTS[name]
    }
    if isinstance(schema := given.get("json_schema"), Mapping):
        with meaningful("json_schema"):
            given["json_schema"] = JsonObject(json.dumps(dict(schema)))
    return ParamsForm(**given)


def params_of(form: ParamsForm) -> SamplingParams:
    """Raises `WireError` for what `SamplingParams` refuses."""
    values = {name: getattr(form, name) for name in ParamsForm.__struct_fields__}
    given: dict[str, Any] = {name: value for name, value in values.items() if value is not UNSET}
    with meaningful("sampling parameters"):
        if isinstance(schema := given.get("json_schema"), JsonObject):
            given["json_schema"] = json.loads(schema.text)
        return SamplingParams(**given)


class DefaultsForm(
    Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """`SamplingDefaults`."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    origin: str = ""


def defaults_form(defaults: SamplingDefaults) -> DefaultsForm:
    """The values that a model recommends."""
    return DefaultsForm(**defaults.given, origin=defaults.origin)


def defaults_of(form: DefaultsForm) -> SamplingDefaults:
    """Raises `WireError` for a value that no request may have."""
    with meaningful("default sampling parameters"):
        return SamplingDefaults(**_values(form))


class PoolingForm(
    Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """`PoolingSpec`."""

    dimensions: Count = 0
    embeds: bool = False
    cuts: tuple[Count, ...] | None = ()
    score_ids: tuple[TokenId, TokenId] | None = None


def pooling_form(spec: PoolingSpec) -> PoolingForm:
    """The uses of a model's last row."""
    return PoolingForm(**{each.name: getattr(spec, each.name) for each in fields(spec)})


def pooling_of(form: PoolingForm) -> PoolingSpec:
    """The uses of a model's last row."""
    return PoolingSpec(**_values(form))


# -- the cache -------------------------------------------------------------------------------------


class CacheForm(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """`CacheOptions`; a pin is its tokens and its seconds."""

    read: bool = True
    write: bool = True
    pins: list[tuple[int, float]] = []
    session: str | None = None


def cache_form(options: CacheOptions) -> CacheForm:
    """The options of a request."""
    pins = [(pin.num_tokens, pin.ttl) for pin in options.pins]
    return CacheForm(read=options.read, write=options.write, pins=pins, session=options.session)


def cache_of(form: CacheForm) -> CacheOptions:
    """Raises `WireError` for what `Pin` refuses."""
    with meaningful("cache options"):
        pins = tuple(Pin(num_tokens, ttl) for num_tokens, ttl in form.pins)
    return CacheOptions(read=form.read, write=form.write, pins=pins, session=form.session)


# -- errors ----------------------------------------------------------------------------------------


class _ErrorForm(
    Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True,
    tag_field="error",
):  # fmt: skip
    message: str


class PlainErrorForm(_ErrorForm, tag="foretoken", frozen=True, kw_only=True):
    """`ForetokenError`, and whatever has no form of its own."""


class InvalidRequestForm(_ErrorForm, tag="invalid_request", frozen=True, kw_only=True):
    """`InvalidRequest`."""

    param: str | None = None


class PromptTooLongForm(
    Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="error",
    tag="prompt_too_long",
):  # fmt: skip
    """`PromptTooLong`, which makes its message of its numbers."""

    num_tokens: int
    limit: int
    context: int
    param: str


class QueueFullForm(_ErrorForm, tag="queue_full", frozen=True, kw_only=True):
    """`QueueFull`."""

    retry_after: Seconds


class DeadlineExceededForm(_ErrorForm, tag="deadline_exceeded", frozen=True, kw_only=True):
    """`DeadlineExceeded`."""

    retry_after: Seconds


class EngineDeadForm(_ErrorForm, tag="engine_dead", frozen=True, kw_only=True):
    """`EngineDead`."""


class ModelLoadErrorForm(_ErrorForm, tag="model_load", frozen=True, kw_only=True):
    """`ModelLoadError`, and the errors below it."""


class ApiErrorForm(_ErrorForm, tag="api", frozen=True, kw_only=True):
    """`ApiError`."""

    status: Annotated[int, Meta(ge=100, le=599)]
    kind: str
    param: str | None = None
    code: str | None = None
    headers: dict[str, str] | None = None


EngineErrorForm = (
    PlainErrorForm
    | InvalidRequestForm
    | PromptTooLongForm
    | QueueFullForm
    | DeadlineExceededForm
    | EngineDeadForm
    | ModelLoadErrorForm
)
ErrorForm = EngineErrorForm | ApiErrorForm


def engine_error_form(error: BaseException) -> EngineErrorForm:
    """The form of an error; one that was not raised on purpose shows nothing of its text."""
    message = str(error)
    match error:
        case PromptTooLong():
            return PromptTooLongForm(
                num_tokens=error.num_tokens,
                limit=error.limit,
                context=error.context,
                param=error.param or "prompt",
            )
        case InvalidRequest():
            return InvalidRequestForm(message=message, param=error.param)
        case QueueFull():
            return QueueFullForm(message=message, retry_after=error.retry_after)
        case DeadlineExceeded():
            return DeadlineExceededForm(message=message, retry_after=error.retry_after)
        case EngineDead():
            return EngineDeadForm(message=message)
        case ModelLoadError():
            return ModelLoadErrorForm(message=message)
        case ForetokenError():
            return PlainErrorForm(message=message)
    return PlainErrorForm(message=INTERNAL)


def engine_error_of(form: EngineErrorForm) -> ForetokenError:
    """An error of the same class, message and fields."""
    match form:
        case PromptTooLongForm():
            return PromptTooLong(
                form.num_tokens, form.limit, param=form.param, context=form.context
            )
        case InvalidRequestForm():
            return InvalidRequest(form.message, param=form.param)
        case QueueFullForm():
            return QueueFull(form.message, retry_after=form.retry_after)
        case DeadlineExceededForm():
            return DeadlineExceeded(form.message, retry_after=form.retry_after)
        case EngineDeadForm():
            return EngineDead(form.message)
        case ModelLoadErrorForm():
            return ModelLoadError(form.message)
        case PlainErrorForm():
            return ForetokenError(form.message)


def error_form(error: BaseException) -> ErrorForm:
    """The form of an engine's error, or of one that is an HTTP answer already."""
    if not isinstance(error, ApiError):
        return engine_error_form(error)
    return ApiErrorForm(
        message=str(error),
        status=error.status,
        kind=error.kind,
        param=error.param,
        code=error.code,
        headers=error.headers,
    )


def error_of(form: ErrorForm) -> ForetokenError | ApiError:
    """An error of the same class, message and fields."""
    if not isinstance(form, ApiErrorForm):
        return engine_error_of(form)
    return ApiError(
        form.status,
        form.message,
        kind=form.kind,
        param=form.param,
        code=form.code,
        headers=form.headers,
    )


# -- tokens and usage ------------------------------------------------------------------------------

LogprobForm = tuple[TokenId, float, list[tuple[TokenId, float]]]
"""`TokenLogprob`: the token, its log-probability, and the alternatives, best first."""


class DeltaForm(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """`Delta` and the request that it belongs to. A list of values without names: it is short."""

    request_id: str
    token_ids: list[TokenId]
    logprobs: list[LogprobForm]
    prompt_logprobs: list[LogprobForm]
    num_proposed: Count
    proposed_sources: list[str]
    accepted_sources: list[str]
    token_sources: list[str]
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    pooled: bytes | None
    error: EngineErrorForm | None


def delta_form(request_id: str, delta: Delta) -> DeltaForm:
    """The tokens of one step for one request."""
    return DeltaForm(
        request_id,
        delta.token_ids,
        _logprob_forms(delta.logprobs),
        _logprob_forms(delta.prompt_logprobs),
        delta.num_proposed,
        delta.proposed_sources,
        delta.accepted_sources,
        delta.token_sources,
        delta.finish_reason,
        delta.stop_reason,
        None if delta.pooled is None else _number_bytes(delta.pooled),
        None if delta.error is None else engine_error_form(delta.error),
    )


def delta_of(form: DeltaForm) -> Delta:
    """The delta, which has no request's id."""
    return Delta(
        token_ids=form.token_ids,
        logprobs=_logprobs_of(form.logprobs),
        prompt_logprobs=_logprobs_of(form.prompt_logprobs),
        num_proposed=form.num_proposed,
        proposed_sources=form.proposed_sources,
        accepted_sources=form.accepted_sources,
        token_sources=form.token_sources,
        finish_reason=form.finish_reason,
        stop_reason=form.stop_reason,
        pooled=None if form.pooled is None else _numbers_of(form.pooled),
        error=None if form.error is None else engine_error_of(form.error),
    )


def _number_bytes(numbers: array[float]) -> bytes:
    """Numbers of 32 bits, the lowest byte first."""
    items = array("f", numbers)
    if sys.byteorder == "big":
        items.byteswap()
    return items.tobytes()


def _numbers_of(data: bytes) -> array[float]:
    """The numbers of `_number_bytes`. Raises `WireError`."""
    items = array("f")
    with meaningful("numbers"):
        items.frombytes(data)
    if sys.byteorder == "big":
        items.byteswap()
    return items


def _logprob_forms(logprobs: Sequence[TokenLogprob]) -> list[LogprobForm]:
    return [(each.token_id, each.logprob, list(each.top)) for each in logprobs]


def _logprobs_of(forms: Sequence[LogprobForm]) -> list[TokenLogprob]:
    return [TokenLogprob(token_id, logprob, tuple(top)) for token_id, logprob, top in forms]


class LossForm(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`Eviction`, with its age: the clocks of two processes have nothing in common."""

    cause: Literal["evicted", "flushed", "late", "unsound", "state_not_kept"]
    age: Seconds


class UsageForm(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """`Usage`."""

    prompt_tokens: Count = 0
    cached_tokens: Count = 0
    matched_tokens: Count = 0
    loaded_tokens: Count = 0
    cache_write_tokens: Count = 0
    image_tokens: Count = 0
    spliced_tokens: Count = 0
    normalized: tuple[str, ...] = ()
    cache_loss: LossForm | None = None
    completion_tokens: Count = 0
    proposed_tokens: Count = 0
    accepted_tokens: Count = 0
    verify_steps: Count = 0
    draft_steps: Count = 0
    tree_steps: Count = 0
    accepted_by_source: dict[str, Count] = {}
    proposed_by_source: dict[str, Count] = {}
    steps_by_accepted: dict[Count, Count] = {}
    accepted_prediction_tokens: Count = 0
    rejected_prediction_tokens: Count = 0
    evicted_tokens: Count = 0
    closed_early: bool = False
    moves: Count = 0
    queue_time: Seconds = 0.0
    time_to_first_token: Seconds = 0.0
    total_time: Seconds = 0.0


def usage_form(usage: Usage, now: float) -> UsageForm:
    """The usage at ``now``, in seconds on the clock of the engine that counted it."""
    values = {each.name: getattr(usage, each.name) for each in fields(Usage)}
    if (loss := usage.cache_loss) is not None:
        values["cache_loss"] = LossForm(cause=loss.cause, age=now - loss.time)
    return UsageForm(**values)


def usage_of(form: UsageForm, now: float) -> Usage:
    """The usage, its times by a clock that shows ``now``."""
    values = _values(form)
    if (loss := form.cache_loss) is not None:
        values["cache_loss"] = Eviction(loss.cause, now - loss.age)
    return Usage(**values)


def _values(form: Struct) -> dict[str, Any]:
    return {name: getattr(form, name) for name in form.__struct_fields__}
