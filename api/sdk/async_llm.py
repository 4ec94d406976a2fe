"""AsyncLLM: text in, text out, on the caller's event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from functools import cached_property, partial
from typing import Any, Literal, TypeVar, overload

import msgspec

from ...core.errors import InvalidRequest, QueueFull
from ...core.interface.output import TokenLogprob
from ..runtime.chat import Turn, Turns
from ..runtime.chat_types import Ask, TurnChoice, TurnDelta
from ..runtime.engine_client import EngineClient
from ..runtime.generation import Answer
from ..runtime.preprocess import (
    Conversation,
    Message,
    Prompt,
    is_one_conversation,
    is_one_prompt,
    many_ids,
    many_params,
    one_id,
    one_params,
)
from ..runtime.tools import NamedChoice, Tools, plain_call, read_choice, read_tools
from ..types.results import CallDelta, Choice, Completion, TextDelta, Tool, ToolCall, ToolChoice
from ..types.sampling_params import SamplingParams

T = TypeVar("T")
Params = SamplingParams | Sequence[SamplingParams] | None
RequestIds = str | Sequence[str] | None


GivenTools = Sequence[Mapping[str, Any]]
"""Tools as OpenAI's clients write them."""
GivenChoice = Literal["auto", "none", "required"] | Mapping[str, Any] | None
"""``tool_choice`` likewise."""


class Asking:
    """The options of `chat` besides the conversation; raises `InvalidRequest`."""

    def __init__(
        self, tools: GivenTools | None, choice: GivenChoice, *, is_parallel: bool = True
    ) -> None:
        self._tools = _tools(tools)
        self._choice = _choice(choice, self._tools, is_parallel=is_parallel)

    def ask(self, messages: Conversation, params: SamplingParams) -> Ask:
        """The chat request."""
        is_one_conversation(messages)  # for its errors
        return Ask(
            messages=[_plain(message) for message in messages],
            params=params,
            tools=self._tools,
            tool_choice=self._choice,
        )


def _tools(given: GivenTools | None) -> list[Tool]:
    try:
        return read_tools(msgspec.convert(list(given or ()), Tools))
    except (msgspec.ValidationError, TypeError) as error:
        raise InvalidRequest(f"tools: {error}", param="tools") from None


def _choice(given: GivenChoice, tools: Sequence[Tool], *, is_parallel: bool) -> ToolChoice:
    known = Literal["auto", "none", "required"] | NamedChoice | None
    try:
        choice: Any = msgspec.convert(given, known)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"tool_choice: {error}", param="tool_choice") from None
    return read_choice(choice, tools, parallel=is_parallel)


def _plain(message: Message) -> Message:
    """Messages with the arguments of earlier calls as objects, as templates expect them."""
    if not isinstance(message, Mapping) or not message.get("tool_calls"):
        return message

    calls = [plain_call(call, "messages") for call in message["tool_calls"]]
    return {**message, "tool_calls": calls}


async def completion_of(turn: Turn) -> Completion:
    """Read a whole turn and close it."""
    choices = await turn.collect()
    answer = turn.answer
    return Completion(
        request_id=answer.request_id,
        prompt_token_ids=list(answer.prompt_token_ids),
        choices=[_whole(choice) for choice in choices],
        usage=turn.usage,
        prompt_logprobs=_prompt_logprobs(answer.params, choices[0].prompt_logprobs),
    )


def _prompt_logprobs(
    params: SamplingParams, found: list[TokenLogprob]
) -> list[TokenLogprob | None] | None:
    return None if params.prompt_logprobs is None else [None, *found]


def _whole(choice: TurnChoice) -> Choice:
    calls = [ToolCall(id=c.id, name=c.name, arguments=c.arguments) for c in choice.calls]
    return Choice(
        index=choice.index,
        text=choice.words,
        token_ids=choice.token_ids,
        finish_reason=choice.finish_reason,
        stop_reason=choice.stop_reason,
        logprobs=choice.logprobs,
        reasoning=choice.reasoning,
        tool_calls=calls,
    )


def text_delta(delta: TurnDelta) -> TextDelta:
    """One step of a turn."""
    calls = [
        CallDelta(index=c.index, id=c.id, name=c.name, arguments=c.arguments) for c in delta.calls
    ]
    return TextDelta(
        text=delta.words,
        token_ids=delta.token_ids,
        sources=delta.sources,
        index=delta.index,
        finish_reason=delta.finish_reason,
        stop_reason=delta.stop_reason,
        logprobs=delta.logprobs,
        prompt_logprobs=delta.prompt_logprobs,
        reasoning=delta.reasoning,
        tool_calls=calls,
    )


class AsyncLLM(EngineClient):
    """A model and its engine.

    ``options`` are those of `EngineConfig`, which are the flags of ``foretoken serve``. The model
    is loaded by `start`, by ``async with``, or by the first request. Belongs to one event loop.
    """

    @overload
    async def generate(  # type: ignore[overload-overlap]
        self,
        prompt: str | list[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
    ) -> Completion: ...

    @overload
    async def generate(
        self,
        prompt: Sequence[Prompt],
        params: Params = None,
        *,
        request_id: Sequence[str] | None = None,
    ) -> list[Completion]: ...

    async def generate(
        self,
        prompt: Prompt | Sequence[Prompt],
        params: Params = None,
        *,
        request_id: RequestIds = None,
    ) -> Completion | list[Completion]:
        """Complete one prompt (text or token ids) or a list of them, in order."""
        if is_one_prompt(prompt):
            return await self._generate_one(prompt, params, request_id)
        return await self._generate_all(list(prompt), params, request_id)  # type: ignore[arg-type]

    @overload
    async def chat(
        self,
        messages: Conversation,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        tools: GivenTools | None = None,
        tool_choice: GivenChoice = None,
        parallel_tool_calls: bool = True,
    ) -> Completion: ...

    @overload
    async def chat(
        self,
        messages: Sequence[Conversation],
        params: Params = None,
        *,
        request_id: Sequence[str] | None = None,
        tools: GivenTools | None = None,
        tool_choice: GivenChoice = None,
        parallel_tool_calls: bool = True,
    ) -> list[Completion]: ...

    async def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        params: Params = None,
        *,
        request_id: RequestIds = None,
        tools: GivenTools | None = None,
        tool_choice: GivenChoice = None,
        parallel_tool_calls: bool = True,
    ) -> Completion | list[Completion]:
        """The next message of one conversation or of a list of them.

        ``tools`` and ``tool_choice`` have the form of OpenAI's API; tool calls are in the
        completion's ``tool_calls``.
        """
        asking = Asking(tools, tool_choice, is_parallel=parallel_tool_calls)
        if is_one_conversation(messages):
            ask = asking.ask(messages, one_params(params))
            return await completion_of(await self._open_turn(ask, one_id(request_id)))
        talks: Sequence[Conversation] = messages  # type: ignore[assignment]
        each = zip(talks, many_params(params, len(talks)), strict=True)
        asks = [asking.ask(talk, own_params) for talk, own_params in each]
        return await self._answer_all(asks, many_ids(request_id, len(asks)))

    async def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
    ) -> AsyncGenerator[TextDelta]:
        """One delta per step, with all its tokens. Leaving early aborts the request."""
        await self.start()
        answer = await self.open(prompt, one_params(params), request_id=one_id(request_id))
        try:
            async with aclosing(answer.deltas()) as deltas:
                async for delta in deltas:
                    yield delta
        finally:
            self.forget(answer)

    async def stream_chat(
        self,
        messages: Conversation,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        tools: GivenTools | None = None,
        tool_choice: GivenChoice = None,
        parallel_tool_calls: bool = True,
    ) -> AsyncGenerator[TextDelta]:
        """The next message, step by step, as content, reasoning and calls. Leaving early aborts."""
        asking = Asking(tools, tool_choice, is_parallel=parallel_tool_calls)
        ask = asking.ask(messages, one_params(params))
        turn = await self._open_turn(ask, one_id(request_id))
        try:
            async with aclosing(turn.deltas()) as deltas:
                async for delta in deltas:
                    yield text_delta(delta)
        finally:
            turn.close()

    async def _open_turn(self, ask: Ask, request_id: str | None) -> Turn:
        await self.start()
        return await self._turns.open(ask, request_id=request_id)

    @cached_property
    def _turns(self) -> Turns:
        return Turns(self)

    async def _answer_all(
        self, asks: Sequence[Ask], request_ids: Sequence[str | None]
    ) -> list[Completion]:
        """Submit in order, as the queue has room, and wait for all; one failure ends the rest."""
        tasks: list[asyncio.Task[Completion]] = []
        try:
            async with asyncio.TaskGroup() as group:
                for ask, own_id in zip(asks, request_ids, strict=True):
                    turn = await self._patiently(partial(self._open_turn, ask, own_id))
                    tasks.append(group.create_task(completion_of(turn)))
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from None
        return [task.result() for task in tasks]

    async def _generate_one(
        self, prompt: Prompt, params: Params, request_id: RequestIds
    ) -> Completion:
        await self.start()
        answer = await self.open(prompt, one_params(params), request_id=one_id(request_id))
        return await self.finish(answer)

    async def _generate_all(
        self, prompts: Sequence[Prompt], params: Params, request_id: RequestIds
    ) -> list[Completion]:
        """Submit in order, as the queue has room, and wait for all; one failure ends the rest."""
        await self.start()
        each_params = many_params(params, len(prompts))
        each_id = many_ids(request_id, len(prompts))
        answers: list[Answer] = []
        try:
            for own_params, own_id in zip(each_params, each_id, strict=True):
                answers.append(self._register(own_params, own_id))
            return await self._finish_all(answers, prompts)
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from None
        finally:
            for answer in answers:  # a task that never began has not done it
                self.forget(answer)

    async def _finish_all(
        self, answers: Sequence[Answer], prompts: Sequence[Prompt]
    ) -> list[Completion]:
        tasks: list[asyncio.Task[Completion]] = []
        async with asyncio.TaskGroup() as group:
            for answer, prompt in zip(answers, prompts, strict=True):
                await self._prepare(answer, prompt)
                await self._submit_patiently(answer)
                tasks.append(group.create_task(self.finish(answer)))
        return [task.result() for task in tasks]

    async def _submit_patiently(self, answer: Answer) -> None:
        async def submit() -> None:
            self._submit_choices(answer)

        await self._patiently(submit)

    async def _patiently(self, submit: Callable[[], Awaitable[T]]) -> T:
        """Retry while the queue is full and requests of this call are running."""
        refused = False
        while True:
            self._room.clear()
            try:
                return await submit()
            except QueueFull as full:
                if refused and not any(each.generations for each in self._answers.values()):
                    raise
                refused = True
                await _wait(self._room, full.retry_after)


async def _wait(event: asyncio.Event, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return
