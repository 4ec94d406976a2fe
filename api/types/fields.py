"""Annotations of body fields: `Refused` for unsupported ones, `SameAs` for aliases.

Decoding applies them, and /openapi.json describes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar, get_args, get_type_hints

import msgspec
from msgspec import Struct

from ...core.errors import InvalidRequest

M = TypeVar("M")


class Refused:
    """Mark a field as unsupported: a body that uses it is rejected.

    ``neutral``: values that have no effect; they and null are accepted. ``unless``: other fields
    with their neutral values. The marked field has no effect, and any value is accepted, while each
    of those fields is neutral or left out.
    """

    __slots__ = ("neutral", "unless")

    def __init__(self, *neutral: object, unless: Mapping[str, object] | None = None) -> None:
        self.neutral, self.unless = neutral, unless

    def accepts(self, value: object, body: Struct) -> bool:
        """Whether the value has no effect in this body."""
        if any(_is_same(value, each) for each in self.neutral):
            return True
        return self.unless is not None and all(
            getattr(body, name, None) in (None, neutral) for name, neutral in self.unless.items()
        )


class SameAs:
    """Mark a field as an alias of the field ``name`` of the same body.

    ``unset``: values that count as leaving the field out.
    """

    __slots__ = ("name", "unset")

    def __init__(self, name: str, *unset: object) -> None:
        self.name, self.unset = name, unset


class Marks(NamedTuple):
    """The marked fields of a struct.

    ``inner``: the fields that hold structs with marked fields, and their JSON names. ``read``
    returns the values of ``refused`` and ``same`` of a body, which are ``absent`` if it has none.
    """

    refused: tuple[tuple[str, Refused], ...]
    same: tuple[tuple[str, SameAs], ...]
    inner: tuple[tuple[str, str], ...]
    read: Callable[[Struct], object]
    absent: tuple[None, ...] | None


@cache
def marks_of(struct: type[Struct]) -> Marks:
    """Return the marked fields of a struct, and the fields that hold structs with marked fields."""
    hints = _hints(struct)
    inner = [
        (name, written_name(struct, name))
        for name, hint in hints.items()
        if any(_has_marks(each) for each in structs_in(hint))
    ]
    refused, same = tuple(_marked(hints, Refused)), tuple(_marked(hints, SameAs))
    names = [name for name, _ in (*refused, *same)]
    # `attrgetter` returns no tuple for a single name.
    absent = (None,) * len(names) if len(names) > 1 else None
    return Marks(refused, same, tuple(inner), attrgetter(*names) if names else _none, absent)


def _none(_body: Struct) -> None:
    return None


def written_name(struct: type[Struct], name: str) -> str:
    """Return the JSON name of a field."""
    names = zip(struct.__struct_fields__, struct.__struct_encode_fields__, strict=True)
    return dict(names)[name]


def _has_marks(struct: type[Struct]) -> bool:
    """Whether a struct or a struct nested in it has a marked field. Recursive types are allowed."""
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
    """Yield the structs named in a type annotation, without the structs inside them."""
    if isinstance(hint, type) and issubclass(hint, Struct):
        yield hint
    for each in get_args(hint):
        yield from structs_in(each)


def settle(body: Struct, path: str = "") -> None:
    """Copy the value of each alias to the field that it is an alias of.

    Raises `InvalidRequest`, which names the field, for a refused field, and for a field and its
    alias with different values.
    """
    marks = marks_of(type(body))
    # Most bodies have none of the fields, and one comparison is faster than a loop.
    if marks.read(body) != marks.absent:
        _settle(body, path, marks)
    for name, written in marks.inner:
        inner = getattr(body, name)
        if inner is None:
            continue
        if isinstance(inner, Struct):
            settle(inner, f"{path}{written}.")
        elif isinstance(inner, list):
            for index, each in enumerate(inner):
                if isinstance(each, Struct):
                    settle(each, f"{path}{written}[{index}].")


def _settle(body: Struct, path: str, marks: Marks) -> None:
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
            message = f"{path}{name} is an alias of {path}{other.name}: send only one of them"
            raise InvalidRequest(message, param=f"{path}{name}")
        setattr(body, other.name, value)


def name_as_given(error: InvalidRequest, body: object) -> None:
    """Rename the field in an error to the alias that the body used for it."""
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
    """Whether two JSON values are equal. 1 equals 1.0 but not true."""
    return isinstance(value, bool) == isinstance(other, bool) and value == other
