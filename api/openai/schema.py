"""Bodies of OpenAI's routes, as `api.serving.sampling` has it: decoding is validation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta, Struct

from ...core.errors import InvalidRequest
from ..media.sources import (
    UNHEARD,
    Detail,
    ImageSource,
    Placed,
    file_text,
    join_parts,
    unread_file,
)
from ..runtime.conversation.chat_input import ChatInput, Handle
from ..runtime.conversation.left_out import tell_left_out
from ..runtime.conversation.messages import ROLES, num_system, one_system
from ..runtime.conversation.tools import (
    CacheSpec,
    NamedChoice,
    ResponseFormat,
    Tools,
    plain_call,
    read_tools,
)
from ..serving.peers import Absent, Empty, Off, On
from ..serving.sampling import (
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
)
from ..types.fields import Refused, SameAs
from ..types.results import Tool
from ..types.sampling_params import SamplingParams

COMPLETION_TOKENS = 16  # OpenAI's default for /v1/completions
MAX_INPUTS = 2048  # texts of /v1/embeddings, as OpenAI has it, and documents


class StreamOptions(Struct):
    """``stream_options``."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # an extension: usage so far in every chunk


Tokens = Annotated[int, Meta(ge=-2)]


class OpenAISampling(Sampling, kw_only=True):
    """Fields that the bodies of OpenAI's routes share."""

    stream_options: StreamOptions | None = None
    n: NumChoices | None = None
    stop: Stop | None = None
    max_tokens: Positive | None = None
    kv_transfer_params: dict[str, Any] | None = None  # an extension, as vLLM has it
    # other names
    max_output_tokens: Annotated[Positive | None, SameAs("max_tokens")] = None
    max_new_tokens: Annotated[Positive | None, SameAs("max_tokens")] = None
    n_predict: Annotated[Tokens | None, SameAs("max_tokens", -1, -2)] = None
    stop_sequences: Annotated[Stop | None, SameAs("stop")] = None


class ImageUrl(Struct):
    """``image_url``: a data URL, or a file of --media-dir. ``detail`` low takes fewer tokens."""

    url: str
    detail: Detail | None = None


class NamedImage(ImageUrl, kw_only=True):
    """An image that has another field in the body than its message says."""

    param: str


class FileFields(Struct):
    """``file``: its content as a data URL; ids name files of OpenAI's."""

    file_data: str | None = None
    filename: str | None = None


class ContentPart(Struct):
    """A part of a message: a text, an image, a file, or what the assistant said in place of an
    answer. Parts of other types are left out, but for sounds and films of the user.
    """

    known_kinds: ClassVar[frozenset[str]] = frozenset({"text", "refusal", "image_url", "file"})
    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: ImageUrl | None = None
    file: FileFields | None = None


class Message(Struct, kw_only=True):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[ContentPart] | None = None
    name: Name | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    function_call: dict[str, Any] | None = None  # what ``tool_calls`` was before
    reasoning_content: str | None = None
    token_ids: TokenIds | None = None  # an extension: those of an answer, which render it


class NamedMessage(Message, kw_only=True):
    """A message that has another place in the body than its index says."""

    path: str


class KeptMessage(NamedMessage, kw_only=True):
    """An answer of ours from the store; its ids render it where the template writes it so."""

    kept_ids: list[int] | None = None


class ThinkingSwitch(Struct, kw_only=True):
    """``thinking``, as DeepSeek's and GLM's servers have it."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Absent = None


class Reasoning(Struct, kw_only=True):
    """``reasoning``, as OpenRouter and SGLang have it."""

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
    token_sources: bool | None = None  # an extension: chunks tell who drafted each token


class CompletionRequest(OpenAISampling, kw_only=True):
    """Body of /v1/completions."""

    prompt: str | list[str | int | list[int]]
    max_tokens: Count | None = None  # 0, with echo: the prompt alone
    max_completion_tokens: Annotated[Count | None, SameAs("max_tokens")] = None
    prediction: Prediction | Guess | None = None  # an extension
    echo: bool | None = None
    logprobs: NumTop | None = None
    best_of: int | None = None
    response_format: ResponseFormat | None = None
    add_special_tokens: bool | None = None
    # for conversations alone
    tools: Empty = None
    tool_choice: Annotated[Any, Refused("none", "auto")] = None


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
    # of other servers
    extra_key: Annotated[Salt | None, SameAs("cache_salt")] = None
    truncate_prompt_tokens: Absent = None
    max_tokens_per_doc: Absent = None
    messages: Absent = None
    normalize: On = None
    use_activation: On = None
    add_special_tokens: On = None
    padding: Annotated[Any, Refused("do_not_pad")] = None
    mm_processor_kwargs: Empty = None
    lora_path: Empty = None
    truncate: Annotated[Any, Refused("NONE", False)] = None
    input_type: Absent = None
    task: Absent = None
    prompt_name: Absent = None
    late_chunking: Off = None
    embed_overrides: Empty = None
    rank_fields: Empty = None
    max_chunks_per_doc: Absent = None
    apply_softmax: Off = None
    raw_scores: Off = None


NO_OPTIONS: Mapping[str, Any] = {}


EmbedDtype = Literal["float32", "float16", "bfloat16"]


class EmbeddingsRequest(PooledRequest, kw_only=True):
    """Body of /v1/embeddings: a text, token ids, or a list of either."""

    input: str | list[str | int | list[int]]
    dimensions: Positive | None = None
    encoding_format: Literal["float", "base64"] | None = None
    embed_dtype: EmbedDtype | None = None  # of base64, as vLLM has it
    endianness: Literal["native", "big", "little"] | None = None  # likewise


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


OneOrMore = str | list[str]


class ScoreRequest(PooledRequest, kw_only=True):
    """Body of /v1/score and /score: a query and a document, or several of either.

    ``text_1`` and ``text_2`` are other names of ``query`` and ``documents``, as are ``queries``,
    ``items``, ``data_1`` and ``data_2``.
    """

    query: OneOrMore | None = None
    documents: OneOrMore | None = None
    text_1: OneOrMore | None = None
    text_2: OneOrMore | None = None
    instruct: str | None = None
    # other names
    queries: Annotated[OneOrMore | None, SameAs("query")] = None
    items: Annotated[OneOrMore | None, SameAs("documents")] = None
    data_1: Annotated[OneOrMore | None, SameAs("text_1")] = None
    data_2: Annotated[OneOrMore | None, SameAs("text_2")] = None


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


def check_logprobs(body: ChatRequest) -> None:
    """Raise `InvalidRequest` for ``top_logprobs`` without ``logprobs``."""
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs: true", param="top_logprobs")


def thinking_options(
    options: Mapping[str, object] | None, effort: str | None, *, thinks: bool | None
) -> dict[str, object]:
    """Return options of the chat template with the reasoning effort and whether to think.

    Those of ``chat_template_kwargs`` take precedence. The effort "none" turns thinking off, as it
    does in vLLM and SGLang.
    """
    found = dict(options or {})
    if effort is not None:
        found.setdefault("reasoning_effort", effort)
    if thinks is None and effort == "none":
        thinks = False
    if thinks is not None:
        found.setdefault("enable_thinking", thinks)
    return found


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
        paths=read_paths(messages),
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


def read_paths(messages: list[Message]) -> list[str]:
    """The places of the messages in the body, as `plain_messages` numbers them."""
    shift = max(0, num_system(message.role for message in messages) - 1)
    paths = [_path(message, index) for index, message in enumerate(messages)]
    return [*paths[:1], *paths[shift + 1 :]]


def _path(message: Message, index: int) -> str:
    return message.path if isinstance(message, NamedMessage) else f"messages[{index}]"


def _plain(message: Message, path: str) -> dict[str, Any]:
    role = ROLES.get(message.role, message.role)
    plain: dict[str, Any] = {"role": role, "content": _content(message, path).text}
    for name in ("name", "tool_call_id", "reasoning_content"):
        if getattr(message, name) is not None:
            plain[name] = getattr(message, name)
    calls = message.tool_calls or [
        {"type": "function", "function": each} for each in [message.function_call] if each
    ]
    if calls:
        plain["tool_calls"] = [plain_call(call) for call in calls]
    return plain


def read_images(messages: list[Message]) -> list[ImageSource]:
    """The images of a conversation, in the order of their marks. Raises as `plain_messages`."""
    return [
        image
        for index, message in enumerate(messages)
        if isinstance(message.content, list)
        for image in _content(message, f"messages[{index}]").images
    ]


def _content(message: Message, path: str) -> Placed:
    content = message.content
    if content is None or isinstance(content, str):
        return Placed(content or "", [])
    parts = [
        _part(part, f"{path}.content[{index}]", message.role) for index, part in enumerate(content)
    ]
    return join_parts([part for part in parts if part is not None])


def _part(part: ContentPart, where: str, role: str) -> str | ImageSource | None:
    """A part as the model gets it; None for one that it does not get."""
    if part.type == "image_url" and part.image_url is not None:
        image = part.image_url
        where = image.param if isinstance(image, NamedImage) else where
        return ImageSource(image.url, where, image.detail or "auto")
    if part.type == "refusal" and part.refusal is not None:
        return part.refusal
    if part.type == "file":
        file = part.file or FileFields()
        text = file_text(file.file_data, file.filename)
        if text is None and role == "user":
            raise InvalidRequest(f"{where}: a file must be a data URL of text", param=where)
        return unread_file(file.filename) if text is None else text
    if part.text is not None and part.type != "image_url":
        return part.text
    if part.type in ("text", "image_url", "refusal"):
        raise InvalidRequest(f"{where}.{part.type} is missing", param=where)
    if part.type in UNHEARD and role == "user":
        raise InvalidRequest(f"{where}: {part.type} parts are not supported", param=where)
    tell_left_out("parts of type", part.type)
    return None
