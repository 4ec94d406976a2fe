"""Convert input items to messages of a conversation, and to stored items."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec

from ....core.errors import InvalidRequest
from ...media.sources import UNHEARD, file_text, unread_file
from ...runtime.conversation.left_out import tell_left_out
from ...runtime.conversation.seen_images import UNSEEN
from ...serving.decoding import is_unknown
from ...types.request_context import random_id
from ..openai.bodies import ContentPart, KeptMessage, Message, NamedImage, NamedMessage
from .bodies import ROLES, TEXT_PARTS, AnswerItem, Item, ItemPart
from .tools import flat_name, found_text

Lookup = Callable[[str], Item | None]
"""Returns a stored item by its id."""

PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc", "compaction": "cmp"}
NAMED_CALLS = ("function", "custom_tool")  # types of calls that have a name
HOSTED_CALLS = ("web_search_call", "file_search_call", "image_generation_call")
"""Calls that a provider executed and whose results the conversation does not contain."""


class Thread(NamedTuple):
    """The items of a conversation in order, and the path of each in the body."""

    items: Sequence[Item]
    paths: Sequence[str]


def thread_of(history: Sequence[Item], items: Sequence[Item]) -> Thread:
    """Return the thread of a request's ``items``, which follow the items of earlier turns."""
    numbers = range(-len(history), len(items))
    return Thread([*history, *items], [f"input[{number}]" for number in numbers])


def read_items(given: str | Sequence[Item] | None, lookup: Lookup) -> list[Item]:
    """Return the items of an ``input`` with references resolved. Raises `InvalidRequest`."""
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
    """Return the items as clients list them: each has an id and a status, and content in parts."""
    return [_kept(item) for item in items]


def _kept(item: Item) -> Item:
    prefix = PREFIXES.get(item.type or "", "item")
    content = item.content
    if item.type == "message" and isinstance(content, str):
        kind = "output_text" if item.role == "assistant" else "input_text"
        content = [ItemPart(type=kind, text=content)]
    return msgspec.structs.replace(
        item,
        id=item.id or f"{prefix}_{random_id()}",
        status=item.status or "completed",
        content=content,
    )


def to_messages(thread: Thread) -> list[Message]:
    """Return the messages of the items. Raises `InvalidRequest` with the path of a bad item.

    Reasoning, text and calls of one answer are merged into one message, so that the conversation
    renders as the model saw it and its prefix hits the cache.
    """
    found = _Messages()
    for item, path in zip(*thread, strict=True):
        found.add(item, path)
    return found.messages


class _Messages:
    """Collects items into messages."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self._reasoning: list[str] = []  # reasoning that belongs to the next message
        self._open: Message | None = None  # the assistant's message that may still get calls
        self._ids: list[int] | None = None  # token ids of a stored answer, until its message begins
        self._kept: KeptMessage | None = None  # the message that holds these ids

    def add(self, item: Item, path: str) -> None:
        """Append an item. Unknown types are left out."""
        if item.token_ids is not None:
            message = f"{path}.token_ids: not supported by this API; use previous_response_id"
            raise InvalidRequest(message, param=f"{path}.token_ids")
        if isinstance(item, AnswerItem):
            self._ids, self._kept = item.answer_ids, None
        kind = item.type or ""
        match kind:
            case "message":
                self._add_message(item, path)
            case "reasoning":
                reasoning = _reasoning_text(item, path)
                self._reasoning += [reasoning] if reasoning or self._reasoning else []
                self._open = None
            case "agent_message":
                self._close(_of_agent(item, path))
            case "additional_tools":
                pass  # `read_tools` reads these items
            case "tool_search_output":
                self._add_result(item, path, found_text(item.tools or ()))
            case _ if kind in HOSTED_CALLS:
                tell_left_out("items of type", kind)
            case _ if kind.endswith("_call"):
                self._add_call(item, path)
            case _ if kind.endswith("_call_output"):
                self._add_result(item, path, _output(item.output, f"{path}.output"))
            case _:
                tell_left_out("items of type", kind)

    def _add_message(self, item: Item, path: str) -> None:
        role = _needed(item, "role", path)
        if role not in ROLES:
            message = f"{path}.role must be one of {', '.join(ROLES)}"
            raise InvalidRequest(message, param=f"{path}.role")
        content, where = _needed(item, "content", path), f"{path}.content"
        if role == "assistant":
            self._begin(_text(content, where), path)
        else:
            self._close(NamedMessage(role=role, content=_content(content, where), path=path))

    def _add_call(self, item: Item, path: str) -> None:
        """Append a call. Calls other than function calls are named after their type."""
        kind = (item.type or "").removesuffix("_call")
        name = item.name or (_needed(item, "name", path) if kind in NAMED_CALLS else kind)
        call_id = item.call_id or item.id or f"call_{len(self.messages)}"
        arguments = _arguments(item, path)
        function = {"name": flat_name(name, item.namespace), "arguments": arguments}
        message = self._open or self._begin(None, path)
        message.tool_calls = message.tool_calls or []
        message.tool_calls.append({"id": call_id, "type": "function", "function": function})
        results = [each for each in (item.output, item.outputs, item.error) if each is not None]
        if results:  # the item contains both the call and its result
            text = "\n".join(_text_of(each) for each in results)
            self._close(Message(role="tool", tool_call_id=call_id, content=text))

    def _add_result(self, item: Item, path: str, content: str | list[ContentPart]) -> None:
        message = NamedMessage(role="tool", content=content, path=path)
        message.tool_call_id = item.call_id
        self._close(message)

    def _begin(self, content: str | None, path: str) -> Message:
        """Append and return an assistant's message."""
        reasoning = "\n".join(self._reasoning)
        message = KeptMessage(
            role="assistant",
            content=content,
            reasoning_content=reasoning or None,
            kept_ids=self._ids,
            path=path,
        )
        if self._kept is not None:  # the answer has two messages, so its ids fit neither
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


def _arguments(item: Item, path: str) -> object:
    """Return the arguments of a function call, or the payload of another type of call."""
    if item.type == "custom_tool_call":
        if not isinstance(item.input, str | None):
            raise InvalidRequest(f"{path}.input must be a text", param=f"{path}.input")
        return {"input": item.input or ""}
    given = (item.arguments, item.action, item.operation, item.input)
    own = next((each for each in given if each is not None), None)
    if own is None and item.code is not None:
        return {"code": item.code}
    return own


def _of_agent(item: Item, path: str) -> Message:
    """Return the message of another agent as a user message."""
    author = f" {item.author}" if item.author else ""
    text = _text(item.content or "", f"{path}.content")
    return NamedMessage(role="user", content=f"Message of the agent{author}:\n{text}", path=path)


def _reasoning_text(item: Item, path: str) -> str:
    """Return the reasoning of an item; without reasoning, its summary."""
    return _text(item.content or item.summary or [], f"{path}.content")


def _output(output: object, path: str) -> str | list[ContentPart]:
    """Return the result of a call: text, parts, or another value as JSON."""
    if isinstance(output, dict) and isinstance(output.get("image_url"), str):
        output = [{**output, "type": "input_image"}]  # the output of a computer call
    is_parts = isinstance(output, list) and all(
        isinstance(part, ItemPart) or (isinstance(part, dict) and isinstance(part.get("type"), str))
        for part in output
    )
    return _content(output, path, is_result=True) if is_parts else _text_of(output)


def _text_of(value: object) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    return msgspec.json.encode(value).decode()


def _content(content: object, path: str, *, is_result: bool = False) -> str | list[ContentPart]:
    """Return content as one text, or as parts if it has images or breakpoints."""
    if isinstance(content, str):
        return content
    parts: list[ContentPart] = []
    for index, part in enumerate(_parts(content, path)):
        if (read := _part(part, f"{path}[{index}]", is_result=is_result)) is not None:
            read.prompt_cache_breakpoint = part.prompt_cache_breakpoint
            parts.append(read)
    if any(part.type == "image_url" or part.prompt_cache_breakpoint for part in parts):
        return parts
    return "\n".join(part.text or "" for part in parts)


def _text(content: object, path: str) -> str:
    """Return content as text. Raises `InvalidRequest` if it has images."""
    found = _content(content, path)
    if isinstance(found, str):
        return found
    images = (i for i, part in enumerate(_parts(content, path)) if part.type == "input_image")
    if (index := next(images, None)) is None:
        return "\n".join(part.text or "" for part in found)
    message = f"{path}[{index}]: images are not supported here"
    raise InvalidRequest(message, param=f"{path}[{index}]")


def _parts(content: object, path: str) -> list[ItemPart]:
    if not isinstance(content, list):
        raise InvalidRequest(f"{path} must be a text or a list of parts", param=path)
    parts = []
    for index, part in enumerate(content):
        try:
            parts.append(part if isinstance(part, ItemPart) else _read_part(part))
        except msgspec.ValidationError as error:
            where = f"{path}[{index}]"
            raise InvalidRequest(f"{where}: {error}", param=where) from None
    return parts


def _read_part(part: object) -> ItemPart:
    if isinstance(part, dict) and is_unknown(part, ItemPart):
        return ItemPart(type=part["type"])
    return msgspec.convert(part, ItemPart)


def _part(part: ItemPart, where: str, *, is_result: bool) -> ContentPart | None:
    """Return a part as the model reads it; None for an unsupported part, which is left out."""
    match part.type:
        case kind if kind in TEXT_PARTS and part.text is not None:
            return ContentPart(type="text", text=part.text)
        case "refusal" if part.refusal is not None:
            return ContentPart(type="text", text=part.refusal)
        case "input_image" if part.image_url is not None:
            image = NamedImage(part.image_url, part.detail, param=where)
            return ContentPart(type="image_url", image_url=image)
        case "input_image" if is_result:
            return ContentPart(type="text", text=UNSEEN)
        case "input_image":
            raise InvalidRequest(f"{where} needs image_url, a data URL", param=where)
        case "input_file":
            text = file_text(part.file_data, part.filename)
            if text is None and not is_result:
                message = f"{where}: a file must be file_data with a data URL of text"
                raise InvalidRequest(message, param=where)
            return ContentPart(
                type="text", text=unread_file(part.filename) if text is None else text
            )
        case kind if kind in TEXT_PARTS or (kind in UNHEARD and not is_result):
            raise InvalidRequest(f"{where}: {kind} parts are not supported", param=where)
    tell_left_out("parts of type", part.type)
    return None
