"""Reading calls in JSON, ``{"name": ..., "arguments": {...}}``, and models' variations of it."""

from __future__ import annotations

import json
import re

from ..output_parser import Cut, Ended, Malformed, Reading, Source, collected
from .call_state import CallState
from .ends import NO_ENDS, Ends
from .json_text import INVALID, json_string, object_of, object_text, scalar, whole_object

NAME_KEYS = ("name", "tool_name", "tool")
ARGUMENT_KEYS = ("arguments", "parameters", "args", "input")
FUNCTION = "function"  # key of the name, or of an object with name and arguments
WRAPPERS = (FUNCTION, "function_call", "tool_call")  # keys of an object with name and arguments
PLAIN_KEYS = {*NAME_KEYS, *ARGUMENT_KEYS, *WRAPPERS, "type", "id", "tool_call_id", "index"}
FENCE = "```"
_INFO = re.compile(r"[^\n`{\[]+")
_BETWEEN = re.compile(r"[\s,;]+")
_SCALAR = re.compile(r"[\w.+-]+")


class JsonCall:
    """Reads one call with its keys in any order.

    ``ends``: delimiters at which its arguments end. A plain call must have arguments and only
    `PLAIN_KEYS`: other objects are content. In other calls, arguments may be members next to the
    name.
    """

    def __init__(self, call: CallState, ends: Ends = NO_ENDS) -> None:
        self._call, self._source, self._ends = call, call.source, ends
        self._name = ""
        self._held = ""  # arguments that came before the name
        self._beside: dict[str, str] = {}  # JSON text of other members by key
        self._is_done = False

    def read(self) -> Reading[None]:
        """Read the call. Raises `Malformed` and `Cut`."""
        call = self._call
        try:
            yield from self._members()
        except Cut:
            if self._name and not self._is_done and not call.is_open and not call.is_held:
                yield from call.begin(self._name)
            raise
        if not self._is_done:
            if call.is_plain or not self._name:
                raise Malformed
            names = call.offers.argument_names(self._name)
            given = [f"{json.dumps(k)}: {v}" for k, v in self._beside.items() if k in names]
            yield from call.whole(self._name, f"{{{', '.join(given)}}}")

    def _members(self) -> Reading[None]:
        source = self._source
        yield from source.expect("{")
        while (yield from source.literal("{")):  # models may double the brace, as in f-strings
            pass
        yield from source.white()
        while not (yield from source.literal("}")):
            yield from self._member()
            yield from source.white()
            is_lax = not self._call.is_plain and not self._is_done
            has_comma = yield from source.literal(",")
            if not has_comma and not (is_lax and (yield from source.peek()) in ('"', "'")):
                yield from self._last_brace()
                return
            yield from source.white()

    def _last_brace(self) -> Reading[None]:
        """Take the last brace, unless the call is complete without it."""
        if (yield from self._source.literal("}")) or self._is_done:
            return
        if not (yield from self._source.peek()):
            raise Ended
        if not (yield from self._ends.here(self._source)):
            raise Malformed

    def _member(self) -> Reading[None]:
        key = yield from json_string(self._source)
        if self._call.is_plain and key not in PLAIN_KEYS:
            raise Malformed
        yield from self._source.white()
        yield from self._source.expect(":")
        yield from self._source.white()
        first = yield from self._source.peek()
        if key in WRAPPERS and first == "{":
            yield from self._members()
        elif key in (*NAME_KEYS, FUNCTION) and not self._name:
            self._name = self._call.check((yield from json_string(self._source)))
            if self._held:
                yield from self._whole(self._held)
        elif key in ARGUMENT_KEYS and not self._held and not self._is_done:
            yield from self._arguments()
        else:
            self._beside[key] = yield from self._other(first)

    def _arguments(self) -> Reading[None]:
        is_object = yield from self._source.ahead("{")
        if is_object and self._name:
            yield from self._call.begin(self._name)
            yield from object_text(self._source, self._ends)
            self._is_done = True
            yield from self._call.end()
            return
        if is_object:
            self._held = yield from whole_object(self._source, self._ends)
        else:
            self._held = yield from other_arguments(self._call, self._ends)
        if self._name:
            yield from self._whole(self._held)

    def _whole(self, arguments: str) -> Reading[None]:
        self._is_done = True
        yield from self._call.whole(self._name, arguments)

    def _other(self, first: str) -> Reading[str]:
        if first in ("{", "["):
            return (yield from collected(object_text(self._source, self._ends)))
        if first in ('"', "'"):
            return json.dumps((yield from json_string(self._source)), ensure_ascii=False)
        word = yield from self._source.run(_SCALAR)
        if not word:
            raise Malformed if first else Cut
        return scalar(word)


def other_arguments(call: CallState, ends: Ends) -> Reading[str]:
    """Return the JSON object for arguments that are written as a string, a list or null.

    A string that contains an object becomes this object; null, "" and [] become an empty one.
    Another string or list becomes the member `INVALID`, or raises `Malformed` if the call is plain.
    Other arguments raise `Malformed`.
    """
    source = call.source
    first = yield from source.peek()
    if first == '"' and (yield from _is_bare_object(source)):
        source.take(1)
        text = yield from whole_object(source, ends)
        yield from source.literal('"')
    elif first in ('"', "'"):
        text = yield from json_string(source)
    elif first == "[":
        text = yield from whole_object(source, ends)
    elif first in (",", "}") and not call.is_plain:
        text = ""
    else:
        yield from source.expect("null")
        text = ""
    found = object_of(text)
    if call.is_plain and INVALID in found:
        raise Malformed
    return found


def _is_bare_object(source: Source) -> Reading[bool]:
    """Whether a string comes next that contains an object with unescaped quotes."""
    if not (yield from source.ahead('"{')):
        return False
    after = yield from source.after_white(2)
    if not (yield from source.ahead('"', after)):
        return False
    return (yield from source.char(after + 1)).isidentifier()


def json_calls(call: CallState, ends: Ends = NO_ENDS) -> Reading[None]:
    """Read calls separated by commas, semicolons or white space, or in a list."""
    source = call.source
    yield from source.white()
    is_list = yield from source.literal("[")
    while True:
        yield from source.white()
        yield from JsonCall(call, ends).read()
        yield from surplus(call, is_list=is_list)
        call.settle()
        if not (yield from _take_separator(call, is_list=is_list)):
            return


def json_block(call: CallState, ends: Ends = NO_ENDS) -> Reading[None]:
    """Read calls in JSON, separated or in lists; a code fence may surround them."""
    source = call.source
    is_fenced = yield from fence(source)
    yield from json_calls(call, ends)
    while (yield from _is_call(source, ends, (at := (yield from source.after(_BETWEEN, 0))))):
        source.take(at)
        yield from json_calls(call, ends)
    if is_fenced:
        yield from source.close(FENCE)


def _is_call(source: Source, ends: Ends, at: int) -> Reading[bool]:
    """Whether another object or list of objects begins ``at`` characters from here."""
    if (yield from ends.here(source, at)):
        return False
    if (yield from source.char(at)) == "[":
        at = yield from source.after_white(at + 1)
    return (yield from source.char(at)) == "{"


def named_call(call: CallState, name: str, ends: Ends = NO_ENDS) -> Reading[None]:
    """Read the arguments of a call whose name is known; a code fence may surround them.

    If a delimiter in ``ends`` comes instead, the call has no arguments.
    """
    source = call.source
    is_fenced = yield from fence(source)
    yield from source.white()
    first = yield from source.peek()
    if first == "{":
        yield from call.begin(name)
        yield from object_text(source, ends)
        yield from call.end()
    elif not first:
        yield from call.begin(name)
        raise Cut
    elif (yield from ends.here(source)):
        yield from call.whole(name, "{}")
    else:
        yield from call.whole(name, (yield from other_arguments(call, ends)))
    yield from surplus(call)
    if is_fenced:
        yield from source.close(FENCE)
    call.settle()


def fence(source: Source) -> Reading[bool]:
    """Take a fence and its info string, if they come next; return whether they did."""
    at = yield from source.after_white()
    if not (yield from source.ahead(FENCE, at)):
        return False
    source.take(at + len(FENCE))
    yield from source.run(_INFO)
    return True


def surplus(call: CallState, *, is_list: bool = False) -> Reading[None]:
    """Take superfluous closing brackets."""
    source = call.source
    at = yield from source.after_white()
    while (char := (yield from source.char(at))) == "}" or (char == "]" and not is_list):
        source.take(at + 1)
        at = yield from source.after_white()


def _take_separator(call: CallState, *, is_list: bool) -> Reading[bool]:
    """Take the separator before another call, or the end of a list; return whether a call comes."""
    source = call.source
    at = yield from source.after_white()
    char = yield from source.char(at)
    if is_list and char == "]":
        source.take(at + 1)
        return False
    if char in (",", ";"):
        start = yield from source.after_white(at + 1)
        after = yield from source.char(start)
        if after == "{":
            source.take(start)
            return True
        if not after or (is_list and after == "]"):
            source.take(start + len(after))
        return False
    if char == "{":
        source.take(at)
    return char == "{"
