"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from ..core.errors import InvalidRequest
from ..core.params import SamplingParams
from ..core.step import TokenLogprob
from .answer import Answer
from .errors import JsonResponse
from .results import Choice, Completion, TextDelta
from .schema import (
    ChatRequest,
    decoder,
    plain_messages,
    refuse_unsupported_chat,
    sampling_params,
)
from .service import Service
from .shapes import Body, Head, chat_logprobs, reason_body
from .sse import EventStream, unless_gone
from .writer import Writer

decode = decoder(ChatRequest)
OPENING: Body = {"delta": {"role": "assistant", "content": ""}}


class ChatRoute:
    """Conversations in OpenAI's shape."""

    def __init__(self, service: Service) -> None:
        self.service = service

    async def create(self, request: Request) -> Response:
        """Answer one conversation, whole or as a stream."""
        body = await self.service.read(request, decode)
        self.service.check_model(body.model)
        refuse_unsupported_chat(body)
        params = chat_params(body)
        self.service.check_room(1, params.n)
        head = Head(prefix="chatcmpl", model=self.service.model)
        llm = self.service.llm
        try:
            prompt_ids = await llm.render(plain_messages(body.messages), template_options(body))
            answer = await llm.open(prompt_ids, params, request_id=head.id)
        except InvalidRequest as error:
            if error.param == "prompt":  # which this body calls otherwise
                error.param = "messages"
            raise
        writer = ChatWriter(self.service, head, body)
        if body.stream:
            return EventStream(
                writer.events(answer),
                close=partial(llm.forget, answer),
                ping_seconds=self.service.settings.ping_seconds,
            )
        completion = await unless_gone(request.receive, llm.finish(answer))
        return JsonResponse(writer.whole(completion))


def chat_params(body: ChatRequest) -> SamplingParams:
    """Sampling parameters of a conversation."""
    asked = body.max_completion_tokens
    return sampling_params(
        body,
        max_tokens=body.max_tokens if asked is None else asked,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
    )


def template_options(body: ChatRequest) -> dict[str, object]:
    """What of the body goes to the chat template."""
    options: dict[str, object] = dict(body.chat_template_kwargs or {})
    if body.add_generation_prompt is not None:
        options["add_generation_prompt"] = body.add_generation_prompt
    if body.continue_final_message is not None:
        options["continue_final_message"] = body.continue_final_message
    return options


class ChatWriter(Writer):
    """Writes one answer."""

    whole_kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    # -- whole ----------------------------------------------------------------------------------

    def whole(self, completion: Completion) -> Body:
        """The answer in one body."""
        return self.answer([self._choice(each) for each in completion.choices], completion.usage)

    def _choice(self, choice: Choice) -> Body:
        self.refuse_aborted(choice.finish_reason, len(choice.token_ids))
        return {
            "index": choice.index,
            "message": {"role": "assistant", "content": choice.text, "refusal": None},
            "logprobs": self._logprobs(choice.logprobs),
            "finish_reason": reason_body(choice.finish_reason),
            "stop_reason": choice.stop_reason,
        }

    def _logprobs(self, logprobs: list[TokenLogprob] | None) -> Body | None:
        return None if logprobs is None else chat_logprobs(self._service.llm.tokenizer, logprobs)

    # -- streamed -------------------------------------------------------------------------------

    async def events(self, answer: Answer) -> AsyncGenerator[bytes]:
        """The answer as events."""
        opened = False
        async with aclosing(answer.deltas()) as deltas:
            async for delta in deltas:
                if delta.finish_reason is not None:
                    num_tokens = answer.generations[delta.index].usage.completion_tokens
                    self.refuse_aborted(delta.finish_reason, num_tokens)
                if not opened:
                    # Clients number the choices by the order in which they first see them.
                    opened = True
                    for index in range(answer.params.n):
                        yield self.chunk(index, OPENING)
                for chunk in self._chunks(delta):
                    yield chunk
        for last in self.end(answer.usage):
            yield last

    def _chunks(self, delta: TextDelta) -> Iterator[bytes]:
        logprobs = self._logprobs(delta.logprobs) if delta.logprobs else None
        if delta.text or logprobs:
            content: Body = {"delta": {"content": delta.text}}
            yield self.chunk(delta.index, content, logprobs=logprobs)
        if delta.finish_reason is not None:
            yield self.chunk(
                delta.index,
                {"delta": {}},
                finish_reason=reason_body(delta.finish_reason),
                stop_reason=delta.stop_reason,
            )
