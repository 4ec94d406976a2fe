"""Convert a body of /v1/responses to a chat request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from ....core.errors import InvalidRequest
from ...runtime.chat_types import Ask
from ...runtime.tools import (
    AllowedTool,
    AllowedTools,
    FunctionName,
    FunctionSpec,
    JsonSchemaSpec,
    NamedChoice,
    ResponseFormat,
    ToolSpec,
)
from ..chat import read_ask
from ..schema import HARMLESS, ChatRequest, Message, Prediction, Sampling
from .inputs import to_messages
from .schema import LOGPROBS, Choice, FlatTool, Item, ResponsesRequest, TextFormat

ChoiceMode = Literal["none", "auto", "required"]
REFUSED = ("background", "conversation", "prompt")
FORMAT_NAMES = ("json_schema", "response_format", "grammar")  # what it has become on the way
NAMES = {"messages": "input", "prompt": "input", "max_tokens": "max_output_tokens"}


def make_ask(body: ResponsesRequest, history: Sequence[Item], items: Sequence[Item]) -> Ask:
    """Make the chat request: ``items`` follow those of the ``history``."""
    return read_ask(_to_chat(body, _messages(body, history, items)))


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


def refuse_unsupported(body: ResponsesRequest) -> None:
    """Raise `InvalidRequest` for fields of this API that foretoken does not support."""
    for name in REFUSED:
        if getattr(body, name) not in HARMLESS:
            raise InvalidRequest(f"{name} is not supported", param=name)
    if body.n not in (None, 1):
        raise InvalidRequest("n must be 1: a response has one answer", param="n")


def _messages(
    body: ResponsesRequest, history: Sequence[Item], items: Sequence[Item]
) -> list[Message]:
    told = to_messages([*history, *items], first_path=len(history))
    if body.instructions:
        told.insert(0, Message(role="system", content=body.instructions))
    if not told:
        raise InvalidRequest("input must not be empty", param="input")
    return told


def _to_chat(body: ResponsesRequest, messages: list[Message]) -> ChatRequest:
    """The body as one of chat completions, whose code interprets the fields."""
    shared = {name: getattr(body, name) for name in Sampling.__struct_fields__}
    wanted = bool(body.top_logprobs) or LOGPROBS in (body.include or ())
    guess = body.prediction
    return ChatRequest(
        **shared,
        messages=messages,
        max_completion_tokens=body.max_output_tokens,
        prediction=Prediction("content", guess) if isinstance(guess, str) else guess,
        logprobs=wanted,
        top_logprobs=body.top_logprobs if wanted else None,
        response_format=_format(body.text.format if body.text else None),
        tools=[_tool(tool) for tool in served_tools(body)] or None,
        tool_choice=_choice(body),
        parallel_tool_calls=body.parallel_tool_calls,
        reasoning_effort=body.reasoning.effort if body.reasoning else None,
        chat_template_kwargs=body.chat_template_kwargs,
    )


def _tool(tool: FlatTool) -> ToolSpec:
    return ToolSpec(
        function=FunctionSpec(
            name=tool.name or "",
            description=tool.description,
            parameters=tool.parameters,
            strict=tool.strict,
        )
    )


def _choice(body: ResponsesRequest) -> ChoiceMode | NamedChoice | None:
    choice = body.tool_choice
    if not isinstance(choice, Choice):
        return choice
    if choice.type == "allowed_tools":
        return NamedChoice(type=choice.type, allowed_tools=_allowed(choice))
    if choice.type != "function" or choice.name is None:
        message = f"tool_choice: type {choice.type} is not supported without a name; use function"
        raise InvalidRequest(message, param="tool_choice")
    return NamedChoice(function=FunctionName(choice.name))


def _allowed(choice: Choice) -> AllowedTools:
    names = [tool.name for tool in choice.tools or () if tool.type == "function" and tool.name]
    tools = [AllowedTool(function=FunctionName(name)) for name in names]
    return AllowedTools(mode=choice.mode or "auto", tools=tools)


def _format(format: TextFormat | None) -> ResponseFormat | None:
    if format is None:
        return None
    if format.type == "json_schema" and format.schema is None:
        raise InvalidRequest("text.format needs a schema", param="text.format.schema")
    spec = JsonSchemaSpec(name=format.name, schema=format.schema, strict=format.strict)
    return ResponseFormat(type=format.type, json_schema=spec if format.schema else None)
