"""AsyncLLM: the Python interface for asyncio, on the caller's event loop."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, TypeGuard, TypeVar, Unpack, overload

from ...core.errors import InvalidRequest, QueueFull
from ...core.options.checks import MAX_INT, as_tuple, check_integer, require
from ..build.hub import at_revision, go_offline
from ..runtime.chat import ChatAnswer, ChatClient
from ..runtime.conversation.chat_input import ChatInput
from ..runtime.decisions.decider import Decider
from ..runtime.decisions.questions import read_questions
from ..runtime.generation import Answer
from ..runtime.pooled.embedder import Embedder, unit_vector
from ..runtime.pooled.pooled_prompts import Pooled, PooledPrompts, entry_names, pool_params
from ..runtime.pooled.reranker import Reranker, ranked
from ..runtime.preprocess import (
    Conversation,
    Prepared,
    Prompt,
    is_one_conversation,
    is_one_prompt,
    many_ids,
    many_params,
    one_id,
    one_params,
    with_adapter,
)
from ..runtime.verifying.answer_verifier import AnswerVerifier
from ..runtime.verifying.recorded import RecordedAnswer
from ..types.results import (
    Choice,
    Completion,
    Decisions,
    Embedding,
    RankedDocument,
    TextDelta,
)
from ..types.sampling_params import SamplingParams
from ..types.verdict import Verdict
from .options import (
    ChatOptions,
    EmbedCall,
    GivenChoice,
    GivenTools,
    ManyCalls,
    ManyChats,
    OneCall,
    OneChat,
    Params,
    RequestIds,
)
from .rollout_client import RolloutClient

T = TypeVar("T")


class AsyncLLM(RolloutClient):
    """A model and its engine.

    ``options`` are the fields of `EngineConfig`, which are the flags of ``foretoken serve``. The
    model is loaded by `start`, by ``async with``, or by the first request. Belongs to one event
    loop. ``revision``: branch, tag or commit of a hub model; raises `InvalidRequest` for other
    models. ``offline``: use only cached hub models, from now on and in the whole process.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        revision: str | None = None,
        offline: bool = False,
        **options: Any,  # noqa: ANN401 - EngineConfig checks them
    ) -> None:
        if offline:
            go_offline()
        if revision is not None:
            model = at_revision(None if model is None else os.fspath(model), revision)
        super().__init__(model, **options)

    @overload
    async def generate(  # type: ignore[overload-overlap]
        self,
        prompt: str | list[int],
        params: SamplingParams | None = None,
        **options: Unpack[OneCall],
    ) -> Completion: ...

    @overload
    async def generate(
        self, prompt: Sequence[Prompt], params: Params = None, **options: Unpack[ManyCalls]
    ) -> list[Completion]: ...

    async def generate(
        self,
        prompt: Prompt | Sequence[Prompt],
        params: Params = None,
        *,
        request_id: RequestIds = None,
        lora: str | None = None,
    ) -> Completion | list[Completion]:
        """Return the completion of one prompt (text or token ids), or of each prompt in a list.

        ``lora``: the adapter for all prompts; overrides `SamplingParams.lora`.
        """
        own = with_adapter(params, lora)
        if is_one_prompt(prompt):
            return await self._generate_one(prompt, own, request_id)
        return await self._generate_all(list(prompt), own, request_id)  # type: ignore[arg-type]

    @overload
    async def chat(
        self,
        messages: Conversation,
        params: SamplingParams | None = None,
        **options: Unpack[OneChat],
    ) -> Completion: ...

    @overload
    async def chat(
        self, messages: Sequence[Conversation], params: Params = None, **options: Unpack[ManyChats]
    ) -> list[Completion]: ...

    async def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        params: Params = None,
        *,
        request_id: RequestIds = None,
        lora: str | None = None,
        tools: GivenTools | None = None,
        tool_choice: GivenChoice = None,
        parallel_tool_calls: bool = True,
    ) -> Completion | list[Completion]:
        """Return the next message of one conversation, or of each conversation in a list."""
        options = ChatOptions(tools, tool_choice, is_parallel=parallel_tool_calls)
        own = with_adapter(params, lora)
        if is_one_conversation(messages):
            chat = options.chat_input(messages, one_params(own))
            answer = await self._open_chat(chat, one_id(request_id))
            return await answer.completion()
        conversations: Sequence[Conversation] = messages  # type: ignore[assignment]
        pairs = zip(conversations, many_params(own, len(conversations)), strict=True)
        chats = [options.chat_input(each, own_params) for each, own_params in pairs]
        return await self._answer_all(chats, many_ids(request_id, len(chats)))

    async def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        lora: str | None = None,
    ) -> AsyncGenerator[TextDelta]:
        """Yield one delta per step, with all its tokens.

        Closing the iterator aborts the request.
        """
        await self.start()
        own = one_params(with_adapter(params, lora))
        answer = await self.open(prompt, own, request_id=one_id(request_id))
        try:
            async with aclosing(answer.deltas()) as deltas:
                async for delta in deltas:
                    yield delta
        finally:
            self.forget(answer)

    async def stream_chat(
        self,
        messages: Conversation,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        lora: str | None = None,
        tools: GivenTools | None = None,
        tool_choice: GivenChoice = None,
        parallel_tool_calls: bool = True,
    ) -> AsyncGenerator[TextDelta]:
        """Yield the deltas of the next message, split into the fields of `Choice`.

        Closing the iterator aborts the request.
        """
        options = ChatOptions(tools, tool_choice, is_parallel=parallel_tool_calls)
        own = with_adapter(params, lora)
        chat = options.chat_input(messages, one_params(own))
        answer = await self._open_chat(chat, one_id(request_id))
        try:
            async with aclosing(answer.deltas()) as deltas:
                async for delta in deltas:
                    yield delta
        finally:
            answer.close()

    @overload
    async def embed(  # type: ignore[overload-overlap]
        self, inputs: str | list[int], **options: Unpack[EmbedCall]
    ) -> Embedding: ...

    @overload
    async def embed(
        self, inputs: Sequence[Prompt], **options: Unpack[EmbedCall]
    ) -> list[Embedding]: ...

    async def embed(
        self,
        inputs: Prompt | Sequence[Prompt],
        *,
        dimensions: int | None = None,
        cache_salt: str | None = None,
        lora: str | None = None,
    ) -> Embedding | list[Embedding]:
        """Return the embedding of one input (text or token ids), or of each input in a list.

        It is the hidden state of the last token, scaled to length 1. ``dimensions``: truncate the
        vector, if the model's config allows it. Raises `InvalidRequest`, which names the input.
        """
        await self.start()
        each, is_one = _inputs(inputs)
        name, params = (
            entry_names("inputs", len(each)),
            pool_params(cache_salt=cache_salt, lora=lora),
        )
        prompts = self._embedder.open(each, params, dimensions, name=name, keeps_ids=True)
        pooled = await self._read(prompts)
        found = await asyncio.to_thread(_embeddings, pooled, dimensions)
        return found[0] if is_one else found

    async def rerank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        top_n: int | None = None,
        instruct: str | None = None,
        cache_salt: str | None = None,
        lora: str | None = None,
    ) -> list[RankedDocument]:
        """Return the documents with their scores for a query, the best first.

        For models that answer yes or no, such as Qwen3-Reranker. ``top_n``: maximum number of
        documents. ``instruct``: describes which documents are relevant. Raises `InvalidRequest`.
        """
        await self.start()
        texts = _texts(query, documents, instruct)
        if top_n is not None:
            check_integer("top_n", top_n, 1, MAX_INT)
        prompts = self._reranker.open(
            [(query, text) for text in texts],
            pool_params(cache_salt=cache_salt, lora=lora),
            instruct,
            name=entry_names("documents", len(texts)),
            query_name=entry_names("query", 1),
        )
        pooled = await self._read(prompts)
        return [
            RankedDocument(
                index=index,
                relevance_score=score,
                document=texts[index],
                usage=pooled[index].usage,
            )
            for index, score in ranked(pooled, top_n)
        ]

    async def decide(
        self,
        input: str | Conversation,
        questions: Sequence[Mapping[str, Any]],
        *,
        cache_salt: str | None = None,
        lora: str | None = None,
    ) -> Decisions:
        """Return the answers to questions about a text or a conversation.

        The questions have the form of OpenAI's Decisions API, with the types predicate, choice and
        score. The input is computed once; an answer is the probabilities of the listed labels, and
        no token is generated. Raises `InvalidRequest`, which names the question.
        """
        await self.start()
        messages = [{"role": "user", "content": input}] if isinstance(input, str) else input
        params = pool_params(cache_salt=cache_salt, lora=lora)
        chat = ChatOptions(None, None).chat_input(messages, params)
        asked = await self._decider.open(chat, read_questions(questions), params)
        return asked.decide(await self._read(asked.prompts))

    async def verify(
        self,
        prompt: Prompt | Conversation,
        answer: Choice | str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        finish_reason: str | None = None,
        index: int = 0,
        checked_from: int = 0,
        lora: str | None = None,
        tools: GivenTools | None = None,
        tool_choice: GivenChoice = None,
        parallel_tool_calls: bool = True,
    ) -> Verdict:
        """Return whether the model gives a recorded answer to a prompt or a conversation.

        ``answer``: a choice of a `Completion`, with its index and finish reason; or the text or the
        token ids of choice ``index``, which ended with ``finish_reason`` (None: not compared).
        ``checked_from``: number of the answer's first tokens that are not compared.
        ``params``: the parameters of the request, with its seed unless the temperature is 0. Raises
        `InvalidRequest`, which names the field.
        """
        await self.start()
        own = one_params(with_adapter(params, lora))
        recorded = replace(_recorded(answer, finish_reason, index), checked_from=checked_from)
        verifier = AnswerVerifier(self, self._chat_client)
        if _is_text_prompt(prompt):
            require(tools is None and tool_choice is None, "tools", "needs a conversation")
            return await verifier.verify_text(prompt, own, recorded)
        options = ChatOptions(tools, tool_choice, is_parallel=parallel_tool_calls)
        conversation: Conversation = prompt  # type: ignore[assignment]
        return await verifier.verify_chat(options.chat_input(conversation, own), recorded)

    async def _read(self, prompts: PooledPrompts) -> list[Pooled]:
        """Return the results of all prompts. Wait while the queue is full."""
        return await self._patiently(prompts.read)

    @cached_property
    def _embedder(self) -> Embedder:
        return Embedder(self)

    @cached_property
    def _reranker(self) -> Reranker:
        return Reranker(self._chat_client, self)

    @cached_property
    def _decider(self) -> Decider:
        return Decider(self._chat_client, self)

    async def _open_chat(self, chat: ChatInput, request_id: str | None) -> ChatAnswer:
        await self.start()
        return await self._chat_client.open(chat, request_id=request_id, hands_out=True)

    async def render(
        self,
        messages: Conversation,
        options: Mapping[str, Any] | None = None,
        *,
        tools: GivenTools | None = None,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """Return the token ids of a conversation, as `chat` renders it.

        ``options``: variables of the chat template.
        """
        await self.start()
        chat = ChatOptions(tools, None).chat_input(messages, SamplingParams())
        template = {"add_generation_prompt": add_generation_prompt, **(options or {})}
        return [*(await self._chat_client.render(replace(chat, template=template))).token_ids]

    @cached_property
    def _chat_client(self) -> ChatClient:
        return ChatClient(self)

    async def _answer_all(
        self, chats: Sequence[ChatInput], request_ids: Sequence[str | None]
    ) -> list[Completion]:
        """Return the answers to conversations, which are submitted in order as the queue has room.

        If one fails, the others are aborted.
        """
        tasks: list[asyncio.Task[Completion]] = []
        try:
            async with asyncio.TaskGroup() as group:
                for chat, own_id in zip(chats, request_ids, strict=True):
                    answer = await self._patiently(partial(self._open_chat, chat, own_id))
                    tasks.append(group.create_task(answer.completion()))
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from None
        return [task.result() for task in tasks]

    async def _generate_one(
        self, prompt: Prompt, params: object, request_id: RequestIds
    ) -> Completion:
        await self.start()
        answer = await self.open(prompt, one_params(params), request_id=one_id(request_id))
        return await self.finish(answer)

    async def _generate_all(
        self, prompts: Sequence[Prompt], params: object, request_id: RequestIds
    ) -> list[Completion]:
        """Return the completions of prompts, which are submitted in order as the queue has room.

        If one fails, the others are aborted.
        """
        await self.start()
        each_params = many_params(params, len(prompts))
        each_id = many_ids(request_id, len(prompts))
        answers: list[Answer] = []
        try:
            for own_params, own_id in zip(each_params, each_id, strict=True):
                answers.append(self._register(own_params, own_id))
            return await self._finish_all(answers, prompts)
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from None
        finally:
            for answer in answers:  # includes answers whose tasks never started
                self.forget(answer)

    async def _finish_all(
        self, answers: Sequence[Answer], prompts: Sequence[Prompt]
    ) -> list[Completion]:
        tasks: list[asyncio.Task[Completion]] = []
        async with asyncio.TaskGroup() as group:
            for answer, prompt in zip(answers, prompts, strict=True):
                prepared = await self._prepare(prompt, answer.params, adapter=answer.adapter)
                await self._submit_patiently(answer, prepared)
                tasks.append(group.create_task(self.finish(answer)))
        return [task.result() for task in tasks]

    async def _submit_patiently(self, answer: Answer, prepared: Prepared) -> None:
        async def submit() -> None:
            self._submit_choices(answer, prepared)

        await self._patiently(submit)

    async def _patiently(self, submit: Callable[[], Awaitable[T]]) -> T:
        """Call ``submit`` again while the queue is full and this client has running requests."""
        refused = False
        while True:
            try:
                return await submit()
            except QueueFull as full:
                if refused and not any(each.generations for each in self._answers.values()):
                    raise
                refused = True
                await self.wait_for_room(full.retry_after)


def _is_text_prompt(given: Prompt | Conversation) -> TypeGuard[Prompt]:
    """Whether ``given`` is a text or token ids, rather than messages. Raises `InvalidRequest`."""
    if is_one_prompt(given):
        return True
    is_one_conversation(given)
    return False


def _recorded(
    answer: Choice | str | Sequence[int], finish_reason: str | None, index: int
) -> RecordedAnswer:
    if isinstance(answer, Choice):
        return RecordedAnswer(
            token_ids=answer.token_ids, finish_reason=answer.finish_reason, index=answer.index
        )
    if isinstance(answer, str):
        return RecordedAnswer(text=answer, finish_reason=finish_reason, index=index)
    ids: Any = as_tuple("answer.token_ids", answer)
    return RecordedAnswer(token_ids=ids, finish_reason=finish_reason, index=index)


def _inputs(given: Prompt | Sequence[Prompt]) -> tuple[list[Prompt], bool]:
    """Return the inputs of a call, and whether a single one was given. Raises `InvalidRequest`."""
    try:
        if is_one_prompt(given):
            return [given], True
    except InvalidRequest as error:
        error.param = "inputs"
        raise
    return list(given), False  # type: ignore[arg-type]


def _texts(query: str, documents: Sequence[str], instruct: str | None) -> list[str]:
    """Return the documents of a call as a list.

    Raises `InvalidRequest` for an empty list and for values of other types.
    """
    texts = list(as_tuple("documents", documents))
    require(bool(texts), "documents", "must have at least one text")
    for index, text in enumerate(texts):
        require(isinstance(text, str), f"documents[{index}]", "must be a text")
    require(isinstance(query, str) and bool(query), "query", "must be a non-empty text")
    require(instruct is None or isinstance(instruct, str), "instruct", "must be a text")
    return texts  # type: ignore[return-value]


def _embeddings(pooled: Sequence[Pooled], dimensions: int | None) -> list[Embedding]:
    return [
        Embedding(
            embedding=unit_vector(each.numbers, dimensions).tolist(),
            prompt_token_ids=list(each.token_ids),
            usage=each.usage,
        )
        for each in pooled
    ]
