"""Convert Anthropic's conversations to the messages that chat templates take."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any, TypeVar

from ...core.errors import InvalidRequest
from ..media.sources import ImageSource, join_parts
from ..runtime.conversation.chat_input import ChatInput, Handle
from ..runtime.conversation.tools import named_choice
from ..types.results import Tool, ToolChoice
from ..types.sampling_params import SamplingParams
from .blocks import INVALID
from .schema import (
    AnyBlock,
    Block,
    CountRequest,
    ImageBlock,
    Message,
    RedactedThinkingBlock,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolSpec,
    ToolUseBlock,
)

Plain = dict[str, Any]
IMAGES = "images"  # likewise: the images of a plain message
HANDLE = "handle"  # of a plain message, until all have their places: its ids, and their field
B = TypeVar("B")
ALLOWED = {
    "user": (TextBlock, ImageBlock, ToolResultBlock),
    "assistant": (TextBlock, ToolUseBlock, ThinkingBlock, RedactedThinkingBlock),
    "system": (TextBlock,),
}
EFFORTS = {"xhigh": "high", "max": "high"}  # templates know three


def read_conversation(body: CountRequest) -> ChatInput:
    """The chat request of a body; raises `InvalidRequest`."""
    messages, tools = plain_conversation(body), read_tools(body.tools)
    handles = [
        Handle(index, *message.pop(HANDLE))
        for index, message in enumerate(messages)
        if HANDLE in message
    ]
    images = [image for message in messages for image in message.pop(IMAGES, ())]
    return ChatInput(
        messages=messages,
        images=images,
        params=SamplingParams(cache_salt=body.cache_salt),
        handles=handles,
        tools=tools,
        tool_choice=read_choice(body, tools),
        template=template_options(body, messages),
    )


def plain_conversation(body: CountRequest) -> list[Plain]:
    """Messages for the chat template; raises `InvalidRequest` naming the path of a bad block.

    Tool results come before the text of their message, directly after the calls they answer.
    Consecutive messages of one role become one, which many templates require.
    """
    plains: list[Plain] = []
    if body.system:
        plains.append({"role": "system", "content": _text(body.system)})
    names: dict[str, str] = {}  # of tools, by the id of the call
    for index, message in enumerate(body.messages):
        plain = _plain(message, f"messages[{index}]", names)
        if message.token_ids is not None:
            param = f"messages[{index}].token_ids"
            if message.role != "assistant":
                raise InvalidRequest(f"{param} is for messages of the assistant only", param=param)
            plain[0][HANDLE] = message.token_ids, param
        plains += plain
    return _merged(plains)


def template_options(body: CountRequest, messages: Sequence[Plain]) -> dict[str, object]:
    """Options for the chat template; the caller's ``chat_template_kwargs`` take precedence."""
    options: dict[str, object] = {}
    if body.thinking is not None:
        options["enable_thinking"] = body.thinking.type != "disabled"
    if body.output_config is not None and body.output_config.effort is not None:
        effort = body.output_config.effort
        options["reasoning_effort"] = EFFORTS.get(effort, effort)
    last = messages[-1]
    if last["role"] == "assistant" and last["content"].strip() and "tool_calls" not in last:
        options |= {"add_generation_prompt": False, "continue_final_message": True}
    return options | (body.chat_template_kwargs or {})


def read_tools(specs: Sequence[ToolSpec] | None) -> list[Tool]:
    """The tools that the caller runs; raises `InvalidRequest` for an incomplete one."""
    tools = []
    for index, spec in enumerate(specs or ()):
        if not spec.is_custom:
            continue
        if spec.name is None or spec.input_schema is None:
            where = f"tools[{index}]"
            raise InvalidRequest(f"{where} needs name and input_schema", param=where)
        tools.append(
            Tool(
                name=spec.name,
                description=spec.description,
                parameters=spec.input_schema,
                strict=bool(spec.strict),
            )
        )
    return tools


def read_choice(body: CountRequest, tools: Sequence[Tool]) -> ToolChoice:
    """``tool_choice``; raises `InvalidRequest`."""
    choice = body.tool_choice
    if choice is None:
        return ToolChoice()
    parallel = not choice.disable_parallel_tool_use
    if choice.type == "tool":
        if choice.name is None:
            raise InvalidRequest("tool_choice of type tool needs a name", param="tool_choice")
        return named_choice(choice.name, tools, parallel=parallel)
    if choice.type == "any":
        if not tools:
            raise InvalidRequest("tool_choice needs tools", param="tool_choice")
        return ToolChoice(mode="required", parallel=parallel)
    return ToolChoice(mode=choice.type, parallel=parallel)


def _merged(plains: Sequence[Plain]) -> list[Plain]:
    """Neighbours of one role as one message; each result of a tool stays one."""
    messages: list[Plain] = []
    for role, neighbours in groupby(plains, key=itemgetter("role")):
        group = list(neighbours)
        messages += group if role == "tool" else [_joined(group)]
    return messages


def _joined(group: list[Plain]) -> Plain:
    """One message out of several, each text put together once."""
    if len(group) == 1:
        return group[0]
    for plain in group:
        if HANDLE in plain:
            _, param = plain[HANDLE]
            message = f"{param}: the message next to this one must be of another role"
            raise InvalidRequest(message, param=param)
    content = "\n".join(plain["content"] for plain in group if plain["content"])
    joined: Plain = {"role": group[0]["role"], "content": content}
    thoughts = [plain["reasoning_content"] for plain in group if "reasoning_content" in plain]
    if thoughts:
        joined["reasoning_content"] = "".join(thoughts)
    calls = [call for plain in group for call in plain.get("tool_calls", ())]
    if calls:
        joined["tool_calls"] = calls
    images = [image for plain in group for image in plain.get(IMAGES, ())]
    return joined | ({IMAGES: images} if images else {})


def _plain(message: Message, path: str, names: dict[str, str]) -> list[Plain]:
    """One message as one or, with results of tools, several."""
    blocks = message.content
    if isinstance(blocks, str):
        return [{"role": message.role, "content": blocks}]
    _check_blocks(blocks, message.role, path)
    if message.role == "assistant":
        return [_assistant(blocks, names)]
    plain = [
        _tool(block, names, f"{path}.content[{index}]")
        for index, block in enumerate(blocks)
        if isinstance(block, ToolResultBlock)
    ]
    if len(plain) < len(blocks) or not plain:
        plain.append({"role": message.role, **_seen(blocks, f"{path}.content")})
    return plain


def _seen(blocks: Sequence[object], path: str) -> Plain:
    """The content of texts and images; other blocks are left out."""
    parts: list[str | ImageSource] = []
    for index, block in enumerate(blocks):
        if isinstance(block, TextBlock):
            parts.append(block.text)
        elif isinstance(block, ImageBlock):
            parts.append(_image(block, f"{path}[{index}]"))
    text, images = join_parts(parts)
    return {"content": text} | ({IMAGES: images} if images else {})


def _image(block: ImageBlock, where: str) -> ImageSource:
    source = block.source
    if source.type == "base64" and source.data is not None:
        return ImageSource(f"data:{source.media_type or 'image/png'};base64,{source.data}", where)
    if source.type == "url" and source.url is not None:
        return ImageSource(source.url, where)
    message = f"{where}: an image's source must be base64 with data"
    raise InvalidRequest(message, param=where)


def _check_blocks(blocks: Sequence[AnyBlock], role: str, path: str) -> None:
    """Raise `InvalidRequest` for a block that is not served, or not in this role."""
    for index, block in enumerate(blocks):
        where = f"{path}.content[{index}]"
        if not isinstance(block, ALLOWED[role]):
            raise _unserved(block, f"in {role} messages", where)
        if isinstance(block, ToolResultBlock):
            for number, inner in enumerate(_blocks(block)):
                if not isinstance(inner, TextBlock | ImageBlock):
                    raise _unserved(inner, "in tool results", f"{where}.content[{number}]")


def _blocks(result: ToolResultBlock) -> Sequence[Block]:
    return result.content if isinstance(result.content, list) else []


def _unserved(block: Block, place: str, where: str) -> InvalidRequest:
    kind = block.__struct_config__.tag
    return InvalidRequest(f"{where}: {kind} blocks are not supported {place}", param=where)


def _assistant(blocks: Sequence[AnyBlock], names: dict[str, str]) -> Plain:
    """Words that citations or calls had cut are put together as they were said."""
    words = "".join(block.text for block in _of(blocks, TextBlock))
    plain: Plain = {"role": "assistant", "content": words}
    thoughts = "".join(block.thinking for block in _of(blocks, ThinkingBlock))
    if thoughts:
        plain["reasoning_content"] = thoughts
    calls = _of(blocks, ToolUseBlock)
    if calls:
        names |= {call.id: call.name for call in calls}
        plain["tool_calls"] = [_call(call) for call in calls]
    return plain


def _call(block: ToolUseBlock) -> Plain:
    """A call; arguments that were no object are again the text that they were."""
    text = block.input.get(INVALID) if len(block.input) == 1 else None
    function = {"name": block.name, "arguments": text if isinstance(text, str) else block.input}
    return {"id": block.id, "type": "function", "function": function}


def _tool(block: ToolResultBlock, names: dict[str, str], path: str) -> Plain:
    """Templates have no place for ``is_error``, so the text says it."""
    inner = block.content
    plain: Plain = {"role": "tool", "content": inner, "tool_call_id": block.tool_use_id}
    if not isinstance(inner, str):
        plain |= _seen(_blocks(block), f"{path}.content")
    if block.is_error:
        plain["content"] = f"Error: {plain['content']}"
    if block.tool_use_id in names:
        plain["name"] = names[block.tool_use_id]
    return plain


def _text(content: str | Sequence[TextBlock]) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(block.text for block in content)


def _of(blocks: Sequence[object], kind: type[B]) -> list[B]:
    return [block for block in blocks if isinstance(block, kind)]
