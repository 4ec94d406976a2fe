"""Convert OpenAI's bodies to `ChatInput`, prompts and sampling parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any, cast

from ....core.errors import InvalidRequest
from ...media.sources import (
    UNHEARD,
    ImageSource,
    Placed,
    file_text,
    join_parts,
    unread_file,
)
from ...runtime.conversation.chat_input import ChatInput, Handle
from ...runtime.conversation.left_out import tell_left_out
from ...runtime.conversation.messages import ROLES, num_system, one_system
from ...runtime.conversation.tools import (
    format_schema,
    plain_call,
    read_choice,
    read_tools,
)
from ...runtime.preprocess import Prompt
from ...serving.sampling import (
    cache_options,
    is_prewarm,
    sampling_params,
    warms_next_turn,
)
from ...types.results import Tool
from ...types.sampling_params import SamplingParams
from .bodies import (
    COMPLETION_TOKENS,
    NO_OPTIONS,
    ChatRequest,
    CompletionRequest,
    ContentPart,
    FileFields,
    KeptMessage,
    Message,
    NamedImage,
    NamedMessage,
    Reasoning,
    TokenizeRequest,
)


def read_chat(body: ChatRequest) -> ChatInput:
    """Return the chat request of a body. Raises `InvalidRequest`."""
    check_logprobs(body)
    tools = read_tools(body.tools)
    parallel = body.parallel_tool_calls is not False
    return ChatInput(
        messages=plain_messages(body.messages),
        images=read_images(body.messages),
        handles=read_handles(body.messages),
        paths=read_paths(body.messages),
        params=chat_params(body),
        tools=tools,
        tool_choice=read_choice(body.tool_choice, tools, parallel=parallel),
        template=template_options(body),
        cache=cache_options(body, body.messages),
        warms_next=warms_next_turn(body),
        cache_key=body.prompt_cache_key,
    )


def chat_params(body: ChatRequest) -> SamplingParams:
    """Return the sampling parameters of a conversation. Raises `InvalidRequest`."""
    asked = body.max_completion_tokens
    return sampling_params(
        body,
        guess=body.prediction,
        n=body.n,
        stop=body.stop,
        max_tokens=body.max_tokens if asked is None else asked,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        json_schema=format_schema(body.response_format),
    )


def template_options(body: ChatRequest) -> dict[str, object]:
    """Return the body's options for the chat template."""
    reasoning, thinks = body.reasoning or Reasoning(), body.enable_thinking
    if thinks is None:
        thinks = reasoning.enabled
    if thinks is None and body.thinking is not None:
        thinks = body.thinking.type != "disabled"
    effort = reasoning.effort if body.reasoning_effort is None else body.reasoning_effort
    options = thinking_options(body.chat_template_kwargs, effort, thinks=thinks)
    if body.add_generation_prompt is not None:
        options["add_generation_prompt"] = body.add_generation_prompt
    if body.continue_final_message is not None:
        options["continue_final_message"] = body.continue_final_message
    return options


def refuse(body: CompletionRequest) -> None:
    """Raise `InvalidRequest` for options that are not supported together."""
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise InvalidRequest(
            f"best_of must equal n ({body.n or 1}), not {body.best_of}", param="best_of"
        )
    if body.prediction is not None and len(read_prompts(body.prompt)) > 1:
        raise InvalidRequest("prediction is supported for a single prompt only", param="prediction")
    if body.stream and body.echo and body.logprobs is not None and (body.n or 1) > 1:
        raise InvalidRequest("echo with logprobs and n > 1 cannot be streamed", param="echo")


def completion_params(body: CompletionRequest) -> SamplingParams:
    """Return the sampling parameters. With ``echo`` and ``max_tokens`` 0, no token is generated."""
    is_alone = body.max_tokens == 0 and (bool(body.echo) or is_prewarm(body))
    return sampling_params(
        body,
        guess=body.prediction,
        n=body.n,
        stop=body.stop,
        max_tokens=COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens,
        logprobs=body.logprobs,
        prompt_logprobs=body.logprobs if body.echo else None,
        json_schema=format_schema(body.response_format),
        prompt_only=is_alone,
    )


def read_prompts(prompt: str | list[str | int | list[int]], param: str = "prompt") -> list[Prompt]:
    """Return the prompts of a text, of token ids, or of a list of either. Raises
    `InvalidRequest`.
    """
    if isinstance(prompt, str):
        return [prompt]
    kinds = {*map(type, prompt)}  # a Python loop over a million ids would block the event loop
    if len(kinds) != 1:
        message = (
            f"{param} must be a text, a list of texts, a list of token ids, or a list of these"
        )
        raise InvalidRequest(message, param=param)
    if kinds == {int}:
        return [cast("list[int]", prompt)]
    return cast("list[Prompt]", prompt)


def check_logprobs(body: ChatRequest) -> None:
    """Raise `InvalidRequest` for ``top_logprobs`` without ``logprobs``."""
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs: true", param="top_logprobs")


def thinking_options(
    options: Mapping[str, object] | None, effort: str | None, *, thinks: bool | None
) -> dict[str, object]:
    """Return the template options with the reasoning effort and whether to reason.

    ``chat_template_kwargs`` (``options``) take precedence. The effort "none" disables reasoning, as
    in vLLM and SGLang.
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
    """Return messages for the chat template: content as one text, the role developer as system.

    Leading system messages are merged, as many templates accept only one. An image is replaced by a
    placeholder in the text.
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
    """Return a conversation that is rendered, but not answered.

    ``opens``: end with the generation prompt. ``template``: other options of the chat template.
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
    """Return the conversation of a /tokenize body."""
    continues = bool(body.continue_final_message)
    return plain_chat(
        messages,
        tools=read_tools(body.tools),
        opens=not continues if body.add_generation_prompt is None else body.add_generation_prompt,
        template={**(body.chat_template_kwargs or {}), "continue_final_message": continues},
    )


def _shift(messages: list[Message]) -> int:
    """Return how many messages fewer `plain_messages` returns: it merges leading system ones."""
    if len(messages) < 2 or messages[1].role not in ("system", "developer"):
        return 0
    return max(0, num_system(message.role for message in messages) - 1)


def read_handles(messages: list[Message]) -> list[Handle]:
    """Return the token ids of messages, each with the index of its message in `plain_messages`.

    Raises `InvalidRequest` for token ids of a message whose role is not assistant.
    """
    shift = _shift(messages)
    handles: list[Handle] = []
    for index, message in enumerate(messages):
        if type(message) is Message and message.token_ids is None:
            continue
        if isinstance(message, KeptMessage) and message.kept_ids is not None:
            handles.append(Handle(index - shift, message.kept_ids))
        if message.token_ids is None:
            continue
        param = f"messages[{index}].token_ids"
        if message.role != "assistant":
            message_ = (
                f"{param} is only allowed in assistant messages, not in {message.role} messages"
            )
            raise InvalidRequest(message_, param=param)
        handles.append(Handle(index - shift, message.token_ids, param))
    return handles


def read_paths(messages: list[Message]) -> list[str]:
    """Return the path in the body of each message that `plain_messages` returns.

    Return [] if the paths are the indices.
    """
    shift = _shift(messages)
    if not shift and {*map(type, messages)} <= {Message}:
        return []
    paths = [_path(message, index) for index, message in enumerate(messages)]
    return [*paths[:1], *paths[shift + 1 :]]


def _path(message: Message, index: int) -> str:
    return message.path if isinstance(message, NamedMessage) else f"messages[{index}]"


def _plain(message: Message, path: str) -> dict[str, Any]:
    role = ROLES.get(message.role, message.role)
    content = message.content
    text = content if type(content) is str else _content(message, path).text
    plain: dict[str, Any] = {"role": role, "content": text}
    if _read_rest(message) == NO_REST:
        return plain
    for name in ("name", "tool_call_id", "reasoning_content"):
        if getattr(message, name) is not None:
            plain[name] = getattr(message, name)
    calls = message.tool_calls or [
        {"type": "function", "function": each} for each in [message.function_call] if each
    ]
    if calls:
        plain["tool_calls"] = [plain_call(call) for call in calls]
    return plain


_REST = ("name", "tool_call_id", "reasoning_content", "tool_calls", "function_call")
NO_REST = (None,) * len(_REST)
_read_rest = attrgetter(*_REST)


def read_images(messages: list[Message]) -> list[ImageSource]:
    """Return the images of a conversation, in the order of their placeholders.

    Raises `InvalidRequest`, like `plain_messages`.
    """
    return [
        image
        for index, message in enumerate(messages)
        if type(message.content) is list
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
    """Return a part as the model reads it; None for an unsupported part, which is left out."""
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
