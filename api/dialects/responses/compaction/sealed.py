"""Compaction items: sealed summaries that replace the items before them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

import msgspec
from msgspec import Struct

from .....core.errors import InvalidRequest
from ....runtime.compaction.seal import Seal
from ....runtime.compaction.summarizer import HEAD, summary_text
from ....serving.compaction import opened
from ....types.request_context import random_id
from ....types.shares import Owner
from ..answers import CompactionItem
from ..bodies import AnswerItem, Item
from ..items import Thread

COMPACTION, TRIGGER = "compaction", "compaction_trigger"
TOOLS, FOUND = "additional_tools", "tool_search_output"


class Compacted(Struct, kw_only=True, omit_defaults=True):
    """The sealed content of a compaction item, which replaces all items before it.

    ``lead``: the system messages and tools of the conversation. ``tail``: its last turn, if it is
    kept. ``keeps_users``: the user's messages before the compaction item are kept.
    """

    summary: str
    lead: list[Item] = []
    tail: list[Item] = []
    keeps_users: bool = False


_decode = msgspec.json.Decoder(Compacted).decode


def sealed(compacted: Compacted, seal: Seal, owner: Owner) -> CompactionItem:
    """Return a new compaction item."""
    text = seal.close(owner, msgspec.json.encode(compacted))
    return CompactionItem(id=new_id(), encrypted_content=text)


def new_id() -> str:
    """Return a new id for a compaction item."""
    return f"cmp_{random_id()}"


def in_effect(thread: Thread, seal: Seal, owner: Owner) -> Thread:
    """Return the thread with its last compaction item, and all before it, replaced by its content.

    The messages of users that an item leaves in place are those that the item before it left.
    Raises `InvalidRequest` for an item whose content was altered or sealed by another server.
    """
    places = [at for at, item in enumerate(thread.items) if item.type == COMPACTION]
    found: list[tuple[int, Compacted]] = []
    while places:
        at = places.pop()
        found.append((at, _opened(thread.items[at], thread.paths[at], seal, owner)))
        if not found[-1][1].keeps_users:
            break
    before, begin = Thread([], []), 0
    for at, compacted in reversed(found):
        before = _joined(before, _between(thread, begin, at))
        before, begin = replaced(compacted, before, Thread([], []), path=thread.paths[at]), at + 1
    return _joined(before, _between(thread, begin, len(thread.items)))


def _opened(item: Item, place: str, seal: Seal, owner: Owner) -> Compacted:
    path = f"{place}.encrypted_content"
    if not isinstance(item.encrypted_content, str):
        raise InvalidRequest(f"{path} must be a text", param=path)
    return _decode(opened(seal, owner, item.encrypted_content, path))


def _between(thread: Thread, begin: int, end: int) -> Thread:
    """Return the items from ``begin`` to ``end``, which may follow a compaction item."""
    items = list(thread.items[begin:end])
    if begin and items and isinstance(last := thread.items[begin - 1], AnswerItem):
        # The token ids of a stored answer belong to the items after its compaction item.
        items[0] = AnswerItem(**msgspec.structs.asdict(items[0]), answer_ids=last.answer_ids)
    return Thread(items, thread.paths[begin:end])


def _joined(first: Thread, second: Thread) -> Thread:
    return Thread([*first.items, *second.items], [*first.paths, *second.paths])


def replaced(compacted: Compacted, before: Thread, later: Thread, *, path: str) -> Thread:
    """Return a thread in which the content of a compaction item replaces the items ``before``.

    ``later``: the items after the compaction item. ``path``: path of the compaction item in the
    body.
    """
    summary = Item(type="message", role="user", content=summary_text(compacted.summary))
    users = user_messages(before) if compacted.keeps_users else Thread([], [])
    items = [*compacted.lead, *users.items, summary, *compacted.tail, *later.items]
    lead, tail = [path] * len(compacted.lead), [path] * len(compacted.tail)
    return Thread(items, [*lead, *users.paths, path, *tail, *later.paths])


def user_messages(thread: Thread) -> Thread:
    """Return the user's messages of a thread, without summaries."""
    places = [
        index
        for index, item in enumerate(thread.items)
        if item.type == "message" and item.role == "user" and not _is_summary(item)
    ]
    return Thread([thread.items[each] for each in places], [thread.paths[each] for each in places])


def lead_of(items: Sequence[Item], end: int) -> list[Item]:
    """Return the system messages and tools with which every prompt of a conversation begins.

    These are the system messages before all other items, and the tools that the first ``end`` items
    added.
    """
    lead = list(takewhile(_is_system, items))
    for item in items[:end]:
        if item.type in (TOOLS, FOUND) and item.tools:
            lead.append(Item(type=TOOLS, tools=item.tools))
    return lead


def last_turn(items: Sequence[Item]) -> int:
    """Return the index of the first item of the last turn.

    The last turn is the last message of the user, or the calls whose results end the conversation,
    with the text and the reasoning before them.
    """
    at = len(items)
    while at and _is_result(items[at - 1]):
        at -= 1
    if at == len(items) and at and not _is_generated(items[at - 1]):
        return at - 1
    while at and _is_generated(items[at - 1]):
        at -= 1
    return at


def has_more(items: Sequence[Item]) -> bool:
    """Whether items contain anything besides system messages, tools and summaries."""
    return not all(_is_system(each) or _is_summary(each) or each.type == TOOLS for each in items)


def _is_system(item: Item) -> bool:
    return item.type == "message" and item.role in ("system", "developer")


def _is_summary(item: Item) -> bool:
    return isinstance(item.content, str) and item.content.startswith(HEAD)


def _is_result(item: Item) -> bool:
    kind = item.type or ""
    return kind.endswith("_call_output") or kind == FOUND


def _is_generated(item: Item) -> bool:
    """Whether the model generated the item."""
    kind = item.type or ""
    is_message = kind == "message" and item.role == "assistant"
    return is_message or kind == "reasoning" or kind.endswith("_call")
