"""Conversion of OpenAI messages to the shape of chat templates, for the server and the SDK."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ....core.errors import InvalidRequest
from ...media.sources import ImageSource, Placed, join_parts, read_part
from .tools import plain_call

ROLES: Mapping[str, str] = {"developer": "system", "function": "tool"}
"""Roles that chat templates call differently."""


def num_system(roles: Iterable[str]) -> int:
    """Return the number of system messages at the beginning."""
    count = 0
    for role in roles:
        if ROLES.get(role, role) != "system":
            break
        count += 1
    return count


def one_system(plain: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with the leading system messages merged into one.

    Many templates accept only one system message.
    """
    if len(plain) < 2 or plain[1]["role"] != "system":
        return plain
    count = num_system(message["role"] for message in plain)
    if count < 2:
        return plain
    text = "\n\n".join(message["content"] for message in plain[:count])
    return [{"role": "system", "content": text}, *plain[count:]]


def read_message(
    message: Mapping[str, Any], where: str
) -> tuple[dict[str, Any], list[ImageSource]]:
    """Return a message in the shape of chat templates, and its images.

    The content becomes one text with placeholders in place of images; other fields are kept. Raises
    `InvalidRequest`, which names the field under ``where``.
    """
    if "content" not in message and not message.get("tool_calls"):
        raise InvalidRequest(f"{where}.content is missing", param=f"{where}.content")
    role, placed = message.get("role"), _content(message.get("content"), f"{where}.content")
    if not isinstance(role, str):
        raise InvalidRequest(f"{where}.role must be a text", param=f"{where}.role")
    plain = {**message, "role": ROLES.get(role, role), "content": placed.text}
    plain.pop("token_ids", None)
    calls = plain.pop("tool_calls", None)
    if calls is None:
        return plain, placed.images
    is_list = isinstance(calls, Sequence) and not isinstance(calls, str)
    if not is_list or not all(isinstance(call, Mapping) for call in calls):
        param = f"{where}.tool_calls"
        raise InvalidRequest(f"{param} must be a list of objects", param=param)
    if calls:
        plain["tool_calls"] = [plain_call(call) for call in calls]
    return plain, placed.images


def _content(content: object, where: str) -> Placed:
    if content is None or isinstance(content, str):
        return Placed(content or "", [])
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise InvalidRequest(f"{where} must be a text or a list of parts", param=where)
    return join_parts([read_part(part, f"{where}[{at}]") for at, part in enumerate(content)])
