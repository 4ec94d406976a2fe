"""POST /v1/completions, the legacy shape: lists of prompts, token ids, echo."""

from __future__ import annotations

from functools import partial
from typing import cast

from starlette.requests import Request
from starlette.responses import Response

from ..core.errors import InvalidRequest
from ..core.interface.request import Usage
from .answer import Answer
from .errors import JsonResponse
from .forms import read_cache
from .intake import Prompt, warm_params
from .legacy import CompletionWriter, echo_ids
from .prompts import PromptNote, text_parts
from .results import Completion
from .sampling_params import SamplingParams
from .schema import (
    COMPLETION_TOKENS,
    CompletionRequest,
    decoder,
    refuse_unsupported,
    sampling_params,
)
from .service import OPENAI_TEMPERATURE, Service
from .shapes import Head
from .sse import HEADERS, EventStream, unless_gone
from .writer import is_prewarm, warm_usage

decode = decoder(CompletionRequest)


class CompletionsRoute:
    """Continues texts."""

    def __init__(self, service: Service) -> None:
        self.service = service

    async def create(self, request: Request) -> Response:
        """Answer one prompt or a list of them, whole or as a stream."""
        body = await self.service.read(request, decode)
        self.service.check_model(body.model)
        self.service.check_range(body, most_temperature=OPENAI_TEMPERATURE)
        refuse(body)
        params = completion_params(body)
        prompts = read_prompts(body.prompt)
        self.service.check_room(len(prompts), params.n)
        head = Head(prefix="cmpl", model=self.service.model)
        wanted = partial(self.service.wanted, request, deadline_ms=body.deadline_ms)
        echoed = await wanted(self._echoed(prompts)) if body.echo else None
        writer = CompletionWriter(self.service, head, body, echoed)
        writer.prompt_ids = prompt_ids(head, len(prompts))
        if is_prewarm(body):
            work = self._prewarm(head, prompts, params, body)
            return _prewarmed(writer, body, await wanted(work))
        answers = await wanted(self._open(head, prompts, params, body))
        if body.stream:
            return EventStream(
                writer.events(answers),
                close=lambda: self._forget(answers),
                ping_seconds=self.service.settings.limits.ping_seconds,
            )
        completions = await unless_gone(request.receive, self._finish(answers))
        return JsonResponse(writer.whole(completions))

    async def _echoed(self, prompts: list[Prompt]) -> list[str]:
        tokenizer = self.service.llm.tokenizer
        added_ids = await tokenizer.encode("")
        texts: list[str] = []
        for prompt in prompts:
            if not isinstance(prompt, str):
                tokenizer.check_ids(prompt, self.service.llm.built.vocab_size)
                prompt = echo_ids(tokenizer, prompt, added_ids)
            texts.append(prompt)
        return texts

    async def _open(
        self, head: Head, prompts: list[Prompt], params: SamplingParams, body: CompletionRequest
    ) -> list[Answer]:
        answers: list[Answer] = []
        llm = self.service.llm
        special = body.add_special_tokens is not False
        cache = read_cache(body.cache, body.prompt_cache_retention, body.prompt_cache_options)
        try:
            for prompt, name in zip(prompts, prompt_ids(head, len(prompts)), strict=True):
                note = PromptNote(parts=text_parts(prompt), cache_key=body.prompt_cache_key)
                if isinstance(prompt, str):
                    prompt = await llm.tokenizer.encode(prompt, add_special_tokens=special)
                answers.append(
                    await llm.open(prompt, params, request_id=name, cache=cache, note=note)
                )
        except BaseException:
            self._forget(answers)
            raise
        return answers

    async def _prewarm(
        self, head: Head, prompts: list[Prompt], params: SamplingParams, body: CompletionRequest
    ) -> list[Usage]:
        answers = await self._open(head, prompts, warm_params(params), body)
        return [warm_usage(self.service, each) for each in await self._finish(answers)]

    async def _finish(self, answers: list[Answer]) -> list[Completion]:
        try:
            return [await self.service.llm.finish(answer) for answer in answers]
        finally:
            self._forget(answers)

    def _forget(self, answers: list[Answer]) -> None:
        for answer in answers:
            self.service.llm.forget(answer)


def prompt_ids(head: Head, count: int) -> list[str]:
    """Under which each prompt of a body is known."""
    return [head.id] if count == 1 else [f"{head.id}-p{index}" for index in range(count)]


def _prewarmed(writer: CompletionWriter, body: CompletionRequest, usages: list[Usage]) -> Response:
    if body.stream:
        return Response(b"".join(writer.prewarmed_events(usages)), headers=HEADERS)
    return JsonResponse(writer.prewarmed(usages))


def refuse(body: CompletionRequest) -> None:
    """Raise `InvalidRequest` for what cannot be honoured."""
    refuse_unsupported(body)
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise InvalidRequest("best_of is not supported beyond n", param="best_of")
    if body.prediction is not None and len(read_prompts(body.prompt)) > 1:
        raise InvalidRequest("prediction needs a single prompt", param="prediction")
    if body.stream and body.echo and body.logprobs is not None and (body.n or 1) > 1:
        raise InvalidRequest("echo with logprobs and n > 1 cannot be streamed", param="echo")


def completion_params(body: CompletionRequest) -> SamplingParams:
    """Sampling parameters of the body."""
    return sampling_params(
        body,
        max_tokens=COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens,
        logprobs=body.logprobs,
        prompt_logprobs=body.logprobs if body.echo else None,
    )


def read_prompts(prompt: str | list[str | int | list[int]]) -> list[Prompt]:
    """A text, token ids, or a list of either."""
    if isinstance(prompt, str):
        return [prompt]
    kinds = {*map(type, prompt)}  # a loop over a million ids would hold the event loop
    if len(kinds) != 1:
        message = "prompt must be a text, a list of texts, token ids, or a list of token ids lists"
        raise InvalidRequest(message, param="prompt")
    if kinds == {int}:
        return [cast("list[int]", prompt)]
    return cast("list[Prompt]", prompt)
