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
from .shapes import Body, Head, chat_logprobs, reason_body, refuse_aborted, usage_body
from .sse import DONE, EventStream, event, unless_gone

decode = decoder(ChatRequest)


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
        head = Head(prefix="chatcmpl", model=self.service.model)
        llm = self.service.llm
        try:
            prompt_ids = await llm.render(plain_messages(body.messages), **template_options(body))
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


class ChatWriter:
    """Writes one answer."""

    def __init__(self, service: Service, head: Head, body: ChatRequest) -> None:
        self._service = service
        self._head = head
        self._include_usage = bool(body.stream_options and body.stream_options.include_usage)

    # -- whole ----------------------------------------------------------------------------------

    def whole(self, completion: Completion) -> Body:
        """The answer in one body."""
        choices = [self._choice(choice) for choice in completion.choices]
        usage = usage_body(completion.usage)
        return {**self._head.body("chat.completion", choices), "usage": usage}

    def _choice(self, choice: Choice) -> Body:
        self._refuse_aborted(choice.finish_reason, len(choice.token_ids))
        return {
            "index": choice.index,
            "message": {"role": "assistant", "content": choice.text, "refusal": None},
            "logprobs": self._logprobs(choice.logprobs),
            "finish_reason": reason_body(choice.finish_reason),
            "stop_reason": choice.stop_reason,
        }

    def _logprobs(self, logprobs: list[TokenLogprob] | None) -> Body | None:
        return None if logprobs is None else chat_logprobs(self._service.llm.tokenizer, logprobs)

    def _refuse_aborted(self, reason: str, num_tokens: int) -> None:
        refuse_aborted(reason, num_tokens, draining=self._service.llm.draining)

    # -- streamed -------------------------------------------------------------------------------

    async def events(self, answer: Answer) -> AsyncGenerator[bytes]:
        """The answer as events."""
        opened = False
        async with aclosing(answer.deltas()) as deltas:
            async for delta in deltas:
                if delta.finish_reason is not None:
                    num_tokens = answer.generations[delta.index].usage.completion_tokens
                    self._refuse_aborted(delta.finish_reason, num_tokens)
                if not opened:
                    # Clients number the choices by the order in which they first see them.
                    opened = True
                    for index in range(answer.params.n):
                        yield self._chunk(index, {"role": "assistant", "content": ""})
                for chunk in self._chunks(delta):
                    yield chunk
        if self._include_usage:
            yield self._event([], usage_body(answer.usage))
        yield DONE

    def _chunks(self, delta: TextDelta) -> Iterator[bytes]:
        logprobs = self._logprobs(delta.logprobs) if delta.logprobs else None
        if delta.text or logprobs:
            yield self._chunk(delta.index, {"content": delta.text}, logprobs=logprobs)
        if delta.finish_reason is not None:
            yield self._chunk(
                delta.index,
                {},
                finish_reason=reason_body(delta.finish_reason),
                stop_reason=delta.stop_reason,
            )

    def _chunk(
        self,
        index: int,
        delta: Body,
        *,
        logprobs: Body | None = None,
        finish_reason: str | None = None,
        stop_reason: int | str | None = None,
    ) -> bytes:
        choice: Body = {
            "index": index,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }
        if stop_reason is not None:
            choice["stop_reason"] = stop_reason
        return self._event([choice], None)

    def _event(self, choices: list[Body], usage: Body | None) -> bytes:
        chunk = self._head.body("chat.completion.chunk", choices)
        if self._include_usage:
            chunk["usage"] = usage
        return event(chunk)
