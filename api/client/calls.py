"""The HTTP API as values: what to send and how to read the answer. Nothing here does I/O."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar
from urllib.parse import quote

import msgspec

from ...core.errors import InvalidRequest
from ...core.interface.request import Usage
from ..openai.wire import Detokenized, Flushed, Head, Model, ModelList, Tokens
from .answers import BranchesAnswer, ChatAnswer, ChatDelta, CompletionDelta, Raw, TextAnswer
from .errors import ServerFailed
from .options import (
    Messages,
    Prefix,
    Prompt,
    chat_body,
    checked_text,
    complete_body,
    listed,
    mapped,
    streamed,
)
from .reading import (
    read_branches,
    read_chat,
    read_chunk,
    read_completion,
    read_text_chunk,
    read_usage,
)

T = TypeVar("T")
S = TypeVar("S")
Options = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Call(Generic[T]):
    """One request; ``read`` makes of the answer's body, or of an event's data, what it means."""

    method: str
    path: str
    read: Callable[[bytes], T]
    body: Mapping[str, Any] | None = None
    query: Mapping[str, str] = field(default_factory=dict)
    retry: bool = True  # when the server is busy, or away

    @property
    def content(self) -> bytes | None:
        """The body as it is sent; raises `InvalidRequest` for what JSON cannot say."""
        if self.body is None:
            return None
        try:
            return msgspec.json.encode(self.body)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise InvalidRequest(f"the request cannot be written as JSON: {error}") from None

    def parsed(self, data: bytes) -> T:
        """What the answer means; raises `ServerFailed` where it is none of this API."""
        try:
            return self.read(data)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            raise ServerFailed(f"{self.path} answered with something else: {error}") from None


def reader(body: type[S], pick: Callable[[S], T]) -> Callable[[bytes], T]:
    """A function from bytes to a part of a struct."""
    decode = msgspec.json.Decoder(body).decode
    return lambda data: pick(decode(data))


def whole(data: bytes) -> Raw:
    """The body as it is."""
    return msgspec.json.decode(data, type=dict[str, Any])


def chat(messages: Messages, options: Options) -> Call[ChatAnswer]:
    """The next message of a conversation."""
    return _post("/v1/chat/completions", chat_body(messages, options), read_chat)


def stream_chat(messages: Messages, options: Options) -> Call[list[ChatDelta]]:
    """The same as events."""
    return _post("/v1/chat/completions", streamed(chat_body(messages, options)), read_chunk)


def complete(prompt: Prompt, options: Options) -> Call[TextAnswer]:
    """The continuation of a text."""
    return _post("/v1/completions", complete_body(prompt, options), read_completion)


def stream_complete(prompt: Prompt, options: Options) -> Call[list[CompletionDelta]]:
    """The same as events."""
    return _post("/v1/completions", streamed(complete_body(prompt, options)), read_text_chunk)


def branches(
    adds: Sequence[Mapping[str, Any]],
    messages: Messages | None,
    prompt: str | Sequence[int] | None,
    options: Options,
) -> Call[BranchesAnswer]:
    """Several continuations of one beginning."""
    if (messages is None) == (prompt is None):
        raise InvalidRequest("branches needs messages or prompt, and not both", param="prompt")
    body = chat_body(messages or (), options)
    if prompt is not None:
        del body["messages"]
        body["prompt"] = prompt
    return _post("/v1/branches", {**body, "branches": listed(adds, "branches")}, read_branches)


def prewarm(messages: Messages, options: Options) -> Call[Usage]:
    """Compute and keep what answers to this conversation will begin with."""
    body = chat_body(messages, options)
    options = mapped(body.get("prompt_cache_options", {}), "prompt_cache_options")
    body["prompt_cache_options"] = {**options, "prewarm": True}
    return _post("/v1/chat/completions", body, reader(Head, lambda head: read_usage(head.usage)))


def models() -> Call[list[Model]]:
    """The models that are served."""
    return _get("/v1/models", reader(ModelList, lambda page: page.data))


def model(name: str) -> Call[Model]:
    """One of them."""
    path = f"/v1/models/{quote(checked_text(name, 'name'))}"
    return _get(path, reader(Model, lambda found: found))


def tokenize(prompt: str | None, messages: Messages | None, special: bool) -> Call[list[int]]:
    """Token ids of a text, or of a conversation."""
    body: dict[str, Any] = {"add_special_tokens": special}
    if prompt is not None:
        body["prompt"] = prompt
    if messages is not None:
        body["messages"] = listed(messages, "messages")
    return _post("/tokenize", body, reader(Tokens, lambda found: found.tokens))


def detokenize(token_ids: Sequence[int]) -> Call[str]:
    """The text of token ids."""
    read = reader(Detokenized, lambda found: found.prompt)
    return _post("/detokenize", {"tokens": listed(token_ids, "token_ids")}, read)


def health() -> Call[bool]:
    """Whether the engine lives."""
    return Call(method="GET", path="/health", read=lambda _: True, retry=False)


def cache() -> Call[Raw]:
    """Occupancy of the prefix cache."""
    return _get("/cache", whole)


def flush_cache(salt: str | None, prefix: Prefix | None) -> Call[int]:
    """Drop cached prefixes; the number of pages that are free again."""
    body: dict[str, Any] = {}
    if salt is not None:
        body["cache_salt"] = salt
    if prefix is not None:
        body["prefix"] = prefix
    return _post("/cache/flush", body, reader(Flushed, lambda found: found.flushed_pages))


def explain_cache(response_id: str, previous_id: str | None, salt: str | None) -> Call[Raw]:
    """Why the prompt of an answer missed."""
    asked = {"response_id": response_id, "previous_id": previous_id, "cache_salt": salt}
    query = {name: checked_text(value, name) for name, value in asked.items() if value is not None}
    return Call(method="GET", path="/cache/explain", read=whole, query=query)


def _get(path: str, read: Callable[[bytes], T]) -> Call[T]:
    return Call(method="GET", path=path, read=read)


def _post(path: str, body: Mapping[str, Any], read: Callable[[bytes], T]) -> Call[T]:
    return Call(method="POST", path=path, body=body, read=read)
