"""What a chat template is given: how long and how deep it is, and what its errors say."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..core.errors import InvalidRequest

SECONDS = 5.0  # for one conversation; then it is the template's fault
INLINE_CHARS = 2_048  # longer texts are tokenised in a thread
MESSAGE_CHARS = 64  # a message costs a template about as much as so much text


def check_messages(messages: object) -> None:
    """Raise `InvalidRequest` for what is no list of objects."""
    if (
        not isinstance(messages, Sequence)
        or isinstance(messages, str | bytes)
        or not all(isinstance(message, Mapping) for message in messages)
    ):
        raise InvalidRequest("messages must be objects with role and content", param="messages")


def count_chars(messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> int:
    """About how long a conversation is, counted no further than matters for where it is done."""
    total = MESSAGE_CHARS * len(messages)
    left: list[object] = [*messages, options]
    while left and total <= INLINE_CHARS:
        value = left.pop()
        total += len(value) if isinstance(value, str) else 1
        if isinstance(value, Mapping):
            left += [*value.keys(), *value.values()]
        elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
            left += value
    return total


def deeper(messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> str:
    """The field that a template cannot get to the end of."""
    given = {"messages": messages, "tools": options.get("tools", ())}
    given["chat_template_kwargs"] = {name: options[name] for name in options if name != "tools"}
    return max(given, key=lambda name: _depth(given[name]))


def _depth(value: object) -> int:
    """How deeply it is nested."""
    depth, level = 0, [value]
    while level:
        depth += 1
        level = [inner for each in level for inner in _inside(each)]
    return depth


def _inside(value: object) -> Iterable[object]:
    if isinstance(value, Mapping):
        return value.values()
    return value if isinstance(value, Sequence) and not isinstance(value, str | bytes) else ()


def template_error(error: Exception) -> str:
    """What a caller may read: what the template's author wrote, and which field is missing."""
    from jinja2 import TemplateError, UndefinedError

    if type(error) in (TemplateError, UndefinedError, ValueError):
        return f"the chat template refuses these messages: {error}"
    return "the chat template cannot render these messages"
