"""Grammars for calls whose arguments are written one by one, not as one object."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ...core.errors import InvalidRequest
from ..structured.grammar_text import lark_text, num_chars
from ..types.sampling_params import MAX_GRAMMAR_CHARS
from .lark import Lark, value
from .tagged import Tags, kinds, listed_values

if TYPE_CHECKING:
    from ..types.results import Tool

# What says more of an object than which properties it has, and can not be followed here.
_ABOUT_WHOLE = (
    "anyOf", "oneOf", "allOf", "not", "if", "$ref", "patternProperties", "propertyNames",
    "minProperties", "maxProperties", "dependentRequired", "dependentSchemas",
)  # fmt: skip
_ABOUT_TEXT = ("pattern", "format", "minLength", "maxLength")
MAX_PROPERTIES = 4096  # of one tool; the text of more is too long in any case
_KEY = re.compile(r"\w+", re.ASCII)


def pythonic_block(lark: Lark, tools: Sequence[Tool], parallel: bool) -> str:
    """``[f(city="Paris"), g()]``; values are written as in JSON, which the reader takes too."""
    indices = {tool.name: index for index, tool in enumerate(tools)}

    def written(tool: Tool) -> str:
        return f'"{tool.name}(" {_keywords(lark, tool, f"args_{indices[tool.name]}")} ")"'

    one = lark.each(tools, written)
    return f'"[" {one} (", " {one})* "]"' if parallel else f'"[" {one} "]"'


def _keywords(lark: Lark, tool: Tool, name: str) -> str:
    properties = properties_of(tool)
    if not properties and (tool.parameters or {}).get("additionalProperties") is not False:
        lark.rule("KEY", r"/[a-z_][a-z0-9_]{0,63}/")
        lark.rule("keyword", f'KEY "=" {value({}, strict=False)}')
        return '(keyword (", " keyword)*)?'
    members = []
    for key, schema in properties.items():
        written = f"{lark_text(key + '=')} {value(schema, strict=tool.strict)}"
        members.append((written, key in required_of(tool)))
    return listed(lark, members, name)


def listed(lark: Lark, members: Sequence[tuple[str, bool]], name: str, *, comma: str = ", ") -> str:
    """All members in order, those that are not required perhaps, with commas between them.

    Two chains of rules: ``first`` where nothing was written yet, ``rest`` behind something.
    """
    first = rest = lark.rule(f"{name}_end", '""')
    for index in reversed(range(len(members))):
        written, is_required = members[index]
        member = lark.rule(f"{name}_{index}", written)
        skips = ("", "") if is_required else (f" | {first}", f" | {rest}")
        first = lark.rule(f"{name}_first_{index}", f"{member} {rest}{skips[0]}")
        rest = lark.rule(f"{name}_rest_{index}", f"{lark_text(comma)} {member} {rest}{skips[1]}")
    return first


def tagged_block(lark: Lark, tools: Sequence[Tool], tags: Tags) -> str:
    """One function with tags; several calls are several blocks."""
    # A text is whatever comes before the tag.
    lark.up_to(tags.value_end, "plain")
    close = f'{lark.mark(tags.function_end)} "\\n"' if tags.function_end else ""

    def written(tool: Tool) -> str:
        begin = lark_text(f"\n{tags.function}{tool.name}{tags.named}\n")
        if not tags.function:
            begin = lark_text(f"{tool.name}\n")
        return f"{begin} {_tagged(lark, tool, tags)} {close}"

    return f"{lark.each(tools, written)} {lark.mark(tags.end)}"


def _tagged(lark: Lark, tool: Tool, tags: Tags) -> str:
    parts = []
    brk, behind = (r'"\n"', r'"\n"') if tags.has_breaks else ("", r'"\n"')
    for key, schema in properties_of(tool).items():
        marks = r' "\n" '.join(map(lark.mark, tags.value))
        begin = f"{lark.mark(tags.parameter)} {lark_text(key)} {marks} {brk}"
        end = f"{brk} {lark.mark(tags.value_end)} {behind}"
        if "string" not in (kinds(schema, tool.parameters or {}) or {"string"}):
            part = f"{begin} {value(schema, strict=tool.strict)} {end}"
        elif texts := [each for each in listed_values(schema) if isinstance(each, str)]:
            part = f"{begin} ({' | '.join(map(lark_text, texts))}) {end}"
        else:
            _check_text(tool, schema)
            part = f"{begin} plain {behind}"
        parts.append(part if key in required_of(tool) else f"({part})?")
    return " ".join(parts)


def _check_text(tool: Tool, schema: Mapping[str, Any]) -> None:
    if tool.strict and (found := [key for key in _ABOUT_TEXT if key in schema]):
        message = f"tools: {tool.name} cannot be strict: {found[0]} of a text cannot be followed"
        raise InvalidRequest(f"{message} in this model's format", param="tools")


def properties_of(tool: Tool) -> dict[str, Mapping[str, Any]]:
    """Schemas of the arguments, each that refers to something with what is defined."""
    schema = tool.parameters or {}
    if tool.strict and (found := [key for key in _ABOUT_WHOLE if key in schema]):
        message = f"tools: {tool.name} cannot be strict: {found[0]} at the top cannot be followed"
        raise InvalidRequest(f"{message} in this model's format", param="tools")
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    properties: dict[str, Any] = {key: {} for key in required_of(tool)}
    properties |= dict(schema.get("properties", {}))
    if not all(map(_KEY.fullmatch, properties)):
        message = f"tools: the arguments of {tool.name} need names of letters, digits and _"
        raise InvalidRequest(message, param="tools")
    given = {key: each if isinstance(each, Mapping) else {} for key, each in properties.items()}
    referring = {key for key, each in given.items() if shared and _refers(each)}
    if len(properties) > MAX_PROPERTIES or len(referring) * num_chars(shared) > MAX_GRAMMAR_CHARS:
        raise InvalidRequest(f"tools: the parameters of {tool.name} are too long", param="tools")
    return {key: {**shared, **each} if key in referring else each for key, each in given.items()}


def _refers(schema: Mapping[str, Any]) -> bool:
    """Whether there is a reference in it."""
    left: list[object] = [schema]
    while left:
        each = left.pop()
        if isinstance(each, Mapping):
            if "$ref" in each:
                return True
            left += each.values()
        elif isinstance(each, list | tuple):
            left += each
    return False


def required_of(tool: Tool) -> Sequence[str]:
    """Names of the arguments that must be there."""
    required = (tool.parameters or {}).get("required")
    listed = required if isinstance(required, list | tuple) else ()
    return [key for key in listed if isinstance(key, str)]
