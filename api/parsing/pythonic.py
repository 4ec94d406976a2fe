"""Reading calls that are written in Python: Llama 3.2's and 4's ``[f(city="Paris", days=3)]``.

The arguments become JSON as they come. Sources: the models' published chat templates.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Container

from .calls import CallState, attempt, marked_calls
from .output_parser import CallArguments, Content, Cut, Malformed, Reading, Source

PYTHON_START, PYTHON_END = "<|python_start|>", "<|python_end|>"
MAX_DEPTH = 64  # lists within lists
_FUNCTION = re.compile(r"[\w.-]+")
_KEY = re.compile(r"\w+")
_SCALAR = re.compile(r"[\w.+-]+")
_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?", re.ASCII)
_HEX = re.compile(r"[0-9a-fA-F]+")
_PLAIN = re.compile(r"[^\"'\\]+")
_CONSTANTS = {"True": "true", "False": "false", "None": "null"}
_CONSTANTS |= {value: value for value in _CONSTANTS.values()}
_QUOTES = ('"""', "'''", '"', "'")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v"}
_ESCAPES |= {"0": "\0", "\n": "", **{char: char for char in "\\'\"/"}}
_NUM_DIGITS = {"x": 2, "u": 4, "U": 8}
_CLOSING = {"[": "]", "(": ")"}


def read_pythonic(source: Source, names: Container[str]) -> Reading[None]:
    """The whole answer is a list of calls; anything else is words, other names than these too."""
    yield from attempt(CallState(source, names), _calls)
    space = yield from source.white()
    if space and (yield from source.peek()):
        yield Content(space)
    yield from source.rest(Content)


def read_marked_pythonic(source: Source, begin: str, end: str) -> Reading[None]:
    """Words and calls: LFM2's list between marks, OLMo 3's with a call a line."""

    def read(call: CallState) -> Reading[None]:
        return _marked(call, begin, end)

    yield from marked_calls(source, begin, read, end)


def _marked(call: CallState, begin: str, end: str) -> Reading[None]:
    source = call.source
    yield from source.expect(begin)
    yield from source.white()
    is_list = yield from source.literal("[")
    while True:
        yield from source.white()
        yield from _call(call)
        yield from source.white()
        if (yield from source.literal(",")):
            continue
        if is_list or (yield from source.ahead(end[:1])) or not (yield from source.peek()):
            break
    if is_list:
        yield from source.closing("]")
        yield from source.white()
    yield from source.closing(end)


def _calls(call: CallState) -> Reading[None]:
    source = call.source
    yield from source.white()
    is_marked = yield from source.literal(PYTHON_START)
    yield from source.white()
    yield from source.expect("[")
    while True:
        yield from source.white()
        yield from _call(call)
        yield from source.white()
        if not (yield from source.literal(",")):
            break
    yield from source.closing("]")
    if is_marked:
        yield from source.white()
        yield from source.closing(PYTHON_END)


def _call(call: CallState) -> Reading[None]:
    source = call.source
    name = call.check((yield from _word(source, _FUNCTION)))
    yield from source.expect("(")
    try:
        yield from source.white()
        if (yield from source.literal(")")):
            yield from call.whole(name, "{}")
        else:
            yield from _keywords(call, name)
    except Cut:
        if not call.is_open:
            yield from call.begin(name)
        raise


def _keywords(call: CallState, name: str) -> Reading[None]:
    source, before = call.source, "{"
    while True:
        key = yield from _word(source, _KEY)
        yield from source.white()
        yield from source.expect("=")
        if not call.is_open:
            yield from call.begin(name)
        yield CallArguments(f"{before}{json.dumps(key, ensure_ascii=False)}: ")
        yield from source.white()
        yield from _value(source, 0)
        yield from source.white()
        if (yield from source.literal(",")):
            yield from source.white()
        if (yield from source.literal(")")):
            break
        before = ", "
    yield CallArguments("}")
    yield from call.end()


def _word(source: Source, pattern: re.Pattern[str]) -> Reading[str]:
    word = yield from source.run(pattern)
    if not word:
        raise Malformed if (yield from source.peek()) else Cut
    return word


def _value(source: Source, depth: int) -> Reading[None]:
    first = yield from source.peek()
    if depth > MAX_DEPTH:
        raise Malformed
    if first in ("'", '"'):
        yield from _string(source)
    elif first in ("[", "("):
        yield from _list(source, _CLOSING[first], depth)
    elif first == "{":
        yield from _dict(source, depth)
    else:
        yield CallArguments(_scalar((yield from _word(source, _SCALAR))))


def _list(source: Source, closing: str, depth: int) -> Reading[None]:
    source.take(1)
    before = "["
    yield from source.white()
    while not (yield from source.literal(closing)):
        yield CallArguments(before)
        yield from _value(source, depth + 1)
        yield from source.separator(closing)
        before = ", "
    yield CallArguments("]" if before == ", " else "[]")


def _dict(source: Source, depth: int) -> Reading[None]:
    source.take(1)
    before = "{"
    yield from source.white()
    while not (yield from source.literal("}")):
        yield CallArguments(before)
        yield from _string(source)
        yield from source.white()
        yield from source.expect(":")
        yield CallArguments(": ")
        yield from source.white()
        yield from _value(source, depth + 1)
        yield from source.separator("}")
        before = ", "
    yield CallArguments("}" if before == ", " else "{}")


def _string(source: Source) -> Reading[None]:
    quote = yield from _quote(source)
    yield CallArguments('"')
    while not (yield from source.literal(quote)):
        if piece := source.match(_PLAIN):
            yield CallArguments(json.dumps(piece, ensure_ascii=False)[1:-1])
            continue
        char = yield from source.peek()
        if char == "\\":
            yield from _escape(source)
        elif char in ("'", '"'):
            yield CallArguments(json.dumps(source.take(1))[1:-1])
        elif not char:
            raise Cut
    yield CallArguments('"')


def _quote(source: Source) -> Reading[str]:
    for quote in _QUOTES:
        if (yield from source.literal(quote)):
            return quote
    raise Malformed if (yield from source.peek()) else Cut


def _escape(source: Source) -> Reading[None]:
    yield from source.want(2)
    kind = source.take(2)[1:]
    if not kind:
        raise Cut
    if kind not in _NUM_DIGITS:
        text = _ESCAPES.get(kind, "\\" + kind)
        yield CallArguments(json.dumps(text, ensure_ascii=False)[1:-1])
        return
    yield from source.want(_NUM_DIGITS[kind])
    digits = source.take(_NUM_DIGITS[kind])
    if len(digits) < _NUM_DIGITS[kind]:
        raise Cut
    if not _HEX.fullmatch(digits) or int(digits, 16) > 0x10FFFF:
        raise Malformed
    yield CallArguments(json.dumps(chr(int(digits, 16)))[1:-1])  # half a character stays escaped


def _scalar(word: str) -> str:
    if word in _CONSTANTS or _NUMBER.fullmatch(word):
        return _CONSTANTS.get(word, word)
    try:
        value = float(word)
    except ValueError:
        raise Malformed from None
    if not math.isfinite(value):
        raise Malformed
    return repr(value)
