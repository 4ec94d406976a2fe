"""Marks of body fields: those that are refused, and those that are other names of another field.

A mark stands in the annotation of its field. Decoding applies it, and /openapi.json reads it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple, TypeVar, get_args, get_type_hints

import msgspec
from msgspec import Struct

from ...core.errors import InvalidRequest

M = TypeVar("M")


class Refused:
    """Marks a field that would change the answer and is not supported.

    ``neutral``: the values, besides null, that change nothing. They are accepted. ``unless``: other
    fields with their neutral values; the marked field changes nothing where all of them have those
    or are left out.
    """

    __slots__ = ("neutral", "unless")

    def __init__(self, *neutral: object, unless: Mapping[str, object] | None = None) -> None:
        self.neutral, self.unless = neutral, unless

    def accepts(self, value: object, body: Struct) -> bool:
        """Whether the value changes nothing in this body."""
        if any(_is_same(value, each) for each in self.neutral):
            return True
        return self.unless is not None and all(
            getattr(body, name, None) in (None, neutral) for name, neutral in self.unless.items()
        )


class SameAs:
    """Marks a field that is another name of the field ``name`` of the same body.

    ``unset``: the values that leave that field out.
    """

    __slots__ = ("name", "unset")

    def __init__(self, name: str, *unset: object) -> None:
        self.name, self.unset = name, unset


class Marks(NamedTuple):
    """The marked fields of a struct; ``inner``: fields whose own structs have marked ones."""

    refused: tuple[tuple[str, Refused], ...]
    same: tuple[tuple[str, SameAs], ...]
    inner: tuple[str, ...]


@cache
def marks_of(struct: type[Struct]) -> Marks:
    """Return the marked fields of a struct."""
    hints = _hints(struct)
    inner = [
        name for name, hint in hints.items() if any(_has_marks(each) for each in structs_in(hint))
    ]
    return Marks(tuple(_marked(hints, Refused)), tuple(_marked(hints, SameAs)), tuple(inner))


def written_name(struct: type[Struct], name: str) -> str:
    """Return the name of a field in JSON."""
    names = zip(struct.__struct_fields__, struct.__struct_encode_fields__, strict=True)
    return dict(names)[name]


def _has_marks(struct: type[Struct]) -> bool:
    """Whether a struct, or one inside of it, has a marked field. A struct may contain its kind."""
    seen, left = {struct}, [struct]
    while left:
        hints = _hints(left.pop())
        if any(True for kind in (Refused, SameAs) for _ in _marked(hints, kind)):
            return True
        inside = {each for hint in hints.values() for each in structs_in(hint)} - seen
        seen |= inside
        left += inside
    return False


def _hints(struct: type[Struct]) -> dict[str, Any]:
    return get_type_hints(struct, include_extras=True)


def structs_in(hint: Any) -> Iterator[type[Struct]]:  # noqa: ANN401 - a type, or several
    """Yield the structs that a type is made of, without those inside of them."""
    if isinstance(hint, type) and issubclass(hint, Struct):
        yield hint
    for each in get_args(hint):
        yield from structs_in(each)


def settle(body: Struct, path: str = "") -> None:
    """Copy fields to the fields that they are other names of.

    Raises `InvalidRequest`, which names the field, for a refused one and for two names of one field
    with different values.
    """
    marks = marks_of(type(body))
    for name, refused in marks.refused:
        value = getattr(body, name)
        if value is not None and not refused.accepts(value, body):
            place = f"{path}{written_name(type(body), name)}"
            raise InvalidRequest(_refusal(place, refused), param=place)
    for name, other in marks.same:
        value = getattr(body, name)
        if value is None or any(_is_same(value, each) for each in other.unset):
            continue
        if getattr(body, other.name) not in (None, value):
            message = f"{path}{name} is another name of {path}{other.name}: send one of them"
            raise InvalidRequest(message, param=f"{path}{name}")
        setattr(body, other.name, value)
    for name in marks.inner:
        inner, place = getattr(body, name), f"{path}{written_name(type(body), name)}"
        if isinstance(inner, Struct):
            settle(inner, f"{place}.")
        elif isinstance(inner, list):
            for index, each in enumerate(inner):
                if isinstance(each, Struct):
                    settle(each, f"{place}[{index}].")


def name_as_given(error: InvalidRequest, body: object) -> None:
    """Let an error of a field name it as the body does, where that has it under another name."""
    if not isinstance(body, Struct):
        return
    for name, other in marks_of(type(body)).same:
        if other.name == error.param and getattr(body, name) is not None:
            error.rename(name)
            return


def _marked(hints: dict[str, Any], kind: type[M]) -> Iterator[tuple[str, M]]:
    for name, hint in hints.items():
        for each in getattr(hint, "__metadata__", ()):
            if isinstance(each, kind):
                yield name, each


def _refusal(name: str, refused: Refused) -> str:
    values = [each for each in refused.neutral if each not in ("", [], {})]
    accepted = " or ".join(msgspec.json.encode(each).decode() for each in values)
    return f"{name} is not supported" + (f": send {accepted} or leave it out" if accepted else "")


def _is_same(value: object, other: object) -> bool:
    """Whether two JSON values are equal: 1 equals 1.0 and not true."""
    return isinstance(value, bool) == isinstance(other, bool) and value == other
