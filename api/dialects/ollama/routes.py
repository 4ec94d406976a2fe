"""POST /api/chat, /api/generate, /api/embed and /api/embeddings."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import TypeVar

from ....core.errors import InvalidRequest
from ...runtime.conversation.prompt_history import PromptNote, text_parts
from ...runtime.generation import Answers
from ...runtime.pooled.embedder import Embedder, unit_vector
from ...runtime.pooled.pooled_prompts import Pooled, PooledPrompts, entry_names, pool_params
from ...serving.answers import AnswerReply
from ...serving.dialect import Dialect
from ...serving.pooled import PooledReply
from ...serving.serving_context import Service
from ...serving.sse import ReadyReply, Reply
from ...types.request_context import random_id
from ...types.results import batch_usage
from .answers import ERRORS, ChatPart, Embedded, EmbeddedOne, GeneratePart
from .bodies import (
    OllamaBody,
    OllamaChatBody,
    OllamaEmbedBody,
    OllamaEmbeddingsBody,
    OllamaGenerateBody,
    OllamaPooledBody,
)
from .models import own_name
from .reading import read_chat, read_params, read_prompt
from .writing import NANO, PartWriter

B = TypeVar("B", bound=OllamaBody)
P = TypeVar("P", bound=OllamaPooledBody)
NAMES = {
    "max_tokens": "options.num_predict",
    "repetition_penalty": "options.repeat_penalty",
    "json_schema": "format",
}


class OllamaDialect(Dialect[B]):
    """The base of the generating routes: checks, streams of JSON lines, and error format."""

    names = NAMES
    error_form = ERRORS
    media_type = "application/x-ndjson"
    ping = b" "  # white space before the next line, since JSON has no comments
    can_resume = False

    def check(self, body: B) -> None:
        """Check the model, whose name may have the tag ":latest", and the options."""
        self.service.check_model(own_name(self.service, body.model))
        options = body.options
        self.service.check_range(options, most_temperature=self.most_temperature)
        self.service.settings.limits.check_body(options)
        if body.think and self.service.chat.syntax.thought_marks is None:
            name = body.model or self.service.model
            raise InvalidRequest(f'"{name}" does not support thinking', param="think")

    def decode(self, data: bytes) -> B:
        """Decode a body. A ``stream`` that was left out becomes true. Raises `ApiError` 400."""
        body = super().decode(data)
        if body.stream is None:
            body.stream = True
        return body


class OllamaChat(OllamaDialect[OllamaChatBody]):
    """Answer one conversation, as JSON lines unless ``stream`` is false."""

    path = "/api/chat"
    body = OllamaChatBody
    answer = ChatPart
    event = ChatPart

    async def open(self, body: OllamaChatBody) -> Reply:
        """Render and submit the messages. Without messages, report that the model is loaded."""
        writer = PartWriter(self.service, is_chat=True)
        chat = await self.service.apart(partial(read_chat, body))
        if not body.messages:
            return writer.loaded()
        answer = await self.service.chat.open(chat, request_id=f"ollama-{random_id()}")
        return AnswerReply(self.service, writer, answer)


class OllamaGenerate(OllamaDialect[OllamaGenerateBody]):
    """Answer one prompt, as JSON lines unless ``stream`` is false."""

    path = "/api/generate"
    body = OllamaGenerateBody
    answer = GeneratePart
    event = GeneratePart

    async def open(self, body: OllamaGenerateBody) -> Reply:
        """Submit the prompt. It is rendered with the chat template, if any, unless ``raw`` is true.

        Without a prompt, report that the model is loaded. Raises `InvalidRequest`.
        """
        writer, request_id = PartWriter(self.service, is_chat=False), f"ollama-{random_id()}"
        if not body.prompt:
            return writer.loaded()
        llm = self.service.llm
        if not body.raw and llm.tokenizer.chat_template:
            chat = await self.service.chat.open(read_prompt(body), request_id=request_id)
            return AnswerReply(self.service, writer, chat)
        for name, what in (("system", "system text"), ("images", "images")):
            if getattr(body, name):
                where = (
                    "raw prompts cannot contain"
                    if body.raw
                    else "the model has no chat template for"
                )
                raise InvalidRequest(f"{where} {what}", param=name)
        note = PromptNote(parts=text_parts(body.prompt))
        answer = await llm.open(body.prompt, read_params(body), request_id=request_id, note=note)
        return AnswerReply(self.service, writer, Answers([answer], llm.forget))


class OllamaPooled(Dialect[P]):
    """The base of the embedding routes: checks and error format."""

    error_form = ERRORS

    def __init__(self, service: Service) -> None:
        super().__init__(service)
        self._embedder = Embedder(service.llm)

    def check(self, body: P) -> None:
        """Check the model, whose name may have the tag ":latest"."""
        self.service.check_model(own_name(self.service, body.model))

    def prompts(
        self, texts: Sequence[str], body: P, *, name: str, is_cut: bool, dimensions: int | None
    ) -> PooledPrompts:
        """Return the prompts of texts from the field ``name``. Raises `InvalidRequest`."""
        params = pool_params(
            cache_salt=None if body.options is None else body.options.cache_salt,
            deadline=None if body.deadline_ms is None else body.deadline_ms / 1000,
        )
        names = entry_names(name, len(texts))
        return self._embedder.open(texts, params, dimensions, name=names, is_cut=is_cut)


class OllamaEmbed(OllamaPooled[OllamaEmbedBody]):
    """Return the embedding of each text."""

    path = "/api/embed"
    body = OllamaEmbedBody
    answer = Embedded

    async def open(self, body: OllamaEmbedBody) -> Reply:
        """Check all texts. They are tokenized and computed when the reply is read."""
        texts = [body.input] if isinstance(body.input, str) else body.input or []
        began, model = time.monotonic(), self.service.model

        def embedded(pooled: Sequence[Pooled]) -> Embedded:
            return Embedded(
                model=model,
                embeddings=[unit_vector(p.numbers, body.dimensions).tolist() for p in pooled],
                total_duration=int((time.monotonic() - began) * NANO),
                prompt_eval_count=batch_usage([p.usage for p in pooled]).prompt_tokens,
            )

        if texts in ([], [""]):
            return ReadyReply(embedded([]))
        is_cut = body.truncate is not False
        prompts = self.prompts(texts, body, name="input", is_cut=is_cut, dimensions=body.dimensions)
        return PooledReply(prompts, embedded)


class OllamaEmbeddings(OllamaPooled[OllamaEmbeddingsBody]):
    """Return the embedding of one text."""

    path = "/api/embeddings"
    body = OllamaEmbeddingsBody
    answer = EmbeddedOne

    async def open(self, body: OllamaEmbeddingsBody) -> Reply:
        """Check the text. It is tokenized and computed when the reply is read."""
        if not body.prompt:
            return ReadyReply(EmbeddedOne(embedding=[]))
        prompts = self.prompts([body.prompt], body, name="prompt", is_cut=True, dimensions=None)
        return PooledReply(
            prompts, lambda pooled: EmbeddedOne(embedding=unit_vector(pooled[0].numbers).tolist())
        )
