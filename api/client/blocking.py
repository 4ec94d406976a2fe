"""Client: the HTTP API from programs without an event loop."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import closing
from time import sleep
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


class Client:
    """A server's HTTP API. Any thread may call it; close it, or use it in a ``with`` block.

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
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self._settings = Settings.of(base_url, api_key, timeout, max_retries)
        self._http = httpx.Client(
            timeout=self._settings.timeout, limits=LIMITS, transport=transport
        )

    def chat(self, messages: Messages, **options: Unpack[ChatOptions]) -> ChatAnswer:
        """The next message of a conversation."""
        return self._send(calls.chat(messages, options))

    def stream_chat(
        self, messages: Messages, **options: Unpack[ChatOptions]
    ) -> Generator[ChatDelta]:
        """The same step by step. Leaving early ends the request on the server."""
        return self._stream(calls.stream_chat(messages, options))

    def complete(self, prompt: Prompt, **options: Unpack[CompleteOptions]) -> TextAnswer:
        """The continuation of a text, of token ids, or of a list of either."""
        return self._send(calls.complete(prompt, options))

    def stream_complete(
        self, prompt: Prompt, **options: Unpack[CompleteOptions]
    ) -> Generator[CompletionDelta]:
        """The same step by step. Leaving early ends the request on the server."""
        return self._stream(calls.stream_complete(prompt, options))

    def branches(
        self,
        branches: Sequence[Json],
        *,
        messages: Messages | None = None,
        prompt: str | Sequence[int] | None = None,
        **options: Unpack[ChatOptions],
    ) -> BranchesAnswer:
        """Several continuations of one beginning, each with its own end, computed together."""
        return self._send(calls.branches(branches, messages, prompt, options))

    def prewarm(self, messages: Messages, **options: Unpack[ChatOptions]) -> Usage:
        """Compute what answers to this conversation begin with, and keep it; nothing is said."""
        return self._send(calls.prewarm(messages, options))

    def models(self) -> list[Model]:
        """The models that are served."""
        return self._send(calls.models())

    def model(self, name: str) -> Model:
        """One of them."""
        return self._send(calls.model(name))

    def tokenize(
        self,
        prompt: str | None = None,
        *,
        messages: Messages | None = None,
        add_special_tokens: bool = True,
    ) -> list[int]:
        """Token ids of a text, or of a conversation as the model reads it."""
        return self._send(calls.tokenize(prompt, messages, add_special_tokens))

    def detokenize(self, token_ids: Sequence[int]) -> str:
        """The text of token ids, special tokens included."""
        return self._send(calls.detokenize(token_ids))

    def cache(self) -> Raw:
        """Occupancy of the prefix cache."""
        return self._send(calls.cache())

    def flush_cache(self, salt: str | None = None, prefix: Prefix | None = None) -> int:
        """Drop what is cached, of a salt, below a prefix, or all; how many pages that freed."""
        return self._send(calls.flush_cache(salt, prefix))

    def explain_cache(
        self, response_id: str, *, previous_id: str | None = None, salt: str | None = None
    ) -> Raw:
        """Why the prompt of an answer missed; ``salt`` is the cache_salt that it was sent with."""
        return self._send(calls.explain_cache(response_id, previous_id, salt))

    def health(self) -> bool:
        """Whether the engine lives; raises `Unreachable` where nobody answers."""
        try:
            return self._send(calls.health())
        except EngineDead:
            return False

    def close(self) -> None:
        """Close its connections."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # -- the way out ----------------------------------------------------------------------------

    def _send(self, call: Call[T]) -> T:
        with closing(self._open(call)) as response, in_our_words():
            data = response.read()
        return call.parsed(data)

    def _stream(self, call: Call[list[T]]) -> Generator[T]:
        reader = EventReader(call)
        with closing(self._open(call)) as response, in_our_words():
            for chunk in response.iter_bytes():
                yield from reader.feed(chunk)
        reader.end()

    def _open(self, call: Call[T]) -> httpx.Response:
        """An answer that has begun well and is not read yet."""
        attempts = Attempts.of(call, self._settings)
        request = self._settings.request(self._http, call)
        while True:
            try:
                response = self._http.send(request, stream=True)
                if response.is_success:
                    return response
                with closing(response):
                    response.read()
                pause = attempts.after_answer(response)
            except httpx.HTTPError as failure:
                pause = attempts.after_failure(failure)
            sleep(pause)
