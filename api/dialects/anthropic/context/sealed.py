"""Compaction blocks: sealed summaries that replace the conversation before them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from .....core.errors import InvalidRequest
from ....runtime.compaction.seal import Seal
from ....runtime.compaction.summarizer import HEAD, summary_text
from ....serving.compaction import opened
from ....serving.errors import ApiError
from ....types.shares import Owner
from ..answers import CompactionContent
from ..bodies import Block, CompactionBlock, CountRequest, Message, PlacedMessage, TextBlock
from .clearing import has_results

C = TypeVar("C", bound=CountRequest)


class Compacted(Struct, kw_only=True, omit_defaults=True):
    """The sealed content of a compaction block. ``tail``: the last turn, if it is kept."""

    summary: str
    tail: list[Message] = []


_decode = msgspec.json.Decoder(Compacted).decode


def sealed(
    compacted: Compacted, seal: Seal, owner: Owner, *, is_signature: bool
) -> CompactionContent:
    """Return a new compaction block.

    ``is_signature``: the field ``signature`` has the sealed content, not ``encrypted_content``.
    """
    text = seal.close(owner, msgspec.json.encode(compacted))
    if is_signature:
        return CompactionContent(content=compacted.summary, signature=text)
    return CompactionContent(content=compacted.summary, encrypted_content=text)


def in_effect(body: C, seal: Seal, owner: Owner) -> C:
    """Return the body with its last compaction block, and all before it, replaced by a summary.

    The summary and the last turn before it are read from the sealed content; a block without sealed
    content has only a summary. Raises `ApiError` 400 for a block that was altered or sealed by
    another server.
    """
    places = [
        (index, number, block)
        for index, message in enumerate(body.messages)
        if isinstance(message.content, list)
        for number, block in enumerate(message.content)
        if isinstance(block, CompactionBlock) and block.content is not None
    ]
    if not places:
        return body
    index, number, block = places[-1]
    path = f"{body.messages[index].path(index)}.content[{number}]"
    compacted = _opened(block, path, seal, owner)
    later = [
        PlacedMessage(**msgspec.structs.asdict(each), body_path=each.path(index + offset))
        for offset, each in enumerate(_rest(body.messages[index:], number))
        if each.content != []
    ]
    messages = replaced(compacted, path, cache_control=block)
    return replace(body, messages=[*messages, *later])


def replaced(
    compacted: Compacted, path: str, *, cache_control: Block | None = None
) -> list[Message]:
    """Return the messages that replace a compaction block and all before it.

    ``path``: path of the block in the body. ``cache_control``: the block, if its cache breakpoint
    applies to the summary.
    """
    control = None if cache_control is None else cache_control.cache_control
    text = TextBlock(text=summary_text(compacted.summary), cache_control=control)
    summary = PlacedMessage(role="user", content=[text], body_path=path)
    tail = [
        PlacedMessage(**msgspec.structs.asdict(each) | {"body_path": path})
        for each in compacted.tail
    ]
    return [summary, *tail]


def last_turn(messages: Sequence[Message]) -> int:
    """Return the index of the first message of the last turn.

    The last turn is the last message of the user, or the calls whose results end the conversation.
    """
    at = len(messages) - 1
    if messages[at].role == "assistant" or has_results(messages[at]):
        at -= 1
    return max(0, at)


def has_more(messages: Sequence[Message]) -> bool:
    """Whether messages contain anything besides earlier summaries."""
    return not all(_is_summary(message) for message in messages)


def _is_summary(message: Message) -> bool:
    content = message.content
    return (
        isinstance(content, list)
        and len(content) == 1
        and isinstance(content[0], TextBlock)
        and content[0].text.startswith(HEAD)
    )


def _rest(messages: Sequence[Message], number: int) -> list[Message]:
    """Return the messages after a compaction block, which is block ``number`` of the first message.

    Empty blocks replace that block and those before it, so that later blocks keep their indices.
    """
    first, *later = messages
    blocks = first.content[number + 1 :]
    unused: list[object] = [CompactionBlock() for _ in range(number + 1)] if blocks else []
    return [replace(first, content=[*unused, *blocks]), *later]


def _opened(block: CompactionBlock, path: str, seal: Seal, owner: Owner) -> Compacted:
    """Return the sealed content of a compaction block. Raises `ApiError` 400 for a broken one."""
    name = "signature" if block.encrypted_content is None else "encrypted_content"
    text = getattr(block, name)
    if text is None:
        return Compacted(summary=block.content or "")
    place = f"{path}.{name}"
    try:
        compacted = _decode(opened(seal, owner, text, place))
    except InvalidRequest as error:
        raise ApiError(400, str(error), param=place, code="compaction_signature_invalid") from None
    if compacted.summary != block.content:
        message = f"{path}.content differs from the summary in {name}"
        raise ApiError(400, message, param=f"{path}.content", code="compaction_content_mismatch")
    return compacted
