"""Checks of the options of an engine (`EngineConfig`) and of a request (`TokenSamplingParams`).

Each check raises `InvalidRequest`, which names the field.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import MISSING, fields
from operator import attrgetter
from typing import Annotated, NamedTuple
from urllib.parse import urlsplit

from msgspec import Meta

from ..errors import InvalidRequest, shown

MAX_INT = 2**31 - 1
MAX_PORT = 65535
ENDLESS = 2**40  # errors do not mention an upper bound of at least this number

# Checked where a message of another process is decoded, not where an object is constructed.
TokenId = Annotated[int, Meta(ge=0, le=MAX_INT)]
Count = Annotated[int, Meta(ge=0)]
Positive = Annotated[int, Meta(ge=1)]
Seconds = Annotated[float, Meta(ge=-1e12, le=1e12)]  # finite: both bounds exclude NaN

CheckNumber = Callable[[str, object, float, float], None]


class Bound(NamedTuple):
    """Allowed range of a numeric field."""

    name: str
    check: CheckNumber
    low: float
    high: float


class Bounds:
    """The allowed ranges of several numeric fields of a dataclass and of its subclasses."""

    def __init__(self, *bounds: Bound) -> None:
        names = [bound.name for bound in bounds]
        self._bounds = bounds
        self._read = attrgetter(*names)
        self._defaults: dict[type, tuple[object, ...]] = {}  # by class

    def check(self, params: object) -> None:
        """Raise `InvalidRequest` for a field outside its range.

        A value that is the default of its class is not checked if the default is None or valid.
        """
        kind = type(params)
        if kind not in self._defaults:
            known = {each.name: each.default for each in fields(kind)}  # type: ignore[arg-type]
            found = tuple(_valid_default(bound, known[bound.name]) for bound in self._bounds)
            self._defaults[kind] = found
        given = zip(self._bounds, self._read(params), self._defaults[kind], strict=True)
        for (name, check, low, high), value, default in given:
            if value is not default:
                check(name, value, low, high)


def _valid_default(bound: Bound, default: object) -> object:
    """Return a default that is None or valid, otherwise `MISSING`, which no value is."""
    if default is None:
        return None
    with suppress(InvalidRequest):
        bound.check(bound.name, default, bound.low, bound.high)
        return default
    return MISSING


def require(holds: bool, param: str, message: str) -> None:
    """Raise `InvalidRequest`, which names ``param``, unless the condition holds."""
    if not holds:
        raise InvalidRequest(f"{param} {message}", param=param)


def check_bool(param: str, value: object) -> None:
    """Raise `InvalidRequest` unless ``value`` is a bool."""
    if value is not True and value is not False:
        raise InvalidRequest(f"{param} must be true or false", param=param)


def as_tuple(param: str, values: Sequence[object]) -> tuple[object, ...]:
    """Return the items of a list or tuple as a tuple. Raises `InvalidRequest` for another type."""
    require(not isinstance(values, (str, bytes)), param, "must be a list")
    try:
        return tuple(values)
    except TypeError:
        raise InvalidRequest(f"{param} must be a list", param=param) from None


def check_integer(param: str, value: object, low: float, high: float) -> None:
    """Raise `InvalidRequest` unless ``value`` is an integer from ``low`` to ``high``."""
    is_int = isinstance(value, int) and not isinstance(value, bool)
    if not is_int:
        raise InvalidRequest(f"{param} must be an integer, not {shown(value)}", param=param)
    if not low <= value <= high:  # type: ignore[operator]
        raise _outside(param, value, low, high)


def check_number(param: str, value: object, low: float, high: float) -> None:
    """Raise `InvalidRequest` unless ``value`` is a number from ``low`` to ``high``."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number:
        raise InvalidRequest(f"{param} must be a number, not {shown(value)}", param=param)
    # NaN fails every comparison, so it is refused here as well.
    if not low <= value <= high:  # type: ignore[operator]
        raise _outside(param, value, low, high)


def tcp_port(param: str, address: str) -> int:
    """Return the port of an address such as tcp://127.0.0.1:5557; 0 stands for any free port.

    Raises `InvalidRequest` for any other text.
    """
    port = None
    with suppress(ValueError):  # the port is not a number, or beyond 65535
        parts = urlsplit(address)
        if parts.hostname and address == f"tcp://{parts.netloc}":
            port = parts.port
    if port is None:
        message = f"{param} must be an address such as tcp://127.0.0.1:5557, not {shown(address)}"
        raise InvalidRequest(message, param=param)
    return port


def _outside(param: str, value: object, low: float, high: float) -> InvalidRequest:
    allowed = f"from {low:.12g} to {high:.12g}"
    if high >= ENDLESS:
        allowed = f"at most {high:.15g}" if value > high else f"at least {low:.12g}"  # type: ignore[operator]
    return InvalidRequest(f"{param} must be {allowed}, not {shown(value)}", param=param)
