"""Ids of calls in the history, for templates that take only ids of their own kind."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

_SHORT = re.compile(r"[a-zA-Z0-9]{9}")


def with_short_ids(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The same conversation with ids of 9 letters and digits, which Mistral's templates insist on.

    Equal ids stay equal, in every turn: a growing conversation keeps its prefix.
    """
    return [_shortened(message) for message in messages]


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
