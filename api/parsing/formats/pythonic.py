"""Reads calls that are written in Python: Llama 3.2's and 4's ``[f(city="Paris", days=3)]``.

The arguments are converted to JSON as they arrive; an expression that is not a literal becomes a
string. Sources: the models' published chat templates.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ...structured.grammar_text import lark_text
from ..call_grammars import Bare, CallGrammar, Marked, several
from ..family import Family
from ..grammars import Lark, listed, properties_of, required_of, takes_any, value
from ..output_parser import CallArguments, Cut, Ended, Malformed, Reading, Source, collected
from ..reading.answer import Beginning, Where
from ..reading.call_state import CallState
from ..reading.ends import NO_ENDS, Ends
from ..reading.json_call import json_block
from ..reading.json_text import scalar

if TYPE_CHECKING:
    from ...types.results import Tool

PYTHON_START, PYTHON_END = "<|python_start|>", "<|python_end|>"
MAX_DEPTH = 64  # maximum depth of nested lists
_FUNCTION = re.compile(r"[\w.-]+")
_KEY = re.compile(r"\w+")
_HEX = re.compile(r"[0-9a-fA-F]+")
_PLAIN = re.compile(r"[^\"'\\<]+")
_IN_EXPRESSION = re.compile(r"[^\"'()\[\]{},<]+")
_QUOTES = ('"""', "'''", '"', "'")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v"}
_ESCAPES |= {"0": "\0", "\n": "", **{char: char for char in "\\'\"/"}}
_NUM_DIGITS = {"x": 2, "u": 4, "U": 8}
_CLOSING = {"[": "]", "(": ")", "{": "}"}


def read_list(call: CallState) -> Reading[None]:
    """Read a list of calls without delimiters."""
    yield from call.source.white()
    yield from call.source.expect("[")
    yield from _calls(call, NO_ENDS, is_list=True)


def _is_list(source: Source) -> Reading[bool]:
    """Whether a list begins with text that looks like a call."""
    at = yield from source.after_white(1)
    end = yield from source.after(_FUNCTION, at)
    return end > at and (yield from source.ahead("(", end))


def _whole_answer(call: CallState) -> Reading[None]:
    yield from call.source.literal(PYTHON_START)
    yield from call.source.white()
    yield from call.source.expect("[")
    yield from _calls(call, Ends((PYTHON_END,)), is_list=True)
    yield from call.source.close(PYTHON_END)


_LIST = Beginning(
    mark="[", read=_whole_answer, is_ahead=_is_list, where=Where.LINE, is_plain=True, is_sure=False
)
# The whole answer is a list of calls, or ends with one.
PYTHONIC = (
    replace(_LIST, where=Where.START, is_sure=True),
    _LIST,
    Beginning(mark=PYTHON_START, read=_whole_answer, ends=(PYTHON_END,), is_plain=True),
)


def marked_pythonic(begin: str, end: str) -> tuple[Beginning, ...]:
    """Return the beginnings of calls in Python between two delimiters, or in a list without
    delimiters.

    Between the delimiters, LFM2 writes a list, and OLMo 3 writes one call per line.
    """

    def read(call: CallState) -> Reading[None]:
        source, ends = call.source, Ends((end,), {begin: ('{"name"', '[{"')})
        yield from source.expect(begin)
        yield from source.white()
        at = 0
        if is_list := (yield from source.ahead("[")):
            at = yield from source.after_white(1)
        if (yield from source.char(at)) in ("{", "`"):
            yield from json_block(call, ends)
        else:
            source.take(1 if is_list else 0)
            yield from _calls(call, ends, is_list=is_list)
        yield from source.close(end)

    return (Beginning(mark=begin, read=read, ends=(end,)), _LIST)


def _calls(call: CallState, ends: Ends, *, is_list: bool) -> Reading[None]:
    """Read calls that are separated by commas, semicolons or white space."""
    source = call.source
    while True:
        yield from source.white()
        yield from _Call(call, ends).read()
        call.settle()
        if is_list and (yield from source.close("]")):
            return
        at = yield from source.after_white()
        if (yield from source.char(at)) in (",", ";"):
            at = yield from source.after_white(at + 1)
        end = yield from source.after(_FUNCTION, at)
        if end == at or not (yield from source.ahead("(", end)):
            break
        source.take(at)
    if is_list:
        yield from source.close(",")
        yield from source.close("]")


class _Call:
    """Reads one call; ``ends`` are the texts that end it early (see `Ends`)."""

    def __init__(self, call: CallState, ends: Ends = NO_ENDS) -> None:
        self._call, self._source, self._ends = call, call.source, ends
        self._has_names = True  # whether all arguments so far have names

    def read(self) -> Reading[None]:
        """Read the call. Raises `Malformed` and `Cut`."""
        call, source = self._call, self._source
        name = call.check((yield from _word(source, _FUNCTION)))
        yield from source.expect("(")
        try:
            yield from source.white()
            if (yield from source.literal(")")):
                yield from call.whole(name, "{}")
            else:
                yield from self._keywords(name)
        except Cut:
            if not call.is_open and not call.is_held:
                yield from call.begin(name)
            raise

    def _keywords(self, name: str) -> Reading[None]:
        call, source, before, num_read = self._call, self._source, "{", 0
        while True:
            key = yield from self._keyword(name, num_read)
            num_read += 1
            if not call.is_open:
                yield from call.begin(name)
            yield CallArguments(f"{before}{json.dumps(key, ensure_ascii=False)}: ")
            yield from source.white()
            yield from self._value(0)
            before = ", "
            if not (yield from self._take_separator()):
                break
        yield CallArguments("}")
        yield from call.end()

    def _keyword(self, name: str, num_before: int) -> Reading[str]:
        """Read the name of an argument; a positional argument gets the name at its index in the
        schema.
        """
        source = self._source
        end = yield from source.after(_KEY, 0)
        at = yield from source.after_white(end)
        if end and (yield from source.char(at)) == "=":
            key = source.take(end)
            source.take(at + 1 - end)
            return key
        if not (yield from source.char(at)):
            raise Cut
        names = self._call.offers.argument_names(name)
        if num_before >= len(names) or (yield from source.peek()) in ("{", "*", ",", ")", "]"):
            raise Malformed
        self._has_names = False
        return names[num_before]

    def _take_separator(self) -> Reading[bool]:
        """Consume the text after an argument; return whether another argument follows."""
        source = self._source
        yield from source.white()
        yield from self._expression()  # drops the rest of an expression that began as a string
        yield from source.white()
        if (yield from source.literal(",")):
            yield from source.white()
        if (yield from source.literal(")")) or (yield from source.ahead("]")):
            return False
        if (yield from self._ends.here(source)):
            return False
        if not (yield from source.peek()):
            raise Ended
        return True

    def _value(self, depth: int) -> Reading[None]:
        first = yield from self._source.peek()
        if depth > MAX_DEPTH:
            raise Malformed
        if first in ("'", '"'):
            yield from self._string(is_argument=depth == 0 and self._has_names)
        elif first == "{":
            yield from self._dict(depth)
        elif first in ("[", "("):
            yield from self._list(_CLOSING[first], depth)
        else:
            word = yield from self._expression()
            if not word and not (yield from self._source.peek()):
                raise Cut
            yield CallArguments(scalar(word))

    def _expression(self) -> Reading[str]:
        """Read text up to a comma, or up to a closing bracket without its opening bracket."""
        source, pieces, open_ = self._source, list[str](), list[str]()
        while True:
            pieces.append((yield from source.run(_IN_EXPRESSION)))
            char = yield from source.peek()
            if not char or (char == "<" and (yield from self._ends.here(source))):
                break
            if char in ("'", '"'):
                pieces.append((yield from _quoted(source)))
                continue
            if not open_ and char in ",)]}":
                break
            if char in _CLOSING:
                open_.append(_CLOSING[char])
            elif open_[-1:] == [char]:
                open_.pop()
            pieces.append(source.take(1))
        return "".join(pieces).strip()

    def _list(self, closing: str, depth: int) -> Reading[None]:
        source = self._source
        source.take(1)
        before = "["
        yield from source.white()
        while not (yield from self._ends.closes(source, closing)):
            yield CallArguments(before)
            yield from self._value(depth + 1)
            yield from source.comma()
            before = ", "
        yield CallArguments("]" if before == ", " else "[]")

    def _dict(self, depth: int) -> Reading[None]:
        source = self._source
        source.take(1)
        before = "{"
        yield from source.white()
        while not (yield from self._ends.closes(source, "}")):
            key = yield from self._dict_key()
            yield CallArguments(f"{before}{key}: ")
            yield from source.white()
            yield from self._value(depth + 1)
            yield from source.comma()
            before = ", "
        yield CallArguments("}" if before == ", " else "{}")

    def _dict_key(self) -> Reading[str]:
        source = self._source
        if (yield from source.peek()) in ("'", '"'):
            key = json.loads((yield from collected(self._string(is_argument=False))))
        else:
            key = yield from _word(source, _KEY)
        yield from source.white()
        yield from source.expect(":")
        return json.dumps(key, ensure_ascii=False)

    # -- strings --------------------------------------------------------------------------------

    def _string(self, *, is_argument: bool) -> Reading[None]:
        source = self._source
        quote = yield from _quote(source)
        yield CallArguments('"')
        while True:
            if piece := source.match(_PLAIN):
                yield CallArguments(json.dumps(piece, ensure_ascii=False)[1:-1])
            char = yield from source.peek()
            if not char:
                raise Cut
            if char == "\\":
                yield from _escape(source)
            elif char == "<" and (yield from self._ends.in_string(source)):
                raise Malformed
            elif (yield from self._ends_string(quote, is_argument=is_argument)):
                source.take(len(quote))
                break
            elif not _PLAIN.match(char):
                yield CallArguments(json.dumps(source.take(1))[1:-1])
        yield CallArguments('"')

    def _ends_string(self, quote: str, *, is_argument: bool) -> Reading[bool]:
        """Whether a quote ends the string, judged by the text after it."""
        source = self._source
        if not (yield from source.ahead(quote)):
            return False
        if len(quote) > 1:
            return True
        at = yield from source.after_white(1)
        char = yield from source.char(at)
        if char == "," and is_argument:
            at = yield from source.after_white(at + 1)
            end = yield from source.after(_KEY, at)
            if end == at:
                return (yield from source.char(at)) in (")", "")
            end = yield from source.after_white(end)
            return (yield from source.char(end)) in ("=", "")
        return not char or char in ",)]}:" or (yield from self._ends.here(source, at))


def _word(source: Source, pattern: re.Pattern[str]) -> Reading[str]:
    word = yield from source.run(pattern)
    if not word:
        raise Malformed if (yield from source.peek()) else Cut
    return word


def _quote(source: Source) -> Reading[str]:
    for quote in _QUOTES:
        if (yield from source.literal(quote)):
            return quote
    raise Malformed if (yield from source.peek()) else Cut


def _quoted(source: Source) -> Reading[str]:
    """Consume and return a string in an expression, unchanged."""
    quote = source.take(1)
    pieces = [quote]
    while (char := (yield from source.peek())) and char != "\n":
        pieces.append(source.take(1))
        if char == quote:
            break
        if char == "\\":
            yield from source.want(1)
            pieces.append(source.take(1))
    return "".join(pieces)


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
    yield CallArguments(json.dumps(chr(int(digits, 16)))[1:-1])  # a lone surrogate stays escaped


def pythonic_block(lark: Lark, tools: Sequence[Tool], parallel: bool) -> str:
    """Return the rule for ``[f(city="Paris"), g()]``; values are in JSON, which the reader
    accepts.
    """
    indices = {tool.name: index for index, tool in enumerate(tools)}

    def written(tool: Tool) -> str:
        return f'"{tool.name}(" {_keywords(lark, tool, f"args_{indices[tool.name]}")} ")"'

    one = lark.each(tools, written)
    return f'"[" {several(one, ", ", parallel=parallel)} "]"'


def _keywords(lark: Lark, tool: Tool, name: str) -> str:
    if tool.input_pattern is not None:
        text = {"type": "string", "pattern": f"^(?:{tool.input_pattern})$"}
        return f'"input=" {_of(tool, "input", text)}'
    properties = properties_of(tool)
    if not properties and takes_any(tool):
        lark.rule("KEY", r"/[a-z_][a-z0-9_]{0,63}/")
        lark.rule("keyword", f'KEY "=" {value({}, strict=False)}')
        return '(keyword (", " keyword)*)?'
    members = []
    for key, schema in properties.items():
        written = f"{lark_text(key + '=')} {_of(tool, key, schema)}"
        members.append((written, key in required_of(tool)))
    return listed(lark, members, name)


def _of(tool: Tool, key: str, schema: Mapping[str, Any]) -> str:
    """Return the rule for the JSON of one argument."""
    return value(schema, strict=tool.strict, of=f"{tool.name}: {key}")


LFM2_CALLS, LFM2_CALLS_END = "<|tool_call_start|>", "<|tool_call_end|>"
OLMO_CALLS, OLMO_CALLS_END = "<function_calls>", "</function_calls>"


def _marked_list(begin: str, end: str) -> Marked:
    """Return the grammar of pythonic calls between delimiters."""

    def block(lark: Lark, tools: Sequence[Tool], parallel: bool) -> str:
        return f"{pythonic_block(lark, tools, parallel)} {lark.mark(end)}"

    return Marked(begin, block, repeats=False)


PYTHONIC_GRAMMAR = Bare(("[", PYTHON_START), pythonic_block)
LFM2 = _marked_list(LFM2_CALLS, LFM2_CALLS_END)
OLMO3 = _marked_list(OLMO_CALLS, OLMO_CALLS_END)


def _family(begin: str, end: str, grammar: CallGrammar) -> Family:
    return Family((begin, end), (begin,), marked_pythonic(begin, end), lambda *_: grammar)


LFM2_FAMILY = _family(LFM2_CALLS, LFM2_CALLS_END, LFM2)
OLMO3_FAMILY = _family(OLMO_CALLS, OLMO_CALLS_END, OLMO3)
PYTHONIC_FAMILY = Family(
    (PYTHON_START, PYTHON_END), ("[func_name1(",), PYTHONIC, lambda *_: PYTHONIC_GRAMMAR
)
