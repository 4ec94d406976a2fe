"""Convert input items to messages of a conversation and to stored items."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from uuid import uuid4

import msgspec

from ....core.errors import InvalidRequest
from ..schema import ContentPart, KeptMessage, Message, NamedImage
from .schema import TEXT_PARTS, AnswerItem, Item, ItemPart

Lookup = Callable[[str], Item | None]
"""Finds a kept item by its id."""

PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}


def read_items(given: str | Sequence[Item] | None, lookup: Lookup) -> list[Item]:
    """The items of an ``input``, references resolved; raises `InvalidRequest`."""
    if given is None:
        return []
    if isinstance(given, str):
        return [Item(type="message", role="user", content=given)]
    return [_resolved(item, f"input[{index}]", lookup) for index, item in enumerate(given)]


def _resolved(item: Item, path: str, lookup: Lookup) -> Item:
    kind = item.type or ("item_reference" if item.role is None else "message")
    if kind != "item_reference":
        return msgspec.structs.replace(item, type=kind)
    found = None if item.id is None else lookup(item.id)
    if found is None:
        message = f"{path}: no stored response has an item with id {item.id!r}"
        raise InvalidRequest(message, param=path)
    return found


def kept_items(items: Sequence[Item]) -> list[Item]:
    """The items as they are listed: with an id, a status, and parts."""
    return [_kept(item) for item in items]


def _kept(item: Item) -> Item:
    prefix = PREFIXES.get(item.type or "", "item")
    content = item.content
    if item.type == "message" and isinstance(content, str):
        kind = "output_text" if item.role == "assistant" else "input_text"
        content = [ItemPart(type=kind, text=content)]
    return msgspec.structs.replace(
        item,
        id=item.id or f"{prefix}_{uuid4().hex}",
        status=item.status or "completed",
        content=content,
    )


def to_messages(items: Sequence[Item], *, first_path: int = 0) -> list[Message]:
    """The messages of the items; raises `InvalidRequest` with the path of a bad item.

    Reasoning, text and calls of one answer become one message again. So the conversation is
    rendered as the model saw it, and its prefix is found in the cache.
    ``first_path``: index of the first item of the body; those before it are from earlier turns.
    """
    thread = _Thread()
    for index, item in enumerate(items):
        thread.add(item, f"input[{index - first_path}]")
    return thread.messages


class _Thread:
    """Collects items into messages."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self._reasoning: list[str] = []  # wait for what they led to
        self._open: Message | None = None  # the assistant's, that calls may still join
        self._ids: list[int] | None = None  # of a stored answer, until its message begins
        self._kept: KeptMessage | None = None  # the message that has them

    def add(self, item: Item, path: str) -> None:
        """Append an item."""
        if item.token_ids is not None:
            message = f"{path}.token_ids: previous_response_id brings the ids of an answer here"
            raise InvalidRequest(message, param=f"{path}.token_ids")
        if isinstance(item, AnswerItem):
            self._ids, self._kept = item.answer_ids, None
        match item.type:
            case "message":
                self._add_message(item, path)
            case "reasoning":
                reasoning = _reasoning_text(item, path)
                self._reasoning += [reasoning] if reasoning or self._reasoning else []
                self._open = None
            case "function_call":
                self._add_call(item, item.arguments, path)
            case "custom_tool_call":  # as a call of a function with one argument
                written = msgspec.json.encode({"input": item.input or ""}).decode()
                self._add_call(item, written, path)
            case "function_call_output" | "custom_tool_call_output":
                content = _content(_needed(item, "output", path), f"{path}.output")
                self._close(Message(role="tool", tool_call_id=item.call_id, content=content))
            case _:
                message = f"{path}: items of type {item.type} are not supported"
                raise InvalidRequest(message, param=path)

    def _add_message(self, item: Item, path: str) -> None:
        role = _needed(item, "role", path)
        content, where = _needed(item, "content", path), f"{path}.content"
        if role == "assistant":
            self._begin(_text(content, where))
        else:
            self._close(Message(role=role, content=_content(content, where)))

    def _add_call(self, item: Item, arguments: str | None, path: str) -> None:
        call_id, name = _needed(item, "call_id", path), _needed(item, "name", path)
        if arguments is None:
            raise InvalidRequest(f"{path} needs arguments", param=f"{path}.arguments")
        function = {"name": name, "arguments": arguments}
        message = self._open or self._begin(None)
        message.tool_calls = message.tool_calls or []
        message.tool_calls.append({"id": call_id, "type": "function", "function": function})

    def _begin(self, content: str | None) -> Message:
        """A message of the assistant's."""
        reasoning = "\n".join(self._reasoning)
        message = KeptMessage(
            role="assistant",
            content=content,
            reasoning_content=reasoning or None,
            kept_ids=self._ids,
        )
        if self._kept is not None:  # an answer of two messages: the ids are those of neither
            self._kept.kept_ids = None
        self._close(message)
        self._ids, self._kept = None, message
        self._open = message
        return message

    def _close(self, message: Message) -> None:
        self._reasoning, self._open = [], None
        self._ids = self._kept = None
        self.messages.append(message)


def _needed(item: Item, name: str, path: str) -> Any:  # noqa: ANN401 - whichever it is
    value = getattr(item, name)
    if value is None:
        raise InvalidRequest(f"{path} needs {name}", param=f"{path}.{name}")
    return value


def _reasoning_text(item: Item, path: str) -> str:
    """The reasoning of an item, or else its summary."""
    content = item.content or item.summary or []
    return _text(content, f"{path}.content")


def _content(content: str | Sequence[ItemPart], path: str) -> str | list[ContentPart]:
    """One text, or parts where there are images."""
    if isinstance(content, str) or not any(part.type == "input_image" for part in content):
        return _text(content, path)
    parts = []
    for index, part in enumerate(content):
        where = f"{path}[{index}]"
        if part.type != "input_image":
            parts.append(ContentPart(type="text", text=_part(part, where)))
        elif part.image_url is None:
            raise InvalidRequest(f"{where} needs image_url, a data URL", param=where)
        else:
            image = NamedImage(part.image_url, part.detail, param=where)
            parts.append(ContentPart(type="image_url", image_url=image))
    return parts


def _text(content: str | Sequence[ItemPart], path: str) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(_part(part, f"{path}[{index}]") for index, part in enumerate(content))


def _part(part: ItemPart, path: str) -> str:
    if part.type == "refusal" and part.refusal is not None:
        return part.refusal
    if part.type not in TEXT_PARTS or part.text is None:
        raise InvalidRequest(f"{path}: {part.type} is not supported yet", param=path)
    return part.text
