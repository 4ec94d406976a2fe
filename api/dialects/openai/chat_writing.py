"""Encode answers of /v1/chat/completions, whole and as events."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from msgspec import UNSET, Struct

from ....core.interface.output import TokenLogprob
from ...runtime.chat import ChatAnswer
from ...runtime.conversation.custom_tools import InputReader, input_of
from ...serving.answers import AnswerReply
from ...serving.serving_context import Service
from ...types.results import CallDelta, Choice, TextDelta, ToolCall
from .answers import (
    CallBody,
    ChatBody,
    ChatChoiceBody,
    ChatLogprobs,
    ChunkBody,
    ChunkChoiceBody,
    CustomBody,
    DeltaBody,
    FunctionBody,
    MessageBody,
)
from .bodies import (
    ChatRequest,
)
from .ready_calls import ReadyCalls
from .token_pieces import TokenPieces
from .writing import Head, Writer, token_infos

OPENING = DeltaBody(role="assistant", content="")


class ChatReply(AnswerReply[ChatAnswer]):
    """The answer to one chat request."""

    _writer: ChatWriter

    async def whole(self) -> object:
        """Return all choices in one body."""
        return self._writer.body(self._answer, await self._answer.collect())


class ChatWriter(Writer[ChatAnswer, ChatChoiceBody, ChunkChoiceBody]):
    """Encodes one answer."""

    whole_kind, whole_type = "chat.completion", ChatBody
    chunk_kind, chunk_type = "chat.completion.chunk", ChunkBody

    def __init__(self, service: Service, head: Head, body: ChatRequest) -> None:
        super().__init__(service, head, body)
        self._reports_sources = bool(body.token_sources)
        self._returns_ids = bool(body.return_token_ids)
        self._custom = {tool.custom.name for tool in body.tools or () if tool.custom is not None}
        self._inputs: dict[tuple[int, int], InputReader] = {}  # by choice index and call index
        options = body.stream_options
        reports_ready = options is not None and bool(options.include_ready_calls)
        self._ready = ReadyCalls(self._whole_call) if reports_ready else None
        self._pieces: defaultdict[int, TokenPieces] = defaultdict(  # pieces by choice
            lambda: TokenPieces(service.llm.tokenizer, service.chat.syntax.thinking)
        )

    # -- whole ----------------------------------------------------------------------------------

    def body(self, answer: ChatAnswer, choices: Sequence[Choice]) -> Struct:
        """Return the answer in one body."""
        usage = answer.usage
        body = ChatBody(
            **self.head.fields(self.whole_kind),
            choices=[self.choice(each) for each in choices],
            usage=self.usage(usage),
            metrics=self.metrics(usage, answer.num_choices),
            receipts=self.receipts(answer),
        )
        if self._returns_ids:
            body.prompt_token_ids = list(answer.prompt_token_ids)
        return body

    def nothing(self, index: int) -> ChatChoiceBody:
        """Return the empty choice of a prompt that was only cached."""
        return self.choice(Choice(index=index, finish_reason="length"))

    def nothing_chunks(self, index: int) -> list[bytes]:
        """Return the events of an empty choice, for a prompt that was only cached."""
        ending = TextDelta(index=index, finish_reason="length")
        return [self.opening(index), *self.write(ending)]

    def choice(self, choice: Choice) -> ChatChoiceBody:
        """Return a choice as the body encodes it."""
        self.refuse_aborted(choice)
        message = MessageBody(content=choice.text)
        if choice.reasoning:
            message.reasoning_content = choice.reasoning
        if choice.tool_calls:
            message.content = choice.text or None
            message.tool_calls = [self._whole_call(call) for call in choice.tool_calls]
        if self._returns_ids and choice.message_ids is not None:
            message.token_ids = choice.message_ids
        return ChatChoiceBody(
            index=choice.index,
            message=message,
            logprobs=self._logprobs(choice.logprobs),
            finish_reason=self.reason(choice),
            stop_reason=choice.stop_reason,
            token_ids=choice.token_ids if self._returns_ids else UNSET,
        )

    def opening(self, index: int) -> bytes:
        """Return the first chunk of a choice."""
        return self.chunk(ChunkChoiceBody(index=index, delta=OPENING))

    def _logprobs(self, logprobs: list[TokenLogprob] | None) -> ChatLogprobs | None:
        if logprobs is None:
            return None
        return ChatLogprobs(content=token_infos(self._service.llm.tokenizer, logprobs))

    # -- streamed -------------------------------------------------------------------------------

    def begin(self, answer: ChatAnswer) -> Iterator[bytes]:
        """Yield the first chunk of each choice in order, since clients number choices by
        arrival.
        """
        self.set_usage(lambda: answer.usage)
        yield self._first(answer)
        for index in range(1, answer.num_choices):
            yield self.opening(index)

    def _first(self, answer: ChatAnswer) -> bytes:
        """Return the first chunk of the stream, with the prompt's token ids if requested."""
        first = ChunkChoiceBody(index=0, delta=OPENING)
        if not self._returns_ids:
            return self.chunk(first)
        return self.event([first], prompt_token_ids=list(answer.prompt_token_ids))

    def write(self, delta: TextDelta) -> list[bytes]:
        """Return the chunks of a delta: one for its content, one for the end of the choice."""
        self.count_sent(delta)
        chunks = []
        content = self._delta_body(delta)
        pieces = self._pieces[delta.index] if self._reports_sources else None
        if pieces is not None:
            pieces.hold(delta)
        logprobs = self._logprobs(delta.logprobs) if delta.logprobs else None
        token_ids = delta.token_ids if self._returns_ids and delta.token_ids else UNSET
        if content is not None or logprobs or token_ids is not UNSET:
            choice = ChunkChoiceBody(
                index=delta.index,
                delta=content or DeltaBody(content=""),
                logprobs=logprobs,
                token_ids=token_ids,
            )
            if pieces is not None:
                choice.token_sources = pieces.read(delta)
            chunks.append(self.chunk(choice))
        if self._ready is not None:
            chunks += self._ready.read(delta)
        if delta.finish_reason is not None:
            reason = self.reason(delta)
            last = ChunkChoiceBody(index=delta.index, delta=DeltaBody(), finish_reason=reason)
            if delta.stop_reason is not None:
                last.stop_reason = delta.stop_reason
            if self._returns_ids and delta.message_ids is not None:
                last.delta.token_ids = delta.message_ids
            if pieces is not None:
                last.token_sources = pieces.rest()
            chunks.append(self.chunk(last))
        return chunks

    # -- calls ----------------------------------------------------------------------------------

    def _whole_call(self, call: ToolCall) -> CallBody:
        if call.name in self._custom:
            custom = CustomBody(name=call.name, input=input_of(call.arguments))
            return CallBody(id=call.id, type="custom", custom=custom)
        function = FunctionBody(name=call.name, arguments=call.arguments)
        return CallBody(id=call.id, type="function", function=function)

    def _delta_body(self, delta: TextDelta) -> DeltaBody | None:
        """Return the delta of a chunk; None if the step adds nothing."""
        calls: list[CallBody] = []
        if delta.tool_calls:  # Nearly all deltas have none.
            calls = [self._call_delta(delta.index, call) for call in delta.tool_calls]
        if not (delta.reasoning or delta.text or calls):
            return None
        return DeltaBody(
            reasoning_content=delta.reasoning or UNSET,
            content=delta.text or UNSET,
            tool_calls=calls or UNSET,
        )

    def _call_delta(self, choice: int, call: CallDelta) -> CallBody:
        """Return what a step adds to a call. Its first body has the id, the type and the name."""
        body = CallBody(index=call.index)
        if call.id:
            body.id = call.id
            body.type = "custom" if call.name in self._custom else "function"
            if body.type == "custom":
                self._inputs[choice, call.index] = InputReader()
        name = call.name or UNSET
        if (reader := self._inputs.get((choice, call.index))) is None:
            body.function = FunctionBody(name=name, arguments=call.arguments)
        else:
            text = reader.add(call.arguments)
            body.custom = CustomBody(name=name, input=text + (reader.end() if call.is_done else ""))
        return body
