"""Bodies of OpenAI's routes, as `api.protocol.sampling` has it: decoding is validation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from ...core.errors import InvalidRequest
from ..media.sources import Detail, ImageSource, Placed, join_parts
from ..protocol.sampling import (
    Count,
    Guess,
    Milliseconds,
    Name,
    NumChoices,
    NumTop,
    Positive,
    Prediction,
    Salt,
    Sampling,
    Stop,
    TokenIds,
    refuse_unsupported,
)
from ..runtime.conversation.chat_input import ChatInput, Handle
from ..runtime.conversation.messages import ROLES, num_system, one_system
from ..runtime.conversation.tools import (
    CacheSpec,
    NamedChoice,
    ResponseFormat,
    Tools,
    plain_call,
    read_tools,
)
from ..types.results import Tool
from ..types.sampling_params import SamplingParams

COMPLETION_TOKENS = 16  # OpenAI's default for /v1/completions
MAX_INPUTS = 2048  # texts of /v1/embeddings, as OpenAI has it, and documents


class StreamOptions(Struct):
    """``stream_options``."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # known and not needed: usage comes once


class OpenAISampling(Sampling, kw_only=True):
    """Fields that the bodies of OpenAI's routes share."""

    stream_options: StreamOptions | None = None
    n: NumChoices | None = None
    stop: Stop | None = None
    max_tokens: Positive | None = None
    kv_transfer_params: dict[str, Any] | None = None  # an extension, as vLLM has it


class ImageUrl(Struct):
    """``image_url``: a data URL, or a file of --media-dir. ``detail`` low takes fewer tokens."""

    url: str
    detail: Detail | None = None


class NamedImage(ImageUrl, kw_only=True):
    """An image that has another field in the body than its message says."""

    param: str


class ContentPart(Struct):
    """A part of a message: a text, an image, or what the assistant said in place of an answer."""

    type: Annotated[str, Meta(extra_json_schema={"enum": ["text", "image_url", "refusal"]})]
    text: str | None = None
    refusal: str | None = None
    image_url: ImageUrl | None = None


class Message(Struct, kw_only=True):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[ContentPart] | None = None
    name: Name | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    token_ids: TokenIds | None = None  # an extension: those of an answer, which render it


class KeptMessage(Message, kw_only=True):
    """An answer of ours from the store; its ids render it where the template writes it so."""

    kept_ids: list[int] | None = None


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
    functions: list[Any] | None = None
    function_call: Any = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    chat_template: Any = None
    token_sources: bool | None = None  # an extension: chunks tell who drafted each token
    echo: bool | None = None
    audio: Any = None


class CompletionRequest(OpenAISampling, kw_only=True):
    """Body of /v1/completions."""

    prompt: str | list[str | int | list[int]]
    max_tokens: Count | None = None  # 0, with echo: the prompt alone
    prediction: Prediction | Guess | None = None  # an extension
    echo: bool | None = None
    logprobs: NumTop | None = None
    best_of: int | None = None
    suffix: str | None = None
    add_special_tokens: bool | None = None


AnyRequest = ChatRequest | CompletionRequest


class PooledRequest(Struct, kw_only=True):
    """Fields that the bodies of the routes share whose answer is no text."""

    model: str | None = None
    stream: bool | None = None  # known and ignored: nothing comes before the end
    # extensions
    cache_salt: Salt | None = None
    priority: int | None = None
    deadline_ms: Milliseconds | None = None
    cache: CacheSpec | None = None
    # known and refused
    truncate_prompt_tokens: Any = None
    max_tokens_per_doc: Any = None
    messages: Any = None
    normalize: Any = None
    add_special_tokens: Any = None


NO_OPTIONS: Mapping[str, Any] = {}
POOLED_REFUSED: Mapping[str, tuple[object, ...]] = {
    "truncate_prompt_tokens": (None,),
    "max_tokens_per_doc": (None,),
    "messages": (None,),
    "normalize": (None, True),
    "add_special_tokens": (None, True),
}
"""Fields of other servers that would change the answer, and the values that change nothing."""


def refuse_unsupported_pooled(body: PooledRequest) -> None:
    """Raise `InvalidRequest` for a field that is known and not supported."""
    for name, harmless in POOLED_REFUSED.items():
        if getattr(body, name) not in harmless:
            known = " other than true" if True in harmless else ""
            raise InvalidRequest(f"{name}{known} is not supported yet", param=name)


class EmbeddingsRequest(PooledRequest, kw_only=True):
    """Body of /v1/embeddings: a text, token ids, or a list of either."""

    input: str | list[str | int | list[int]]
    dimensions: Positive | None = None
    encoding_format: Literal["float", "base64"] | None = None


class TextDocument(Struct):
    """A document as an object."""

    text: str


Query = Annotated[str, Meta(min_length=1)]
Documents = Annotated[list[str | TextDocument], Meta(min_length=1, max_length=MAX_INPUTS)]


class RerankRequest(PooledRequest, kw_only=True):
    """Body of /v1/rerank, /v2/rerank and /rerank; ``instruction``: vLLM's name of ``instruct``."""

    query: Query
    documents: Documents
    top_n: Positive | None = None
    return_documents: bool | None = None
    instruct: str | None = None
    instruction: str | None = None


class ScoreRequest(PooledRequest, kw_only=True):
    """Body of /v1/score: a query and a document or several, or as many queries as documents.

    ``text_1`` and ``text_2`` are other names of ``query`` and ``documents``.
    """

    query: str | list[str] | None = None
    documents: str | list[str] | None = None
    text_1: str | list[str] | None = None
    text_2: str | list[str] | None = None
    instruct: str | None = None


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


class DetokenizeRequest(Struct, kw_only=True):
    """Body of /detokenize."""

    tokens: list[int]
    model: str | None = None


def refuse_unsupported_chat(body: ChatRequest) -> None:
    """The same for the fields of a conversation."""
    refuse_unsupported(body)
    if body.echo:
        raise InvalidRequest("echo is not supported here", param="echo")
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs: true", param="top_logprobs")


def plain_messages(messages: list[Message]) -> list[dict[str, Any]]:
    """Messages for the chat template: content as one text, developer as system.

    System messages at the beginning become one: many templates accept only one. In the place of
    each image there is its mark.
    """
    return one_system(
        [_plain(message, f"messages[{index}]") for index, message in enumerate(messages)]
    )


def plain_chat(
    messages: list[Message],
    *,
    tools: Sequence[Tool] = (),
    opens: bool,
    cache_salt: str | None = None,
    template: Mapping[str, Any] = NO_OPTIONS,
) -> ChatInput:
    """A conversation that is only rendered. ``opens``: with what opens an answer at its end.

    ``template``: other options of the chat template.
    """
    return ChatInput(
        messages=plain_messages(messages),
        images=read_images(messages),
        params=SamplingParams(cache_salt=cache_salt),
        handles=read_handles(messages),
        tools=tools,
        template={**template, "add_generation_prompt": opens},
    )


def tokenized_chat(body: TokenizeRequest, messages: list[Message]) -> ChatInput:
    """The conversation of /tokenize, with its options for the chat template."""
    continues = bool(body.continue_final_message)
    return plain_chat(
        messages,
        tools=read_tools(body.tools),
        opens=not continues if body.add_generation_prompt is None else body.add_generation_prompt,
        template={**(body.chat_template_kwargs or {}), "continue_final_message": continues},
    )


def read_handles(messages: list[Message]) -> list[Handle]:
    """The messages that are rendered by their ids, as `plain_messages` numbers them.

    Raises `InvalidRequest` for ids of a message that is not the assistant's.
    """
    # Those of the system at the beginning become one.
    shift = max(0, num_system(message.role for message in messages) - 1)
    handles = []
    for index, message in enumerate(messages):
        if isinstance(message, KeptMessage) and message.kept_ids is not None:
            handles.append(Handle(index - shift, message.kept_ids))
        if message.token_ids is None:
            continue
        param = f"messages[{index}].token_ids"
        if message.role != "assistant":
            message_ = f"{param} is for messages of the assistant only, not of {message.role}"
            raise InvalidRequest(message_, param=param)
        handles.append(Handle(index - shift, message.token_ids, param))
    return handles


def _plain(message: Message, path: str) -> dict[str, Any]:
    role = ROLES.get(message.role, message.role)
    plain: dict[str, Any] = {"role": role, "content": _content(message.content, path).text}
    for name in ("name", "tool_call_id", "reasoning_content"):
        if getattr(message, name) is not None:
            plain[name] = getattr(message, name)
    if message.tool_calls:
        plain["tool_calls"] = [plain_call(call, path) for call in message.tool_calls]
    return plain


def read_images(messages: list[Message]) -> list[ImageSource]:
    """The images of a conversation, in the order of their marks. Raises as `plain_messages`."""
    return [
        image
        for index, message in enumerate(messages)
        if isinstance(message.content, list)
        for image in _content(message.content, f"messages[{index}]").images
    ]


def _content(content: str | list[ContentPart] | None, path: str) -> Placed:
    if content is None or isinstance(content, str):
        return Placed(content or "", [])
    return join_parts(
        [_part(part, f"{path}.content[{index}]") for index, part in enumerate(content)]
    )


def _part(part: ContentPart, where: str) -> str | ImageSource:
    if part.type == "image_url" and part.image_url is not None:
        image = part.image_url
        where = image.param if isinstance(image, NamedImage) else where
        return ImageSource(image.url, where, image.detail or "auto")
    if part.type == "refusal" and part.refusal is not None:
        return part.refusal
    if part.type in ("text", "image_url") and part.text is None:
        raise InvalidRequest(f"{where}.{part.type} is missing", param=where)
    if part.type != "text" or part.text is None:
        raise InvalidRequest(f"{where}: {part.type} is not supported yet", param=where)
    return part.text
