"""ChatAnswer: the next message of a conversation, independent of the API.

A route converts its body to a `ChatInput`. `ChatClient` renders it, adds a grammar for structured
output, and returns a `ChatAnswer`, whose text is split into reasoning, content and tool calls as it
arrives. Only the encoding of the answer depends on the API.
"""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from functools import cached_property, partial
from typing import Any

from msgspec.structs import replace

from ...core.errors import InvalidRequest
from ...core.interface.request import Request, Usage
from ...core.interface.sampling import Pooling
from ..parsing.output_format import Syntax, check_tools
from ..parsing.output_parser import (
    CallArguments,
    CallBegin,
    CallEnd,
    Content,
    Event,
    OutputParser,
    Reasoning,
)
from ..types.request_context import owner_of, random_id
from ..types.results import CallDelta, Choice, Completion, TextDelta, ToolChoice
from ..types.sampling_params import SamplingParams
from .conversation.chat_input import ChatInput
from .conversation.conversation_tokens import TAIL_IDS, ConversationTokens
from .conversation.normalize import Normalizer
from .conversation.prompt_history import PromptNote
from .conversation.seen_images import see, with_results_seen
from .conversation.template_writer import TemplateWriter
from .conversation.token_history import PrefixDigest, TokenHistory, message_digest
from .engine_client import EngineClient
from .generation import Answer, EndedChoice, Generation, each_of
from .preprocess import PromptTokens, needs_closing, warm_params
from .sessions import tell_wait
from .turns.idle_prefill import IdlePrefill

MESSAGE_BYTES = 256  # recording a message takes about as long as reading this many bytes


class ChoiceReader:
    """Parser of the text of one choice into reasoning, content and calls.

    They are collected in ``choice``.
    """

    def __init__(self, parser: OutputParser, choice: ToolChoice, *, index: int = 0) -> None:
        self.is_done = False
        self.choice = Choice(index=index)
        self._parser = parser
        self._is_single = choice.is_single  # the choice ends after its first call
        # If a call is required, any text in the output is the rest of a truncated call delimiter.
        self._has_text = choice.mode != "required"
        self._num_calls = 0
        self._is_called = False  # whether the last call is complete

    def read(self, delta: TextDelta) -> list[TextDelta]:
        """Return the deltas of a step: several if content or reasoning follows a call.

        After the end of the choice, the list is empty even if the engine still generates: a choice
        that may have only one call ends after that call, but the model may go on with other text.
        """
        if self.is_done:
            return []
        events = self._parser.feed(delta.text)
        if delta.finish_reason is not None:
            is_cut = delta.finish_reason != "stop" or isinstance(delta.stop_reason, str)
            events = [*events, *self._parser.end(is_cut=is_cut)]
        parts = [replace(delta, text="", finish_reason=None, stop_reason=None)]
        for event in events:
            if self._is_single and self._is_called:
                if isinstance(event, Content) and not event.text.strip():
                    continue
                self.is_done = True
                break
            if isinstance(event, Content | Reasoning) and not _keeps_order(event, parts[-1]):
                parts.append(TextDelta(index=delta.index))
            self._take(event, parts[-1])
        self._end(parts[-1], delta)
        for part in parts:
            self.choice.add(part)
        return parts

    def _message_ids(self, delta: TextDelta) -> list[int] | None:
        """Return the token ids of the whole message; None if they are not known exactly.

        A stop string may end inside a token. The ids of a choice that ended after its only call may
        include the first tokens of the text after the call.
        """
        reason = delta.finish_reason
        if reason is None or self.is_done or isinstance(delta.stop_reason, str):
            return None
        ids = [*self.choice.token_ids, *delta.token_ids]
        return ids[:-1] if reason == "stop" else ids

    def _end(self, last: TextDelta, delta: TextDelta) -> None:
        """Set the finish reason if the choice has ended.

        A choice ends after its only call or at the end of its text.
        """
        reason, last.stop_reason = delta.finish_reason, delta.stop_reason
        if self.is_done or reason is not None:
            last.message_ids = self._message_ids(delta)
        if self.is_done:
            last.finish_reason = "tool_calls"
        elif reason is not None:
            self.is_done = True
            last.finish_reason = "tool_calls" if self._ends_called(delta) else reason

    def _ends_called(self, delta: TextDelta) -> bool:
        """Whether the finish reason is "tool_calls".

        A call that a stop string has truncated does not count.
        """
        if self._is_single and self._is_called:
            return True
        was_cut = isinstance(delta.stop_reason, str) and not self._is_called
        return delta.finish_reason == "stop" and self._num_calls > 0 and not was_cut

    def _take(self, event: Event, part: TextDelta) -> None:
        """Add a parsed event to a delta."""
        match event:
            case Reasoning(text):
                part.reasoning += text
            case Content(text):
                part.text += text if self._has_text else ""
            case CallBegin(name):
                call_id = f"call_{random_id()[:24]}"
                part.tool_calls.append(CallDelta(index=self._num_calls, id=call_id, name=name))
                self._num_calls += 1
                self._is_called = False
            case CallArguments(text):
                self._call(part).arguments += text
            case CallEnd():
                self._call(part).is_done = self._is_called = True

    def _call(self, part: TextDelta) -> CallDelta:
        """Return the delta of the current call."""
        index = self._num_calls - 1
        if not part.tool_calls or part.tool_calls[-1].index != index:
            part.tool_calls.append(CallDelta(index=index))
        return part.tool_calls[-1]


def _keeps_order(event: Content | Reasoning, part: TextDelta) -> bool:
    """Whether the delta is still in order with the event added: reasoning, content, calls."""
    return not part.tool_calls and (not part.text or isinstance(event, Content))


class ChatAnswer:
    """A running answer to a conversation. Its owner must `close` it in a ``finally``."""

    def __init__(
        self,
        llm: EngineClient,
        answer: Answer,
        chat: ChatInput,
        make_parser: Callable[[], OutputParser],
        *,
        hands_out: Callable[[Choice], bool] = lambda _: False,
        history: TokenHistory | None = None,
        on_choice: Sequence[Callable[[Choice], None]] = (),
    ) -> None:
        self._answer = answer
        self._llm = llm
        self._chat = chat
        self._make_parser = make_parser
        self._hands_out = hands_out  # whether to return the message's token ids
        self._history = history
        self._on_choice = on_choice  # called at the end of each choice
        self._readers = [self.reader(index) for index in range(answer.params.n)]

    def reader(self, index: int = 0) -> ChoiceReader:
        """Return a new parser of the text of one choice."""
        return ChoiceReader(self._make_parser(), self._chat.tool_choice, index=index)

    @property
    def answer(self) -> Answer:
        """The generations that yield the text of the message."""
        return self._answer

    @property
    def usage(self) -> Usage:
        """The usage so far."""
        return self._answer.usage

    @property
    def prompt_token_ids(self) -> Sequence[int]:
        """The token ids of the prompt."""
        return self._answer.prompt_token_ids

    @property
    def request(self) -> Request:
        """The engine's request for the first choice."""
        return self._answer.request

    @property
    def num_choices(self) -> int:
        """Number of choices."""
        return len(self._readers)

    def num_tokens(self, index: int) -> int:
        """Return the number of tokens that one choice has so far."""
        return self._answer.generations[index].usage.completion_tokens

    def ended_choices(self) -> Iterator[EndedChoice]:
        """Yield all choices, once the answer is read to its end."""
        pairs = zip(self._readers, self._answer.generations, strict=True)
        for index, (reader, each) in enumerate(pairs):
            choice = reader.choice
            yield EndedChoice(index, each.request, choice.token_ids, choice.finish_reason)

    def close(self) -> None:
        """Abort the requests that still run. May be called twice."""
        self._llm.forget(self._answer)

    async def deltas(self) -> AsyncGenerator[TextDelta]:
        """Yield one delta per step and choice. The deltas of several choices are interleaved."""
        try:
            async with aclosing(self._answer.deltas()) as deltas:
                async for delta in deltas:
                    for part in self._parts(delta):
                        yield part
                        if part.finish_reason is not None:
                            self._answer.generations[delta.index].close()
        except InvalidRequest as error:
            _name_field(error, self._chat)
            raise

    def _parts(self, delta: TextDelta) -> list[TextDelta]:
        """Return the deltas of a step. At the end of a choice, remember its token ids."""
        reader = self._readers[delta.index]
        parts = reader.read(delta)
        if parts and parts[-1].finish_reason is not None:
            self._remember(reader.choice)
            for on_choice in self._on_choice:
                on_choice(reader.choice)
            if not self._hands_out(reader.choice):
                parts[-1].message_ids = reader.choice.message_ids = None
        return parts

    def _remember(self, choice: Choice) -> None:
        """Remember the token ids of a complete message, unless the request forbids cache writes."""
        history, salt, ids = self._history, self._chat.params.cache_salt, choice.message_ids
        if not ids or not self._chat.cache.write:
            return
        self._llm.prompts.add_answer(self._answer.request_id, ids)
        if history is None:
            return
        digest = message_digest(choice.message)
        if digest is not None:
            prefix = PrefixDigest().after(self._answer.prompt_token_ids)
            history.put(owner_of(salt), salt, digest, prefix, ids)

    async def collect(self) -> list[Choice]:
        """Return all choices, read to their ends, and close the answer.

        If a choice fails, its error is raised.
        """
        pairs = zip(self._readers, self._answer.generations, strict=True)
        try:
            return await each_of([self._read(reader, generation) for reader, generation in pairs])
        except InvalidRequest as error:
            _name_field(error, self._chat)
            raise
        finally:
            self.close()

    async def _read(self, reader: ChoiceReader, generation: Generation) -> Choice:
        """Read one choice to its end. Abort its request if the choice ends before its text."""
        async for delta in generation:
            self._parts(delta)
            if reader.is_done:
                generation.close()
        return reader.choice

    async def completion(self) -> Completion:
        """Read the whole answer, close it and return it."""
        return self._answer.completion(await self.collect())


class ChatClient:
    """A client that renders conversations and submits them to an engine.

    ``tool_parser``, ``reasoning_parser``: names of formats, or "auto" to choose them by the chat
    template. ``history``: earlier answers, whose token ids are looked up by their text; None if
    answers are not remembered. ``normalizer`` changes conversations before they are rendered.
    ``idle_prefill``: whether the beginnings of next turns are computed while the engine is idle.
    """

    def __init__(
        self,
        llm: EngineClient,
        *,
        tool_parser: str = "auto",
        reasoning_parser: str = "auto",
        history: TokenHistory | None = None,
        normalizer: Normalizer | None = None,
        idle_prefill: bool = False,
    ) -> None:
        self._llm = llm
        self.history = history
        self._normalizer = normalizer
        self._tool_parser, self._reasoning_parser = tool_parser, reasoning_parser
        self.next_turns = IdlePrefill(llm, self.render, is_on=idle_prefill)

    @cached_property
    def syntax(self) -> Syntax:
        """The model's output format. Available once the model is loaded."""
        tokenizer = self._llm.tokenizer
        return Syntax.choose(
            tokenizer.chat_template,
            tokenizer.vocab,
            tokenizer.special_ids,
            tool_parser=self._tool_parser,
            reasoning_parser=self._reasoning_parser,
            response_template=tokenizer.response_template,
        )

    @cached_property
    def _renderer(self) -> ConversationTokens:
        built = self._llm.built
        return ConversationTokens(
            self._llm.tokenizer,
            self.syntax,
            vocab_size=built.vocab_size,
            end_ids=built.eos_token_ids,
            history=self.history,
        )

    @cached_property
    def _writer(self) -> TemplateWriter:
        return TemplateWriter(self._llm, self.syntax, self._renderer.can_splice)

    async def open(
        self,
        chat: ChatInput,
        *,
        request_id: str | None = None,
        prompt: PromptTokens | None = None,
        hands_out: bool = False,
        pooling: Pooling | None = None,
        transfer: Mapping[str, Any] | None = None,
    ) -> ChatAnswer:
        """Render the conversation, unless ``prompt`` is given, and submit it.

        ``hands_out``: set `Choice.message_ids` if the template can render the message from these
        ids and every id has text. ``pooling``: request numbers in place of an answer.
        ``transfer``: the request's ``kv_transfer_params``. Raises `InvalidRequest`, `QueueFull` and
        `EngineDead`.
        """
        self._check_tools(chat)
        if prompt is None:
            prompt = await self.render(chat)
        tools, tail = chat.callable_tools, self._tail(prompt.token_ids)
        can_splice = (await self._writer.facts()).splices if hands_out else {}
        shown = self.syntax.shown_ids(tools=bool(tools))
        try:
            answer = await self._llm.open(
                prompt,
                self._constrained(chat, tail),
                request_id=request_id,
                shown_ids=shown,
                cache=chat.cache,
                note=await self._note(chat, prompt),
                needs_closing=_needs_closing(chat),
                pooling=pooling,
                transfer=transfer,
            )
        except InvalidRequest as error:
            _name_field(error, chat)
            raise
        if pooling is None:  # and not before: a refused request drops nothing
            self.next_turns.arrived(chat)
        return ChatAnswer(
            self._llm,
            answer,
            chat,
            partial(
                self.syntax.parser,
                tools=tools,
                prompt_tail=tail,
                has_form=chat.params.structured_field is not None,
            ),
            hands_out=lambda choice: (
                can_splice.get(bool(choice.tool_calls), False)
                and not self._llm.tokenizer.has_silent(choice.message_ids or (), shown)
            ),
            history=self.history,
            on_choice=self._listeners(chat, answer.request) if chat.params.n == 1 else (),
        )

    def _listeners(self, chat: ChatInput, request: Request) -> list[Callable[[Choice], None]]:
        """Return the functions that get the answer to a request with a single choice."""
        found: list[Callable[[Choice], None]] = []
        if request.cache.session is not None:
            found.append(partial(tell_wait, self._llm.engine, request))
        if self.next_turns.wants(chat, request):
            found.append(self.next_turns.after(chat, request))
        return found

    async def check(self, chat: ChatInput, *, is_prewarm: bool = False) -> Sequence[int]:
        """Render and check a conversation without submitting it; return the prompt's token ids.

        ``is_prewarm``: check the conversation for `prewarm` rather than for an answer. Raises
        `InvalidRequest` and `EngineDead`.
        """
        self._check_tools(chat)
        prompt = await self.render(chat)
        try:
            if is_prewarm:
                return await self._llm.check(prompt, warm_params(chat.params))
            return await self._llm.check(
                prompt,
                self._constrained(chat, self._tail(prompt.token_ids)),
                needs_closing=_needs_closing(chat),
            )
        except InvalidRequest as error:
            _name_field(error, chat)
            raise

    async def render(self, chat: ChatInput) -> PromptTokens:
        """Return the token ids of a conversation with its tools, up to the start of the answer.

        Every prompt of a conversation is rendered by this method. Raises `InvalidRequest`.
        """
        chat, names = self.normalized(chat)
        images, tokenizer = self._llm.images, self._llm.tokenizer
        if chat.images:
            chat = await with_results_seen(chat, images, tokenizer)
        try:
            seen = await see(chat, images, tokenizer)
            shield = await self._writer.shield(chat)
            write = partial(self._writer.write, seen=seen, shield=shield)
            prompt = await self._renderer.render(chat, write, shield)
            placed = seen.placed(prompt.token_ids, chat.params.cache_salt)
            if not names and not placed:
                return prompt
            return dataclasses.replace(prompt, normalized=names, images=placed)
        except InvalidRequest as error:
            if error.param == "prompt":
                error.param = "messages"
            raise

    def normalized(self, chat: ChatInput) -> tuple[ChatInput, tuple[str, ...]]:
        """Return the normalized conversation, and the names of the rules that changed it."""
        return (chat, ()) if self._normalizer is None else self._normalizer.apply(chat)

    async def _note(self, chat: ChatInput, prompt: PromptTokens) -> PromptNote:
        """Return the record of the parts of a rendered ``prompt``.

        A long conversation is processed in a thread.
        """

        def note() -> PromptNote:
            shown = self.normalized(chat)[0] if prompt.normalized else chat
            return shown.note(self.syntax.thought_marks)

        return await self._llm.tokenizer.apart(MESSAGE_BYTES * len(chat.messages), note)

    def _check_tools(self, chat: ChatInput) -> None:
        check_tools(chat.tools, chat.tool_choice)
        if chat.callable_tools and not self.syntax.has_tools:
            message = (
                "tools are not supported: the model has no chat template, or --tool-parser is none"
            )
            raise InvalidRequest(message, param="tools")

    def _constrained(self, chat: ChatInput, tail: str) -> SamplingParams:
        """Return the sampling parameters, with a grammar for the whole answer if it needs one."""
        grammar = self.syntax.constrain(
            chat.params, tools=chat.callable_tools, choice=chat.tool_choice, prompt_tail=tail
        )
        if grammar is None:
            return chat.params
        return dataclasses.replace(
            chat.params, grammar=grammar, json_schema=None, regex=None, choice=None
        )

    def _tail(self, prompt_ids: Sequence[int]) -> str:
        """Return the text at the end of the prompt, where a template may open the reasoning.

        Return "" for a model without reasoning.
        """
        if self.syntax.thinking is None:
            return ""
        return self._llm.tokenizer.decode(prompt_ids[-TAIL_IDS:], skip_special_tokens=False)

    async def prewarm(
        self,
        chat: ChatInput,
        *,
        request_id: str | None = None,
        prompt: PromptTokens | None = None,
    ) -> Completion:
        """Cache the prompt of a conversation. Raises the errors of `open`.

        The result shows whether the request was aborted; its single token is not part of an answer.
        """
        self._check_tools(chat)
        if prompt is None:
            prompt = await self.render(chat)
        try:
            answer = await self._llm.open(
                prompt,
                warm_params(chat.params),
                request_id=request_id,
                cache=chat.cache,
                note=await self._note(chat, prompt),
            )
        except InvalidRequest as error:
            _name_field(error, chat)
            raise
        return await self._llm.finish(answer)


def _needs_closing(chat: ChatInput) -> bool:
    """Whether the answer is useless unless it is complete, such as a tool call or JSON."""
    return bool(chat.callable_tools) or needs_closing(chat.params)


def _name_field(error: InvalidRequest, chat: ChatInput) -> None:
    """Rename the field that an error names to the field of the request's body."""
    if error.param == "prompt":
        error.param = "messages"
    # The grammar was generated from the tools or from another field of the body.
    elif error.param == "grammar" and chat.params.grammar is None:
        error.rename("tools" if chat.callable_tools else chat.params.structured_field or "tools")
