"""Reads calls whose arguments are plain text between tags, one pair of tags per argument.

The tool's schema determines the type of each value. A value may contain tags as text: a tag closes
the value only if the text after it may follow there, and an argument without its closing tag ends
at the next argument of the tool. Sources: the published chat templates of Qwen3-Coder, Seed-OSS,
MiniMax M2 and GLM 4.5.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ...structured.grammar_text import lark_text
from ..call_grammars import Marked
from ..family import Family
from ..grammars import Lark, _check_text, properties_of, required_of
from ..output_parser import CallArguments, Cut, Malformed, Reading, Source, collected
from ..reading.answer import Beginning
from ..reading.call_state import CallState
from ..reading.ends import Ends
from ..reading.json_call import json_block
from ..reading.json_text import CONSTANTS, INVALID, is_json, object_text, repaired
from ..reading.offers import KINDS, kinds, listed_values
from .pythonic import _of

if TYPE_CHECKING:
    from ...types.results import Tool

_QUOTES = frozenset("\"'`\\,;)]")  # a tag next to such a character is quoted text


@dataclass(frozen=True, slots=True, kw_only=True)
class Tags:
    """The tags around calls, functions and arguments.

    A function's name is between ``function`` and ``named``. An argument's name is between
    ``parameter`` and ``value``, and ``value_end`` ends its value. ``name`` and ``argument`` are
    patterns of valid names. ``has_breaks``: a line break at the beginning or the end of a value
    belongs to the tags. A format with functions writes names as attributes, followed by ``quote``;
    the reader also accepts other quotes and ``name=``. ``types``: attributes of a parameter's tag
    by the JSON type that they declare. ``object_marks``: the tags around arguments that are
    written as one JSON object.
    """

    begin: str
    end: str
    function: str = ""
    named: str = ""
    quote: str = ""
    function_end: str = ""  # if empty, the call ends with ``end``
    parameter: str
    value: tuple[str, ...]  # the tags before a value, with any white space between them
    value_end: str
    name: re.Pattern[str]
    argument: re.Pattern[str]
    has_breaks: bool = False
    line: str = "\n"  # the text between tags that the model writes
    types: Mapping[str, str] = field(default_factory=dict)
    object_marks: tuple[str, str] = ("", "")

    @property
    def closing(self) -> tuple[str, ...]:
        """The closing tags, inner ones first."""
        return tuple(filter(None, (self.value_end, self.function_end, self.end)))

    @property
    def opening(self) -> tuple[str, ...]:
        """The tags that open an argument or a call."""
        return tuple(filter(None, (self.parameter, self.function, self.begin)))

    @property
    def begins(self) -> tuple[str, ...]:
        """The opening tags without their quotation mark, which a model may leave out."""
        return tuple(tag.rstrip('"') for tag in self.opening)

    @property
    def function_start(self) -> str:
        """The tag with the name of a function, without its attribute."""
        return _stem(self.function)

    @property
    def parameter_start(self) -> str:
        """The tag with the name of an argument, without its attribute."""
        return _stem(self.parameter) if self.function else self.parameter

    def name_in(self, written: str) -> str | None:
        """Return the name in an opening tag.

        Returns "" for an empty name, and None if the tag has no name.
        """
        if not self.function:
            return _bare(written)
        found = _ATTRIBUTE.fullmatch(written)
        return _bare(found[found.lastindex or 0]) if found else None

    def declared(self, written: str, types: frozenset[str]) -> frozenset[str]:
        """Return the types of a value; ``types`` are its schema's.

        If these allow a string and other types, the type that the opening tag ``written`` declares,
        if any, decides whether the value is a string.
        """
        if types and (types == {"string"} or "string" not in types):
            return types
        given = {name for name, attribute in self.types.items() if attribute in written}
        if not given:
            return types
        return frozenset({"string"}) if "string" in given else KINDS - {"string"}

    def attribute(self, kind: str) -> str:
        """Return the attribute that declares a type, with the space before it."""
        return f" {self.types[kind]}" if kind in self.types else ""

    def with_form(self, written: str) -> Tags:
        """Return these tags with the argument's tag in the form that the model wrote.

        ``written`` is the text after the tag's name.
        """
        tag = self.parameter_start + written
        if tag.startswith(self.parameter):
            return self
        return replace(self, parameter=tag[: tag.index("=") + 1])


WRAPPERS = ("<tool_call>", "<tool_calls>", "<function_calls>")
NAME = re.compile(r"[^<>\n]+")
_ATTRIBUTE = re.compile(r"""(?:\s+(?:name|tool|key))?\s*=\s*(?:"([^"]*).*|'([^']*).*|(.*))""")
_WORD = re.compile(r"[\w.:-]+")
_INSIDE_QWEN: dict[str, Any] = {
    "function": "<function=", "named": ">", "function_end": "</function>",
    "parameter": "<parameter=", "value": (">",), "value_end": "</parameter>",
    "name": NAME, "argument": NAME, "has_breaks": True,
}  # fmt: skip
QWEN_CODER = Tags(begin="<tool_call>", end="</tool_call>", **_INSIDE_QWEN)
SEED = Tags(begin="<seed:tool_call>", end="</seed:tool_call>", **_INSIDE_QWEN)
MINIMAX = Tags(
    begin="<minimax:tool_call>", end="</minimax:tool_call>",
    function='<invoke name="', named=">", quote='"', function_end="</invoke>",
    parameter='<parameter name="', value=(">",), value_end="</parameter>",
    name=NAME, argument=NAME,
)  # fmt: skip
GLM = Tags(
    begin="<tool_call>", end="</tool_call>", parameter="<arg_key>",
    value=("</arg_key>", "<arg_value>"), value_end="</arg_value>", name=_WORD, argument=NAME,
)  # fmt: skip


def tagged_beginnings(tags: Tags) -> list[Beginning]:
    """Return how calls begin: with the format's first delimiter, or with a function's tag."""
    ends = tuple(filter(None, (tags.function_end, tags.end)))
    marked = Beginning(mark=tags.begin, read=partial(read_block, tags=tags), ends=ends)
    return [marked, *function_beginnings(tags)] if tags.function else [marked]


def function_beginnings(tags: Tags) -> list[Beginning]:
    """Return how calls begin if the outer delimiter of their format is missing.

    Their functions may stand alone, or between the tags of other formats.
    """
    start = tags.function_start

    def is_ahead(source: Source, before: str) -> Reading[bool]:
        at = (yield from source.after_white(len(before))) if before else 0
        is_there = yield from source.ahead(start, at)
        return is_there and (yield from source.char(at + len(start))) in ("=", " ")

    def read(call: CallState, before: str) -> Reading[None]:
        yield from call.source.expect(before)
        yield from call.source.white()
        yield from _functions(call, tags)

    return [
        Beginning(
            mark=before or start,
            read=partial(read, before=before),
            is_ahead=partial(is_ahead, before=before),
            ends=(tags.function_end, tags.end, before.replace("<", "</")),
            is_plain=True,
        )
        for before in ("", *WRAPPERS)
    ]


def read_block(call: CallState, tags: Tags | None = None) -> Reading[None]:
    """Read calls from their first delimiter on: between the tags of a format, or as JSON.

    Without ``tags`` the delimiter is ``<tool_call>``, and the text after it identifies the format.
    """
    source, own = call.source, tags or QWEN_CODER
    yield from source.expect(own.begin)
    yield from source.white()
    first = yield from source.peek()
    if first in ("{", "[", "`"):
        yield from json_block(call, Ends((own.end,), {own.begin: ('{"name"',)}))
    elif tags := (yield from _which(source, own)):
        yield from _functions(call, tags)
    elif not own.function or (yield from _is_glm(call)):
        yield from _functions(call, GLM)
    else:
        raise Malformed if first else Cut
    yield from source.close(own.end)


def _which(source: Source, own: Tags) -> Reading[Tags | None]:
    """Return the tags of the function that comes next, or None.

    The delimiters ``begin`` and ``end`` around the call are taken from ``own``.
    """
    for tags in (own, QWEN_CODER, MINIMAX):
        if tags.function and (yield from source.ahead(tags.function_start)):
            return replace(tags, begin=own.begin, end=own.end)
    return None


def _is_glm(call: CallState) -> Reading[bool]:
    """Whether a name comes next, with arguments in GLM's tags or, for a known tool, in JSON."""
    source = call.source
    end = yield from source.after(GLM.name, 0)
    at = yield from source.after_white(end)
    if (yield from source.char(at)) == "{":
        return source.text(0, end) in call.offers
    return (yield from source.ahead(GLM.parameter, at))


def _functions(call: CallState, tags: Tags) -> Reading[None]:
    """Read consecutive functions."""
    source, is_first, start = call.source, True, tags.function_start
    while is_first or (start and (yield from source.ahead(start))):
        yield from _Function(call, tags).read()
        call.settle()
        at = yield from source.after_white()
        if start and (yield from source.ahead(start, at)):
            source.take(at)
        is_first = False


class _Function:
    """Reads one call."""

    def __init__(self, call: CallState, tags: Tags) -> None:
        self._call, self._source, self._tags = call, call.source, tags
        self._name = self._written = ""
        self._given: set[str] = set()  # the names of the arguments so far
        self._last = "\n"  # the last character of the current value
        self._is_closed = False  # whether the last value ended with its own tag
        self._is_quoting = False  # whether the current value quotes the beginning of a call

    def read(self) -> Reading[None]:
        """Read the call. Raises `Malformed` and `Cut`."""
        call, source, tags = self._call, self._source, self._tags
        yield from source.expect(tags.function_start)
        self._name = call.check(tags.name_in((yield from source.run(tags.name))) or "")
        yield from self._name_end()
        if (yield from self._is_object()):
            yield from self._object()
        else:
            yield from self._elements()
            yield from self._opened()
            yield CallArguments("}")
            yield from call.end()

    def _name_end(self) -> Reading[None]:
        """Consume the end of the tag with the name; a line break may replace it."""
        source, tags = self._source, self._tags
        at = yield from source.after_white()
        if not at or not (yield from source.which((tags.parameter_start, tags.function_end), at)):
            yield from source.expect(tags.named)
        yield from source.white()

    @property
    def _is_function(self) -> bool:
        """Whether the name calls a tool, rather than being the next word of a sentence."""
        return bool(self._tags.function) or self._name in self._call.offers

    def _is_object(self) -> Reading[bool]:
        """Whether the arguments are a JSON object; takes the tag before it."""
        if begin := self._tags.object_marks[0]:
            yield from self._source.literal(begin)
        return self._is_function and (yield from self._source.ahead("{"))

    def _opened(self) -> Reading[None]:
        if not self._call.is_open:
            yield from self._call.begin(self._name)
            yield CallArguments("{")

    def _object(self) -> Reading[None]:
        """Read arguments that are one JSON object."""
        tags = self._tags
        yield from self._call.begin(self._name)
        yield from object_text(self._source, Ends(tags.closing[1:]))
        yield from self._call.end()
        for mark in filter(None, (tags.object_marks[1], tags.function_end)):
            yield from self._source.close(mark)

    def _elements(self) -> Reading[None]:
        """Read arguments up to the end of the call, whose closing tag may be missing."""
        source, tags, call = self._source, self._tags, self._call
        outside = tuple(filter(None, (tags.end, tags.function_start, tags.begin)))
        starts = (*tags.closing, *outside, tags.parameter_start)
        while True:
            yield from source.white()
            if not (yield from source.peek()):
                yield from self._end_of_text()
                return
            if (yield from source.literal(tags.parameter_start)):
                yield from self._parameter()
            elif tags.function_end and (yield from source.literal(tags.function_end)):
                return
            elif call.is_plain and not call.is_open:
                raise Malformed
            elif (yield from source.which(outside)):
                return
            elif not call.is_open:
                raise Malformed
            else:  # text outside all arguments
                source.take(1)
                yield from _dropped(source.until_any(starts, CallArguments))
                yield from source.literal(tags.value_end)

    def _end_of_text(self) -> Reading[None]:
        """Accept missing closing tags after complete arguments.

        Raises `Cut` if the answer was cut off or the call has not begun.
        """
        if not self._call.is_open and (self._call.is_plain or not self._is_function):
            raise Cut
        if self._source.is_cut:
            yield from self._opened()
            raise Cut

    # -- arguments ------------------------------------------------------------------------------

    def _parameter(self) -> Reading[None]:
        """Read an argument; drop it if it has no name."""
        key = yield from self._key()
        self._last, self._is_quoting = "\n", False
        if not key:
            yield from _dropped(self._pieces())
            return
        before = ", " if self._call.is_open else "{"
        if not self._call.is_open:
            yield from self._call.begin(self._name)
        yield CallArguments(f"{before}{json.dumps(key, ensure_ascii=False)}: ")
        self._given.add(key)
        schema = self._call.offers.schema(self._name)
        properties = schema.get("properties", {})
        types = self._tags.declared(self._written, kinds(properties.get(key), schema))
        if self._tags.has_breaks:
            yield from self._source.literal("\n")
        if types <= {"string"}:
            yield CallArguments('"')
            yield from self._text()
            yield CallArguments('"')
        else:
            yield from self._other(types)

    def _key(self) -> Reading[str]:
        """Read the name of an argument and the tags before its value; "" if they are malformed."""
        source = self._source
        self._written = written = yield from source.run(self._tags.argument)
        key = self._tags.name_in(written)
        if key:
            self._tags = self._tags.with_form(written)
        is_value = False
        for index, mark in enumerate(self._tags.value):
            if index:
                yield from source.white()
            is_value = yield from source.literal(mark)
        if not is_value and not (yield from source.peek()):
            raise Cut
        return key if key and is_value else ""

    def _text(self) -> Reading[None]:
        """Yield the value as the inside of a JSON string, without the tags' white space."""
        held: list[str] = []
        for event in self._pieces():
            if event is None:
                yield None
                continue
            assert isinstance(event, CallArguments)
            stripped = event.text.rstrip()
            if stripped:
                yield CallArguments(_inside("".join(held) + stripped))
                held.clear()
            held.append(event.text[len(stripped) :])
        yield CallArguments(_inside(self._without_break("".join(held))))

    def _other(self, types: frozenset[str]) -> Reading[None]:
        """Read a value whose type may be other than string."""
        text = yield from collected(self._pieces())
        yield CallArguments(as_json(text.strip(), self._without_break(text), types))

    def _without_break(self, text: str) -> str:
        """Return the end of a value without the white space that belongs to the next tag."""
        if not self._is_closed:
            return text.rstrip()
        return text.removesuffix("\n") if self._tags.has_breaks else text

    def _pieces(self) -> Reading[None]:
        """Yield the text of a value and consume its closing tag.

        Raises `Cut` if the text ends before the value does.
        """
        source, tags = self._source, self._tags
        while mark := (yield from self._to_tag()):
            if (yield from self._ends_value(mark)):
                self._is_closed = yield from source.literal(tags.value_end)
                return
            yield CallArguments(source.take(len(mark)))
            self._last = mark[-1]
            if mark in tags.opening[1:]:
                self._is_quoting = True
            elif (yield from source.peek()) in _QUOTES:
                self._is_quoting = False
        raise Cut

    def _to_tag(self) -> Reading[str]:
        """Yield the text before the next tag and return the tag without consuming it; "" for
        none.
        """
        tags = self._tags
        reading = self._source.until_any((*tags.closing, *tags.opening), CallArguments)
        while True:
            try:
                event = next(reading)
            except StopIteration as end:
                return str(end.value)
            if isinstance(event, CallArguments):
                self._last = event.text[-1]
            yield event

    # -- where a value ends ---------------------------------------------------------------------

    def _ends_value(self, mark: str) -> Reading[bool]:
        """Whether the next tag ends the current value rather than being part of it."""
        source, tags = self._source, self._tags
        is_quoted = mark in tags.opening[1:] and self._last in "\"'`"
        if is_quoted or (self._is_quoting and mark in tags.opening):
            return False
        if mark == tags.parameter:
            return (yield from self._is_next_argument(len(mark)))
        if mark == tags.function:
            return (yield from self._is_offered(len(mark)))
        at = yield from source.after_white(len(mark))
        if mark == tags.begin:
            if tags.function and not (yield from source.ahead(tags.function, at)):
                return False
            return (yield from self._is_offered(at + len(tags.function)))
        if not (yield from source.char(at)):
            return mark == tags.value_end or not source.is_cut
        outer = tags.closing[tags.closing.index(mark) + 1 :]
        if closing := (yield from source.which(outer, at)):
            return (yield from self._is_closing(closing, at))
        begins = tags.begins[tags.closing.index(mark) :]
        return bool((yield from source.which(begins, at)))

    def _is_closing(self, closing: str, at: int) -> Reading[bool]:
        """Whether a closing tag at ``at`` ends the call, and is not quoted text in a value."""
        source, tags = self._source, self._tags
        direct = at + len(closing)
        after = yield from source.after_white(direct)
        outer = tags.closing[tags.closing.index(closing) + 1 :]
        if further := (yield from source.which(outer, after)):
            return (yield from self._is_closing(further, after))
        return not (self._is_quoting and (yield from source.char(direct)) in _QUOTES)

    def _is_next_argument(self, at: int) -> Reading[bool]:
        """Whether the name at ``at`` is missing, or is a further argument of the tool."""
        source = self._source
        end = yield from source.after(self._tags.argument, at)
        key = _bare(source.text(at, end)).partition('"')[0]
        if not key:
            return self._last == "\n"
        if key in self._given or not (yield from source.ahead(self._tags.value[0], end)):
            return False
        names = self._call.offers.argument_names(self._name)
        return key in names if names else self._last == "\n"

    def _is_offered(self, at: int) -> Reading[bool]:
        """Whether an offered tool's name is at ``at``, followed by arguments or an end tag."""
        source, tags = self._source, self._tags
        end = yield from source.after(tags.name, at)
        if not (yield from source.ahead(tags.named, end)):
            return False
        if _bare(source.text(at, end)) not in self._call.offers:
            return False
        at = yield from source.after_white(end + len(tags.named))
        marks = (tags.parameter_start, *tags.closing[1:])
        return bool((yield from source.which(marks, at))) or (yield from source.char(at)) in "{"


def _bare(name: str) -> str:
    return name.strip(" \t\"'/")


def _stem(tag: str) -> str:
    found = re.match(r"<[^\s=]+", tag)
    return found[0] if found else ""


def _inside(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _dropped(reading: Reading[object]) -> Reading[None]:
    """Run ``reading`` to its end and drop its events."""
    for event in reading:
        if event is None:
            yield None


def as_json(word: str, text: str, types: frozenset[str]) -> str:
    """Return the JSON of a value of one of ``types``; ``word`` is its text without white space."""
    word = CONSTANTS.get(word, word)
    if "string" in types and word != "null":
        return json.dumps(text, ensure_ascii=False)
    if is_json(word):
        return word
    found = repaired(word) if word.startswith(("{", "[")) else None
    return found if found and INVALID not in found else json.dumps(text, ensure_ascii=False)


def tagged_block(lark: Lark, tools: Sequence[Tool], tags: Tags) -> str:
    """Return the grammar for one function call in tags; each call has its own block."""
    close = f'{lark.mark(tags.function_end)} "\\n"' if tags.function_end else ""

    def written(tool: Tool) -> str:
        begin = lark.mark(f"\n{tags.function}{tool.name}{tags.quote}{tags.named}\n")
        if not tags.function:
            begin = lark_text(f"{tool.name}\n")
        return f"{begin} {tagged_arguments(lark, tool, tools.index(tool), tags)} {close}"

    return f"{lark.each(tools, written)} {lark.mark(tags.end)}"


def tagged_arguments(lark: Lark, tool: Tool, index: int, tags: Tags) -> str:
    """Return the grammar for the arguments of a call in tags.

    ``index``: the number of the tool, which names its rules.
    """
    parts = []
    # A string is all text before the closing tag.
    lark.up_to(tags.value_end, "plain")
    after = lark_text(tags.line) if tags.line else ""
    brk = after if tags.has_breaks else ""
    for key, schema in properties_of(tool).items():
        marks = r' "\n" '.join(map(lark.mark, tags.value))
        found = kinds(schema, tool.parameters or {}) or {"string"}
        kind = "string" if "string" in found else min(found)
        begin = f"{lark.mark(tags.parameter)} {lark_text(key + tags.quote + tags.attribute(kind))}"
        begin = f"{begin} {marks} {brk}"
        end = f"{brk} {lark.mark(tags.value_end)} {after}"
        if kind != "string":
            part = f"{begin} {_of(tool, key, schema)} {end}"
        elif texts := [each for each in listed_values(schema) if isinstance(each, str)]:
            part = f"{begin} ({' | '.join(map(lark_text, texts))}) {end}"
        elif tool.input_pattern is not None:
            pattern = f"(?:{tool.input_pattern})" + ("\n" if tags.has_breaks else "")
            part = f"{begin} {lark.matching(pattern, tags.value_end, f'input_{index}')} {after}"
        else:
            _check_text(tool, schema)
            part = f"{begin} plain {after}"
        parts.append(part if key in required_of(tool) else f"({part})?")
    return " ".join(parts)


def _grammar(tags: Tags) -> Marked:
    def block(lark: Lark, tools: Sequence[Tool], _: bool) -> str:
        return tagged_block(lark, tools, tags)

    return Marked(tags.begin, block, between="\n")


TAGS = {"qwen3-coder": QWEN_CODER, "seed": SEED, "minimax": MINIMAX, "glm": GLM}
TAGGED = {name: _grammar(tags) for name, tags in TAGS.items()}


def _family(name: str, *clues: str) -> Family:
    tags = TAGS[name]
    inner = (tags.parameter, *tags.value, tags.value_end) if not tags.function else ()
    marks = (tags.begin, tags.end, *inner)
    return Family(marks, clues, tagged_beginnings(tags), lambda *_: TAGGED[name])


MINIMAX_FAMILY = _family("minimax", "<invoke name=")
SEED_FAMILY = _family("seed", "<seed:tool_call>")
GLM_FAMILY = _family("glm", "<arg_key>")
QWEN_CODER_FAMILY = _family("qwen3-coder", QWEN_CODER.begin, "<function=")
