"""Forms: encodings of objects that messages between front and replica cannot contain directly.

Most fields of messages are structs of the core. They are sent unchanged, and a field of another
type or name is refused. Usage and log-probabilities are dataclasses, whose unknown fields are
ignored. An object has a form if its value depends on the process or its type is too loose:
``x_form`` returns the form of an object, and ``x_of`` returns an equal object from the form.
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
    """Bytes that are no message of this protocol, or a message with invalid content."""


@contextmanager
def wire_errors(what: str) -> Iterator[None]:
    """Turn errors about a value into `WireError`; ``what`` names the value in the message."""
    try:
        yield
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise WireError(f"{what}: {error}") from None


# -- numbers ---------------------------------------------------------------------------------------


def ids_form(token_ids: Sequence[int]) -> bytes:
    """Return token ids as 64-bit little-endian integers."""
    return _bytes_of(array("q", token_ids))


def ids_of(data: bytes) -> array[int]:
    """Return the token ids of `ids_form`. Raises `WireError`."""
    with wire_errors("token ids"):
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
    """Return the parameters that differ from their defaults, by name.

    A JSON schema that is an object becomes the bytes of its text, since its numbers may have any
    size.
    """
    given = {name: getattr(params, name) for name in _DEFAULTS}
    given = {name: value for name, value in given.items() if value is not _DEFAULTS[name]}
    if isinstance(schema := given.get("json_schema"), Mapping):
        with wire_errors("json_schema"):
            given["json_schema"] = json.dumps(dict(schema)).encode()
    return given


def params_of(form: Mapping[str, Any]) -> SamplingParams:
    """Return the parameters of a form. Raises `WireError` if `SamplingParams` refuses them."""
    with wire_errors("sampling parameters"):
        if isinstance(schema := form.get("json_schema"), bytes):
            form = {**form, "json_schema": json.loads(schema)}
        return SamplingParams(**form)


def usage_form(usage: Usage, now: float) -> Usage:
    """Return a usage as a form; ``now``: seconds on the clock of the engine that counted it.

    The time of a cache loss is replaced by its age, since the clocks of two processes differ.
    """
    if (loss := usage.cache_loss) is None:
        return usage
    return replace(usage, cache_loss=replace(loss, time=now - loss.time))


def usage_of(form: Usage, now: float) -> Usage:
    """Return the usage of a form; ``now``: seconds on the receiver's clock.

    Raises `WireError` for an infinite age of a cache loss.
    """
    if (loss := form.cache_loss) is not None and not math.isfinite(loss.time):
        raise WireError("the age of a cache loss is not finite")
    return usage_form(form, now)  # time = now - age, as age = now - time


# -- errors ----------------------------------------------------------------------------------------


class ErrorForm(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """An error: its class, its message, and the fields that the class lists in ``wire_fields``."""

    kind: str
    message: str
    param: str | None = None
    num_tokens: Count = 0
    limit: Count = 0
    context: Count = 0
    retry_after: Seconds = 0.0
    may_pass: bool = False


def shown_error(error: Exception) -> ForetokenError:
    """Return an error for the other side; an unexpected one is replaced by a generic one."""
    return error if isinstance(error, ForetokenError) else ForetokenError(INTERNAL)


def error_form(error: ForetokenError) -> ErrorForm:
    """Return the form of an error, with its nearest class that can be sent."""
    kind = next(each for each in type(error).__mro__ if _ERRORS.get(each.__name__) is each)
    values = {name: getattr(error, name) for name in _ERRORS[kind.__name__].wire_fields}
    return ErrorForm(kind=kind.__name__, message=str(error), **values)


def error_of(form: ErrorForm) -> ForetokenError:
    """Return the error of a form, with the same class, message and fields.

    Raises `WireError` for an unknown class.
    """
    if (kind := _ERRORS.get(form.kind)) is None:
        raise WireError(f"the error class {shown(form.kind)} is unknown")
    error = kind.__new__(kind, form.message)  # without __init__, which would make the message again
    for name in kind.wire_fields:
        setattr(error, name, getattr(form, name))
    return error


# -- hooks for msgpack -----------------------------------------------------------------------------


def to_msgpack(value: object) -> object:
    """Return an error, an array, or a subclass of a number or str as a type that msgpack has.

    Raises TypeError for other values.
    """
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
    """Return the error, or the array of 32-bit floats, of a form."""
    if kind is ForetokenError:
        return error_of(msgspec.convert(form, ErrorForm))
    return _filled(array("f"), msgspec.convert(form, bytes))
