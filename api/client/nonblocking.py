"""AsyncClient: the same as Client on the caller's event loop."""

from __future__ import annotations

from asyncio import sleep
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import Self, TypeVar, Unpack

import httpx

from ...core.errors import EngineDead
from ...core.interface.request import Usage
from ..openai.wire import Model
from . import calls
from .answers import BranchesAnswer, ChatAnswer, ChatDelta, CompletionDelta, Raw, TextAnswer
from .calls import Call
from .exchange import (
    BASE_URL,
    LIMITS,
    TIMEOUT,
    Attempts,
    EventReader,
    Settings,
    in_our_words,
)
from .options import ChatOptions, CompleteOptions, Json, Messages, Prefix, Prompt

T = TypeVar("T")


class AsyncClient:
    """A server's HTTP API. Close it, or use it in an ``async with`` block.

    ``api_key``: that of FORETOKEN_API_KEY if none is given. ``timeout``: seconds without a byte.
    ``max_retries``: how often a call is tried again when the server is busy, ends, or cannot be
    reached; its Retry-After is honoured, and nothing is tried again once an answer has begun.
    ``transport`` is what httpx sends by, a Unix socket say. Errors: `client.errors`.
    """

    def __init__(
        self,
        base_url: str = BASE_URL,
        *,
        api_key: str | None = None,
        timeout: float = TIMEOUT,
        max_retries: int = 2,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._settings = Settings.of(base_url, api_key, timeout, max_retries)
        self._http = httpx.AsyncClient(
            timeout=self._settings.timeout, limits=LIMITS, transport=transport
        )

    async def chat(self, messages: Messages, **options: Unpack[ChatOptions]) -> ChatAnswer:
        """The next message of a conversation."""
        return await self._send(calls.chat(messages, options))

    def stream_chat(
        self, messages: Messages, **options: Unpack[ChatOptions]
    ) -> AsyncGenerator[ChatDelta]:
        """The same step by step. Leaving early ends the request on the server."""
        return self._stream(calls.stream_chat(messages, options))

    async def complete(self, prompt: Prompt, **options: Unpack[CompleteOptions]) -> TextAnswer:
        """The continuation of a text, of token ids, or of a list of either."""
        return await self._send(calls.complete(prompt, options))

    def stream_complete(
        self, prompt: Prompt, **options: Unpack[CompleteOptions]
    ) -> AsyncGenerator[CompletionDelta]:
        """The same step by step. Leaving early ends the request on the server."""
        return self._stream(calls.stream_complete(prompt, options))

    async def branches(
        self,
        branches: Sequence[Json],
        *,
        messages: Messages | None = None,
        prompt: str | Sequence[int] | None = None,
        **options: Unpack[ChatOptions],
    ) -> BranchesAnswer:
        """Several continuations of one beginning, each with its own end, computed together."""
        return await self._send(calls.branches(branches, messages, prompt, options))

    async def prewarm(self, messages: Messages, **options: Unpack[ChatOptions]) -> Usage:
        """Compute what answers to this conversation begin with, and keep it; nothing is said."""
        return await self._send(calls.prewarm(messages, options))

    async def models(self) -> list[Model]:
        """The models that are served."""
        return await self._send(calls.models())

    async def model(self, name: str) -> Model:
        """One of them."""
        return await self._send(calls.model(name))

    async def tokenize(
        self,
        prompt: str | None = None,
        *,
        messages: Messages | None = None,
        add_special_tokens: bool = True,
    ) -> list[int]:
        """Token ids of a text, or of a conversation as the model reads it."""
        return await self._send(calls.tokenize(prompt, messages, add_special_tokens))

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """The text of token ids, special tokens included."""
        return await self._send(calls.detokenize(token_ids))

    async def cache(self) -> Raw:
        """Occupancy of the prefix cache."""
        return await self._send(calls.cache())

    async def flush_cache(self, salt: str | None = None, prefix: Prefix | None = None) -> int:
        """Drop what is cached, of a salt, below a prefix, or all; how many pages that freed."""
        return await self._send(calls.flush_cache(salt, prefix))

    async def explain_cache(
        self, response_id: str, *, previous_id: str | None = None, salt: str | None = None
    ) -> Raw:
        """Why the prompt of an answer missed; ``salt`` is the cache_salt that it was sent with."""
        return await self._send(calls.explain_cache(response_id, previous_id, salt))

    async def health(self) -> bool:
        """Whether the engine lives; raises `Unreachable` where nobody answers."""
        try:
            return await self._send(calls.health())
        except EngineDead:
            return False

    async def close(self) -> None:
        """Close its connections."""
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    # -- the way out ----------------------------------------------------------------------------

    async def _send(self, call: Call[T]) -> T:
        async with aclosing(await self._open(call)) as response:
            with in_our_words():
                data = await response.aread()
        return call.parsed(data)

    async def _stream(self, call: Call[list[T]]) -> AsyncGenerator[T]:
        reader = EventReader(call)
        async with aclosing(await self._open(call)) as response:
            with in_our_words():
                async for chunk in response.aiter_bytes():
                    for delta in reader.feed(chunk):
                        yield delta
        reader.end()

    async def _open(self, call: Call[T]) -> httpx.Response:
        """An answer that has begun well and is not read yet."""
        attempts = Attempts.of(call, self._settings)
        request = self._settings.request(self._http, call)
        while True:
            try:
                response = await self._http.send(request, stream=True)
                if response.is_success:
                    return response
                async with aclosing(response):
                    await response.aread()
                pause = attempts.after_answer(response)
            except httpx.HTTPError as failure:
                pause = attempts.after_failure(failure)
            await sleep(pause)
