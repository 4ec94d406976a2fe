"""Structs and functions of the C sources as ctypes types.

The sources are the only place that lists the fields of a struct and the arguments of a function.
This module reads only the C that they use: a struct of scalars, structs and pointers, and the head
of a function marked ``FT_EXPORT``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from ctypes import (
    POINTER,
    Structure,
    addressof,
    c_char,
    c_double,
    c_float,
    c_int,
    c_int32,
    c_int64,
    c_uint64,
    c_void_p,
)
from functools import cache
from typing import Any

from numpy.typing import NDArray

from .recipe import sources

_SCALARS: dict[str, Any] = {
    "int": c_int,
    "int32_t": c_int32,
    "int64_t": c_int64,
    "uint64_t": c_uint64,
    "float": c_float,
    "double": c_double,
}
_COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)
_STRUCT = re.compile(r"struct (?:(ft_\w+) )?\{([^{}]*)\}(?: (ft_\w+))?;")
_FUNCTION = re.compile(r"FT_EXPORT (\w+) (\w+)\(([^)]*)\)")
_VARIABLES = re.compile(r"(?:(?:const|struct) )*(\w+) (.+)", re.DOTALL)
_VARIABLE = re.compile(r"((?:\*|const\b|\s)*)(\w+)")


class Structs:
    """The structs of the C sources by name: ``STRUCTS.ft_kv(page_size=16)`` makes one.

    Fields are given by name; a field that is left out is 0 or NULL. A pointer to a struct, made by
    `ctypes.pointer`, keeps that struct alive. A pointer to anything else is an address, and the
    caller keeps its memory alive. Raises AttributeError for a struct or a field that C does not
    have.
    """

    def __getattr__(self, name: str) -> type[Structure]:
        body = _declarations()[0].get(name)
        if body is None:
            raise AttributeError(f"the C sources have no struct {name}")
        # Without slots an unknown field would become an attribute of the instance.
        struct: type[Structure] = type(name, (Structure,), {"__slots__": ()})
        setattr(self, name, struct)  # set before its fields, one of which may point to it
        struct._fields_ = [
            (field, _type(base, depth))
            for variables in _COMMENT.sub("", body).split(";")[:-1]
            for base, depth, field in _variables(variables)
        ]
        return struct


STRUCTS = Structs()


def address_of(numbers: NDArray[Any]) -> int:
    """Return the address of a contiguous, writable array for a C function; 0 if it is empty.

    A step needs some thirty addresses, and numpy's ``ctypes.data`` takes four times as long.
    """
    return addressof(c_char.from_buffer(numbers)) if numbers.size else 0


def signatures() -> Iterator[tuple[str, Any, list[Any]]]:
    """Yield name, result type and argument types of each exported function.

    A pointer to a struct accepts only the struct, an array of such structs or None (NULL). Any
    other pointer accepts an address.
    """
    for result, name, arguments in _declarations()[1]:
        found = [] if arguments == "void" else arguments.split(",")
        variables = [variable for each in found for variable in _variables(each)]
        types = [_type(base, depth) for base, depth, _ in variables]
        yield name, None if result == "void" else _SCALARS[result], types


@cache
def _declarations() -> tuple[dict[str, str], list[tuple[str, str, str]]]:
    """Return the bodies of structs by name, and (result, name, arguments) of functions, as text."""
    text = b"".join([path.read_bytes() for path in sources()]).decode()
    bodies = {tag or name: body for tag, body, name in _STRUCT.findall(text)}
    return bodies, _FUNCTION.findall(text)


def _variables(declaration: str) -> Iterator[tuple[str, int, str]]:
    """Yield base type, number of stars and name of each variable of ``const float *cos, *sin``.

    Raises ValueError for arrays and everything else that this module does not read.
    """
    found = _VARIABLES.fullmatch(declaration.strip())
    for each in found[2].split(",") if found else [""]:
        variable = _VARIABLE.fullmatch(each.strip())
        if found is None or variable is None:
            raise ValueError(f"cannot read the C declaration {declaration.strip()!r}")
        yield found[1], variable[1].count("*"), variable[2]


def _type(base: str, depth: int) -> type[Any]:
    """Return the ctypes type of a ``base`` with ``depth`` stars."""
    kind: type[Any]
    if base.startswith("ft_"):
        kind = getattr(STRUCTS, base)
    elif depth:
        kind, depth = c_void_p, depth - 1
    else:
        kind = _SCALARS[base]
    for _ in range(depth):
        kind = POINTER(kind)
    return kind
