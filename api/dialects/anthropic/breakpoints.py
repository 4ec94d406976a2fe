"""cache_control: the breakpoints in a body, and the conversation up to each of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

from msgspec.structs import replace

from ....core.errors import InvalidRequest
from ...runtime.conversation.chat_input import ChatInput
from ...serving.caching.breakpoints import NEXT_CONTENT, Mark
from .bodies import (
    Block,
    CacheControl,
    CountRequest,
    Message,
    SystemBlock,
    TextBlock,
    ToolResultBlock,
)
from .reading import read_conversation

MAX_BREAKPOINTS = 4
TTL = {"5m": 300.0, "1h": 3600.0}  # seconds
NEXT = Message(role="user", content=NEXT_CONTENT)


def read_marks(body: CountRequest) -> list[Mark]:
    """Return all breakpoints of a body. Raises `InvalidRequest` for more than four."""
    ends = [*_in_tools(body), *_in_system(body), *_in_messages(body)]
    if body.cache_control is not None and ends and ends[-1].control is None:
        ends[-1] = BlockEnd(body.cache_control, ends[-1].head)
    marked = [(each.control, each.head) for each in ends if each.control is not None]
    if len(marked) > MAX_BREAKPOINTS:
        message = f"at most {MAX_BREAKPOINTS} blocks may carry cache_control, not {len(marked)}"
        raise InvalidRequest(message, param="cache_control")
    return [Mark(partial(_read, head), TTL[control.ttl or "5m"]) for control, head in marked]


def _read(head: Callable[[], CountRequest]) -> ChatInput:
    return read_conversation(head())


class BlockEnd(NamedTuple):
    """The cache control of a block. ``head`` returns the body up to the end of the block."""

    control: CacheControl | None
    head: Callable[[], CountRequest]


def _in_tools(body: CountRequest) -> Iterator[BlockEnd]:
    """Yield the end of each tool. Templates render the system text with the tools, so it is kept
    in the body.
    """
    tools = body.tools or []
    for end, tool in enumerate(tools, start=1):
        if tool.is_custom:
            yield BlockEnd(tool.cache_control, partial(_tools_head, body, end))


def _tools_head(body: CountRequest, end: int) -> CountRequest:
    return replace(body, tools=(body.tools or [])[:end], messages=[NEXT])


def _in_system(body: CountRequest) -> Iterator[BlockEnd]:
    blocks = body.system if isinstance(body.system, list) else []
    for end, block in enumerate(blocks, start=1):
        yield BlockEnd(block.cache_control, partial(_system_head, body, blocks[:end]))
    if isinstance(body.system, str):
        yield BlockEnd(None, lambda: replace(body, messages=[NEXT]))


def _system_head(body: CountRequest, blocks: list[SystemBlock]) -> CountRequest:
    return replace(body, system=blocks, messages=[NEXT])


def _in_messages(body: CountRequest) -> Iterator[BlockEnd]:
    for index, message in enumerate(body.messages):
        if isinstance(message.content, str):
            yield BlockEnd(None, partial(_message_head, body, index, message))
            continue
        for end, block in enumerate(message.content, start=1):
            cut = partial(_cut_head, body, index, end)
            yield BlockEnd(_control(block), cut)


def _cut_head(body: CountRequest, index: int, end: int) -> CountRequest:
    message = body.messages[index]
    ids = message.token_ids if end == len(message.content) else None
    cut = replace(message, content=message.content[:end], token_ids=ids)
    return _message_head(body, index, cut)


def _message_head(body: CountRequest, index: int, last: Message) -> CountRequest:
    return replace(body, messages=[*body.messages[:index], last])


def _control(block: Block) -> CacheControl | None:
    """Return the cache control of a block.

    For a tool result without one, return the first one among the text blocks inside it.
    """
    if block.cache_control is None and isinstance(block, ToolResultBlock):
        inner = block.content if isinstance(block.content, list) else []
        controls = [each.cache_control for each in inner if isinstance(each, TextBlock)]
        return next((each for each in controls if each is not None), None)
    return block.cache_control
