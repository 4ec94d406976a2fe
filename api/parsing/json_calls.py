"""Reading calls that are written in JSON.

Of arguments only strings and brackets are looked at: they are given on as the model wrote them,
valid or not, because the client can ask the model to repair them and we can not.
"""

from __future__ import annotations

import json
import re

from .calls import CallState
from .events import CallArguments
from .input_buffer import Cut, Malformed, Reading, Source, collected

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
