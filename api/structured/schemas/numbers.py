"""Bounds of numbers in the form that the grammar library supports.

They never allow a number that the schema forbids.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

BOUNDS = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")
# the largest integer that the library accepts and a float can represent
MOST_INTEGER = 2**63 - 1024
MOST_NUMBER = 10**15
EXACT = 2**53
MOST_DECIMALS = 15

Limit = tuple[float, bool]  # the limit, and whether it is excluded


def bounds(schema: Mapping[str, object], *, is_integer: bool) -> dict[str, float]:
    """Return the bounds of a schema in the library's form. ``schema`` may be of any draft."""
    low = _limit(schema, "minimum", "exclusiveMinimum", max)
    high = _limit(schema, "maximum", "exclusiveMaximum", min)
    return _of_integers(low, high) if is_integer else _of_numbers(low, high)


def _limit(schema: Mapping[str, object], key: str, exclusive: str, tighter: object) -> Limit | None:
    bound, other = schema.get(key), schema.get(exclusive)
    found: list[Limit] = []
    if _is_number(bound):
        found.append((bound, other is True))  # type: ignore[arg-type]
    if _is_number(other):
        found.append((other, True))  # type: ignore[arg-type]
    if not found:
        return None
    value = tighter(each[0] for each in found)  # type: ignore[operator]
    return value, any(is_out for each, is_out in found if each == value)


def _is_number(value: object) -> bool:
    if isinstance(value, bool):
        return False
    return isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))


def _of_integers(low: Limit | None, high: Limit | None) -> dict[str, float]:
    found: dict[str, float] = {}
    if low is not None:
        least = math.floor(low[0]) + 1 if low[1] else math.ceil(low[0])
        found["minimum"] = _exact(max(least, -MOST_INTEGER), up=True)
    if high is not None:
        most = math.ceil(high[0]) - 1 if high[1] else math.floor(high[0])
        found["maximum"] = _exact(min(most, MOST_INTEGER), up=False)
    return found


def _exact(value: int, *, up: bool) -> int:
    """Return the nearest integer that a float can represent exactly, rounded ``up`` or down."""
    number = float(value)
    if abs(value) > EXACT and (number < value if up else number > value):
        number = math.nextafter(number, math.inf if up else -math.inf)
    return int(number)


def _of_numbers(low: Limit | None, high: Limit | None) -> dict[str, float]:
    found: dict[str, float] = {}
    if low is not None:
        value = max(low[0], -MOST_NUMBER)
        found["exclusiveMinimum" if low[1] and value == low[0] else "minimum"] = value
    if high is not None:
        value = min(high[0], MOST_NUMBER)
        found["exclusiveMaximum" if high[1] and value == high[0] else "maximum"] = value
    if low is not None and high is not None:
        _move_whole(found, low[0], high[0])
    return found


def _move_whole(found: dict[str, float], low: float, high: float) -> None:
    """Move an excluded integer limit slightly inwards if the limits are less than 1 apart.

    The library would include such a limit.
    """
    if "exclusiveMinimum" in found and low >= 0 and low == int(low) and low < high < low + 1:
        del found["exclusiveMinimum"]
        found["minimum"] = _between(low, high)
    if "exclusiveMaximum" in found and high <= 0 and high == int(high) and high - 1 < low < high:
        del found["exclusiveMaximum"]
        found["maximum"] = -_between(-high, -low)


def _between(low: float, high: float) -> float:
    """Return a number between two numbers, with few decimals."""
    for decimals in range(1, MOST_DECIMALS):
        value = round(low + 10.0**-decimals, decimals)
        if low < value < high:
            return value
    return (low + high) / 2
