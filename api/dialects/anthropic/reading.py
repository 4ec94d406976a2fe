"""Convert conversations of Anthropic's API to the messages that chat templates expect."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from typing import Any, TypeVar

import msgspec

from ....core.errors import InvalidRequest
from ...media.sources import ImageSource, join_parts, unread_file
from ...runtime.conversation.chat_input import ChatInput, Handle
from ...runtime.conversation.left_out import tell_left_out
from ...runtime.conversation.seen_images import UNSEEN
from ...runtime.conversation.tools import loaded_text, named_choice, plain_arguments
from ...types.results import Tool, ToolChoice
from ...types.sampling_params import SamplingParams
from .bodies import (
    Block,
    CountRequest,
    DocumentBlock,
    ImageBlock,
    Message,
    OtherBlock,
    RedactedThinkingBlock,
    SearchResultBlock,
    SystemBlock,
    TextBlock,
    ThinkingBlock,
    ToolReferenceBlock,
    ToolResultBlock,
    ToolSpec,
    ToolUseBlock,
)

Plain = dict[str, Any]
IMAGES = "images"  # temporary key of a message: the images in it
HANDLE = "handle"  # temporary key of a message: its token ids, and the name of their field
PATH = "path"  # temporary key of a message: its path in the body
B = TypeVar("B")
SEEN = (TextBlock, ImageBlock, DocumentBlock, SearchResultBlock)
SAID = (TextBlock, ThinkingBlock, RedactedThinkingBlock, ToolUseBlock)
ALLOWED = {
    "user": (*SEEN, ToolResultBlock),
    "assistant": (*SEEN, *SAID, ToolReferenceBlock),
    "system": (TextBlock,),
}
EFFORTS = {"xhigh": "high", "max": "high"}  # templates know three levels
UNREADABLE = ("data", "signature", "cache_control")  # fields of results that the model cannot read


@dataclass(slots=True)
class Known:
    """Deferred tools by name, and the names of called tools by call id."""

    tools: Mapping[str, Tool]
    names: dict[str, str] = field(default_factory=dict)


def read_conversation(body: CountRequest) -> ChatInput:
    """Return the chat request of a body. Raises `InvalidRequest`."""
    tools = read_tools(body.tools, _referenced(body))
    messages = plain_conversation(body, tools)
    paths = [message.pop(PATH) for message in messages]
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
        paths=paths,
        tools=tools,
        tool_choice=read_choice(body, tools),
        template=template_options(body, messages),
    )


def plain_conversation(body: CountRequest, tools: Sequence[Tool] = ()) -> list[Plain]:
    """Return the messages for the chat template. Raises `InvalidRequest` with the block's path.

    Tool results precede the text of their message, directly after the calls that they answer.
    Consecutive messages of the same role are merged, as many templates require.
    """
    plains: list[Plain] = []
    system = _system_text(body.system) if body.system else None
    if system is not None:
        plains.append({"role": "system", "content": system, PATH: "system"})
    known = Known({tool.name: tool for tool in tools if tool.is_loaded})
    for index, message in enumerate(body.messages):
        path = f"messages[{index}]"
        plain = [{**each, PATH: path} for each in _plain(message, path, known)]
        if message.token_ids is not None:
            param = f"{path}.token_ids"
            if message.role != "assistant":
                raise InvalidRequest(f"{param} is only allowed in assistant messages", param=param)
            plain[0][HANDLE] = message.token_ids, param
        plains += plain
    return _merged(plains)


def template_options(body: CountRequest, messages: Sequence[Plain]) -> dict[str, object]:
    """Return the template options. The caller's ``chat_template_kwargs`` take precedence."""
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


def read_tools(specs: Sequence[ToolSpec] | None, referenced: frozenset[str]) -> list[Tool]:
    """Return the tools that the caller runs. Raises `InvalidRequest` for an incomplete one.

    ``referenced``: names of tools found by a tool search. Other deferred tools are left out.
    """
    tools = []
    for index, spec in enumerate(specs or ()):
        if not spec.is_custom:
            tell_left_out("tools of type", spec.type or "")
            continue
        if spec.name is None or spec.input_schema is None:
            where = f"tools[{index}]"
            raise InvalidRequest(f"{where} needs name and input_schema", param=where)
        if spec.defer_loading and spec.name not in referenced:
            continue
        tools.append(
            Tool(
                name=spec.name,
                description=spec.description,
                parameters=spec.input_schema,
                strict=bool(spec.strict),
                is_loaded=bool(spec.defer_loading),
            )
        )
    return tools


def _referenced(body: CountRequest) -> frozenset[str]:
    """Return the names of the tools that tool search results refer to."""
    if not any(spec.defer_loading for spec in body.tools or ()):
        return frozenset()
    return frozenset(
        inner.tool_name
        for message in body.messages
        for block in _of(message.content, ToolResultBlock)
        for inner in _of(_blocks(block), ToolReferenceBlock)
    )


def read_choice(body: CountRequest, tools: Sequence[Tool]) -> ToolChoice:
    """Return ``tool_choice`` as a `ToolChoice`. Raises `InvalidRequest`."""
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
    """Merge consecutive messages of the same role, except tool results."""
    messages: list[Plain] = []
    for role, neighbours in groupby(plains, key=itemgetter("role")):
        group = list(neighbours)
        messages += group if role == "tool" else [_joined(group)]
    return messages


def _joined(group: list[Plain]) -> Plain:
    """Return several messages as one. Raises `InvalidRequest` if one of them has token ids."""
    if len(group) == 1:
        return group[0]
    for plain in group:
        if HANDLE in plain:
            _, param = plain[HANDLE]
            message = f"{param}: adjacent messages must not have the same role"
            raise InvalidRequest(message, param=param)
    content = "\n".join(plain["content"] for plain in group if plain["content"])
    joined: Plain = {"role": group[0]["role"], "content": content, PATH: group[0][PATH]}
    thoughts = [plain["reasoning_content"] for plain in group if "reasoning_content" in plain]
    if thoughts:
        joined["reasoning_content"] = "".join(thoughts)
    calls = [call for plain in group for call in plain.get("tool_calls", ())]
    if calls:
        joined["tool_calls"] = calls
    images = [image for plain in group for image in plain.get(IMAGES, ())]
    return joined | ({IMAGES: images} if images else {})


def _plain(message: Message, path: str, known: Known) -> list[Plain]:
    """Return a message as template messages: each tool result becomes a message of its own."""
    blocks = message.content
    if isinstance(blocks, str):
        return [{"role": message.role, "content": blocks}]
    _check_blocks(blocks, message.role, path)
    if message.role == "assistant":
        return _assistant(blocks, known)
    plain = [
        _tool(block, known, f"{path}.content[{index}]")
        for index, block in enumerate(blocks)
        if isinstance(block, ToolResultBlock)
    ]
    if not plain or any(not isinstance(each, ToolResultBlock | OtherBlock) for each in blocks):
        plain.append({"role": message.role, **_seen(blocks, f"{path}.content", known)})
    return plain


def _seen(blocks: Sequence[Block], path: str, known: Known, *, is_result: bool = False) -> Plain:
    """Return the content that the model reads. Unsupported blocks are left out with a warning."""
    parts: list[str | ImageSource] = []
    loaded = [block.tool_name for block in _of(blocks, ToolReferenceBlock)]
    if loaded:
        tools = [known.tools[name] for name in loaded if name in known.tools]
        parts.append(loaded_text(tools, [name for name in loaded if name not in known.tools]))
    for index, block in enumerate(blocks):
        if isinstance(block, TextBlock):
            parts.append(block.text)
        elif isinstance(block, ImageBlock):
            parts.append(_image(block, f"{path}[{index}]", is_result=is_result))
        elif isinstance(block, DocumentBlock | SearchResultBlock):
            parts.append(_document(block))
        elif isinstance(block, OtherBlock) or (
            is_result and not isinstance(block, ToolReferenceBlock)
        ):
            tell_left_out("content blocks of type", _kind(block))
    text, images = join_parts(parts)
    return {"content": text} | ({IMAGES: images} if images else {})


def _document(block: DocumentBlock | SearchResultBlock) -> str:
    """Return the text of a document, or a note if it is not text."""
    source = block.source
    if isinstance(block, SearchResultBlock):
        head = f"{block.title or ''} {source if isinstance(source, str) else ''}".strip()
        return "\n".join(each for each in (head, readable(block.content)) if each)
    head = "\n".join(each for each in (block.title, block.context) if each)
    text = _text_of_source(source)
    if text is None:
        tell_left_out("documents without text")
        return unread_file(block.title)
    return f"{head}\n{text}" if head else text


def _text_of_source(source: object) -> str | None:
    match source:
        case {"type": "text", "data": str(text)}:
            return text
        case {"type": "content", "content": content}:
            return readable(content)
        case {"type": "base64", "media_type": str(kind), "data": str(data)} if kind.startswith(
            "text/"
        ):
            try:
                return base64.b64decode(data, validate=True).decode()
            except ValueError:
                return None
    return None


def readable(value: object) -> str:
    """Return content as text: strings are joined, other values are written as JSON."""
    if value is None or isinstance(value, str):
        return value or ""
    if isinstance(value, Block):
        return value.text if isinstance(value, TextBlock) else ""
    if isinstance(value, list):
        return "\n".join(text for each in value if (text := readable(each)))
    if isinstance(value, dict) and isinstance(value.get("text"), str):
        return str(value["text"])
    return msgspec.json.encode(_without_secrets(value)).decode()


def _without_secrets(value: object) -> object:
    if isinstance(value, list):
        return [_without_secrets(each) for each in value]
    if not isinstance(value, dict):
        return value
    return {
        name: _without_secrets(each)
        for name, each in value.items()
        if name not in UNREADABLE and not name.startswith("encrypted")
    }


def _image(block: ImageBlock, where: str, *, is_result: bool) -> str | ImageSource:
    source = block.source
    if source.type == "base64" and source.data is not None:
        return ImageSource(f"data:{source.media_type or 'image/png'};base64,{source.data}", where)
    if source.type == "url" and source.url is not None:
        return ImageSource(source.url, where)
    if is_result:
        return UNSEEN
    message = f"{where}: the source of an image must be base64 data or a URL"
    raise InvalidRequest(message, param=where)


def _check_blocks(blocks: Sequence[Block], role: str, path: str) -> None:
    """Raise `InvalidRequest` for a known block type that this role must not have."""
    for index, block in enumerate(blocks):
        where = f"{path}.content[{index}]"
        if not isinstance(block, (*ALLOWED[role], OtherBlock)):
            message = f"{where}: {_kind(block)} blocks are not supported in {role} messages"
            raise InvalidRequest(message, param=where)


def _blocks(result: ToolResultBlock) -> Sequence[Block]:
    return result.content if isinstance(result.content, list) else []


def _kind(block: Block) -> str:
    """Return the type of a block."""
    return block.type if isinstance(block, OtherBlock) else str(block.__struct_config__.tag)


def _assistant(blocks: Sequence[Block], known: Known) -> list[Plain]:
    """Return an assistant's message, split at the results of calls that a provider executed."""
    plains: list[Plain] = []
    begun: list[Block] = []
    for block in blocks:
        if isinstance(block, OtherBlock) and block.is_result:
            plains += [_said(begun, known)] if begun else []
            plains.append(_provided(block, known))
            begun = []
        else:
            begun.append(block)
    return [*plains, _said(begun, known)] if begun or not plains else plains


def _provided(block: OtherBlock, known: Known) -> Plain:
    """Return the result of a call that a provider executed."""
    text = readable(block.content)
    return _result(block.tool_use_id or "", text, known, is_error=bool(block.is_error))


def _said(blocks: Sequence[Block], known: Known) -> Plain:
    """Return an assistant's message. Its text blocks are joined: citations and calls split them."""
    words = "".join(block.text for block in _of(blocks, TextBlock))
    plain: Plain = {"role": "assistant", "content": words}
    thoughts = "".join(block.thinking for block in _of(blocks, ThinkingBlock))
    if thoughts:
        plain["reasoning_content"] = thoughts
    calls = _of(blocks, ToolUseBlock)
    if calls:
        known.names |= {call.id: call.name for call in calls}
        plain["tool_calls"] = [_call(call) for call in calls]
    for block in blocks:
        if not isinstance(block, SAID):
            tell_left_out("content blocks of type", _kind(block))
    return plain


def _call(block: ToolUseBlock) -> Plain:
    """Return a tool call. Invalid arguments, which clients wrap in an object, are unwrapped."""
    text = _unparsed(block.input)
    arguments = plain_arguments(block.input) if text is None else text
    function = {"name": block.name, "arguments": arguments}
    return {"id": block.id, "type": "function", "function": function}


def _unparsed(given: object) -> str | None:
    """Return the text of invalid arguments that this server or Claude Code wrapped; else None."""
    match given:
        case {"INVALID_JSON": str(text), **more} if not more:
            return text
        case {"__unparsedToolInput": {"raw": str(text), "len": int(size)}}:
            # If the sizes differ, the client truncated the text.
            return text if size in (len(text), len(text.encode())) else None
    return None


def _tool(block: ToolResultBlock, known: Known, path: str) -> Plain:
    """Return the result of a call that the client executed."""
    if isinstance(block.content, list):
        seen = _seen(block.content, f"{path}.content", known, is_result=True)
    else:
        seen = {"content": readable(block.content)}
    plain = _result(block.tool_use_id, seen["content"], known, is_error=bool(block.is_error))
    return seen | plain


def _result(call_id: str, text: str, known: Known, *, is_error: bool) -> Plain:
    """Return the result of a call. Templates do not support ``is_error``, so the text shows it."""
    content = f"Error: {text}" if is_error else text
    plain: Plain = {"role": "tool", "content": content, "tool_call_id": call_id}
    return plain | ({"name": known.names[call_id]} if call_id in known.names else {})


def _system_text(system: str | Sequence[SystemBlock]) -> str | None:
    """Return the text of the system prompt; None if none of its blocks is supported."""
    if isinstance(system, str):
        return system
    texts: list[str] = []
    for index, block in enumerate(system):
        if block.type != "text":
            tell_left_out("system blocks of type", block.type)
        elif block.text is None:
            raise InvalidRequest(f"system[{index}] needs text", param=f"system[{index}].text")
        else:
            texts.append(block.text)
    return "\n".join(texts) if texts else None


def _of(blocks: Sequence[object], kind: type[B]) -> list[B]:
    return [block for block in blocks if isinstance(block, kind)]
