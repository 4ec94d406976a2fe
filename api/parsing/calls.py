"""Ids of calls in the forms that some chat templates require."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

_SHORT = re.compile(r"[a-zA-Z0-9]{9}")


def with_short_ids(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The conversation with call ids of 9 letters and digits, which Mistral's templates require.

    Equal ids stay equal, in every turn: a growing conversation keeps its prefix.
    """
    return [_shortened(message) for message in messages]


def with_numbered_ids(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The same conversation with ids of the form ``functions.name:index``, whose names Kimi's
    templates write in the place of the calls'. Calls are counted from the first one on.
    """
    ids: dict[str, str] = {}
    return [_numbered(message, ids) for message in messages]


def _numbered(message: Mapping[str, Any], ids: dict[str, str]) -> Mapping[str, Any]:
    changed = dict(message)
    if isinstance(changed.get("tool_calls"), list | tuple):
        changed["tool_calls"] = [_renamed(call, ids) for call in changed["tool_calls"]]
    given = changed.get("tool_call_id")
    if isinstance(given, str) and given in ids:
        changed["tool_call_id"] = ids[given]
    return changed


def _renamed(call: Mapping[str, Any], ids: dict[str, str]) -> Mapping[str, Any]:
    function = call.get("function")
    name = function.get("name", "") if isinstance(function, Mapping) else ""
    written = f"functions.{name}:{len(ids)}"
    ids[str(call.get("id", written))] = written
    return {**call, "id": written}


def _shortened(message: Mapping[str, Any]) -> Mapping[str, Any]:
    changed = dict(message)
    if isinstance(changed.get("tool_call_id"), str):
        changed["tool_call_id"] = _short(changed["tool_call_id"])
    if changed.get("tool_calls"):
        calls = changed["tool_calls"]
        changed["tool_calls"] = [{**call, "id": _short(str(call.get("id", "")))} for call in calls]
    return changed


def _short(call_id: str) -> str:
    if _SHORT.fullmatch(call_id):
        return call_id
    return blake2b(call_id.encode(), digest_size=5).hexdigest()[:9]
