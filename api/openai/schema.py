"""Bodies of the HTTP routes. Decoding is validation: a bad field is an error with its JSON path.

Unknown fields are ignored, since clients send many. Known fields that foretoken does not support
are refused by `refuse_unsupported`, because an answer that ignores them would be wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from ...core.errors import InvalidRequest
from ...core.interface.sampling import MAX_ALLOWED, MAX_BIASED_TOKENS, MAX_LISTED, MAX_LOGPROBS
from ...core.validation import MAX_INT
from ..runtime.tools import (
    CacheSpec,
    GrammarText,
    NamedChoice,
    PromptCacheOptions,
    ResponseFormat,
    StructuredOutputs,
    Texts,
    Tools,
    plain_call,
    structured_output_of,
)
from ..serving.errors import bad_json
from ..types.sampling_params import (
    MAX_DEPTH,
    MAX_N,
    MAX_PREDICTION_CHARS,
    MAX_STOP_CHARS,
    MAX_STOP_STRINGS,
    MAX_WORDS,
    SamplingParams,
)

T = TypeVar("T", bound=Struct)
COMPLETION_TOKENS = 16  # OpenAI's default for /v1/completions

Label = Annotated[str, Meta(max_length=1024)]  # it is remembered beyond its request
Name = Annotated[str, Meta(max_length=256)]
Positive = Annotated[int, Meta(ge=1, le=MAX_INT)]
Count = Annotated[int, Meta(ge=0, le=MAX_INT)]
NumChoices = Annotated[int, Meta(ge=1, le=MAX_N)]
One = Annotated[int, Meta(extra_json_schema={"minimum": 1, "maximum": 1})]  # checked with a reason
Seed = Annotated[int, Meta(extra_json_schema={"minimum": -(2**63), "maximum": 2**64 - 1})]
Temperature = Annotated[float, Meta(ge=0, le=100)]
Probability = Annotated[float, Meta(ge=0, le=1)]
TopP = Annotated[float, Meta(gt=0, le=1)]
TopK = Annotated[int, Meta(ge=-1, le=MAX_INT)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
RepetitionPenalty = Annotated[float, Meta(ge=0.01, le=100)]
StopText = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARS)]
StopTexts = Annotated[list[StopText], Meta(max_length=MAX_STOP_STRINGS)]
Stop = StopText | StopTexts
BadWords = Annotated[list[StopText], Meta(max_length=MAX_WORDS)]
StopIds = Annotated[list[Count], Meta(max_length=MAX_LISTED)]
AllowedIds = Annotated[list[Count], Meta(min_length=1, max_length=MAX_ALLOWED)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
Salt = Annotated[str, Meta(min_length=1, max_length=1024)]
Guess = Annotated[str, Meta(max_length=MAX_PREDICTION_CHARS)]
LogitBias = Annotated[
    dict[int, Bias],
    Meta(
        max_length=MAX_BIASED_TOKENS,
        extra_json_schema={"propertyNames": {"pattern": "^(0|[1-9][0-9]{0,9})$"}},
    ),
]
Milliseconds = Annotated[float, Meta(ge=0, le=1e9)]
NumTop = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]
Depth = Annotated[int, Meta(ge=0, le=MAX_DEPTH)]
Speculation = Literal["auto", "off"] | Depth


class StreamOptions(Struct):
    """``stream_options``."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # known and not needed: usage comes once


class Sampling(Struct, kw_only=True):
    """Fields that both completion routes share. Null means the default everywhere."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: NumChoices | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    stop: Stop | None = None
    seed: Seed | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: LogitBias | None = None
    max_tokens: Positive | None = None
    # extensions
    top_k: TopK | None = None
    min_p: Probability | None = None
    repetition_penalty: RepetitionPenalty | None = None
    min_tokens: Count | None = None
    stop_token_ids: StopIds | None = None
    allowed_token_ids: AllowedIds | None = None
    bad_words: BadWords | None = None
    ignore_eos: bool | None = None
    speculation: Speculation | None = None
    cache_salt: Salt | None = None
    priority: int | None = None
    deadline_ms: Milliseconds | None = None
    regex: GrammarText | None = None
    grammar: GrammarText | None = None
    choice: Texts | None = None
    json_schema: dict[str, Any] | None = None
    close_early: bool | None = None
    structured_outputs: StructuredOutputs | None = None
    cache: CacheSpec | None = None
    prompt_cache_key: Label | None = None
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None
    prompt_cache_options: PromptCacheOptions | None = None
    explain_cache: bool | None = None
    # known and refused
    guided_json: Any = None
    guided_regex: Any = None
    guided_grammar: Any = None
    guided_choice: Any = None
    prompt_logprobs: Any = None
    truncate_prompt_tokens: Any = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None


class ContentPart(Struct):
    """A part of a message; only text is supported."""

    type: Annotated[str, Meta(extra_json_schema={"enum": ["text"]})]
    text: str | None = None


class Message(Struct, kw_only=True):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[ContentPart] | None = None
    name: Name | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


class PredictionPart(Struct):
    """A part of a prediction; only text is supported."""

    type: Literal["text"]
    text: str


class Prediction(Struct):
    """``prediction``: the caller's guess at the answer."""

    type: Literal["content"]
    content: str | list[PredictionPart]

    @property
    def text(self) -> str:
        """The whole text."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


class ChatRequest(Sampling, kw_only=True):
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
    functions: list[Any] | None = None
    function_call: Any = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    chat_template: Any = None
    token_sources: bool | None = None  # an extension: chunks tell who drafted each token
    echo: bool | None = None
    audio: Any = None


class CompletionRequest(Sampling, kw_only=True):
    """Body of /v1/completions."""

    prompt: str | list[str | int | list[int]]
    prediction: Prediction | Guess | None = None  # an extension
    echo: bool | None = None
    logprobs: NumTop | None = None
    best_of: int | None = None
    suffix: str | None = None
    add_special_tokens: bool | None = None


AnyRequest = ChatRequest | CompletionRequest


class TokenizeRequest(Struct, kw_only=True):
    """Body of /tokenize: a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Meta(min_length=1)] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    return_token_strs: bool | None = None


class DetokenizeRequest(Struct, kw_only=True):
    """Body of /detokenize."""

    tokens: list[int]
    model: str | None = None


SAME_NAME = (
    "n", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "min_tokens", "stop",
    "stop_token_ids", "allowed_token_ids", "bad_words", "ignore_eos", "seed", "presence_penalty",
    "frequency_penalty", "logit_bias", "speculation", "cache_salt", "priority", "regex", "grammar",
    "choice", "json_schema", "close_early",
)  # fmt: skip
REFUSED = (
    "guided_json", "guided_regex", "guided_grammar", "guided_choice",
    "prompt_logprobs", "truncate_prompt_tokens", "include_stop_str_in_output",
    "functions", "function_call", "chat_template", "audio", "suffix",
)  # fmt: skip
HARMLESS: tuple[object, ...] = (None, False, "", "none", [], {})


def decoder(body_type: type[T]) -> Callable[[bytes], T]:
    """A function from bytes to the struct; raises `ApiError` 400."""
    decode = msgspec.json.Decoder(body_type).decode

    def checked(data: bytes) -> T:
        try:
            data.decode()  # msgspec does not look into the texts of fields that it passes over
            return decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError) as error:
            raise bad_json(error) from None

    return checked


def sampling_params(
    body: Sampling,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
) -> SamplingParams:
    """The parameters of a body; raises `InvalidRequest`."""
    given = {name: value for name in SAME_NAME if (value := getattr(body, name, None)) is not None}
    given |= structured_output_of(getattr(body, "response_format", None), body.structured_outputs)
    guess = getattr(body, "prediction", None)
    return SamplingParams(
        **given,
        max_tokens=max_tokens,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        prediction=guess.text if isinstance(guess, Prediction) else guess,
        deadline=None if body.deadline_ms is None else body.deadline_ms / 1000,
    )


def refuse_unsupported(body: Sampling) -> None:
    """Raise `InvalidRequest` for a field that is known and not supported."""
    for name in REFUSED:
        if getattr(body, name, None) not in HARMLESS:
            raise InvalidRequest(f"{name} is not supported yet", param=name)
    if body.skip_special_tokens is False:
        raise InvalidRequest("skip_special_tokens must be true", param="skip_special_tokens")


def refuse_unsupported_chat(body: ChatRequest) -> None:
    """The same for the fields of a conversation."""
    refuse_unsupported(body)
    if body.echo:
        raise InvalidRequest("echo is not supported here", param="echo")
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs: true", param="top_logprobs")


def plain_messages(messages: list[Message]) -> list[dict[str, Any]]:
    """Messages for the chat template: content as one text, developer as system.

    System messages at the beginning become one: many templates accept only one.
    """
    plain = [_plain(message, f"messages[{index}]") for index, message in enumerate(messages)]
    others = (index for index, message in enumerate(plain) if message["role"] != "system")
    num_system = next(others, len(plain))
    if num_system < 2:
        return plain
    text = "\n\n".join(message["content"] for message in plain[:num_system])
    return [{"role": "system", "content": text}, *plain[num_system:]]


def _plain(message: Message, path: str) -> dict[str, Any]:
    role = {"developer": "system", "function": "tool"}.get(message.role, message.role)
    plain: dict[str, Any] = {"role": role, "content": _content(message.content, path)}
    for name in ("name", "tool_call_id", "reasoning_content"):
        if getattr(message, name) is not None:
            plain[name] = getattr(message, name)
    if message.tool_calls:
        plain["tool_calls"] = [plain_call(call, path) for call in message.tool_calls]
    return plain


def _content(content: str | list[ContentPart] | None, path: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    for index, part in enumerate(content):
        if part.type != "text" or part.text is None:
            where = f"{path}.content[{index}]"
            raise InvalidRequest(f"{where}: {part.type} is not supported yet", param=where)
    return "\n".join(part.text or "" for part in content)
