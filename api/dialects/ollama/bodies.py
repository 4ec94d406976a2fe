"""Bodies of Ollama's routes: decoding is validation. Unknown fields and options are ignored.

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


MAX_INPUTS = 2048  # texts of /api/embed


class Options(RefusedSampling, kw_only=True):
    """``options``: sampling parameters. Those of the machine (num_ctx, num_gpu) are ignored."""

    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: Probability | None = None
    seed: Seed | None = None
    stop: Stop | None = None
    num_predict: int | None = None  # below 1: up to the end of the context
    repeat_penalty: RepetitionPenalty | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    # extensions
    speculation: Speculation | None = None
    cache_salt: Salt | None = None
    # other names
    max_tokens: Annotated[int | None, SameAs("num_predict")] = None
    n_predict: Annotated[int | None, SameAs("num_predict")] = None
    repetition_penalty: Annotated[RepetitionPenalty | None, SameAs("repeat_penalty")] = None


class OllamaBody(Struct, kw_only=True):
    """Fields that both generating routes have."""

    model: str | None = None
    stream: bool | None = True
    format: Format | None = None
    options: Options | None = None
    think: Think | None = None
    keep_alive: KeepAlive | None = None  # the model stays loaded in any case
    deadline_ms: Milliseconds | None = None  # an extension
    # known and refused
    logprobs: Off = None
    top_logprobs: Zero = None


class FunctionCall(Struct, kw_only=True):
    """The function of a call; its arguments are what a model wrote."""

    name: str
    arguments: Any = None


class Call(Struct, kw_only=True):
    """A call in a message of the assistant."""

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
    # known and refused
    suffix: Empty = None
    template: Empty = None
    context: Empty = None


class OllamaEmbedOptions(Struct, kw_only=True):
    """``options`` of vectors. Those of the machine (num_ctx, num_gpu) are ignored."""

    cache_salt: Salt | None = None  # an extension


class OllamaPooledBody(Struct, kw_only=True):
    """Fields that both routes of vectors have."""

    model: str | None = None
    stream: bool | None = None  # known and ignored: nothing comes before the end
    options: OllamaEmbedOptions | None = None
    keep_alive: KeepAlive | None = None  # the model stays loaded in any case
    deadline_ms: Milliseconds | None = None  # an extension


class OllamaEmbedBody(OllamaPooledBody, kw_only=True):
    """Body of /api/embed: a text or a list of texts; without one the model is only confirmed."""

    input: str | Annotated[list[str], Meta(max_length=MAX_INPUTS)] | None = None
    truncate: bool | None = None  # as a missing one: true
    dimensions: Positive | None = None


class OllamaEmbeddingsBody(OllamaPooledBody, kw_only=True):
    """Body of /api/embeddings, the older route: one text."""

    prompt: str | None = None


class OllamaShowBody(Struct, kw_only=True):
    """Body of /api/show; ``name`` is an older name of ``model``."""

    model: str | None = None
    name: str | None = None
