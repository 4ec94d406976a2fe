"""Chat completions, completions, and the routes that render their prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

from ....core.errors import InvalidRequest
from ...receipts.signer import ReceiptSigner
from ...runtime.conversation.chat_input import ChatInput
from ...runtime.conversation.prompt_history import PromptNote, text_parts
from ...runtime.generation import Answer, Answers
from ...runtime.preprocess import Prompt, PromptTokens, warm_params
from ...serving.answers import prewarm, warm_usage
from ...serving.dialect import READS, Dialect
from ...serving.render import Rendered, render_chat, rendered
from ...serving.sampling import cache_options, is_prewarm
from ...serving.serving_context import Service
from ...serving.sse import ReadyReply, Reply
from ...types.sampling_params import SamplingParams
from .answers import (
    ChatBody,
    ChunkBody,
    TextBody,
)
from .bodies import (
    ChatRequest,
    CompletionRequest,
)
from .breakpoints import with_breakpoints
from .chat_writing import ChatReply, ChatWriter
from .prefill import handing_over, transfer_of
from .reading import completion_params, read_chat, read_prompts, refuse
from .text_writing import CompletionWriter, TextReply, echo_ids, prompt_ids
from .writing import Head


class ChatRoute(Dialect[ChatRequest]):
    """Answer one conversation, whole or as a stream."""

    path = "/v1/chat/completions"
    body = ChatRequest
    answer: ClassVar[Any] = ChatBody
    event: ClassVar[Any] = ChunkBody
    in_batches = True
    reply_kind: ClassVar[type[ChatReply]] = ChatReply
    writer_kind: ClassVar[type[ChatWriter]] = ChatWriter

    async def open(self, body: ChatRequest) -> Reply:
        """Render the conversation, locate its breakpoints and submit it."""
        chat = await self.read(body)
        head = Head(prefix="chatcmpl", model=self.service.model)
        writer = self.writer_kind(self.service, head, body)
        options = body.prompt_cache_options
        pinned = await with_breakpoints(self.service, body.messages, options, chat)
        chat, writer.breakpoints = pinned.chat, pinned.breakpoints
        if is_prewarm(body):
            usage = await prewarm(self.service, chat, request_id=head.id, prompt=pinned.prompt)
            return writer.warmed([usage])
        open_reply = partial(self._reply, writer, head, chat, body, pinned.prompt)
        return await handing_over(self.service, transfer_of(body), open_reply)

    async def _reply(
        self,
        writer: ChatWriter,
        head: Head,
        chat: ChatInput,
        body: ChatRequest,
        prompt: PromptTokens | None,
    ) -> ChatReply:
        await ReceiptSigner.prepare(self.service)
        answer = await self.service.chat.open(
            chat,
            request_id=head.id,
            prompt=prompt,
            hands_out=bool(body.return_token_ids),
            transfer=transfer_of(body),
        )
        return self.reply_kind(self.service, writer, answer)

    async def read(self, body: ChatRequest) -> ChatInput:
        """Return the chat request of a body. Raises `InvalidRequest`, also for too many choices."""
        chat = await self.service.apart(partial(read_chat, body))
        self.service.check_room(1, chat.params.n)
        return chat

    def rename(self, error: InvalidRequest, body: ChatRequest) -> None:
        """Rename json_schema in an error to response_format if the body has this field."""
        if error.param == "json_schema" and body.response_format is not None:
            error.param = "response_format"


class ChatRender(ChatRoute):
    """Render one conversation: check it and return its prompt's token ids."""

    path = "/v1/chat/completions/render"
    answer = Rendered
    event = None
    statuses = READS
    in_batches = False

    async def open(self, body: ChatRequest) -> Reply:
        """Render and check the conversation without submitting it."""
        chat, head = await self.read(body), Head(prefix="chatcmpl", model=self.service.model)
        return ReadyReply(
            await render_chat(
                self.service, chat, body, request_id=head.id, is_prewarm=is_prewarm(body)
            )
        )


class CompletionsRoute(Dialect[CompletionRequest]):
    """Answer one prompt or a list of them, whole or as a stream."""

    path = "/v1/completions"
    body = CompletionRequest
    answer: ClassVar[Any] = TextBody
    event: ClassVar[Any] = TextBody
    in_batches = True
    reply_kind: ClassVar[type[TextReply]] = TextReply
    writer_kind: ClassVar[type[CompletionWriter]] = CompletionWriter

    async def open(self, body: CompletionRequest) -> Reply:
        """Tokenize and submit all prompts."""
        params, prompts, echoed = await self.read(body)
        head = Head(prefix="cmpl", model=self.service.model)
        writer = self.writer_kind(self.service, head, body, echoed)
        writer.prompt_ids = prompt_ids(head, len(prompts))
        if is_prewarm(body):
            done = await (await self._open(head, prompts, params, body)).collect()
            return writer.warmed([warm_usage(self.service, each) for each in done])
        transfer = transfer_of(body, num_prompts=len(prompts))
        open_reply = partial(self._reply, writer, head, prompts, params, body)
        return await handing_over(self.service, transfer, open_reply)

    async def _reply(
        self,
        writer: CompletionWriter,
        head: Head,
        prompts: list[Prompt],
        params: SamplingParams,
        body: CompletionRequest,
    ) -> TextReply:
        await ReceiptSigner.prepare(self.service)
        answers = await self._open(head, prompts, params, body)
        return self.reply_kind(self.service, writer, answers)

    async def read(
        self, body: CompletionRequest
    ) -> tuple[SamplingParams, list[Prompt], list[str] | None]:
        """Return the parameters, the prompts and, with ``echo``, the text of each prompt.

        Raises `InvalidRequest`.
        """
        refuse(body)
        params, prompts = completion_params(body), read_prompts(body.prompt)
        self.service.check_room(len(prompts), params.n)
        generates = not params.prompt_only
        echoed = await self._echoed(prompts, generates=generates) if body.echo else None
        return warm_params(params) if is_prewarm(body) else params, prompts, echoed

    async def _echoed(self, prompts: list[Prompt], *, generates: bool) -> list[str]:
        tokenizer = self.service.llm.tokenizer
        added_ids = await tokenizer.encode("")
        texts: list[str] = []
        for prompt in prompts:
            if not isinstance(prompt, str):
                vocab_size = self.service.llm.built.vocab_size
                tokenizer.check_ids(prompt, vocab_size, generates=generates)
                prompt = echo_ids(tokenizer, prompt, added_ids)
            texts.append(prompt)
        return texts

    async def _open(
        self, head: Head, prompts: list[Prompt], params: SamplingParams, body: CompletionRequest
    ) -> Answers:
        answers: list[Answer] = []
        transfer = transfer_of(body, num_prompts=len(prompts))
        try:
            for prompt, name in zip(prompts, prompt_ids(head, len(prompts)), strict=True):
                answers.append(await open_text(self.service, body, prompt, params, name, transfer))
        except BaseException:
            for answer in answers:
                self.service.llm.forget(answer)
            raise
        return Answers(answers, self.service.llm.forget)


class CompletionsRender(CompletionsRoute):
    """Render prompts: check each and return its token ids."""

    path = "/v1/completions/render"
    answer = list[Rendered]
    event = None
    statuses = READS
    in_batches = False

    async def open(self, body: CompletionRequest) -> Reply:
        """Tokenize and check the prompts without submitting them."""
        params, prompts, _ = await self.read(body)
        head = Head(prefix="cmpl", model=self.service.model)
        found = []
        for prompt, name in zip(prompts, prompt_ids(head, len(prompts)), strict=True):
            token_ids = await self.service.llm.check(
                await text_ids(self.service, body, prompt), params
            )
            found.append(rendered(self.service, body, params, token_ids, name))
        return ReadyReply(found)


async def open_text(
    service: Service,
    body: CompletionRequest,
    prompt: Prompt,
    params: SamplingParams,
    name: str,
    transfer: Mapping[str, Any] | None = None,
) -> Answer:
    """Tokenize and submit one prompt with the request id ``name``."""
    note = PromptNote(parts=text_parts(prompt), cache_key=body.prompt_cache_key)
    token_ids = await text_ids(service, body, prompt)
    return await service.llm.open(
        token_ids,
        params,
        request_id=name,
        cache=cache_options(body),
        note=note,
        transfer=transfer,
    )


async def text_ids(service: Service, body: CompletionRequest, prompt: Prompt) -> Sequence[int]:
    """Return the token ids of one prompt, which may be token ids already."""
    if not isinstance(prompt, str):
        return prompt
    special = body.add_special_tokens is not False
    return await service.llm.tokenizer.encode(prompt, add_special_tokens=special)
