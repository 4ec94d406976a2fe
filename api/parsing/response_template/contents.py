"""Parsers of the text of tool calls, and the transform of parsed values into calls."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import regex

from ..formats.pythonic import read_list
from ..output_parser import CallArguments, CallBegin, CallEnd, ReaderParser, Source
from ..reading.call_state import CallState
from ..reading.json_text import CONSTANTS, is_json, object_of, repaired
from ..reading.offers import Offers, kinds
from .nested import calls_alone

Pattern: TypeAlias = "regex.Pattern[str]"
MAX_DEPTH = 32  # maximum depth of a transform, and of parsers inside of parsers
_PLACEHOLDER = regex.compile(r"\{(\w+(?:\.\w+)*)\}")
_BARE_KEY = regex.compile(r'"(?:\\.|[^"\\])*+(?:"|\\?\Z)|(?<=[{,])(\s*)(\w+)(\s*):', regex.DOTALL)
_HELD = "\x01"  # encloses a string's number, which replaces the string for a while
_RECURSION = regex.compile(r"\(\?(?:R|[-+]?\d|&|P[>&])")
MAX_PATTERN_CHARS = 4096
SECONDS = 0.2  # time limit for the pattern of a field's tags


@dataclass(frozen=True, slots=True)
class Raw:
    """An argument's text, and the value that the template's parser returns for it."""

    text: str
    value: Any


def check_args(content: str, args: Any) -> None:  # noqa: ANN401 - JSON
    """Raise ValueError if the arguments of a parser are wrong."""
    if not isinstance(args, dict):
        raise ValueError("content_args is not an object")
    for depth in range(MAX_DEPTH + 1):
        if depth == MAX_DEPTH:
            raise ValueError("value_parser is nested too deeply")
        if content not in CONTENTS:
            raise ValueError(f"the parser {content!r} is not known")
        if content == "xml-inline":
            _check_tags(args.get("tag_pattern"))
        delims = args.get("string_delims", [])
        if not isinstance(delims, list) or not all(_is_pair(each) for each in delims):
            raise ValueError("string_delims must be a list of pairs of texts")
        for key in ("line_sep", "kv_sep"):
            if key in args and not (isinstance(args[key], str) and args[key]):
                raise ValueError(f"{key} must be a text")
        inner = args.get("value_parser")
        if inner is None:
            return
        if not isinstance(inner, dict) or not isinstance(inner.get("args", {}), dict):
            raise ValueError("value_parser is not an object")
        content, args = str(inner.get("name", "text")), inner.get("args", {})


def _check_tags(written: object) -> None:
    if not {"key", "value"} <= set(compiled(written, "tag_pattern").groupindex):
        raise ValueError("tag_pattern needs the groups key and value")


def compiled(written: object, where: str) -> Pattern:
    """Return a compiled pattern, in which ``.`` matches line breaks. Raises ValueError.

    Patterns that call a group or themselves are refused, since such a search may take all memory.
    """
    if not isinstance(written, str) or len(written) > MAX_PATTERN_CHARS:
        raise ValueError(f"{where} must be a text of at most {MAX_PATTERN_CHARS} characters")
    if _RECURSION.search(written):
        raise ValueError(f"{where} calls a group, which is not supported")
    try:
        return regex.compile(written, regex.DOTALL)
    except (regex.error, RecursionError, OverflowError) as error:
        raise ValueError(f"{where} is not a regular expression: {error}") from None


def _is_pair(each: object) -> bool:
    return isinstance(each, list) and len(each) == 2 and all(isinstance(e, str) and e for e in each)


def check_transform(transform: object, depth: int = 0) -> None:
    """Raise ValueError if a transform is nested too deeply or mixes placeholders with text."""
    if depth > MAX_DEPTH:
        raise ValueError("transform is nested too deeply")
    if isinstance(transform, dict | list):
        for each in transform.values() if isinstance(transform, dict) else transform:
            check_transform(each, depth + 1)
    elif isinstance(transform, str) and bool(_PLACEHOLDER.search(transform)) != bool(
        _PLACEHOLDER.fullmatch(transform)
    ):
        raise ValueError(f"transform mixes a placeholder with text: {transform!r}")


# -- parsers --------------------------------------------------------------------------------------


def parse(text: str, content: str, args: Mapping[str, Any]) -> Any:  # noqa: ANN401 - JSON
    """Return the value of a field's text. Raises ValueError and TimeoutError."""
    return CONTENTS[content](text, args)


def _text(text: str, args: Mapping[str, Any]) -> str:
    return text.strip() if args.get("strip", True) else text


def _json(text: str, args: Mapping[str, Any]) -> Any:  # noqa: ANN401 - JSON
    """Parse JSON, with unquoted keys and strings between other delimiters if ``args`` say so.

    Objects and lists are repaired.
    """
    if _HELD in text:
        raise ValueError("the text contains a control character")
    strings: list[str] = []
    written = text
    for begin, end in args.get("string_delims", ()):
        written = _held(written, begin, end, strings)
    if args.get("unquoted_keys"):
        written = _BARE_KEY.sub(_quoted_key, written)
    written = regex.sub(f"{_HELD}(\\d+){_HELD}", lambda m: json.dumps(strings[int(m[1])]), written)
    word = written.strip()
    found_text = word if is_json(word) else repaired(word) if word[:1] in ("{", "[") else None
    if found_text is None:
        if args.get("allow_non_json"):
            return _text(text, args)
        raise ValueError("the text is not JSON")
    return json.loads(found_text)


def _held(text: str, begin: str, end: str, strings: list[str]) -> str:
    """Return a text with numbers in place of the strings between two delimiters.

    The strings are appended to ``strings``.
    """
    pieces, at = [], 0
    while (start := text.find(begin, at)) >= 0:
        stop = text.find(end, start + len(begin))
        if stop < 0:
            break
        pieces += [text[at:start], f"{_HELD}{len(strings)}{_HELD}"]
        strings.append(text[start + len(begin) : stop])
        at = stop + len(end)
    return "".join([*pieces, text[at:]])


def _quoted_key(found: regex.Match[str]) -> str:
    return found[0] if found[2] is None else f'{found[1]}"{found[2]}"{found[3]}:'


def _xml_inline(text: str, args: Mapping[str, Any]) -> dict[str, Any]:
    """Parse tags, one for each member.

    With ``merge_duplicates``, the values of a repeated key become a list.
    """
    members: dict[str, Any] = {}
    lists: set[str] = set()
    tags = regex.compile(args["tag_pattern"], regex.DOTALL)
    for found in tags.finditer(text, timeout=SECONDS):
        key, value = found["key"], _inner(found["value"] or "", args)
        if key in members and args.get("merge_duplicates"):
            members[key] = [*(members[key] if key in lists else [members[key]]), value]
            lists.add(key)
        elif key is not None:
            members[key] = value
    return members


def _kv_lines(text: str, args: Mapping[str, Any]) -> dict[str, Any]:
    """Parse lines, one for each member."""
    separator = args.get("kv_sep", ":")
    members = {}
    for line in text.split(args.get("line_sep", "\n")):
        key, is_member, value = line.partition(separator)
        if is_member:
            members[_text(key, args)] = _inner(_text(value, args), args)
    return members


def _inner(text: str, args: Mapping[str, Any]) -> Raw:
    parser = args.get("value_parser")
    if parser is None:
        return Raw(text, text)
    return Raw(text, parse(text, parser.get("name", "text"), parser.get("args", {})))


def _python_call_list(text: str, _: Mapping[str, Any]) -> list[dict[str, Any]]:
    parser = ReaderParser(calls_alone(read_list, Offers()))
    calls: list[dict[str, Any]] = []
    for event in (*parser.feed(text), *parser.end()):
        if isinstance(event, CallBegin):
            calls.append({"name": event.name, "arguments": ""})
        elif isinstance(event, CallArguments):
            calls[-1]["arguments"] += event.text
        elif isinstance(event, CallEnd):
            calls[-1]["arguments"] = json.loads(calls[-1]["arguments"])
    return calls


CONTENTS: dict[str, Callable[[str, Mapping[str, Any]], Any]] = {
    "text": _text,
    "int": lambda text, args: int(_text(text, args)),
    "float": lambda text, args: float(_text(text, args)),
    "bool": lambda text, args: _text(text, args).lower() in ("true", "1"),
    "json": _json,
    "xml-inline": _xml_inline,
    "kv-lines": _kv_lines,
    "python-call-list": _python_call_list,
}


# -- calls ----------------------------------------------------------------------------------------


def calls_of(value: object, offers: Offers) -> Iterable[tuple[str, str]]:
    """Yield the names and the arguments (JSON) of the calls in a transformed value.

    Arguments are converted to the types of the tool's schema. Raises ValueError if a value is no
    call, and `Malformed` for a name that cannot be a tool's name.
    """
    if isinstance(value, list):
        for each in value:
            yield from calls_of(each, offers)
        return
    function = value.get("function", value) if isinstance(value, dict) else None
    written = function.get("name") if isinstance(function, dict) else None
    written = written.value if isinstance(written, Raw) else written
    if not isinstance(function, dict) or not isinstance(written, str):
        raise ValueError("the value is not a call")
    name = CallState(Source(), offers).check(written.strip())
    yield name, _arguments(name, function.get("arguments"), offers)


def _arguments(name: str, given: object, offers: Offers) -> str:
    if isinstance(given, dict):
        schema = offers.schema(name)
        properties = schema.get("properties", {})
        return json.dumps(
            {key: _typed(each, kinds(properties.get(key), schema)) for key, each in given.items()},
            ensure_ascii=False,
        )
    if isinstance(given, str):
        return object_of(given)
    return "{}" if given is None else object_of(json.dumps(_plain(given), ensure_ascii=False))


def _typed(value: object, types: frozenset[str]) -> Any:  # noqa: ANN401 - JSON
    """Return an argument, converted to a type of its schema if its text allows that."""
    if isinstance(value, list) and "array" not in types:
        return [_typed(each, types) for each in value]
    text = value.text if isinstance(value, Raw) else value
    if not types or not isinstance(text, str):
        return _plain(value)
    word = CONSTANTS.get(text.strip(), text.strip())
    if "string" in types and not (word == "null" and "null" in types):
        return text
    if is_json(word):
        return json.loads(word)
    found = repaired(word) if word.startswith(("{", "[")) else None
    return json.loads(found) if found else text


def _plain(value: object) -> Any:  # noqa: ANN401 - JSON
    """Return a value with each `Raw` in it replaced by its parsed value."""
    if isinstance(value, Raw):
        return _plain(value.value)
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, list) else value


def transformed(transform: object, value: object, names: Mapping[str, object]) -> Any:  # noqa: ANN401
    """Return a transform with its placeholders replaced, or ``value`` without a transform.

    The placeholder ``content`` has the value ``value``, all others are in ``names``. Raises
    ValueError for a placeholder without a value.
    """
    if transform is None:
        return value
    return _replaced(transform, {**names, "content": value})


def _replaced(transform: object, names: Mapping[str, object]) -> Any:  # noqa: ANN401 - JSON
    if isinstance(transform, dict):
        return {key: _replaced(each, names) for key, each in transform.items()}
    if isinstance(transform, list):
        return [_replaced(each, names) for each in transform]
    path = placeholder(transform)
    if path is None:
        return transform
    found: object = names
    for key in path.split("."):
        found = found.value if isinstance(found, Raw) else found
        if not isinstance(found, Mapping) or key not in found:
            raise ValueError(f"{path} is missing")
        found = found[key]
    return found


def placeholder(transform: object) -> str | None:
    """Return the name in a placeholder; None for another value."""
    found = _PLACEHOLDER.fullmatch(transform) if isinstance(transform, str) else None
    return found[1] if found else None
