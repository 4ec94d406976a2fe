"""ContextManager: edits and compacts conversations as ``context_management`` asks."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from .....core.errors import InvalidRequest, PromptTooLong
from ....runtime.compaction.summarizer import INSTRUCTIONS
from ....runtime.conversation.chat_input import ChatInput
from ....serving.caching.breakpoints import Breakpoints
from ....serving.compaction import explain_compaction, seal_of, summarizer_of
from ....serving.errors import ApiError
from ....serving.serving_context import Service
from ....serving.sse import Reply
from ....types.request_context import owner_of
from ..answers import AppliedEdit, ClearedThinking, ClearedToolUses
from ..answers import Compacted as CompactedEdit
from ..bodies import (
    ClearThinking,
    ClearToolUses,
    Compact,
    CountRequest,
    Message,
    MessagesRequest,
    ToolUseBlock,
    Trigger,
)
from ..reading import read_conversation
from ..writing import MessageWriter
from .clearing import Cleared, clear_thinking, clear_tool_uses, tool_uses
from .sealed import Compacted, has_more, in_effect, last_turn, replaced, sealed
from .writing import DeferredReply, Managed, ManagedWriter

C = TypeVar("C", bound=CountRequest)
CLEARING_TOKENS = 100_000  # default trigger of `ClearToolUses`
HOW = "context_management or compaction"
Make = Callable[..., MessageWriter]
"""Makes the writer of an answer; it takes the arguments of `MessageWriter`."""


@dataclass(slots=True)
class Edited(Generic[C]):
    """A body whose conversation was edited. ``applied``: the edits that changed it."""

    body: C
    applied: list[AppliedEdit] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Route:
    """The functions of a route that the manager calls.

    ``read`` returns the chat request of a body. ``answer`` renders and submits a body. ``writer``
    returns the writer of an answer.
    """

    read: Callable[[MessagesRequest], ChatInput]
    answer: Callable[[MessagesRequest, Make], Awaitable[Reply]]
    writer: Callable[[MessagesRequest, Breakpoints, Make], MessageWriter]


class ContextManager:
    """Manages the context of conversations of the Messages API."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._seal = seal_of(service)

    def in_effect(self, body: C) -> C:
        """Return the body with its last compaction block, and all before it, replaced by a summary.

        Raises `ApiError` 400 for a block that was altered or sealed by another server.
        """
        return in_effect(body, self._seal, owner_of(body.cache_salt))

    async def open(self, body: MessagesRequest, route: Route) -> Reply:
        """Apply ``context_management`` or ``compaction``, and return the reply."""
        edited = await self.edited(body)
        body = edited.body
        if body.compaction is not None:
            _check_compaction(body)
            asked = (body.compaction.instructions or "").strip()
            return DeferredReply(partial(self._compact_alone, body, route, asked or INSTRUCTIONS))
        edit = next((each for each in _edits(body) if isinstance(each, Compact)), None)
        if edit is not None and body.max_tokens and await self._is_due(body, edit):
            return DeferredReply(partial(self._compact, edited, route, edit))
        return await route.answer(body, _made(Managed(edits=edited.applied)))

    async def edited(self, body: C) -> Edited[C]:
        """Return the body with the parts cleared that its edits name. Raises `InvalidRequest`."""
        edited = Edited(body)
        _check_edits(_edits(body))
        for edit in _edits(body):
            match edit:
                case ClearToolUses():
                    await self._clear_tool_uses(edited, edit)
                case ClearThinking():
                    cleared = await self._service.apart(
                        partial(clear_thinking, edited.body.messages, edit)
                    )
                    if cleared.num_cleared:
                        num = await self._cleared(edited, cleared)
                        edited.applied.append(
                            ClearedThinking(
                                cleared_thinking_turns=cleared.num_cleared, cleared_input_tokens=num
                            )
                        )
        return edited

    async def count(self, body: CountRequest) -> int:
        """Return the number of prompt tokens of a body. Raises `InvalidRequest`."""
        chat = await self._service.apart(partial(read_conversation, body))
        return await summarizer_of(self._service).count(chat)

    async def explain(self, error: PromptTooLong, body: MessagesRequest) -> None:
        """Add to the error's message how many prompt tokens a compaction would leave."""
        num_left = None
        if _can_shorten(body):
            num_left = await self.count(_after(body, "", keeps_last=True)[0])
        explain_compaction(error, num_left, summarizer_of(self._service), how=HOW)

    async def _clear_tool_uses(self, edited: Edited[C], edit: ClearToolUses) -> None:
        trigger = edit.trigger or Trigger(type="input_tokens", value=CLEARING_TOKENS)
        cleared = await self._service.apart(partial(clear_tool_uses, edited.body.messages, edit))
        if not cleared.num_cleared:
            return
        if trigger.type == "tool_uses":
            is_due = len(tool_uses(edited.body.messages)) > trigger.value
        else:
            most = summarizer_of(self._service).threshold(trigger.value)
            is_due = await self.count(edited.body) > most
        if not is_due:
            return
        before = edited.body
        num = await self._cleared(edited, cleared)
        if edit.clear_at_least is not None and num < edit.clear_at_least.value:
            edited.body = before
            return
        edited.applied.append(
            ClearedToolUses(cleared_tool_uses=cleared.num_cleared, cleared_input_tokens=num)
        )

    async def _cleared(self, edited: Edited[C], cleared: Cleared) -> int:
        """Replace the conversation by the cleared one; return by how many tokens it is shorter."""
        before = await self.count(edited.body)
        edited.body = replace(edited.body, messages=cleared.messages)
        return before - await self.count(edited.body)

    async def _is_due(self, body: MessagesRequest, edit: Compact) -> bool:
        if not _can_shorten(body):
            return False
        asked = None if edit.trigger is None else edit.trigger.value
        threshold = summarizer_of(self._service).threshold(asked)
        return await self.count(body) > threshold

    async def _compact(self, edited: Edited[MessagesRequest], route: Route, edit: Compact) -> Reply:
        """Summarize all but the last turn, then answer.

        With ``pause_after_compaction``, summarize all turns and do not answer.
        """
        body, pauses = edited.body, bool(edit.pause_after_compaction)
        more = (edit.instructions or "").strip()
        asked = f"{INSTRUCTIONS}\n\n{more}" if more else INSTRUCTIONS
        managed, shorter = await self._summarized(
            body, route, asked, applied=edited.applied, keeps_last=not pauses
        )
        make = _made(managed)
        return _alone(body, route, make) if pauses else await route.answer(shorter, make)

    async def _compact_alone(self, body: MessagesRequest, route: Route, asked: str) -> Reply:
        managed, _ = await self._summarized(body, route, asked, keeps_last=False, is_signature=True)
        return _alone(body, route, _made(managed))

    async def _summarized(
        self,
        body: MessagesRequest,
        route: Route,
        asked: str,
        *,
        applied: Sequence[AppliedEdit] = (),
        keeps_last: bool,
        is_signature: bool = False,
    ) -> tuple[Managed, MessagesRequest]:
        """Summarize a conversation; return the results to report, and the shorter conversation.

        ``applied``: the edits that were made before the compaction. ``keeps_last``: do not
        summarize the last turn.
        """
        summarizer, most = summarizer_of(self._service), self._service.llm.built.max_model_len - 1
        if (num_left := await self.count(_after(body, "", keeps_last=keeps_last)[0])) > most:
            raise PromptTooLong(num_left, most, param="messages", context=most + 1)
        end = last_turn(body.messages) if keeps_last else len(body.messages)
        head = replace(body, messages=body.messages[:end])
        chat = await self._service.apart(partial(route.read, head))
        summary = await summarizer.summarize(chat, asked)
        shorter, compacted = _after(body, summary.text, keeps_last=keeps_last)
        owner = owner_of(body.cache_salt)
        block = sealed(compacted, self._seal, owner, is_signature=is_signature)
        num_cleared = await self.count(body) - await self.count(shorter)
        edits = [*applied, CompactedEdit(cleared_input_tokens=num_cleared)]
        return Managed(edits=edits, block=block, spent=summary.usage), shorter


def _edits(body: CountRequest) -> list[ClearToolUses | ClearThinking | Compact]:
    return [] if body.context_management is None else body.context_management.edits


def _check_edits(edits: Sequence[Struct]) -> None:
    """Raise `InvalidRequest` for two edits of the same type."""
    kinds = [type(each) for each in edits]
    for index, kind in enumerate(kinds):
        if kind in kinds[:index]:
            param = f"context_management.edits[{index}]"
            message = f"{param}: only one edit of the type {kind.__struct_config__.tag} is allowed"
            raise InvalidRequest(message, param=param)


def _made(managed: Managed) -> Make:
    return partial(ManagedWriter, managed=managed)


def _alone(body: MessagesRequest, route: Route, make: Make) -> Reply:
    writer = route.writer(body, Breakpoints(), make)
    if not isinstance(writer, ManagedWriter):
        raise TypeError("the route's writer does not write compaction blocks")
    return writer.alone()


def _can_shorten(body: CountRequest) -> bool:
    return has_more(body.messages[: last_turn(body.messages)])


def _after(body: C, summary: str, *, keeps_last: bool) -> tuple[C, Compacted]:
    """Return the compacted body, and the content to seal in its compaction block."""
    end = last_turn(body.messages) if keeps_last else len(body.messages)
    compacted = Compacted(summary=summary, tail=body.messages[end:])
    last = len(body.messages) - 1
    messages = replaced(compacted, body.messages[last].path(last))
    return replace(body, messages=messages), compacted


def _check_compaction(body: MessagesRequest) -> None:
    """Raise an error for a conversation that ``compaction`` cannot summarize."""
    if body.context_management is not None:
        message = "compaction cannot be combined with context_management"
        raise InvalidRequest(message, param="compaction")
    last = body.messages[-1]
    if last.role == "assistant" and any(_is_call(each) for each in last.content):
        path = last.path(len(body.messages) - 1)
        raise ApiError(
            400,
            f"{path}: the last turn has a tool call without a result",
            param=path,
            code="compaction_incomplete_turn",
        )
    if not any(_is_text(message) for message in body.messages):
        message = "messages have no content to summarize"
        raise ApiError(400, message, param="messages", code="compaction_nothing_to_summarize")


def _is_call(block: object) -> bool:
    return isinstance(block, ToolUseBlock)


def _is_text(message: Message) -> bool:
    if isinstance(message.content, str):
        return bool(message.content.strip()) and message.role != "system"
    return bool(message.content) and message.role != "system"
