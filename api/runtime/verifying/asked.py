"""Asked: the prompt or the conversation of a recorded answer, which can be submitted again."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from typing_extensions import override

from ....core.interface.request import CacheOptions
from ....core.interface.sampling import Pooling
from ...types.request_context import note_answer
from ...types.sampling_params import SamplingParams
from ..chat import ChatClient
from ..conversation.chat_input import ChatInput
from ..engine_client import EngineClient
from ..generation import Answer
from ..preprocess import Prompt, PromptTokens
from .visible_text import VisibleText


@dataclass(frozen=True, slots=True)
class Opened:
    """A submitted request. Its owner must `close` it in a ``finally``."""

    answer: Answer
    text: VisibleText
    close: Callable[[], None]


class Asked(Protocol):
    """A prompt or a conversation. No request writes into the prefix cache.

    ``opened``: all requests that were submitted, in order.
    """

    opened: list[Opened]

    async def prompt(self) -> PromptTokens:
        """Return the token ids of the prompt."""

    async def generate(self, params: SamplingParams) -> Opened:
        """Submit a request that generates an answer."""

    async def compare(
        self, params: SamplingParams, token_ids: Sequence[int], compare_from: int
    ) -> Opened:
        """Submit a request that compares ``token_ids`` from an index on; see `Pooling`."""


class AskedText(Asked):
    """A prompt that is text or token ids."""

    def __init__(
        self, llm: EngineClient, prompt: Prompt, cache: CacheOptions, request_id: str | None
    ) -> None:
        self._llm, self._prompt, self._request_id = llm, prompt, request_id
        self.opened = []
        self._cache = read_only(cache)

    @override
    async def prompt(self) -> PromptTokens:
        if isinstance(self._prompt, str):
            self._prompt = await self._llm.tokenizer.encode(self._prompt, generates=False)
        return PromptTokens(self._prompt)

    @override
    async def generate(self, params: SamplingParams) -> Opened:
        return await self._open(self._prompt, params)

    @override
    async def compare(
        self, params: SamplingParams, token_ids: Sequence[int], compare_from: int
    ) -> Opened:
        prompt = dataclasses.replace(await self.prompt(), compared=token_ids)
        opened = await self._open(prompt, params, Pooling(compare_from=compare_from))
        note_answer(opened.answer)
        return opened

    async def _open(
        self,
        prompt: Prompt | PromptTokens,
        params: SamplingParams,
        pooling: Pooling | None = None,
    ) -> Opened:
        answer = await self._llm.open(
            prompt, params, request_id=self._request_id, cache=self._cache, pooling=pooling
        )
        text = VisibleText(self._llm, answer)
        self.opened.append(Opened(answer, text, lambda: self._llm.forget(answer)))
        return self.opened[-1]


class AskedChat(Asked):
    """A conversation."""

    def __init__(
        self, llm: EngineClient, client: ChatClient, chat: ChatInput, request_id: str | None
    ) -> None:
        self._llm, self._client, self._request_id = llm, client, request_id
        self.opened = []
        self._chat = dataclasses.replace(chat, cache=read_only(chat.cache), cache_key=None)
        self._prompt: PromptTokens | None = None  # set once the conversation is rendered

    @override
    async def prompt(self) -> PromptTokens:
        if self._prompt is None:
            self._prompt = await self._client.render(self._chat)
        return self._prompt

    @override
    async def generate(self, params: SamplingParams) -> Opened:
        return await self._open(params, self._prompt)

    @override
    async def compare(
        self, params: SamplingParams, token_ids: Sequence[int], compare_from: int
    ) -> Opened:
        prompt = dataclasses.replace(await self.prompt(), compared=token_ids)
        opened = await self._open(params, prompt, Pooling(compare_from=compare_from))
        note_answer(opened.answer)
        return opened

    async def _open(
        self, params: SamplingParams, prompt: PromptTokens | None, pooling: Pooling | None = None
    ) -> Opened:
        chat = dataclasses.replace(self._chat, params=params)
        running = await self._client.open(
            chat, request_id=self._request_id, prompt=prompt, pooling=pooling
        )
        text = VisibleText(self._llm, running.answer, running.reader())
        self.opened.append(Opened(running.answer, text, running.close))
        return self.opened[-1]


def read_only(cache: CacheOptions) -> CacheOptions:
    """Return options that read from the cache if ``cache`` does, and write nothing to it."""
    return CacheOptions(read=cache.read, write=False)
