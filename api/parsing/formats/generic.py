"""The generic tool format, for models whose chat template does not support tools.

The system text describes the tools in plain JSON. The model writes a call as ``<tool_call>{"name":
..., "arguments": {...}}</tool_call>``, like Hermes and Qwen, so their reader and grammar are used.
Calls and results of earlier turns become text, so the template needs only alternating messages of a
user and an assistant.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ....core.errors import InvalidRequest
from ..family import Family
from .hermes import HERMES, HERMES_BEGIN, HERMES_END, HERMES_GRAMMAR

if TYPE_CHECKING:
    from ...types.results import Tool

GENERIC = "generic"
RESULT_BEGIN, RESULT_END = "<tool_response>", "</tool_response>"
INTRODUCTION = "You can call tools. Each is given as JSON, with a JSON schema of its arguments:"
INSTRUCTION = f"""To call a tool, write a block like this one, and a block for each further call:
{HERMES_BEGIN}
{{"name": "<name of the tool>", "arguments": {{"<argument>": <value>}}}}
{HERMES_END}
Results come back between {RESULT_BEGIN} and {RESULT_END}.
Answer in words where no tool is needed."""
ANY_ARGUMENTS: Mapping[str, Any] = {"type": "object"}

Message = Mapping[str, Any]


def needs_text(messages: Sequence[Message], tools: Sequence[Tool]) -> bool:
    """Whether the conversation has tools, calls or results, which the template does not support."""
    return bool(tools) or any(
        message.get("role") == "tool" or message.get("tool_calls") for message in messages
    )


def as_text(
    messages: Sequence[Message], tools: Sequence[Tool], *, has_system_role: bool
) -> list[Message]:
    """Return the conversation with tools, calls and results as text.

    The tools are described at the beginning of the system message or, without a system role, of the
    first user message: a prompt is cached from its beginning, and tools change less often than the
    text after them. Results become a user message, to which the text of the user's next message is
    added. Raises `InvalidRequest` for tools or calls that are nested too deeply.
    """
    written: list[Message] = []
    joins = False  # the last message holds results
    for message in messages:
        role = message.get("role")
        if role == "tool":
            result = f"{RESULT_BEGIN}\n{_content(message)}\n{RESULT_END}"
            _append(written, result, joins=joins)
        elif role == "user" and joins:
            _append(written, _content(message), joins=True)
        elif message.get("tool_calls"):
            rest = {key: each for key, each in message.items() if key != "tool_calls"}
            written.append({**rest, "content": _with_calls(message)})
        else:
            written.append(message)
        joins = role == "tool"
    return _introduced(written, describe(tools), has_system_role) if tools else written


def _append(written: list[Message], text: str, *, joins: bool) -> None:
    """Append a text as a user message, or to the last message if ``joins``."""
    if joins:
        text = f"{_content(written.pop())}\n{text}"
    written.append({"role": "user", "content": text})


def _introduced(messages: list[Message], text: str, has_system_role: bool) -> list[Message]:
    """Return the messages with ``text`` at the beginning of the system or first user message."""
    wanted = "system" if has_system_role else "user"
    index = next((i for i, each in enumerate(messages) if each.get("role") == wanted), None)
    if index is None or (has_system_role and index > 0):
        return [{"role": wanted, "content": text}, *messages]
    first = messages[index]
    together = {**first, "content": f"{text}\n\n{_content(first)}"}
    return [*messages[:index], together, *messages[index + 1 :]]


def describe(tools: Sequence[Tool]) -> str:
    """Return the text that lists the tools and explains how to write a call."""
    return "\n".join([INTRODUCTION, *map(_described, tools), "", INSTRUCTION])


def _described(tool: Tool) -> str:
    body: dict[str, Any] = {"name": tool.name}
    if tool.description:
        body["description"] = tool.description
    body["parameters"] = tool.parameters or ANY_ARGUMENTS
    return _json(body, "tools")


def _with_calls(message: Message) -> str:
    blocks = [_block(call) for call in message["tool_calls"]]
    return "\n".join([text for text in (_content(message),) if text] + blocks)


def _block(call: Mapping[str, Any]) -> str:
    """Return a call in the form in which the model writes it."""
    function = call.get("function")
    function = function if isinstance(function, Mapping) else call
    arguments = function.get("arguments") or {}
    text = arguments if isinstance(arguments, str) else _json(arguments, "messages")
    name = _json(function.get("name", ""), "messages")
    return f'{HERMES_BEGIN}\n{{"name": {name}, "arguments": {text}}}\n{HERMES_END}'


def _json(value: object, param: str) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except (RecursionError, TypeError, ValueError):
        message = f"{param} is not valid JSON, or nested too deeply"
        raise InvalidRequest(message, param=param) from None


def _content(message: Message) -> str:
    """Return the text of a message."""
    content = message.get("content")
    if isinstance(content, list | tuple):
        parts = (part.get("text", "") if isinstance(part, Mapping) else part for part in content)
        return "\n".join(map(str, parts))
    return "" if content is None else str(content)


GENERIC_FAMILY = Family((HERMES_BEGIN, HERMES_END), (), HERMES, lambda *_: HERMES_GRAMMAR)
