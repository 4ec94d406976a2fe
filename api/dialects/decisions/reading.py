"""Read the conversation of a body of /v1/decisions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from ....core.errors import InvalidRequest
from ...runtime.conversation.chat_input import ChatInput
from ...runtime.decisions.questions import JsonPart
from ...serving.caching.fields import read_cache
from ...types.sampling_params import SamplingParams
from ..openai.reading import plain_messages, read_images, read_paths
from ..responses.bodies import Item
from ..responses.items import HOSTED_CALLS, read_items, thread_of, to_messages
from .bodies import DecisionsRequest

JSON_KIND = "input_json"
READ_KINDS = frozenset(
    {"message", "reasoning", "item_reference", "agent_message", "tool_search_output"}
)


def read_conversation(body: DecisionsRequest, params: SamplingParams) -> ChatInput:
    """Return the input as a conversation. Raises `InvalidRequest` naming the field."""
    given = body.input
    if not given:
        raise InvalidRequest("input must not be empty", param="input")
    if not isinstance(given, str):
        given = [_checked(item, f"input[{index}]") for index, item in enumerate(given)]
    messages = to_messages(thread_of((), read_items(given, lambda _: None)))
    if not messages:
        raise InvalidRequest("input must have a message", param="input")
    return ChatInput(
        messages=plain_messages(messages),
        images=read_images(messages),
        paths=read_paths(messages),
        params=params,
        cache=read_cache(body.cache, None, body.prompt_cache_options, messages),
        cache_key=body.prompt_cache_key,
    )


def _checked(item: Item, path: str) -> Item:
    """Return the item with its JSON parts as text.

    Raises `InvalidRequest` for a type of item that a prompt cannot contain.
    """
    kind = item.type or "message"
    is_call = kind.endswith(("_call", "_call_output")) and kind not in HOSTED_CALLS
    if not is_call and kind not in READ_KINDS:
        raise InvalidRequest(f"{path}: items of type {kind[:64]!a} are not supported", param=path)
    return _with_texts(item, path)


def _with_texts(item: Item, path: str) -> Item:
    """Return the item with each JSON part replaced by a text part that contains the JSON."""
    content = item.content
    if not isinstance(content, list) or not any(map(_is_json, content)):
        return item
    return msgspec.structs.replace(item, content=_texts(content, f"{path}.content"))


def _texts(parts: Sequence[Any], path: str) -> list[Any]:
    texts = []
    for index, part in enumerate(parts):
        if not _is_json(part):
            texts.append(part)
            continue
        try:
            read = msgspec.convert(part, JsonPart)
        except msgspec.ValidationError as error:
            where = f"{path}[{index}]"
            raise InvalidRequest(f"{where}: {error}", param=where) from None
        texts.append({"type": "input_text", "text": read.text})
    return texts


def _is_json(part: object) -> bool:
    return isinstance(part, dict) and part.get("type") == JSON_KIND
