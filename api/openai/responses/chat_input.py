"""Convert a body of /v1/responses to a chat request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ....core.errors import InvalidRequest
from ...protocol.sampling import HARMLESS, cache_options, refuse_unsupported, sampling_params
from ...runtime.conversation.chat_input import ChatInput
from ...runtime.conversation.tools import ANY_OBJECT, allowed_choice, named_choice, read_choice
from ...types.results import Tool, ToolChoice
from ...types.sampling_params import SamplingParams
from ..schema import Message, plain_messages, read_handles, read_images
from .inputs import to_messages
from .schema import LOGPROBS, FlatChoice, FlatTool, Item, ResponsesRequest, TextFormat

REFUSED = ("background", "conversation", "prompt", "return_token_ids")
FORMAT_NAMES = ("json_schema", "grammar")  # what it has become on the way
NAMES = {"messages": "input", "prompt": "input", "max_tokens": "max_output_tokens"}


def make_chat_input(
    body: ResponsesRequest, history: Sequence[Item], items: Sequence[Item]
) -> ChatInput:
    """Make the chat request: ``items`` follow those of the ``history``."""
    messages, tools = _messages(body, history, items), _tools(body)
    refuse_unsupported(body)
    return ChatInput(
        messages=plain_messages(messages),
        images=read_images(messages),
        handles=read_handles(messages),
        params=_params(body),
        tools=tools,
        tool_choice=_tool_choice(body, tools),
        template=_template_options(body),
        cache=cache_options(body),
        cache_key=body.prompt_cache_key,
    )


def rename(error: InvalidRequest, body: ResponsesRequest) -> None:
    """The name of a field in the bodies of this API."""
    error.param = _name(error.param, body)


def _name(param: str | None, body: ResponsesRequest) -> str | None:
    has_format = body.text is not None and body.text.format is not None
    if has_format and (param in FORMAT_NAMES or (param == "tools" and not served_tools(body))):
        return "text.format"
    if param is None:
        return None
    return "input" if param.startswith("messages[") else NAMES.get(param, param)


def served_tools(body: ResponsesRequest) -> list[FlatTool]:
    """The functions among the tools; hosted tools are ignored, since agents always send them."""
    return [tool for tool in body.tools or () if tool.type == "function" and tool.name]


def refuse_own(body: ResponsesRequest) -> None:
    """Raise `InvalidRequest` for fields of this API that foretoken does not support."""
    for name in REFUSED:
        if getattr(body, name) not in HARMLESS:
            raise InvalidRequest(f"{name} is not supported", param=name)
    if body.n not in (None, 1):
        raise InvalidRequest("n must be 1: a response has one answer", param="n")


def _messages(
    body: ResponsesRequest, history: Sequence[Item], items: Sequence[Item]
) -> list[Message]:
    messages = to_messages([*history, *items], first_path=len(history))
    if body.instructions:
        messages.insert(0, Message(role="system", content=body.instructions))
    if not messages:
        raise InvalidRequest("input must not be empty", param="input")
    return messages


def _tools(body: ResponsesRequest) -> list[Tool]:
    return [
        Tool(
            name=tool.name or "",
            description=tool.description,
            parameters=tool.parameters,
            strict=bool(tool.strict),
        )
        for tool in served_tools(body)
    ]


def _tool_choice(body: ResponsesRequest, tools: Sequence[Tool]) -> ToolChoice:
    choice, parallel = body.tool_choice, body.parallel_tool_calls is not False
    if not isinstance(choice, FlatChoice):
        return read_choice(choice, tools, parallel=parallel)
    if choice.type == "allowed_tools":
        allowed = choice.tools or ()
        names = {tool.name for tool in allowed if tool.type == "function" and tool.name}
        return allowed_choice(names, tools, mode=choice.mode or "auto", parallel=parallel)
    if choice.type != "function" or choice.name is None:
        message = f"tool_choice: type {choice.type} is not supported without a name; use function"
        raise InvalidRequest(message, param="tool_choice")
    return named_choice(choice.name, tools, parallel=parallel)


def _params(body: ResponsesRequest) -> SamplingParams:
    wants_logprobs = bool(body.top_logprobs) or LOGPROBS in (body.include or ())
    asked = body.max_output_tokens
    return sampling_params(
        body,
        guess=body.prediction,
        n=body.n,
        stop=body.stop,
        max_tokens=body.max_tokens if asked is None else asked,
        logprobs=(body.top_logprobs or 0) if wants_logprobs else None,
        json_schema=_schema(body.text.format if body.text else None),
    )


def _template_options(body: ResponsesRequest) -> dict[str, object]:
    options: dict[str, object] = dict(body.chat_template_kwargs or {})
    if body.reasoning is not None and body.reasoning.effort is not None:
        options.setdefault("reasoning_effort", body.reasoning.effort)
    return options


def _schema(format: TextFormat | None) -> Mapping[str, object] | None:
    if format is None or format.type == "text":
        return None
    if format.type == "json_object":
        return ANY_OBJECT
    if format.schema is None:
        raise InvalidRequest("text.format needs a schema", param="text.format.schema")
    return format.schema
