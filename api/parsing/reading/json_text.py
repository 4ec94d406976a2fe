"""Arguments as JSON, also if the model wrote them almost as JSON.

Valid JSON passes unchanged. Clear errors are repaired while the text streams: raw control
characters, wrong escapes and quotes inside strings, strings in single quotes, Python's constants,
keys and values without quotes, missing or superfluous commas and brackets. From the first
unreadable place the text becomes the member `INVALID` of the object.
"""

from __future__ import annotations

import json
import math
import re

from ..output_parser import CallArguments, Cut, Ended, Malformed, Reading, Source
from .ends import NO_ENDS, Ends

INVALID = "INVALID_JSON"  # Anthropic's name for arguments that are no object
CONSTANTS = {"True": "true", "False": "false", "None": "null"}
_IN_STRING = re.compile(r"[^\"'\\<\x00-\x1f\[]+")
_IN_KEY = re.compile(r"[^\"'\\\n]+")
_KEY = re.compile(r"[\w$.-]+")
_IN_WORD = re.compile(r"[^,\]}\n<\[]+")
_JSON_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][-+]?\d+)?", re.ASCII)
_NUMBER = re.compile(r"[-+]?((0|[1-9][\d_]*)(\.\d*)?|\.\d+)([eE][-+]?\d+)?", re.ASCII)
_CLOSING = {"{": "}", "[": "]"}
_TO_QUOTE = {'"': re.compile(r'[^"\\]+'), "'": re.compile(r"[^'\\]+")}
_SIMPLE_ESCAPES = '"\\/bfnrt'
_HEX = re.compile(r"[0-9a-fA-F]{4}")
_STRUCTURE = re.compile(r"[^\"{}\[\],:\s]+")
_PLAIN = re.compile(r'[^"\\]+')
_SURROGATE = re.compile("[\ud800-\udfff]")  # surrogates, which UTF-8 cannot encode


class JsonTail:
    """Follows a JSON text piece by piece, and knows how to complete it."""

    def __init__(self) -> None:
        self._open: list[str] = []  # missing closing brackets
        self._last = ""  # the last token: a bracket, "," ":", "key" or "value"
        self._in_string = self._is_key = self._is_escaped = False

    def add(self, text: str) -> None:
        """Append a piece of the text."""
        at = 0
        while at < len(text):
            at = self._string(text, at) if self._in_string else self._token(text, at)

    def _string(self, text: str, at: int) -> int:
        if self._is_escaped:
            self._is_escaped = False
            return at + 1
        if found := _PLAIN.match(text, at):
            return found.end()
        if text[at] == "\\":
            self._is_escaped = True
        else:
            self._in_string, self._last = False, "key" if self._is_key else "value"
        return at + 1

    def _token(self, text: str, at: int) -> int:
        char = text[at]
        if char == '"':
            self._is_key = self._open[-1:] == ["}"] and self._last in ("{", ",")
            self._in_string = True
        elif char in "{[":
            self._open.append(_CLOSING[char])
            self._last = char
        elif char in "}]":
            self._open.pop()
            self._last = "value"
        elif char in ",:":
            self._last = char
        elif not char.isspace():
            self._last = "value"
            found = _STRUCTURE.match(text, at)
            return found.end() if found else at + 1
        return at + 1

    def closing(self) -> str:
        """Return the text that completes the JSON; "{}" if there is no text yet."""
        text, last = "", self._last
        if self._in_string:
            text, last = '"', "key" if self._is_key else "value"
        if last == "key":
            text += ": null"
        elif last == ":":
            text += "null"
        elif last == ",":
            text += f'"{INVALID}": null' if self._open[-1] == "}" else "null"
        return text + "".join(reversed(self._open)) if last else "{}"


def object_text(source: Source, ends: Ends = NO_ENDS) -> Reading[None]:
    """Yield an object or list as valid JSON while it arrives.

    Raises `Malformed` at a delimiter in ``ends``, `Ended` if the text ends between two members, and
    `Cut` if it ends elsewhere.
    """
    yield from _JsonText(source, ends).read()


def whole_object(source: Source, ends: Ends = NO_ENDS) -> Reading[str]:
    """Return an object or list as valid JSON, closed if a delimiter or the text's end cuts it off.

    Raises `Cut` if the text ends inside a member, or if a limit ended it.
    """
    pieces: list[str] = []
    tail = JsonTail()
    try:
        for event in object_text(source, ends):
            if event is None:
                yield None
                continue
            assert isinstance(event, CallArguments)
            pieces.append(event.text)
            tail.add(event.text)
    except Malformed:
        pieces.append(tail.closing())
    except Ended:
        if source.is_cut:
            raise
        pieces.append(tail.closing())
    return "".join(pieces)


def repaired(text: str) -> str | None:
    """Return an object or list as valid JSON, or None if that is impossible."""
    source = Source()
    source.add(text)
    source.is_ended = True
    reading = whole_object(source)
    try:
        next(reading)
    except StopIteration as end:
        return str(end.value)
    except Cut:
        pass
    return None


def object_of(text: str) -> str:
    """Return the JSON object of a text of arguments; other text becomes its member `INVALID`."""
    text = text.strip()
    try:
        inner = json.loads(text or "{}", strict=False)
    except (ValueError, RecursionError):
        inner = text
    if inner is None or inner == []:
        return "{}"
    written = inner.strip() if isinstance(inner, str) else text or "{}"
    found = repaired(written) if written.startswith("{") else None
    return found or json.dumps({INVALID: text}, ensure_ascii=False)


class _JsonText:
    """Reads one object or list, and yields it as valid JSON."""

    def __init__(self, source: Source, ends: Ends) -> None:
        self._source, self._ends = source, ends
        self._starts = {mark[0] for mark in ends.marks}
        self._has_bare_keys = False
        self._open: list[str] = []  # missing closing brackets
        self._is_first = True  # the innermost bracket has no member yet
        self._gap = ""  # text since the last member, yielded before the next one

    def read(self) -> Reading[None]:
        """Yield the text.

        Raises `Malformed` at a delimiter, and `Cut` or `Ended` at the text's end.
        """
        yield from self._opened()
        while self._open:
            self._gap += yield from self._source.white()
            char = yield from self._source.peek()
            if not char:
                yield CallArguments(self._gap.replace(",", ""))
                raise Ended
            if char in self._starts and (yield from self._ends.here(self._source)):
                raise Malformed
            if char in "}]":
                yield from self._closed(self._source.take(1))
            elif char == ",":
                self._gap += self._source.take(1)
            elif self._open[-1] == "]":
                yield from self._separated()
                yield from self._value()
            else:
                yield from self._member()

    def _opened(self) -> Reading[None]:
        bracket = self._source.take(1)
        self._open.append(_CLOSING[bracket])
        self._is_first = True
        yield CallArguments(bracket)

    def _closed(self, bracket: str) -> Reading[None]:
        """Close a bracket and all brackets inside it; a superfluous bracket is left out."""
        if bracket not in self._open:
            return
        space, self._gap = self._gap.replace(",", ""), ""
        closed = ""
        while not closed.endswith(bracket):
            closed += self._open.pop()
        self._is_first = False
        yield CallArguments(space + closed)

    def _separated(self) -> Reading[None]:
        """Yield one comma between two members, with the model's own white space."""
        gap, self._gap = self._gap, ""
        first, comma, rest = gap.partition(",")
        if self._is_first:
            yield CallArguments(gap.replace(",", ""))
        elif comma:
            yield CallArguments(first + comma + rest.replace(",", ""))
        else:
            yield CallArguments(f",{gap or ' '}")
        self._is_first = False

    # -- members --------------------------------------------------------------------------------

    def _member(self) -> Reading[None]:
        found = yield from _key_ahead(self._source, 0)
        if found is None:
            yield from self._unreadable()
            return
        length, after = found
        yield from self._separated()
        written = self._source.take(length)
        self._has_bare_keys |= written[0] not in "\"'"
        yield CallArguments(_key_text(written) + self._source.take(after - length))
        yield CallArguments((yield from self._source.white()))
        yield from self._value()

    def _unreadable(self) -> Reading[None]:
        """Yield the rest of the outermost object as a string, the member `INVALID`."""
        before = "" if self._is_first and len(self._open) == 1 else ", "
        depth = self._open.count("}")
        inner, self._open = self._open[1:], self._open[:1]
        yield CallArguments("".join(reversed(inner)) + f'{before}"{INVALID}": "')
        if not before:
            yield CallArguments("{")
        while True:
            char = yield from self._source.peek()
            if not char:
                raise Cut
            if char in "<[" and (yield from self._ends.here(self._source)):
                raise Malformed
            depth += {"{": 1, "}": -1}.get(char, 0)
            if depth == 0:
                break
            yield CallArguments(_escaped(self._source.take(1)))
        self._gap, self._is_first = "", False
        yield CallArguments('"' if before else '}"')

    def _value(self) -> Reading[None]:
        char = yield from self._source.peek()
        if not char:
            raise Cut
        if char in ("{", "[") and not (yield from self._ends.here(self._source)):
            yield from self._opened()
        elif char in ('"', "'"):
            yield from self._string(self._source.take(1))
        else:
            yield CallArguments(scalar((yield from self._word())))

    def _word(self) -> Reading[str]:
        """Return unquoted text up to a character that may follow a value."""
        pieces = []
        while True:
            pieces.append((yield from self._source.run(_IN_WORD)))
            char = yield from self._source.peek()
            if char not in ("<", "[") or (yield from self._ends.here(self._source)):
                break
            pieces.append(self._source.take(1))
        written = "".join(pieces)
        word = written.rstrip()
        if not word and not char:
            raise Cut
        self._gap = written[len(word) :]
        return word

    # -- strings --------------------------------------------------------------------------------

    def _string(self, quote: str) -> Reading[None]:
        source = self._source
        yield CallArguments('"')
        while True:
            if piece := source.match(_IN_STRING):
                yield CallArguments(piece)
            char = yield from source.peek()
            if not char:
                raise Cut
            if char == "\\":
                yield CallArguments((yield from _escape(source)))
            elif char in "<[" and (yield from self._ends.in_string(source)):
                raise Malformed
            elif char == quote and (yield from self._ends_string()):
                source.take(1)
                yield CallArguments('"')
                return
            elif char == "\n":
                yield from self._break()
            elif char == '"' or char < " ":
                yield CallArguments(_escaped(source.take(1)))
            elif not _IN_STRING.match(char):
                yield CallArguments(source.take(1))

    def _break(self) -> Reading[None]:
        """Yield a raw line break and the white space after it.

        Raises `Malformed` if a delimiter that ends the string follows: the white space belongs to
        the delimiter.
        """
        at = yield from self._source.after_white()
        if (yield from self._ends.in_string(self._source, at)):
            raise Malformed
        yield CallArguments(_escaped(self._source.take(at)))

    def _ends_string(self) -> Reading[bool]:
        """Whether the next quote ends its string, according to the text after it."""
        source = self._source
        after = yield from source.after_white(1)
        char = yield from source.char(after)
        if char in ("}", "]"):
            if char not in self._open:
                return False
            is_outermost = len(self._open) == 1  # then any text may follow the bracket
            return is_outermost or (yield from source.char(after + 1)) not in ('"', "'")
        if not char or (yield from self._ends.here(source, after)):
            return True
        if char == ",":
            if self._open[-1] == "]":
                return True
            after = yield from source.after_white(after + 1)
            char = yield from source.char(after)
            if not char or char == "}":
                return True
        elif after == 1 or self._open[-1] == "]":
            return False
        if char not in ('"', "'") and not self._has_bare_keys:
            return False
        return (yield from _key_ahead(source, after)) is not None


def _key_ahead(source: Source, at: int) -> Reading[tuple[int, int] | None]:
    """Return the offsets after a key at ``at`` and after its colon, or None without a key."""
    quote = yield from source.char(at)
    if not quote:
        raise Cut
    end = at
    if quote in ('"', "'"):
        end = yield from _string_end(source, at + 1, quote)
    else:
        end = yield from source.after(_KEY, at)
    if end <= at:
        return None
    colon = yield from source.after_white(end)
    char = yield from source.char(colon)
    if not char:
        raise Cut
    return (end, colon + 1) if char == ":" else None


def _string_end(source: Source, at: int, quote: str) -> Reading[int]:
    """Return the end of a string that is on one line, or 0 if a line break comes first."""
    while True:
        at = yield from source.after(_IN_KEY, at)
        char = yield from source.char(at)
        if not char:
            raise Cut
        if char == "\n":
            return 0
        if char == quote:
            return at + 1
        at += 2 if char == "\\" else 1


def _key_text(written: str) -> str:
    """Return a key, or another short string, as a JSON string."""
    if written[0] == "'":
        return _escaped_whole(written[1:-1].replace("\\'", "'").replace('"', '\\"'))
    return _escaped_whole(written[1:-1] if written[0] == '"' else written)


def _escaped_whole(inside: str) -> str:
    """Return ``inside`` as a JSON string; a backslash that begins no escape is text."""
    text = f'"{inside}"'
    for strict in (True, False):
        try:
            value = json.loads(text, strict=strict)
        except ValueError:
            continue
        return text if strict else json.dumps(value, ensure_ascii=False)
    return json.dumps(inside, ensure_ascii=False)


def _escape(source: Source) -> Reading[str]:
    """Take and return an escape; a backslash before a character without an escape is text."""
    yield from source.want(2)
    written = source.take(2)
    if len(written) < 2:
        raise Cut
    char = written[1]
    if char in _SIMPLE_ESCAPES:
        return written
    if char == "'":
        return char
    if char != "u":
        return "\\\\" + _escaped(char)
    yield from source.want(4)
    if digits := source.match(_HEX):
        return written + digits
    if source.is_ended and not (yield from source.char(3)):
        raise Cut
    return "\\\\u"


def _escaped(char: str) -> str:
    return json.dumps(char, ensure_ascii=False)[1:-1]


def scalar(word: str) -> str:
    """Return unquoted text as a JSON constant, number or string; "" becomes null."""
    word = CONSTANTS.get(word, word) or "null"
    if word in CONSTANTS.values() or _JSON_NUMBER.fullmatch(word):
        return word
    if _NUMBER.fullmatch(word):
        value = float(word.replace("_", ""))
        if math.isfinite(value):
            whole = word.replace("_", "").lstrip("+")
            return str(int(whole)) if whole.lstrip("-").isdigit() else repr(value)
    return json.dumps(word, ensure_ascii=False)


def is_json(word: str) -> bool:
    """Whether a text is a JSON value; NaN and Infinity are not."""
    try:
        json.loads(word, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return False
    return True


def _refuse(constant: str) -> None:
    raise ValueError(constant)


def json_string(source: Source) -> Reading[str]:
    """Take a string in double or single quotes, and return its value.

    Raises `Malformed` and `Cut`.
    """
    quote = yield from source.peek()
    if quote not in _TO_QUOTE:
        raise Malformed if quote else Cut
    raw = [source.take(1)]
    while True:
        raw.append((yield from source.run(_TO_QUOTE[quote])))
        yield from source.want(1)
        if (char := source.take(1)) == "\\":
            yield from source.want(1)
            char += source.take(1)
        raw.append(char)
        if char == quote:
            break
        if not char:
            raise Cut
    value = str(json.loads(_key_text("".join(raw))))
    if _SURROGATE.search(value):
        raise Malformed
    return value
