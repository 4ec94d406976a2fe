"""Forms: what a message between front and replica carries in another shape than its own.

Most fields are structs of the core, sent as they are and decoded strictly: a field of another type
or name is refused. Usage and log-probabilities are dataclasses: surplus fields of theirs are
ignored. What is not equal in two processes, or has no type that says it all, has a form:
``x_form`` makes it of an object, ``x_of`` makes an equal object of it.
"""

from __future__ import annotations

import json
import math
import sys
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any

import msgspec
from msgspec import Struct

from ....core.errors import (
    DeadlineExceeded,
    EngineDead,
    ForetokenError,
    InvalidRequest,
    ModelLoadError,
    PromptTooLong,
    QueueFull,
    shown,
)
from ....core.interface.request import Usage
from ....core.options.checks import Count, Seconds
from ...serving.errors import INTERNAL
from ...types.sampling_params import SamplingParams

_DEFAULTS: Mapping[str, object] = {each.name: each.default for each in fields(SamplingParams)}
_ERRORS: Mapping[str, type[ForetokenError]] = {
    each.__name__: each
    for each in (
        ForetokenError,
        InvalidRequest,
        PromptTooLong,
        QueueFull,
        DeadlineExceeded,
        EngineDead,
        ModelLoadError,
    )
}


class WireError(ForetokenError):
    """Bytes that are no message of this protocol, or a message that means nothing."""


@contextmanager
def meaningful(what: str) -> Iterator[None]:
    """Turn the refusal of a value into a `WireError`."""
    try:
        yield
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise WireError(f"{what}: {error}") from None


# -- numbers ---------------------------------------------------------------------------------------


def ids_form(token_ids: Sequence[int]) -> bytes:
    """Token ids as integers of 64 bits, the lowest byte first."""
    return _bytes_of(array("q", token_ids))


def ids_of(data: bytes) -> array[int]:
    """Return the token ids of `ids_form`. Raises `WireError`."""
    with meaningful("token ids"):
        return _filled(array("q"), data)


def _bytes_of(numbers: array[Any]) -> bytes:
    if sys.byteorder == "big":
        numbers = numbers[:]
        numbers.byteswap()
    return numbers.tobytes()


def _filled(numbers: array[Any], data: bytes) -> array[Any]:
    numbers.frombytes(data)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers


# -- parameters and usage --------------------------------------------------------------------------


def params_form(params: SamplingParams) -> dict[str, Any]:
    """Return the parameters that were given: a default that marks itself as left out stays left
    out.

    A JSON schema that was given as an object is the bytes of its text: its numbers may have any
    size.
    """
    given = {name: getattr(params, name) for name in _DEFAULTS}
    given = {name: value for name, value in given.items() if value is not _DEFAULTS[name]}
    if isinstance(schema := given.get("json_schema"), Mapping):
        with meaningful("json_schema"):
            given["json_schema"] = json.dumps(dict(schema)).encode()
    return given


def params_of(form: Mapping[str, Any]) -> SamplingParams:
    """Return the parameters of a form. Raises `WireError` for what `SamplingParams` refuses."""
    with meaningful("sampling parameters"):
        if isinstance(schema := form.get("json_schema"), bytes):
            form = {**form, "json_schema": json.loads(schema)}
        return SamplingParams(**form)


def usage_form(usage: Usage, now: float) -> Usage:
    """Return the usage at ``now``, in seconds on the clock of the engine that counted it.

    A loss has its age in place of its time: the clocks of two processes have nothing in common.
    """
    if (loss := usage.cache_loss) is None:
        return usage
    return replace(usage, cache_loss=replace(loss, time=now - loss.time))


def usage_of(form: Usage, now: float) -> Usage:
    """Return the usage on a clock that shows ``now``. Raises `WireError` for an infinite age."""
    if (loss := form.cache_loss) is not None and not math.isfinite(loss.time):
        raise WireError("a loss without an age")
    return usage_form(form, now)  # the age of a time, and the time of an age


# -- errors ----------------------------------------------------------------------------------------


class ErrorForm(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """An error: its class, its message, and what the class names in ``wire_fields``."""

    kind: str
    message: str
    param: str | None = None
    num_tokens: Count = 0
    limit: Count = 0
    context: Count = 0
    retry_after: Seconds = 0.0
    may_pass: bool = False


def shown_error(error: Exception) -> ForetokenError:
    """Return the error that the other side sees: one that was not raised on purpose loses its
    text.
    """
    return error if isinstance(error, ForetokenError) else ForetokenError(INTERNAL)


def error_form(error: ForetokenError) -> ErrorForm:
    """Return the form of the nearest class that has one."""
    kind = next(each for each in type(error).__mro__ if _ERRORS.get(each.__name__) is each)
    values = {name: getattr(error, name) for name in _ERRORS[kind.__name__].wire_fields}
    return ErrorForm(kind=kind.__name__, message=str(error), **values)


def error_of(form: ErrorForm) -> ForetokenError:
    """Return an error of the same class, message and fields.

    Raises `WireError` for an unknown class.
    """
    if (kind := _ERRORS.get(form.kind)) is None:
        raise WireError(f"an error of the unknown class {shown(form.kind)}")
    error = kind.__new__(kind, form.message)  # the message is made already
    for name in kind.wire_fields:
        setattr(error, name, getattr(form, name))
    return error


# -- what msgpack lacks ----------------------------------------------------------------------------


def to_msgpack(value: object) -> object:
    """Return what msgpack can write for an error, an array, or a subclass of a number or text."""
    match value:
        case ForetokenError():
            return error_form(value)
        case array():
            return _bytes_of(value)
        case int():
            return int(value)
        case float():
            return float(value)
        case str():
            return str(value)
    raise TypeError(f"a value of type {type(value).__name__} cannot be sent")


def from_msgpack(kind: type, form: object) -> object:
    """Return the error or the array, numbers of 32 bits, of a form."""
    if kind is ForetokenError:
        return error_of(msgspec.convert(form, ErrorForm))
    return _filled(array("f"), msgspec.convert(form, bytes))
