"""POST /v1/chat/completions."""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections import defaultdict
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from functools import partial

from msgspec import UNSET, Struct

from ...core.errors import InvalidRequest
from ...core.interface.output import TokenLogprob
from ..runtime.chat import Turn
from ..runtime.chat_types import Ask, Call, TurnChoice, TurnDelta
from ..runtime.tools import read_cache, read_choice, read_tools
from ..serving.serve import Dialect
from ..serving.serving_context import Service
from ..serving.sse import Reply
from ..text.tokenizer import Tokenizer
from ..types.results import Body
from ..types.sampling_params import SamplingParams
from .schema import (
    AnyRequest,
    ChatRequest,
    decoder,
    plain_messages,
    refuse_unsupported_chat,
    sampling_params,
)
from .shapes import Head, Warmed, Writer, chat_logprobs, is_prewarm, prewarm, reason_body
from .wire import (
    CallBody,
    ChatBody,
    ChatChoiceBody,
    ChunkBody,
    ChunkChoiceBody,
    DeltaBody,
    FunctionBody,
    MessageBody,
)

decode = decoder(ChatRequest)
OPENING = DeltaBody(role="assistant", content="")


class ChatRoute(Dialect[ChatRequest]):
    """Answer one conversation, whole or as a stream."""

    def decode(self, data: bytes) -> ChatRequest:
        """A body; raises `ApiError` 400."""
        return decode(data)

    async def open(self, body: ChatRequest) -> Reply:
        """Render and submit."""
        ask = await self.service.apart(partial(read_ask, body))
        self.service.check_room(1, ask.params.n)
        head = Head(prefix="chatcmpl", model=self.service.model)
        writer = ChatWriter(self.service, head, body)
        if is_prewarm(body):
            return Warmed(writer, [await prewarm(self.service, ask, request_id=head.id)])
        return ChatReply(writer, await self.service.turns.open(ask, request_id=head.id))

    def rename(self, error: InvalidRequest, body: ChatRequest) -> None:
        """The name of a field in the body: response_format where the schema came from there."""
        if error.param == "json_schema" and body.response_format is not None:
            error.param = "response_format"


class ChatReply(Reply):
    """The answer to one chat request."""

    def __init__(self, writer: ChatWriter, turn: Turn) -> None:
        self._writer, self._turn = writer, turn

    async def whole(self) -> object:
        """The n choices in one body."""
        return self._writer.whole(self._turn, await self._turn.collect())

    def events(self) -> AsyncGenerator[bytes]:
        """The n choices as events, interleaved."""
        return self._writer.events(self._turn)

    def close(self) -> None:
        """Abort what still runs."""
        self._turn.close()


def read_ask(body: ChatRequest) -> Ask:
    """The chat request of a body; raises `InvalidRequest`."""
    refuse_unsupported_chat(body)
    tools = read_tools(body.tools)
    parallel = body.parallel_tool_calls is not False
    return Ask(
        messages=plain_messages(body.messages),
        params=chat_params(body),
        tools=tools,
        tool_choice=read_choice(body.tool_choice, tools, parallel=parallel),
        template=template_options(body),
        cache=read_cache(body.cache, body.prompt_cache_retention, body.prompt_cache_options),
        cache_key=body.prompt_cache_key,
    )


def chat_params(body: ChatRequest) -> SamplingParams:
    """Sampling parameters of a conversation."""
    asked = body.max_completion_tokens
    return sampling_params(
        body,
        max_tokens=body.max_tokens if asked is None else asked,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
    )


def template_options(body: ChatRequest) -> dict[str, object]:
    """Options of the body for the chat template."""
    options: dict[str, object] = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        options.setdefault("reasoning_effort", body.reasoning_effort)
    if body.add_generation_prompt is not None:
        options["add_generation_prompt"] = body.add_generation_prompt
    if body.continue_final_message is not None:
        options["continue_final_message"] = body.continue_final_message
    return options


class ChatWriter(Writer[ChatChoiceBody, ChunkChoiceBody]):
    """Encodes one answer."""

    whole_kind, whole_type = "chat.completion", ChatBody
    chunk_kind, chunk_type = "chat.completion.chunk", ChunkBody

    def __init__(self, service: Service, head: Head, body: AnyRequest) -> None:
        super().__init__(service, head, body)
        self._tells_sources = bool(getattr(body, "token_sources", None))
        self._pieces: defaultdict[int, TokenPieces] = defaultdict(  # by choice
            lambda: TokenPieces(service.llm.tokenizer)
        )

    # -- whole ----------------------------------------------------------------------------------

    def whole(self, turn: Turn, choices: Sequence[TurnChoice]) -> Struct:
        """The answer in one body."""
        return self.answer([self.choice(each) for each in choices], turn.usage)

    def nothing(self, index: int) -> ChatChoiceBody:
        """The empty choice, for a prompt that was only cached."""
        return self.choice(TurnChoice(index=index, finish_reason="length"))

    def nothing_chunks(self, index: int) -> list[bytes]:
        """The same as events."""
        ending = TurnDelta(index=index, finish_reason="length")
        return [self.opening(index), *self._chunks(ending)]

    def choice(self, choice: TurnChoice) -> ChatChoiceBody:
        """One of the n answers."""
        self.refuse_aborted(choice.finish_reason, len(choice.token_ids))
        message = MessageBody(content=choice.words)
        if choice.reasoning:
            message.reasoning_content = choice.reasoning
        if choice.calls:
            message.content = choice.words or None
            message.tool_calls = [_whole_call(call) for call in choice.calls]
        return ChatChoiceBody(
            index=choice.index,
            message=message,
            logprobs=self._logprobs(choice.logprobs),
            finish_reason=reason_body(choice.finish_reason),
            stop_reason=choice.stop_reason,
        )

    def opening(self, index: int) -> bytes:
        """The first chunk of a choice."""
        return self.chunk(ChunkChoiceBody(index=index, delta=OPENING))

    def _logprobs(self, logprobs: list[TokenLogprob] | None) -> Body | None:
        return None if logprobs is None else chat_logprobs(self._service.llm.tokenizer, logprobs)

    # -- streamed -------------------------------------------------------------------------------

    async def events(self, turn: Turn) -> AsyncGenerator[bytes]:
        """The answer as events."""
        opened = False
        async with aclosing(turn.deltas()) as deltas:
            async for delta in deltas:
                if delta.finish_reason is not None:
                    self.refuse_aborted(delta.finish_reason, turn.num_tokens(delta.index))
                if not opened:
                    # Clients number the choices by the order in which they first see them.
                    opened = True
                    for index in range(turn.num_choices):
                        yield self.opening(index)
                for chunk in self._chunks(delta):
                    yield chunk
        for last in self.end(turn.usage):
            yield last

    def _chunks(self, delta: TurnDelta) -> list[bytes]:
        """The chunks of a delta: one for its content, and one for the end."""
        chunks = []
        content = _delta_body(delta)
        if self._tells_sources and content is None and not delta.logprobs:
            self._pieces[delta.index].hold(delta)
        logprobs = self._logprobs(delta.logprobs) if delta.logprobs else None
        if content is not None or logprobs:
            choice = ChunkChoiceBody(
                index=delta.index, delta=content or DeltaBody(content=""), logprobs=logprobs
            )
            if self._tells_sources:
                choice.token_sources = self._pieces[delta.index].read(delta)
            chunks.append(self.chunk(choice))
        if delta.finish_reason is not None:
            reason = reason_body(delta.finish_reason)
            last = ChunkChoiceBody(index=delta.index, delta=DeltaBody(), finish_reason=reason)
            if delta.stop_reason is not None:
                last.stop_reason = delta.stop_reason
            chunks.append(self.chunk(last))
        return chunks


class TokenPieces:
    """The text of each token of a choice, and its draft source; "" is the target model.

    The tokens of one character are one piece: it stands at the last of them.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = getincrementaldecoder("utf-8")("replace")
        self._waiting: list[tuple[int, str]] = []  # tokens that no chunk has told yet

    def hold(self, delta: TurnDelta) -> None:
        """Tokens whose text comes with a later chunk."""
        self._waiting += zip(delta.token_ids, delta.sources, strict=False)

    def read(self, delta: TurnDelta) -> list[tuple[str, str]]:
        """The pieces of a step, and of those before it that added no text."""
        self.hold(delta)
        special, told = self._tokenizer.special_ids, []
        for token_id, source in self._waiting:
            if token_id not in special:
                text = self._decoder.decode(self._tokenizer.token_bytes(token_id))
                told += [(text, source)] if text else []
        self._waiting = []
        return told


def _whole_call(call: Call) -> CallBody:
    function = FunctionBody(name=call.name, arguments=call.arguments)
    return CallBody(id=call.id, type="function", function=function)


def _delta_body(delta: TurnDelta) -> DeltaBody | None:
    """The delta of a chunk; None if a step adds nothing."""
    if not (delta.reasoning or delta.words or delta.calls):
        return None
    return DeltaBody(
        reasoning_content=delta.reasoning or UNSET,
        content=delta.words or UNSET,
        tool_calls=[_call_delta(call) for call in delta.calls] or UNSET,
    )


def _call_delta(call: Call) -> CallBody:
    if not call.id:
        function = FunctionBody(arguments=call.arguments)
        return CallBody(index=call.index, function=function)
    body = _whole_call(call)
    body.index = call.index
    return body
