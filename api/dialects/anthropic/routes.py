"""POST /v1/messages, /v1/messages/count_tokens and /v1/messages/render."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, TypeVar

from ....core.errors import InvalidRequest, PromptTooLong
from ...runtime.conversation.chat_input import ChatInput
from ...serving.answers import AnswerReply, prewarm
from ...serving.caching.breakpoints import Breakpoints, Mark
from ...serving.caching.locator import BreakpointLocator
from ...serving.dialect import READS, Dialect
from ...serving.render import Rendered, render_chat
from ...serving.sampling import (
    cache_options,
    is_prewarm,
    sampling_params,
    warms_next_turn,
)
from ...serving.serving_context import ANTHROPIC_TEMPERATURE, Service
from ...serving.sse import ReadyReply, Reply
from ...types.sampling_params import SamplingParams
from .answers import ERRORS, CountReport, MessageAnswer, StreamEvent, TokenCount
from .bodies import CountRequest, MessagesRequest
from .breakpoints import read_marks
from .context.manager import ContextManager, Make, Route
from .reading import read_conversation
from .writing import PING, MessageWriter, new_id

C = TypeVar("C", bound=CountRequest)
NAMES = {"stop": "stop_sequences", "json_schema": "output_config.format", "prompt": "messages"}


class MessagesDialect(Dialect[C]):
    """The base of the Messages routes: field names, error format and keep-alive event."""

    names = NAMES
    error_form = ERRORS
    most_temperature = ANTHROPIC_TEMPERATURE
    ping = PING

    def __init__(self, service: Service) -> None:
        super().__init__(service)
        self.context = ContextManager(service)


class MessagesCount(MessagesDialect[CountRequest]):
    """Count the tokens of a conversation."""

    path = "/v1/messages/count_tokens"
    body = CountRequest
    answer = TokenCount
    statuses = READS

    def check(self, body: CountRequest) -> None:
        """Check the model only, since sampling parameters do not affect the count."""
        self.service.check_model(body.model)

    async def open(self, body: CountRequest) -> Reply:
        """Count the tokens of a conversation, after the edits that clear parts of it."""
        given = self.context.in_effect(body)
        edited = await self.context.edited(given)
        chat = await self.service.apart(partial(read_conversation, edited.body))
        prompt = await self.service.chat.render(chat)
        count = TokenCount(input_tokens=len(prompt.token_ids))
        if body.context_management is not None:
            original = await self.context.count(given)
            count.context_management = CountReport(original_input_tokens=original)
        return ReadyReply(count)


class MessagesRoute(MessagesDialect[MessagesRequest]):
    """Answer one conversation, whole or as a stream."""

    path = "/v1/messages"
    body = MessagesRequest
    answer: ClassVar[Any] = MessageAnswer
    event: ClassVar[Any] = StreamEvent
    in_batches = True

    def __init__(self, service: Service) -> None:
        super().__init__(service)
        self._locator = BreakpointLocator(service.chat)

    async def open(self, body: MessagesRequest) -> Reply:
        """Manage the context as requested, then answer the conversation."""
        body = self.context.in_effect(body)
        if body.context_management is None and body.compaction is None:
            return await self._answer(body)
        return await self.context.open(body, Route(read_chat, self._answer, self._writer))

    async def _answer(self, body: MessagesRequest, make: Make = MessageWriter) -> Reply:
        """Render the conversation, locate its breakpoints and submit it.

        If ``max_tokens`` is 0, only cache the prompt.
        """
        try:
            return await self._submitted(body, make)
        except PromptTooLong as error:
            await self.context.explain(error, body)
            raise

    async def _submitted(self, body: MessagesRequest, make: Make) -> Reply:
        client = self.service.chat
        marks, chat = await self.read(body)
        prompt = await client.render(chat)
        chat, breakpoints = await self._locator.with_pins(
            marks, chat, prompt.token_ids, self.service.llm.page_size
        )
        writer = self._writer(body, breakpoints, make)
        if body.max_tokens == 0:
            usage = await prewarm(self.service, chat, request_id=writer.id, prompt=prompt)
            return writer.warmed(usage)
        answer = await client.open(
            chat, request_id=writer.id, prompt=prompt, hands_out=writer.returns_ids
        )
        return AnswerReply(self.service, writer, answer)

    async def read(self, body: MessagesRequest) -> tuple[Sequence[Mark], ChatInput]:
        """Return the breakpoints of a body and its chat request. Raises `InvalidRequest`."""
        return await self.service.apart(lambda: (read_marks(body), read_chat(body)))

    def _writer(self, body: MessagesRequest, breakpoints: Breakpoints, make: Make) -> MessageWriter:
        asked = body.diagnostics
        return make(
            service=self.service,
            breakpoints=breakpoints,
            max_tokens=body.max_tokens,
            shows_thoughts=body.thinking is None or body.thinking.display != "omitted",
            previous_id=None if asked is None else asked.previous_message_id,
            explains=bool(body.explain_cache),
            returns_ids=bool(body.return_token_ids),
        )


class MessagesRender(MessagesRoute):
    """Render one conversation: check it and return its prompt's token ids."""

    path = "/v1/messages/render"
    answer = Rendered
    event = None
    statuses = READS
    in_batches = False

    async def open(self, body: MessagesRequest) -> Reply:
        """Render and check the conversation without submitting it."""
        _, chat = await self.read(self.context.in_effect(body))
        only_cached = body.max_tokens == 0
        return ReadyReply(
            await render_chat(self.service, chat, body, request_id=new_id(), is_prewarm=only_cached)
        )


def read_chat(body: MessagesRequest) -> ChatInput:
    """Return the chat request of a body. Raises `InvalidRequest`."""
    if body.n not in (None, 1):
        raise InvalidRequest("n must be 1", param="n")
    if is_prewarm(body):
        name = "prompt_cache_options.prewarm"
        raise InvalidRequest(
            f"{name} is not supported by this route: set max_tokens to 0 instead", param=name
        )
    return replace(
        read_conversation(body),
        params=read_params(body),
        cache=cache_options(body),
        warms_next=warms_next_turn(body),
        cache_key=body.prompt_cache_key,
    )


def read_params(body: MessagesRequest) -> SamplingParams:
    """Return the sampling parameters. A ``max_tokens`` of 0 becomes 1, the engine's minimum."""
    return sampling_params(
        body,
        guess=body.prediction,
        max_tokens=body.max_tokens or 1,
        stop=body.stop_sequences,
        json_schema=None if body.format is None else body.format.schema,
    )
