"""The tools of a response: the functions that the model sees, and the form of their calls.

Agents send tools in several places (``tools``, ``additional_tools`` items, tool search results) and
forms (functions, custom tools, namespaces with one MCP server each). The model sees them all as
functions; a call is returned in the form of its tool.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import Literal, NamedTuple

import msgspec

from ....core.errors import InvalidRequest
from ...runtime.conversation.custom_tools import custom_tool
from ...runtime.conversation.left_out import tell_left_out
from ...runtime.conversation.tools import (
    allowed_choice,
    loaded_text,
    named_choice,
    read_choice,
)
from ...types.results import Tool, ToolChoice
from .bodies import CustomFormat, FlatChoice, FlatTool, Item, ResponsesRequest

Kind = Literal["function", "custom", "tool_search"]
MAX_NAME_CHARS = 128
TOOL_SEARCH = "tool_search"
_NOT_IN_NAMES = re.compile(r"[^a-zA-Z0-9_-]")


class ServedTool(NamedTuple):
    """A tool for the model, and the type, name and namespace that the client gave it."""

    tool: Tool
    kind: Kind
    name: str
    namespace: str | None = None


def flat_name(name: str, namespace: str | None) -> str:
    """Return the name by which the model calls a tool in a namespace."""
    if namespace is None:
        return name
    joined = f"{namespace}{name}" if namespace.endswith("_") else f"{namespace}__{name}"
    flat = _NOT_IN_NAMES.sub("_", joined)
    if flat == joined and len(flat) <= MAX_NAME_CHARS:
        return flat
    digest = blake2b(joined.encode(), digest_size=4).hexdigest()
    return f"{flat[: MAX_NAME_CHARS - len(digest) - 1]}_{digest}"


def served_tools(body: ResponsesRequest) -> list[FlatTool]:
    """Return the supported entries of ``tools``, without the tools that a provider runs."""
    return [tool for tool in body.tools or () if _flattened([tool])]


def read_tools(body: ResponsesRequest, items: Sequence[Item]) -> list[ServedTool]:
    """Return all tools of a conversation. Tools in items replace others of the same name."""
    given = _flattened(body.tools or ())
    added: dict[str, ServedTool] = {}
    for item in items:
        if item.type in ("additional_tools", "tool_search_output"):
            is_loaded = item.type != "additional_tools"
            found = _flattened(item.tools or (), is_loaded=is_loaded)
            added |= {each.tool.name: each for each in found}
    return [*(each for each in given if each.tool.name not in added), *added.values()]


def found_text(tools: Sequence[FlatTool]) -> str:
    """Return the text of a tool search result."""
    return loaded_text([each.tool for each in _flattened(tools)])


def _flattened(
    tools: Iterable[FlatTool], namespace: str | None = None, *, is_loaded: bool = False
) -> list[ServedTool]:
    found: list[ServedTool] = []
    for tool in tools:
        if tool.type == "namespace" and tool.tools:
            inside = namespace if tool.name is None else tool.name
            found += _flattened(tool.tools, inside, is_loaded=is_loaded)
        elif tool.type in ("function", "custom") and tool.name:
            found.append(_served(tool, tool.name, namespace, is_loaded=is_loaded))
        elif _is_search(tool):
            search = msgspec.structs.replace(tool, name=TOOL_SEARCH)
            found.append(_served(search, TOOL_SEARCH, None, is_loaded=is_loaded))
        else:
            tell_left_out("tools of type", tool.type)
    return found


def _is_search(tool: FlatTool) -> bool:
    """Whether the tool is a tool search that the client executes."""
    return tool.type == TOOL_SEARCH and tool.execution == "client"


def _served(tool: FlatTool, name: str, namespace: str | None, *, is_loaded: bool) -> ServedTool:
    flat = flat_name(name, namespace)
    if tool.type == "custom":
        form = tool.format or CustomFormat()
        made = custom_tool(
            flat,
            tool.description,
            form.syntax,
            form.definition,
            param="tools",
            is_loaded=is_loaded,
        )
        return ServedTool(made, "custom", name, namespace)
    made = Tool(
        name=flat,
        description=tool.description,
        parameters=tool.parameters,
        strict=bool(tool.strict),
        is_loaded=is_loaded,
    )
    kind: Kind = "tool_search" if tool.type == TOOL_SEARCH else "function"
    return ServedTool(made, kind, name, namespace)


def tool_choice(body: ResponsesRequest, served: Sequence[ServedTool]) -> ToolChoice:
    """Return ``tool_choice`` and ``parallel_tool_calls`` as a `ToolChoice`. Raises
    `InvalidRequest`.
    """
    choice, parallel = body.tool_choice, body.parallel_tool_calls is not False
    tools = [each.tool for each in served]
    if not isinstance(choice, FlatChoice):
        return read_choice(choice, tools, parallel=parallel)
    if choice.type == "allowed_tools":
        names = {
            _chosen(each.name, each.namespace, served)
            for each in choice.tools or ()
            if each.type in ("function", "custom") and each.name
        }
        return allowed_choice(names, tools, mode=choice.mode or "auto", parallel=parallel)
    if choice.type not in ("function", "custom") or choice.name is None:
        message = f"tool_choice: type {choice.type} is not supported without a name; use function"
        raise InvalidRequest(message, param="tool_choice")
    return named_choice(_chosen(choice.name, choice.namespace, served), tools, parallel=parallel)


def _chosen(name: str, namespace: str | None, served: Sequence[ServedTool]) -> str:
    """Return the model's name for a tool that a ``tool_choice`` names."""
    matches = [
        each.tool.name
        for each in served
        if each.name == name and namespace in (None, each.namespace)
    ]
    return matches[0] if len(matches) == 1 else flat_name(name, namespace)
