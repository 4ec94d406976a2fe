"""Bodies of Ollama's routes: decoding is validation. Unknown fields and options are ignored.

Null means that a field was left out, as in Ollama.
"""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct

from ..protocol.sampling import (
    Milliseconds,
    Penalty,
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
from ..runtime.conversation.tools import Tools

Format = Literal["", "json"] | dict[str, Any]
Think = bool | Literal["low", "medium", "high"]
KeepAlive = str | float


class Options(Struct, kw_only=True):
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
    logprobs: bool | None = None
    top_logprobs: int | None = None


class FunctionCall(Struct, kw_only=True):
    """The function of a call; its arguments are an object, not a text."""

    name: str
    arguments: dict[str, Any] | None = None


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
    suffix: str | None = None
    template: str | None = None
    context: list[int] | None = None


class OllamaShowBody(Struct, kw_only=True):
    """Body of /api/show; ``name`` is an older name of ``model``."""

    model: str | None = None
    name: str | None = None
