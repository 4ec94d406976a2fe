"""POST /api/chat and /api/generate."""

from __future__ import annotations

from functools import partial
from typing import TypeVar

from ...core.errors import InvalidRequest
from ..runtime.conversation.prompt_history import PromptNote, text_parts
from ..serving.dialect import Dialect
from ..serving.sse import Reply
from ..types.request_context import random_id
from .conversation import read_chat, read_params, read_prompt
from .errors import ERRORS
from .models import own_name
from .protocol import ChatPart, GeneratePart
from .schema import OllamaBody, OllamaChatBody, OllamaGenerateBody
from .writer import AnswerWriter, OllamaReply

B = TypeVar("B", bound=OllamaBody)
NAMES = {
    "max_tokens": "options.num_predict",
    "repetition_penalty": "options.repeat_penalty",
    "json_schema": "format",
}


class OllamaDialect(Dialect[B]):
    """Checks, streams as lines of JSON and the form of errors, shared by the routes."""

    names = NAMES
    error_form = ERRORS
    media_type = "application/x-ndjson"
    ping = b" "  # white space before the next line: there are no comments
    can_resume = False

    def check(self, body: B) -> None:
        """Check the model, which may have the tag "latest", and the options."""
        self.service.check_model(own_name(self.service, body.model))
        options = body.options
        self.service.check_range(options, most_temperature=self.most_temperature)
        self.service.settings.limits.check_body(options)
        if body.think and self.service.chat.syntax.thought_marks is None:
            name = body.model or self.service.model
            raise InvalidRequest(f'"{name}" does not support thinking', param="think")

    def decode(self, data: bytes) -> B:
        """A body, streamed where null or nothing says otherwise; raises `ApiError` 400."""
        body = super().decode(data)
        if body.stream is None:
            body.stream = True
        return body


class OllamaChat(OllamaDialect[OllamaChatBody]):
    """Answer one conversation, as lines of JSON unless ``stream`` is false."""

    path = "/api/chat"
    body = OllamaChatBody
    answer = ChatPart
    event = ChatPart

    async def open(self, body: OllamaChatBody) -> Reply:
        """Render and submit; without messages only confirm that the model is loaded."""
        writer = AnswerWriter(self.service, is_chat=True)
        chat = await self.service.apart(partial(read_chat, body))
        if not body.messages:
            return writer.loaded()
        answer = await self.service.chat.open(chat, request_id=f"ollama-{random_id()}")
        return OllamaReply(writer, answer, answer.close)


class OllamaGenerate(OllamaDialect[OllamaGenerateBody]):
    """Answer one prompt, as lines of JSON unless ``stream`` is false."""

    path = "/api/generate"
    body = OllamaGenerateBody
    answer = GeneratePart
    event = GeneratePart

    async def open(self, body: OllamaGenerateBody) -> Reply:
        """Render with the chat template, unless ``raw`` or there is none, and submit."""
        writer, request_id = AnswerWriter(self.service, is_chat=False), f"ollama-{random_id()}"
        if not body.prompt:
            return writer.loaded()
        llm = self.service.llm
        if not body.raw and llm.tokenizer.chat_template:
            chat = await self.service.chat.open(read_prompt(body), request_id=request_id)
            return OllamaReply(writer, chat, chat.close)
        for name, what in (("system", "a system text"), ("images", "images")):
            if getattr(body, name):
                where = (
                    "raw prompts have no place" if body.raw else "the model has no chat template"
                )
                raise InvalidRequest(f"{where} for {what}", param=name)
        note = PromptNote(parts=text_parts(body.prompt))
        answer = await llm.open(body.prompt, read_params(body), request_id=request_id, note=note)
        return OllamaReply(writer, answer, partial(llm.forget, answer))
