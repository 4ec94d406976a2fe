"""POST /v1/branches: several continuations of one beginning, which is computed once.

Each branch is a request of its own with its own suffix. The prefix cache does the rest: the first
computes what all share, the others wait for it and borrow its pages; nobody writes into a shared
page.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response

from ..core.errors import InvalidRequest
from .answer import merge
from .chat import OPENING, ChatWriter, read_ask
from .completions import completion_params
from .errors import JsonResponse
from .forms import read_cache
from .output.events import PlainParser
from .prompts import PromptNote, text_parts
from .results import batch_usage
from .schema import ChatRequest, CompletionRequest, Message, Positive, decoder
from .service import Service
from .shapes import Body, Head, usage_body
from .sse import EventStream, unless_gone
from .talk import Ask, TurnChoice, TurnDelta
from .turn import Turn

MAX_BRANCHES = 64
Text = str | list[int]


class Branch(Struct, kw_only=True, forbid_unknown_fields=True):
    """What one branch adds to the beginning, and where it samples otherwise than the body says."""

    messages: list[Message] | None = None
    prompt: Text | None = None
    seed: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    stop: str | list[str] | None = None
    max_tokens: Positive | None = None
    max_completion_tokens: Positive | None = None


class BranchesRequest(Struct, kw_only=True):
    """Body of /v1/branches; what else it holds are fields of a chat or of a text completion."""

    branches: Annotated[list[Branch], Meta(min_length=1, max_length=MAX_BRANCHES)]
    messages: msgspec.Raw = msgspec.Raw()
    prompt: Text | None = None


decode = decoder(BranchesRequest)
decode_chat = decoder(ChatRequest)
decode_completion = decoder(CompletionRequest)
AnyBody = ChatRequest | CompletionRequest


def decode_branches(data: bytes) -> list[AnyBody]:
    """One body for each branch, as if it had been sent alone; raises 400."""
    asked = decode(data)
    is_chat = bool(bytes(asked.messages))
    if is_chat == (asked.prompt is not None):
        raise InvalidRequest("needs prompt or messages, and not both", param="prompt")
    shared: AnyBody = decode_chat(data) if is_chat else decode_completion(data)
    if shared.n not in (None, 1):
        raise InvalidRequest("n must be 1: each branch is one answer", param="n")
    return [_merged(shared, each, f"branches[{i}]") for i, each in enumerate(asked.branches)]


def _merged(shared: AnyBody, branch: Branch, path: str) -> AnyBody:
    own = {
        name: value for name, value in msgspec.structs.asdict(branch).items() if value is not None
    }
    wrong = "prompt" if isinstance(shared, ChatRequest) else "messages"
    if wrong in own or (wrong == "messages" and "max_completion_tokens" in own):
        name = wrong if wrong in own else "max_completion_tokens"
        message = f"{path}: {name} does not suit the body"
        raise InvalidRequest(message, param=f"{path}.{name}")
    if isinstance(shared, ChatRequest):
        own["messages"] = [*shared.messages, *(branch.messages or ())]
    else:
        own["prompt"] = _joined(shared.prompt, branch.prompt, path)
    return msgspec.structs.replace(shared, **own)


def _joined(front: Any, end: Text | None, path: str) -> Text:  # noqa: ANN401 - a union of lists
    if end is not None and isinstance(front, str) != isinstance(end, str):
        message = f"{path}.prompt must be a text or token ids, as the body's prompt is"
        raise InvalidRequest(message, param=f"{path}.prompt")
    whole: Text = front if end is None else front + end
    return whole


class BranchesRoute:
    """Forks a beginning into branches."""

    def __init__(self, service: Service) -> None:
        self.service = service

    async def create(self, request: Request) -> Response:
        """Answer all branches, whole or as one stream."""
        bodies = await self.service.read(request, decode_branches)
        first = bodies[0]
        self.service.check_model(first.model)
        self.service.check_room(len(bodies), 1)
        head = Head(prefix="branches", model=self.service.model)
        turns = await self._open(bodies, head)
        writer = BranchWriter(self.service, head, first)
        if first.stream:
            return EventStream(
                writer.branch_events(turns),
                close=lambda: _close(turns),
                ping_seconds=self.service.settings.ping_seconds,
            )
        choices = await unless_gone(request.receive, _collect(turns))
        return JsonResponse(writer.branches(turns, choices))

    async def _open(self, bodies: Sequence[AnyBody], head: Head) -> list[Turn]:
        turns: list[Turn] = []
        try:
            for index, body in enumerate(bodies):
                turns.append(await self._open_one(body, f"{head.id}-{index}"))
        except BaseException:
            _close(turns)
            raise
        return turns

    async def _open_one(self, body: AnyBody, name: str) -> Turn:
        if isinstance(body, ChatRequest):
            return await self.service.turns.open(read_ask(body), request_id=name)
        prompt: Any = body.prompt
        ask = Ask(messages=(), params=completion_params(body))
        answer = await self.service.llm.open(
            prompt,
            ask.params,
            request_id=name,
            cache=read_cache(body.cache, body.prompt_cache_retention, body.prompt_cache_options),
            note=PromptNote(parts=text_parts(prompt), cache_key=body.prompt_cache_key),
        )
        return Turn(self.service.llm, answer, ask, [PlainParser()])


def _close(turns: Sequence[Turn]) -> None:
    for turn in turns:
        turn.close()


async def _collect(turns: Sequence[Turn]) -> list[TurnChoice]:
    """All answers; an error of one ends the others."""
    try:
        return [
            replace(choice, index=index)
            for index, turn in enumerate(turns)
            for choice in await turn.collect()
        ]
    finally:
        _close(turns)


class BranchWriter(ChatWriter):
    """Writes branches as a chat's choices are written, each with its own usage."""

    whole_kind = "branches"

    def branches(self, turns: Sequence[Turn], choices: Sequence[TurnChoice]) -> Body:
        """All branches in one body."""
        written = [
            {**self.choice(choice), "usage": usage_body(turn.usage)}
            for turn, choice in zip(turns, choices, strict=True)
        ]
        body = self.answer([], batch_usage([turn.usage for turn in turns]))
        del body["choices"]
        return {**body, "branches": written}

    async def branch_events(self, turns: Sequence[Turn]) -> AsyncGenerator[bytes]:
        """The branches as one stream of chat chunks, told apart by their index."""
        sources = [_numbered(turn, index) for index, turn in enumerate(turns)]
        opened = False
        async with aclosing(merge(sources)) as deltas:
            async for delta in deltas:
                if delta.finish_reason is not None:
                    self.refuse_aborted(delta.finish_reason, turns[delta.index].num_tokens(0))
                if not opened:
                    opened = True
                    for index in range(len(turns)):
                        yield self.chunk(index, OPENING)
                for chunk in self._chunks(delta):
                    yield chunk
        for last in self.end(batch_usage([turn.usage for turn in turns])):
            yield last


async def _numbered(turn: Turn, index: int) -> AsyncGenerator[TurnDelta]:
    async with aclosing(turn.deltas()) as deltas:
        async for delta in deltas:
            yield replace(delta, index=index)
