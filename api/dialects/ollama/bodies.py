"""Bodies of Ollama's routes. Decoding validates them; unknown fields and options are ignored.

Null means that a field was left out, as in Ollama.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from ...runtime.conversation.tools import Tools
from ...serving.peers import Empty, Off, RefusedSampling, Zero
from ...serving.sampling import (
    Milliseconds,
    Penalty,
    Positive,
    Probability,
    RepetitionPenalty,
    Salt,
    Seed,
    Speculation,
    Stop,
    Temperature,
    TopK,
    TopP,
)
from ...types.fields import SameAs

Format = Literal["", "json"] | dict[str, Any]
Think = bool | Literal["low", "medium", "high"]
KeepAlive = str | float


MAX_INPUTS = 2048  # maximum number of texts in /api/embed


class Options(RefusedSampling, kw_only=True):
    """``options``: sampling parameters. Hardware options (num_ctx, num_gpu) are ignored."""

    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: Probability | None = None
    seed: Seed | None = None
    stop: Stop | None = None
    num_predict: int | None = None  # values below 1: up to the end of the context
    repeat_penalty: RepetitionPenalty | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    # extensions of Ollama's API
    speculation: Speculation | None = None
    cache_salt: Salt | None = None
    # aliases of other fields
    max_tokens: Annotated[int | None, SameAs("num_predict")] = None
    n_predict: Annotated[int | None, SameAs("num_predict")] = None
    repetition_penalty: Annotated[RepetitionPenalty | None, SameAs("repeat_penalty")] = None


class OllamaBody(Struct, kw_only=True):
    """Body fields that /api/chat and /api/generate share."""

    model: str | None = None
    stream: bool | None = True
    format: Format | None = None
    options: Options | None = None
    think: Think | None = None
    keep_alive: KeepAlive | None = None  # ignored: the model always stays loaded
    deadline_ms: Milliseconds | None = None  # an extension of Ollama's API
    # recognised but not supported
    logprobs: Off = None
    top_logprobs: Zero = None


class FunctionCall(Struct, kw_only=True):
    """The called function. Its arguments may be any JSON value."""

    name: str
    arguments: Any = None


class Call(Struct, kw_only=True):
    """A tool call in an assistant's message."""

    function: FunctionCall


class ChatMessage(Struct, kw_only=True):
    """One turn of a conversation."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    tool_calls: list[Call] | None = None
    tool_name: str | None = None
    images: list[str] | None = None  # base64


class OllamaChatBody(OllamaBody, kw_only=True):
    """Body of /api/chat."""

    messages: list[ChatMessage] | None = None
    tools: Tools | None = None


class OllamaGenerateBody(OllamaBody, kw_only=True):
    """Body of /api/generate."""

    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None
    images: list[str] | None = None  # base64
    # recognised but not supported
    suffix: Empty = None
    template: Empty = None
    context: Empty = None


class OllamaEmbedOptions(Struct, kw_only=True):
    """``options`` of the embedding routes. Hardware options are ignored."""

    cache_salt: Salt | None = None  # an extension of Ollama's API


class OllamaPooledBody(Struct, kw_only=True):
    """Body fields that /api/embed and /api/embeddings share."""

    model: str | None = None
    stream: bool | None = None  # ignored: the answer is sent in one piece
    options: OllamaEmbedOptions | None = None
    keep_alive: KeepAlive | None = None  # ignored: the model always stays loaded
    deadline_ms: Milliseconds | None = None  # an extension of Ollama's API


class OllamaEmbedBody(OllamaPooledBody, kw_only=True):
    """Body of /api/embed: one text or several. Without a text, no embedding is returned."""

    input: str | Annotated[list[str], Meta(max_length=MAX_INPUTS)] | None = None
    truncate: bool | None = None  # true by default
    dimensions: Positive | None = None


class OllamaEmbeddingsBody(OllamaPooledBody, kw_only=True):
    """Body of /api/embeddings, the older route, which takes one text."""

    prompt: str | None = None


class OllamaShowBody(Struct, kw_only=True):
    """Body of /api/show. ``name`` is the older name of ``model``."""

    model: str | None = None
    name: str | None = None
