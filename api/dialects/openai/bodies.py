"""Bodies of OpenAI's routes. Decoding validates them; see `api.serving.sampling`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta, Struct

from ...media.sources import (
    Detail,
)
from ...runtime.conversation.tools import (
    NamedChoice,
    ResponseFormat,
    Tools,
)
from ...serving.caching.fields import PromptCacheBreakpoint
from ...serving.peers import Absent, Empty, Off
from ...serving.sampling import (
    Count,
    Guess,
    Name,
    NumChoices,
    NumTop,
    Positive,
    Prediction,
    Sampling,
    Stop,
    TokenIds,
)
from ...types.fields import Refused, SameAs

COMPLETION_TOKENS = 16  # OpenAI's default for /v1/completions


class StreamOptions(Struct):
    """``stream_options``."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # an extension: report the usage in every chunk
    include_ready_calls: bool | None = None  # an extension: an event for each complete call


Tokens = Annotated[int, Meta(ge=-2)]


class OpenAISampling(Sampling, kw_only=True):
    """Body fields that OpenAI's routes share."""

    stream_options: StreamOptions | None = None
    n: NumChoices | None = None
    stop: Stop | None = None
    max_tokens: Positive | None = None
    kv_transfer_params: dict[str, Any] | None = None  # an extension, in vLLM's form
    # aliases of other fields
    max_output_tokens: Annotated[Positive | None, SameAs("max_tokens")] = None
    max_new_tokens: Annotated[Positive | None, SameAs("max_tokens")] = None
    n_predict: Annotated[Tokens | None, SameAs("max_tokens", -1, -2)] = None
    stop_sequences: Annotated[Stop | None, SameAs("stop")] = None


class ImageUrl(Struct):
    """``image_url``: a data URL, or a file in --media-dir. ``detail`` "low" uses fewer tokens."""

    url: str
    detail: Detail | None = None


class NamedImage(ImageUrl, kw_only=True):
    """An image. Errors name the body's field ``param``, not the image's index in a message."""

    param: str


class FileFields(Struct):
    """``file``: its content as a data URL. Ids of files at OpenAI are not supported."""

    file_data: str | None = None
    filename: str | None = None


class ContentPart(Struct):
    """A part of a message: a text, an image, a file or a refusal.

    Audio and video from the user are rejected. Parts of any other type are ignored.
    """

    known_kinds: ClassVar[frozenset[str]] = frozenset({"text", "refusal", "image_url", "file"})
    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: ImageUrl | None = None
    file: FileFields | None = None
    prompt_cache_breakpoint: PromptCacheBreakpoint | None = None


class Message(Struct, kw_only=True):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[ContentPart] | None = None
    name: Name | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    function_call: dict[str, Any] | None = None  # the older form of ``tool_calls``
    reasoning_content: str | None = None
    # an extension of OpenAI's API: token ids of an answer, rendered in place of its text
    token_ids: TokenIds | None = None


class NamedMessage(Message, kw_only=True):
    """A message. Errors name its ``path`` in the body, instead of its index."""

    path: str


class KeptMessage(NamedMessage, kw_only=True):
    """A stored answer. Its token ids replace its text if the chat template allows that."""

    kept_ids: list[int] | None = None


class ThinkingSwitch(Struct, kw_only=True):
    """``thinking``, as in the APIs of DeepSeek and GLM."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Absent = None


class Reasoning(Struct, kw_only=True):
    """``reasoning``, as in the APIs of OpenRouter and SGLang."""

    effort: str | None = None
    enabled: bool | None = None
    max_tokens: Absent = None
    exclude: Off = None


class ChatRequest(OpenAISampling, kw_only=True):
    """Body of /v1/chat/completions."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    max_completion_tokens: Positive | None = None
    prediction: Prediction | None = None
    logprobs: bool | None = None
    top_logprobs: NumTop | None = None
    response_format: ResponseFormat | None = None
    tools: Tools | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    reasoning: Reasoning | None = None
    thinking: ThinkingSwitch | None = None
    enable_thinking: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    token_sources: bool | None = None  # an extension: chunks report the draft source of each token


class CompletionRequest(OpenAISampling, kw_only=True):
    """Body of /v1/completions."""

    prompt: str | list[str | int | list[int]]
    max_tokens: Count | None = None  # with ``echo``, 0 means to compute only the prompt
    max_completion_tokens: Annotated[Count | None, SameAs("max_tokens")] = None
    prediction: Prediction | Guess | None = None  # an extension of this route
    echo: bool | None = None
    logprobs: NumTop | None = None
    best_of: int | None = None
    response_format: ResponseFormat | None = None
    add_special_tokens: bool | None = None
    # rejected, since only conversations can have tools
    tools: Empty = None
    tool_choice: Annotated[Any, Refused("none", "auto")] = None


AnyRequest = ChatRequest | CompletionRequest


NO_OPTIONS: Mapping[str, Any] = {}


class TokenizeRequest(Struct, kw_only=True):
    """Body of /tokenize: a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Meta(min_length=1)] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool | None = None
    tools: Tools | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None
    chat_template: Empty = None


class DetokenizeRequest(Struct, kw_only=True):
    """Body of /detokenize."""

    tokens: list[int]
    model: str | None = None
