"""Reading calls: what the formats have in common.

A call has begun when its name is known and its arguments begin. What turns out wrong before that
is given back as words; what turns out wrong later ends the call, which then has no `CallEnd`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from .events import CallArguments, CallBegin, CallEnd, Words
from .input_buffer import Cut, Malformed, Reading, Source

MAX_NAME_CHARS = 256


_SHORT = re.compile(r"[a-zA-Z0-9]{9}")


def with_short_ids(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The same conversation with ids of 9 letters and digits, which Mistral's templates insist on.

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


@dataclass(slots=True)
class CallState:
    """How far the call under way has come.

    ``names``: only these are calls, for the formats without a mark, where anything may look like
    one. None: any name; of a tool that is not there the client tells the model.
    """

    source: Source
    names: Container[str] | None = None
    is_open: bool = False  # begun and not ended
    has_begun: bool = False  # this one or one before it

    def check(self, name: str) -> str:
        """The name. Raises `Malformed`."""
        fits = 0 < len(name) <= MAX_NAME_CHARS and name.isprintable()
        if not fits or (self.names is not None and name not in self.names):
            raise Malformed
        return name

    def begin(self, name: str) -> Reading[None]:
        """From here on there is no way back to words."""
        self.is_open = self.has_begun = True
        self.source.let_go()
        yield CallBegin(name)

    def end(self) -> Reading[None]:
        """The call is complete; what follows may be words again."""
        self.is_open = False
        self.source.keep()
        yield CallEnd()

    def whole(self, name: str, arguments: str) -> Reading[None]:
        """All of it at once."""
        yield from self.begin(name)
        yield CallArguments(arguments)
        yield from self.end()


CallReader = Callable[[CallState], Reading[None]]


def attempt(call: CallState, read: CallReader, *, end: str = "", before: str = "") -> Reading[bool]:
    """Read calls from here; False if they are not whole. What is none is given as words.

    ``before``: space that was read already and is words, too, if there is no call. ``end``: the
    mark behind a call, which is no words where a call breaks off in front of it.
    """
    call.source.keep()
    is_whole = True
    try:
        yield from read(call)
    except (Malformed, Cut):
        is_whole = False
    kept = call.source.let_go()
    if call.is_open:
        yield from call.source.literal(end)
        call.is_open = False
    elif not is_whole and (text := ("" if call.has_begun else before) + kept):
        yield Words(text)
    return is_whole


def marked_calls(source: Source, mark: str, read: CallReader, end: str = "") -> Reading[None]:
    """Words, and calls wherever the mark is; the space around calls is not the user's."""
    is_whole = False
    while (space := (yield from _to_mark(source, mark, behind_call=is_whole))) is not None:
        is_whole = yield from attempt(CallState(source), read, end=end, before=space)


def _to_mark(source: Source, mark: str, *, behind_call: bool) -> Reading[str | None]:
    """Give the words up to the mark; the space that is alone before it, None if there is none."""
    space = yield from source.white()
    if (yield from source.ahead(mark)):
        return space
    if space and not (behind_call and not (yield from source.peek())):
        yield Words(space)
    return "" if (yield from source.until(mark, Words)) else None
