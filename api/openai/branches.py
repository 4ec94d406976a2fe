"""POST /v1/branches: several continuations of one beginning, which is computed once.

Each branch is a request of its own with its own suffix. The prefix cache does the rest: the first
computes what all share, the others wait for it and borrow its pages; nobody writes into a shared
page.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response

from ...core.errors import InvalidRequest, PromptTooLong
from ..parsing.events import PlainParser
from ..runtime.chat import Turn
from ..runtime.chat_types import Ask, TurnChoice, TurnDelta
from ..runtime.generation import merge
from ..runtime.prompt_history import PromptNote, text_parts
from ..runtime.tools import read_cache
from ..serving.errors import JsonResponse
from ..serving.serving_context import OPENAI_TEMPERATURE, Service
from ..serving.sse import EventStream, unless_gone
from ..types.results import Body, batch_usage
from .chat import OPENING, ChatWriter, read_ask
from .completions import completion_params, refuse
from .schema import ChatRequest, CompletionRequest, Message, Positive, decoder
from .shapes import Head, is_prewarm, usage_body

MAX_BRANCHES = 64
Text = str | list[int]
AnyBody = ChatRequest | CompletionRequest


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Fork:
    """One branch as a body of its own, and where the fields of that stand."""

    body: AnyBody
    path: str
    own: frozenset[str]  # fields that the branch gave
    num_shared: int  # messages of the beginning

    @contextmanager
    def naming(self) -> Iterator[None]:
        """Let errors name the field as the body of all branches calls it."""
        try:
            yield
        except InvalidRequest as error:
            name = error.param or ""
            place = self._place(name)
            if place != name:
                error.param = place
                if not isinstance(error, PromptTooLong):  # whose words clients know
                    error.args = (_renamed(str(error), name, place),)
            raise

    def _place(self, name: str) -> str:
        found = _INDEXED.match(name)
        if found is None:
            return f"{self.path}.{name}" if name in self.own else name
        index = int(found["index"]) - self.num_shared
        return name if index < 0 else f"{self.path}.messages[{index}]{name[found.end() :]}"


def _renamed(message: str, name: str, place: str) -> str:
    found = re.compile(rf"\b{re.escape(name)}").search(message)
    if found is None:
        return f"{place}: {message}"
    return f"{message[: found.start()]}{place}{message[found.end() :]}"


_INDEXED = re.compile(r"messages\[(?P<index>\d+)\]")
decode = decoder(BranchesRequest)
decode_chat = decoder(ChatRequest)
decode_completion = decoder(CompletionRequest)


def decode_branches(data: bytes) -> list[Fork]:
    """One body for each branch, as if it had been sent alone; raises 400."""
    asked = decode(data)
    is_chat = bool(bytes(asked.messages))
    if is_chat == (asked.prompt is not None):
        raise InvalidRequest("needs prompt or messages, and not both", param="prompt")
    shared: AnyBody = decode_chat(data) if is_chat else decode_completion(data)
    if shared.n not in (None, 1):
        raise InvalidRequest("n must be 1: each branch is one answer", param="n")
    if shared.echo:
        raise InvalidRequest("echo is not supported here", param="echo")
    if is_prewarm(shared):
        name = "prompt_cache_options.prewarm"
        raise InvalidRequest(f"{name}: a chat or a completion can be prewarmed", param=name)
    return [_forked(shared, each, f"branches[{i}]") for i, each in enumerate(asked.branches)]


def _forked(shared: AnyBody, branch: Branch, path: str) -> Fork:
    own = {
        name: value for name, value in msgspec.structs.asdict(branch).items() if value is not None
    }
    wrong = "prompt" if isinstance(shared, ChatRequest) else "messages"
    if wrong in own or (wrong == "messages" and "max_completion_tokens" in own):
        name = wrong if wrong in own else "max_completion_tokens"
        message = f"{path}: {name} does not suit the body"
        raise InvalidRequest(message, param=f"{path}.{name}")
    given = frozenset(own)
    num_shared = 0
    if isinstance(shared, ChatRequest):
        num_shared = len(shared.messages)
        own["messages"] = [*shared.messages, *(branch.messages or ())]
        # Else the body's would win: of the two fields that mean the same, it stands above.
        own.setdefault("max_completion_tokens", branch.max_tokens or shared.max_completion_tokens)
    else:
        own["prompt"] = _joined(shared.prompt, branch.prompt, path)
    body = msgspec.structs.replace(shared, **own)
    return Fork(body=body, path=path, own=given, num_shared=num_shared)


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
        forks = await self.service.read(request, decode_branches)
        first = forks[0].body
        for fork in forks:
            self.service.check_range(fork.body, most_temperature=OPENAI_TEMPERATURE)
        self.service.check_model(first.model)
        self._check_limits(forks)
        self.service.check_room(len(forks), 1)
        head = Head(prefix="branches", model=self.service.model)
        writer = BranchWriter(self.service, head, first)
        writer.prompt_ids = [f"{head.id}-{index}" for index in range(len(forks))]
        opening = self._open(request, forks, writer.prompt_ids)
        turns = await self.service.wanted(request, opening, first.deadline_ms)
        if first.stream:
            return EventStream(
                writer.branch_events(turns),
                close=lambda: _close(turns),
                ping_seconds=self.service.settings.limits.ping_seconds,
            )
        choices = await unless_gone(request.receive, _collect(turns))
        return JsonResponse(writer.branches(turns, choices))

    def _check_limits(self, forks: Sequence[Fork]) -> None:
        limits = self.service.settings.limits
        limits.check("branches", len(forks), "max_prompts")
        for fork in forks:
            with fork.naming():
                limits.check_body(fork.body)

    async def _open(
        self, request: Request, forks: Sequence[Fork], names: Sequence[str]
    ) -> list[Turn]:
        turns: list[Turn] = []
        try:
            for fork, name in zip(forks, names, strict=True):
                with fork.naming():
                    turns.append(await self._open_one(request, fork.body, name))
        except BaseException:
            _close(turns)
            raise
        return turns

    async def _open_one(self, request: Request, body: AnyBody, name: str) -> Turn:
        if isinstance(body, ChatRequest):
            ask = await self.service.apart(request, partial(read_ask, body))
            return await self.service.turns.open(ask, request_id=name)
        refuse(body)
        prompt: Any = body.prompt
        note = PromptNote(parts=text_parts(prompt), cache_key=body.prompt_cache_key)
        if isinstance(prompt, str):
            special = body.add_special_tokens is not False
            prompt = await self.service.llm.tokenizer.encode(prompt, add_special_tokens=special)
        ask = Ask(messages=(), params=completion_params(body))
        answer = await self.service.llm.open(
            prompt,
            ask.params,
            request_id=name,
            cache=read_cache(body.cache, body.prompt_cache_retention, body.prompt_cache_options),
            note=note,
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
            {**self.choice(choice), "usage": usage_body(turn.usage) | self.explanation(name)}
            for turn, choice, name in zip(turns, choices, self.prompt_ids, strict=True)
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
