"""What may be asked of a request, for type checkers and editors, and the body that it becomes.

The names are those of the HTTP bodies. Two are friendlier: ``deadline`` is in seconds, and
``prediction`` may be a text.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, TypedDict

from ...core.errors import InvalidRequest

Messages = Sequence[Mapping[str, Any]]
"""A conversation in OpenAI's form: ``[{"role": "user", "content": "..."}]``."""
Prompt = str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]]
"""A text, token ids, or a list of either."""
Prefix = str | Sequence[int] | Messages
"""What prompts begin with: a text, token ids, or a conversation."""
Json = Mapping[str, Any]


class CacheOptions(TypedDict, total=False):
    """Whether a request may borrow from the prefix cache, and leave its own there."""

    read: bool
    write: bool


class PromptCacheOptions(TypedDict, total=False):
    """OpenAI's way to keep a prompt, to warm it, and to ask why it missed."""

    mode: str
    ttl: Literal["30m", "12h"]
    prewarm: bool
    comparison_response_id: str


class SamplingOptions(TypedDict, total=False):
    """What both kinds of completion take. ``extra_body`` holds fields that are not listed here."""

    model: str
    n: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    max_tokens: int
    min_tokens: int
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    allowed_token_ids: Sequence[int]
    bad_words: Sequence[str]
    ignore_eos: bool
    seed: int
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: Mapping[int, float]
    json_schema: Json
    regex: str
    grammar: str
    choice: Sequence[str]
    close_early: bool
    prediction: str | Json
    speculation: Literal["auto", "off"] | int
    cache_salt: str
    cache: CacheOptions
    prompt_cache_key: str
    prompt_cache_retention: Literal["in_memory", "24h"]
    prompt_cache_options: PromptCacheOptions
    explain_cache: bool
    priority: int
    deadline: float  # seconds
    extra_body: Json


class ChatOptions(SamplingOptions, total=False):
    """What `Client.chat` takes beside the messages."""

    tools: Sequence[Json]
    tool_choice: Literal["auto", "none", "required"] | Json
    parallel_tool_calls: bool
    response_format: Json
    logprobs: bool
    top_logprobs: int
    max_completion_tokens: int
    reasoning_effort: str
    add_generation_prompt: bool
    continue_final_message: bool
    chat_template_kwargs: Json


class CompleteOptions(SamplingOptions, total=False):
    """What `Client.complete` takes beside the prompt."""

    echo: bool
    logprobs: int
    add_special_tokens: bool


def chat_body(messages: Messages, options: Mapping[str, Any]) -> dict[str, Any]:
    """Body of /v1/chat/completions; raises `InvalidRequest` for an option that there is not."""
    body = _body(options, ChatOptions)
    if isinstance(body.get("prediction"), str):
        body["prediction"] = {"type": "content", "content": body["prediction"]}
    return {"messages": listed(messages, "messages"), **body}


def complete_body(prompt: Prompt, options: Mapping[str, Any]) -> dict[str, Any]:
    """Body of /v1/completions; raises `InvalidRequest` for an option that there is not."""
    return {"prompt": prompt, **_body(options, CompleteOptions)}


def streamed(body: dict[str, Any]) -> dict[str, Any]:
    """The same, asked for as events with the usage at their end."""
    return {**body, "stream": True, "stream_options": {"include_usage": True}}


def _body(options: Mapping[str, Any], known: type) -> dict[str, Any]:
    names = _names(known)
    for name in options:
        if name not in names:
            # The server passes unknown fields over, so a misspelt one would do nothing.
            raise InvalidRequest(f"{name} is not an option; use extra_body for others", param=name)
    body = {name: value for name, value in options.items() if value is not None}
    body |= mapped(body.pop("extra_body", {}), "extra_body")
    for name, value in body.items():
        if isinstance(value, float) and not math.isfinite(value):  # which JSON would call null
            raise InvalidRequest(f"{name} must be a finite number", param=name)
    deadline = body.pop("deadline", None)
    if deadline is not None:
        body["deadline_ms"] = _milliseconds(deadline)
    return body


def _milliseconds(deadline: object) -> float:
    if not isinstance(deadline, int | float):
        raise InvalidRequest("deadline must be a number of seconds", param="deadline")
    return deadline * 1000


def listed(value: object, param: str) -> list[Any]:
    """A list of it; raises `InvalidRequest` for what is none."""
    if not isinstance(value, Iterable) or isinstance(value, str | bytes | Mapping):
        raise InvalidRequest(f"{param} must be a list", param=param)
    return list(value)


def mapped(value: object, param: str) -> Mapping[str, Any]:
    """The same; raises `InvalidRequest` for what is no mapping."""
    if not isinstance(value, Mapping):
        raise InvalidRequest(f"{param} must be a mapping", param=param)
    return value


def checked_text(value: object, param: str) -> str:
    """The same; raises `InvalidRequest` for what is no text that can be sent."""
    try:
        if isinstance(value, str) and value.encode():
            return value
    except UnicodeEncodeError:
        pass
    raise InvalidRequest(f"{param} must be a text, without halves of surrogate pairs", param=param)


def _names(known: type) -> frozenset[str]:
    """The keys of a TypedDict and of those that it is made from."""
    keys: frozenset[str] = known.__optional_keys__  # type: ignore[attr-defined]
    return keys
