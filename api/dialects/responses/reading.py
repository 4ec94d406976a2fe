"""Convert a body of /v1/responses to a chat request."""

from __future__ import annotations

from collections.abc import Mapping

from ....core.errors import InvalidRequest
from ...runtime.conversation.chat_input import ChatInput
from ...runtime.conversation.tools import ANY_OBJECT, as_strict_as
from ...serving.sampling import cache_options, sampling_params, warms_next_turn
from ...types.sampling_params import SamplingParams
from ..openai.bodies import Message, NamedMessage
from ..openai.reading import plain_messages, read_handles, read_images, read_paths, thinking_options
from .bodies import LOGPROBS, ResponsesRequest, TextFormat
from .items import Thread, to_messages
from .tools import ServedTool, read_tools, served_tools, tool_choice

FORMAT_NAMES = ("json_schema", "grammar")  # parameters that ``text.format`` is converted to
NAMES = {"messages": "input", "prompt": "input", "max_tokens": "max_output_tokens"}


def make_chat_input(
    body: ResponsesRequest, thread: Thread
) -> tuple[ChatInput, list[ServedTool], list[Message]]:
    """Return the chat request of a conversation, its tools and its messages."""
    messages, served = _messages(body, thread), read_tools(body, thread.items)
    chat = ChatInput(
        messages=plain_messages(messages),
        images=read_images(messages),
        handles=read_handles(messages),
        paths=read_paths(messages),
        params=_params(body),
        tools=[each.tool for each in served],
        tool_choice=tool_choice(body, served),
        template=_template_options(body),
        cache=cache_options(body, messages),
        warms_next=warms_next_turn(body),
        cache_key=body.prompt_cache_key,
    )
    return chat, served, messages


def rename(error: InvalidRequest, body: ResponsesRequest) -> None:
    """Replace the parameter name in an error by the name of the field in the body."""
    error.param = _name(error.param, body)


def _name(param: str | None, body: ResponsesRequest) -> str | None:
    has_format = body.text is not None and body.text.format is not None
    if has_format and (param in FORMAT_NAMES or (param == "tools" and not served_tools(body))):
        return "text.format"
    if param is None:
        return None
    return "input" if param.startswith("messages[") else NAMES.get(param, param)


def check_n(body: ResponsesRequest) -> None:
    """Raise `InvalidRequest` unless ``n`` is 1 or left out."""
    if body.n not in (None, 1):
        raise InvalidRequest("n must be 1: a response has a single answer", param="n")


def _messages(body: ResponsesRequest, thread: Thread) -> list[Message]:
    messages = to_messages(thread)
    if body.instructions:
        system = NamedMessage(role="system", content=body.instructions, path="instructions")
        messages.insert(0, system)
    if not messages:
        raise InvalidRequest("input must not be empty", param="input")
    return messages


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
    effort = None if body.reasoning is None else body.reasoning.effort
    return thinking_options(body.chat_template_kwargs, effort, thinks=body.enable_thinking)


def _schema(format: TextFormat | None) -> Mapping[str, object] | None:
    if format is None or format.type == "text":
        return None
    if format.type == "json_object" and format.schema is None:
        return ANY_OBJECT
    if format.schema is None:
        raise InvalidRequest("text.format needs a schema", param="text.format.schema")
    return as_strict_as(format.strict, format.schema)
