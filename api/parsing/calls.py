"""Parsing tool calls: code that all formats share.

A call begins when its name is known and its arguments begin. Before that, malformed text becomes
content; after that, an error ends the call, which then has no `CallEnd`.

JSON arguments are passed on as the model wrote them, valid or not: only strings and brackets are
parsed. The client can ask the model to repair them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from .output_parser import (
    CallArguments,
    CallBegin,
    CallEnd,
    Content,
    Cut,
    Malformed,
    Reading,
    Source,
    collected,
)

MAX_NAME_CHARS = 256


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


@dataclass(slots=True)
class CallState:
    """State of the present call.

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
        """Begin a call: its text cannot become content again."""
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
        yield Content(text)
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
        yield Content(space)
    return "" if (yield from source.until(mark, Content)) else None


ARGUMENT_KEYS = ("arguments", "parameters")
TOOL_NAME = "tool_name"  # Cohere's key of a name
EXTRA_KEYS = ("type", "id")  # that a call without a mark may have
_IN_STRING = re.compile(r'[^"\\]+')
_IN_OBJECT = re.compile(r'[^"{}\[\]<]+')
_SCALAR = re.compile(r"[\w.+-]+")
_SURROGATE = re.compile("[\ud800-\udfff]")  # half a character, which has no UTF-8
_BRACKETS = {"{": 1, "[": 1, "}": -1, "]": -1}


class JsonCall:
    """``{"name": ..., "arguments": {...}}``, its keys in any order.

    ``mark``: see `object_text`. ``is_bare``: no mark said that a call comes, so that an object
    with other keys, or without arguments, is an answer and no call.
    """

    def __init__(self, call: CallState, *, mark: str = "", is_bare: bool = False) -> None:
        self._call, self._source = call, call.source
        self._mark, self._is_bare = mark, is_bare
        self._name = ""
        self._held = ""  # arguments that came before the name
        self._is_done = False

    def read(self) -> Reading[None]:
        """Read it. Raises `Malformed` and `Cut`."""
        try:
            yield from self._members()
        except Cut:
            if self._name and not self._call.is_open and not self._is_done:
                yield from self._call.begin(self._name)
            raise
        if not self._is_done:
            if self._is_bare or not self._name:
                raise Malformed
            yield from self._call.whole(self._name, "{}")

    def _members(self) -> Reading[None]:
        source = self._source
        yield from source.expect("{")
        yield from source.white()
        while not (yield from source.literal("}")):
            yield from self._member()
            yield from source.white()
            if not (yield from source.literal(",")):
                yield from self._last_brace()
                return
            yield from source.white()

    def _last_brace(self) -> Reading[None]:
        if self._is_done:  # models forget it, and nothing is unclear without it
            yield from self._source.literal("}")
        else:
            yield from self._source.expect("}")

    def _member(self) -> Reading[None]:
        key = yield from _key(self._source)
        if (key == "name" or (key == TOOL_NAME and not self._is_bare)) and not self._name:
            self._name = self._call.check((yield from json_string(self._source)))
            if self._held:
                yield from self._whole(self._held)
        elif key in ARGUMENT_KEYS and not self._held and not self._is_done:
            yield from self._arguments()
        elif self._is_bare and key not in EXTRA_KEYS:
            raise Malformed
        else:
            yield from _skip_value(self._source)

    def _arguments(self) -> Reading[None]:
        if not self._name:
            self._held = yield from collected(arguments_text(self._source, self._mark))
        elif (yield from self._source.ahead("{")):
            yield from self._call.begin(self._name)
            yield from object_text(self._source, self._mark)
            self._is_done = True
            yield from self._call.end()
        else:
            yield from self._whole((yield from collected(arguments_text(self._source))))

    def _whole(self, arguments: str) -> Reading[None]:
        self._is_done = True
        yield from self._call.whole(self._name, arguments)


def arguments_text(source: Source, mark: str = "") -> Reading[None]:
    """An object; also one inside a string, as some models write it, or null for an empty one."""
    first = yield from source.peek()
    if first == "{":
        yield from object_text(source, mark)
    elif first == '"':
        text = (yield from json_string(source)).strip()
        if not text.startswith("{"):
            raise Malformed
        yield CallArguments(text)
    else:
        yield from source.expect("null")
        yield CallArguments("{}")


def object_text(source: Source, mark: str = "") -> Reading[None]:
    """An object or list as it comes. ``mark``, which begins with "<", may be in its strings only.

    Raises `Malformed` at the mark, `Cut` at the end of the text.
    """
    depth = 0
    while True:
        if piece := source.match(_IN_OBJECT):
            yield CallArguments(piece)
        char = yield from source.peek()
        if char == '"':
            yield from _string_text(source)
            continue
        if not char:
            raise Cut
        if char == "<" and mark and (yield from source.ahead(mark)):
            raise Malformed
        yield CallArguments(source.take(1))
        depth += _BRACKETS.get(char, 0)
        if depth == 0:
            return


def _string_text(source: Source) -> Reading[None]:
    yield CallArguments(source.take(1))
    while True:
        if piece := source.match(_IN_STRING):
            yield CallArguments(piece)
        char = yield from source.peek()
        if not char:
            raise Cut
        if char == "\\":
            yield from source.want(2)
            yield CallArguments(source.take(2))
        elif char == '"':
            yield CallArguments(source.take(1))
            return


def json_string(source: Source) -> Reading[str]:
    """The value of a string. Raises `Malformed` and `Cut`."""
    if not (yield from source.ahead('"')):
        raise Malformed if (yield from source.peek()) else Cut
    raw = yield from collected(_string_text(source))
    try:
        value = str(json.loads(raw, strict=False))
    except ValueError:
        raise Malformed from None
    if _SURROGATE.search(value):
        raise Malformed
    return value


def _key(source: Source) -> Reading[str]:
    key = yield from json_string(source)
    yield from source.white()
    yield from source.expect(":")
    yield from source.white()
    return key


def _skip_value(source: Source) -> Reading[None]:
    first = yield from source.peek()
    if first in ("{", "["):
        yield from collected(object_text(source))
    elif first == '"':
        yield from json_string(source)
    elif not (yield from source.run(_SCALAR)):
        raise Malformed if first else Cut
