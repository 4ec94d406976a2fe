"""POST /v1/branches: several continuations of one prefix, which is computed once.

Each branch is a request with its own suffix. The prefix cache does the rest: the first branch
computes the shared prefix, the others wait for it and borrow its pages. Shared pages are read only.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import asdict, replace

from ...core.errors import InvalidRequest, PromptTooLong
from ..parsing.output_parser import PlainParser
from ..protocol.decoding import decoder
from ..protocol.sampling import (
    Positive,
    Probability,
    Seed,
    Stop,
    Temperature,
    TopK,
    TopP,
    is_prewarm,
)
from ..runtime.chat import ChatAnswer
from ..runtime.conversation.chat_input import ChatInput
from ..runtime.generation import each_of, merge
from ..serving.serve import Dialect
from ..serving.sse import Reply
from ..types.fields import name_as_given
from ..types.results import Choice, TextDelta, batch_usage
from .chat import ChatWriter, read_chat
from .completions import completion_params, open_text, read_prompts, refuse
from .protocol import BranchBody, BranchesBody, UsageBody
from .schema import ChatRequest, CompletionRequest, Message
from .writer import Head, usage_body

MAX_BRANCHES = 64
Text = str | list[int]
AnyBody = ChatRequest | CompletionRequest


class Branch(Struct, kw_only=True, forbid_unknown_fields=True):
    """The suffix of one branch, and sampling parameters that differ from the body's."""

    messages: list[Message] | None = None
    prompt: Text | None = None
    seed: Seed | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: Probability | None = None
    stop: Stop | None = None
    max_tokens: Positive | None = None
    max_completion_tokens: Positive | None = None


class BranchesRequest(Struct, kw_only=True):
    """Body of /v1/branches; its other fields are those of a chat or a text completion."""

    branches: Annotated[list[Branch], Meta(min_length=1, max_length=MAX_BRANCHES)]
    messages: msgspec.Raw = msgspec.Raw()
    prompt: Text | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Fork:
    """One branch as a complete body, and the paths of its fields in the original body."""

    body: AnyBody
    path: str
    own: frozenset[str]  # fields that the branch gave
    num_shared: int  # messages of the beginning

    @contextmanager
    def naming(self) -> Iterator[None]:
        """Make errors in the block name fields by their paths in the original body."""
        try:
            yield
        except InvalidRequest as error:
            name_as_given(error, self.body)
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


@dataclass(frozen=True, slots=True)
class Forks:
    """The branches of one body; shared options are those of the first."""

    forks: list[Fork]

    @property
    def model(self) -> str | None:
        """The requested model."""
        return self.forks[0].body.model

    @property
    def stream(self) -> bool | None:
        """Whether the answer is a stream."""
        return self.forks[0].body.stream

    @property
    def deadline_ms(self) -> float | None:
        """Deadline of all branches, in milliseconds."""
        return self.forks[0].body.deadline_ms


def decode_branches(data: bytes) -> Forks:
    """One complete body for each branch; raises `ApiError` 400."""
    asked = decode(data)
    is_chat = bool(bytes(asked.messages))
    if is_chat == (asked.prompt is not None):
        raise InvalidRequest("the body needs either prompt or messages, not both", param="prompt")
    shared: AnyBody = decode_chat(data) if is_chat else decode_completion(data)
    if shared.n not in (None, 1):
        raise InvalidRequest("n must be 1: each branch has one answer", param="n")
    if shared.echo:
        raise InvalidRequest("echo is not supported for branches", param="echo")
    if is_prewarm(shared):
        name = "prompt_cache_options.prewarm"
        raise InvalidRequest(
            f"{name} is not supported for branches: send it in a chat or a completion", param=name
        )
    return Forks([_forked(shared, each, f"branches[{i}]") for i, each in enumerate(asked.branches)])


def _forked(shared: AnyBody, branch: Branch, path: str) -> Fork:
    own = {
        name: value for name, value in msgspec.structs.asdict(branch).items() if value is not None
    }
    wrong = "prompt" if isinstance(shared, ChatRequest) else "messages"
    if wrong in own or (wrong == "messages" and "max_completion_tokens" in own):
        name = wrong if wrong in own else "max_completion_tokens"
        kind = "messages" if wrong == "prompt" else "a prompt"
        message = f"{path}.{name} is not supported: the body has {kind}"
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
    body = replace(shared, **own)
    return Fork(body=body, path=path, own=given, num_shared=num_shared)


def _joined(front: Any, end: Text | None, path: str) -> Text:  # noqa: ANN401 - a union of lists
    if end is not None and isinstance(front, str) != isinstance(end, str):
        message = f"{path}.prompt must be a text or token ids, as the body's prompt is"
        raise InvalidRequest(message, param=f"{path}.prompt")
    whole: Text = front if end is None else front + end
    return whole


class BranchesRoute(Dialect[Forks]):
    """Answer all branches, whole or as one stream."""

    def decode(self, data: bytes) -> Forks:
        """All branches; raises `ApiError` 400."""
        return decode_branches(data)

    def check(self, body: Forks) -> None:
        """Each branch within the limits of a body of its own."""
        limits = self.service.settings.limits
        for fork in body.forks:
            self.service.check_range(fork.body, most_temperature=self.most_temperature)
        self.service.check_model(body.model)
        limits.check("branches", len(body.forks), "max_prompts")
        for fork in body.forks:
            with fork.naming():
                limits.check_body(fork.body)
        self.service.check_room(len(body.forks), 1)

    async def open(self, body: Forks) -> Reply:
        """Submit all branches or none."""
        head = Head(prefix="branches", model=self.service.model)
        writer = BranchWriter(self.service, head, body.forks[0].body)
        writer.prompt_ids = [f"{head.id}-{index}" for index in range(len(body.forks))]
        reply = BranchReply(writer)
        try:
            for fork, name in zip(body.forks, writer.prompt_ids, strict=True):
                with fork.naming():
                    reply.answers.append(await self._open_one(fork.body, name))
        except BaseException:
            reply.close()
            raise
        return reply

    async def _open_one(self, body: AnyBody, name: str) -> ChatAnswer:
        if isinstance(body, ChatRequest):
            chat = await self.service.apart(partial(read_chat, body))
            ids = bool(body.return_token_ids)
            return await self.service.chat.open(chat, request_id=name, hands_out=ids)
        refuse(body)
        [prompt] = read_prompts(body.prompt)
        chat = ChatInput(messages=(), params=completion_params(body))
        answer = await open_text(self.service, body, prompt, chat.params, name)
        return ChatAnswer(self.service.llm, answer, chat, PlainParser)


class BranchReply(Reply):
    """The answer with all branches; an error in one ends the others."""

    def __init__(self, writer: BranchWriter) -> None:
        self._writer = writer
        self.answers: list[ChatAnswer] = []

    async def whole(self) -> object:
        """All branches in one body."""
        branches = await each_of([answer.collect() for answer in self.answers])
        choices = [
            replace(choice, index=index)
            for index, branch in enumerate(branches)
            for choice in branch
        ]
        return self._writer.branches(self.answers, choices)

    def events(self) -> AsyncGenerator[bytes]:
        """All branches as events, interleaved."""
        return self._writer.branch_events(self.answers)

    def close(self) -> None:
        """Abort what still runs."""
        for answer in self.answers:
            answer.close()


class BranchWriter(ChatWriter):
    """Encodes branches like the choices of a chat, each with its own usage."""

    def branches(self, answers: Sequence[ChatAnswer], choices: Sequence[Choice]) -> BranchesBody:
        """All branches in one body."""
        written = [
            self._branch(answer, choice, name)
            for answer, choice, name in zip(answers, choices, self.prompt_ids, strict=True)
        ]
        usage = self.usage(batch_usage([answer.usage for answer in answers]))
        return BranchesBody(**self._head.fields("branches"), usage=usage, branches=written)

    def _branch(self, answer: ChatAnswer, choice: Choice, name: str) -> BranchBody:
        usage = self._branch_usage(answer, name)
        branch = BranchBody(**asdict(self.choice(choice)), usage=usage)
        if self._returns_ids:
            branch.prompt_token_ids = list(answer.prompt_token_ids)
        return branch

    def _branch_usage(self, answer: ChatAnswer, name: str) -> UsageBody:
        spent = usage_body(answer.usage)
        found = self._service.llm.explain(name) if self._explains else None
        if found is not None:
            spent.cache_explanation = found.body()
        return spent

    async def branch_events(self, answers: Sequence[ChatAnswer]) -> AsyncGenerator[bytes]:
        """The branches as one stream of chat chunks, told apart by their index."""
        self.follow(lambda: batch_usage([answer.usage for answer in answers]))
        sources = [_numbered(answer, index) for index, answer in enumerate(answers)]
        opened = False
        async with aclosing(merge(sources)) as deltas:
            async for delta in deltas:
                if delta.finish_reason is not None:
                    self.refuse_aborted(delta.finish_reason, answers[delta.index].num_tokens(0))
                if not opened:
                    opened = True
                    for index in range(len(answers)):
                        yield self.opening(index)
                for chunk in self._chunks(delta):
                    yield chunk
        for last in self.end(batch_usage([answer.usage for answer in answers])):
            yield last


async def _numbered(answer: ChatAnswer, index: int) -> AsyncGenerator[TextDelta]:
    async with aclosing(answer.deltas()) as deltas:
        async for delta in deltas:
            yield replace(delta, index=index)
