"""Edits that clear parts of a conversation: results of tool calls, and reasoning."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import NamedTuple, TypeGuard

from msgspec.structs import replace

from ..bodies import (
    Block,
    ClearThinking,
    ClearToolUses,
    Message,
    RedactedThinkingBlock,
    ThinkingBlock,
    ThinkingTurns,
    ToolResultBlock,
    ToolUseBlock,
)

CLEARED = "[The result of this tool call was cleared to save context.]"
KEPT_TOOL_USES = 3
KEPT_TURNS = 1
THOUGHTS = (ThinkingBlock, RedactedThinkingBlock)
Edit = Callable[[Block], Block | None]
"""Returns the block that replaces its argument; None to remove it."""


class Cleared(NamedTuple):
    """An edited conversation. ``num_cleared``: number of the tool calls or turns cleared in it."""

    messages: list[Message]
    num_cleared: int


def tool_uses(messages: Sequence[Message]) -> list[ToolUseBlock]:
    """Return the calls of the client's own tools in a conversation, in order."""
    return [each for message in messages for each in _blocks(message) if _is_use(each)]


def clear_tool_uses(messages: Sequence[Message], edit: ClearToolUses) -> Cleared:
    """Clear the results of tool calls, but not of the latest calls and of excluded tools."""
    num_kept = KEPT_TOOL_USES if edit.keep is None else edit.keep.value
    uses, excluded = tool_uses(messages), set(edit.exclude_tools or ())
    old = [use for use in uses[: max(0, len(uses) - num_kept)] if use.name not in excluded]
    inputs = edit.clear_tool_inputs
    bare = {use.id for use in old if inputs is True or (inputs and use.name in inputs)}
    done = _with_results(messages, {use.id for use in old})

    def cleared(block: Block) -> Block:
        if isinstance(block, ToolResultBlock) and block.tool_use_id in done:
            return replace(block, content=CLEARED)
        if _is_use(block) and block.id in bare & done:
            return replace(block, input={})
        return block

    return Cleared([_edited(message, cleared) for message in messages], len(done))


def clear_thinking(messages: Sequence[Message], edit: ClearThinking) -> Cleared:
    """Remove the reasoning of all but the latest turns that have any.

    A turn is all that the model generated between two messages of the user; tool results do not
    count as messages of the user.
    """
    turns = [turn for turn in _turns(messages) if any(map(_thinks, turn))]
    num_kept = _num_kept_turns(edit, len(turns))
    old = {id(message) for turn in turns[: len(turns) - num_kept] for message in turn}

    def cleared(block: Block) -> Block | None:
        return None if isinstance(block, THOUGHTS) else block

    edited = [_edited(message, cleared) if id(message) in old else message for message in messages]
    return Cleared(edited, len(turns) - num_kept)


def _num_kept_turns(edit: ClearThinking, num_turns: int) -> int:
    match edit.keep:
        case "all" | ThinkingTurns(type="all"):
            return num_turns
        case ThinkingTurns(value=int(value)):
            return min(value, num_turns)
    return min(KEPT_TURNS, num_turns)


def _turns(messages: Sequence[Message]) -> Iterator[list[Message]]:
    """Yield the assistant's messages of each turn."""
    turn: list[Message] = []
    for message in messages:
        if message.role == "assistant":
            turn.append(message)
        elif turn and not has_results(message):
            yield turn
            turn = []
    if turn:
        yield turn


def has_results(message: Message) -> bool:
    """Whether a message has results of tool calls."""
    return any(isinstance(each, ToolResultBlock) for each in _blocks(message))


def _with_results(messages: Sequence[Message], ids: Collection[str]) -> set[str]:
    """Return the ids among ``ids`` that name a call whose result is not cleared yet."""
    return {
        each.tool_use_id
        for message in messages
        for each in _blocks(message)
        if isinstance(each, ToolResultBlock) and each.tool_use_id in ids and each.content != CLEARED
    }


def _is_use(block: Block) -> TypeGuard[ToolUseBlock]:
    return type(block) is ToolUseBlock


def _thinks(message: Message) -> bool:
    return any(isinstance(each, THOUGHTS) for each in _blocks(message))


def _edited(message: Message, edit: Edit) -> Message:
    """Return a message with edited blocks; without token ids if an edit has changed a block."""
    old = _blocks(message)
    new = [edited for each in old if (edited := edit(each)) is not None]
    if len(new) == len(old) and all(a is b for a, b in zip(new, old, strict=True)):
        return message
    return replace(message, content=new, token_ids=None)


def _blocks(message: Message) -> list[Block]:
    return message.content if isinstance(message.content, list) else []
