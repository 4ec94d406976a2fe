"""Convert Ollama's bodies to `ChatInput`."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from ...media.sources import ImageSource, Placed, join_parts
from ...runtime.conversation.chat_input import ChatInput
from ...runtime.conversation.tools import ANY_OBJECT, plain_arguments, read_tools
from ...types.sampling_params import SamplingParams
from .bodies import ChatMessage, OllamaBody, OllamaChatBody, OllamaGenerateBody, Options

SAME_NAME = (
    "temperature", "top_p", "top_k", "min_p", "seed", "stop", "presence_penalty",
    "frequency_penalty", "speculation", "cache_salt",
)  # fmt: skip


def read_chat(body: OllamaChatBody) -> ChatInput:
    """Return the chat request of a body. Raises `InvalidRequest`."""
    messages = body.messages or ()
    return ChatInput(
        messages=plain_messages(messages),
        images=[
            image
            for index, message in enumerate(messages)
            for image in _placed(message.images, "", f"messages[{index}].images").images
        ],
        params=read_params(body),
        tools=read_tools(body.tools),
        template=template_options(body),
    )


def read_prompt(body: OllamaGenerateBody) -> ChatInput:
    """Return a prompt and its system text as a conversation. Raises `InvalidRequest`."""
    text, images = _placed(body.images, body.prompt, "images")
    messages = [{"role": "user", "content": text}]
    if body.system:
        messages.insert(0, {"role": "system", "content": body.system})
    return ChatInput(
        messages=messages,
        images=images,
        params=read_params(body),
        template=template_options(body),
    )


def read_params(body: OllamaBody) -> SamplingParams:
    """Return the sampling parameters of a body. Raises `InvalidRequest`."""
    options = body.options or Options()
    given = {name: getattr(options, name) for name in SAME_NAME}
    given["repetition_penalty"] = options.repeat_penalty
    if options.num_predict is not None and options.num_predict > 0:
        given["max_tokens"] = options.num_predict
    if body.format:
        given["json_schema"] = ANY_OBJECT if body.format == "json" else body.format
    return SamplingParams(
        **{name: value for name, value in given.items() if value is not None},
        deadline=None if body.deadline_ms is None else body.deadline_ms / 1000,
    )


def template_options(body: OllamaBody) -> Mapping[str, object]:
    """Return the template options for reasoning: whether to reason, and the effort."""
    if body.think is None:
        return {}
    options: dict[str, object] = {"enable_thinking": body.think is not False}
    return options if isinstance(body.think, bool) else options | {"reasoning_effort": body.think}


def plain_messages(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Return the messages for the chat template.

    Some templates require ids of calls, which Ollama's API lacks, so each call gets one. A result
    gets the id of the first unanswered call of its tool. Without a ``tool_name``, it gets the id of
    the first unanswered call of any tool.
    """
    waiting: deque[tuple[str, str]] = deque()  # name and id of calls without a result
    plains, number = [], 0
    for index, message in enumerate(messages):
        text, _ = _placed(message.images, message.content, f"messages[{index}].images")
        plain: dict[str, Any] = {"role": message.role, "content": text}
        if message.thinking:
            plain["reasoning_content"] = message.thinking
        if message.tool_calls:
            plain["tool_calls"] = []
            for call in message.tool_calls:
                call_id = f"call_{number:08}"
                arguments = plain_arguments(call.function.arguments)
                function = {"name": call.function.name, "arguments": arguments}
                plain["tool_calls"].append(
                    {"id": call_id, "type": "function", "function": function}
                )
                waiting.append((call.function.name, call_id))
                number += 1
        if message.role == "tool":
            plain |= _answered(message.tool_name, waiting)
        plains.append(plain)
    return plains


def _placed(images: Sequence[str] | None, text: str | None, where: str) -> Placed:
    """Return the content of a message: its images, followed by its text."""
    sources = [
        ImageSource(
            each if each.startswith("data:") else f"data:;base64,{each}", f"{where}[{index}]"
        )
        for index, each in enumerate(images or ())
    ]
    return join_parts([*sources, text or ""])


def _answered(name: str | None, waiting: deque[tuple[str, str]]) -> dict[str, str]:
    """Return the name and the id of the call that a result answers."""
    found = next((each for each in waiting if name in (None, each[0])), None)
    if found is None:
        return {} if name is None else {"name": name}
    waiting.remove(found)
    return {"name": found[0], "tool_call_id": found[1]}
