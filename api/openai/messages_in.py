"""Messages of OpenAI's bodies in the plain form that chat templates take."""

from __future__ import annotations

from typing import Any

from ...core.errors import InvalidRequest
from ..runtime.tools import plain_call
from .schema import ContentPart, Message


def plain_messages(messages: list[Message]) -> list[dict[str, Any]]:
    """What a chat template is given: content as one text, developer as system.

    System messages at the beginning become one: many templates take no second one.
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
