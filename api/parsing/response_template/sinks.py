"""Sinks: each turns the text of one field of a response template into events."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Protocol

from ..formats.pythonic import read_list
from ..output_parser import (
    CallArguments,
    CallBegin,
    CallEnd,
    Content,
    Event,
    Malformed,
    OutputParser,
    PlainParser,
    ReaderParser,
    Reading,
    Reasoning,
    Source,
)
from ..reading.call_state import CallReader, CallState
from ..reading.json_call import ARGUMENT_KEYS, NAME_KEYS, json_block, named_call
from ..reading.json_text import object_of
from ..reading.offers import Offers
from .contents import calls_of, parse, placeholder, transformed
from .nested import calls_alone
from .spec import Field, Kind

Captures = Mapping[str, str]
Events = Iterator[Event]


class Sink(Protocol):
    """Takes the text of one field, region by region; a region is one occurrence of the field."""

    def open(self, written: str, captures: Captures) -> Iterable[Event]:
        """Begin a region. ``written``: its first delimiter; ``captures``: groups of its pattern."""

    def feed(self, text: str) -> Iterable[Event]:
        """Take more text of the region."""

    def close(self, written: str, captures: Captures, *, is_cut: bool = False) -> Iterable[Event]:
        """End the region. ``written``: its last delimiter; "" at the end of the answer."""

    def settle(self) -> None:
        """Forget the white space that is held back, because it belongs to the prompt."""

    @property
    def is_in_string(self) -> bool:
        """Whether the region's text so far ends inside a string, where a delimiter is text."""


class TextSink:
    """Sink of content or reasoning, which strips a region's text unless ``strip`` is false.

    ``make``: returns the parser of the region's text.
    """

    is_in_string = False

    def __init__(self, field: Field, make: Callable[[], OutputParser]) -> None:
        self._wrap = Reasoning if field.kind is Kind.REASONING else Content
        self._strips, self._join, self._make = field.args.get("strip", True), field.join, make
        self._inner: OutputParser | None = None
        self._has_earlier = False  # whether an earlier region has text
        self._space = ""

    def open(self, written: str, captures: Captures) -> Events:
        """Begin a region."""
        del written, captures
        self._space = ""
        yield from ()

    def feed(self, text: str) -> Events:
        """Yield the text, but hold back white space at its end."""
        if self._inner is None:
            text = text.lstrip() if self._strips else text
            if not text:
                return
            self._inner = self._make()
            text = self._join + text if self._has_earlier else text
            self._has_earlier = True
        end = len(text.rstrip()) if self._strips else len(text)
        if end:
            yield from self._wrapped(self._inner.feed(self._space + text[:end]))
            self._space = ""
        self._space += text[end:]

    def close(self, written: str, captures: Captures, *, is_cut: bool = False) -> Events:
        """End the region."""
        del written, captures
        if self._inner is not None:
            yield from self._wrapped(self._inner.end(is_cut=is_cut))
            self._inner = None

    def settle(self) -> None:
        """Forget the white space that is held back."""
        self._space = ""

    def _wrapped(self, events: Iterable[Event]) -> Events:
        for event in events:
            is_text = isinstance(event, Content)
            yield self._wrap(event.text) if is_text else event  # type: ignore[union-attr]


class CallSink:
    """Sink of calls. Text that is not a call becomes content, with its delimiters."""

    def __init__(self, field: Field, offers: Offers) -> None:
        self._field, self._offers = field, offers
        self._raw: list[str] = []
        self._captures: dict[str, str] = {}
        self._string = _StringState(is_json=field.content == "json" and not field.args)

    @property
    def is_in_string(self) -> bool:
        """Whether the text so far ends inside a string."""
        return self._string.is_inside

    def open(self, written: str, captures: Captures) -> Events:
        """Begin a region."""
        self._raw, self._captures = [written], dict(captures)
        self._string.reset()
        yield from ()

    def feed(self, text: str) -> Events:
        """Take text."""
        self._raw.append(text)
        self._string.add(text)
        yield from ()

    def close(self, written: str, captures: Captures, *, is_cut: bool = False) -> Events:
        """End the region."""
        raise NotImplementedError

    def settle(self) -> None:
        """Do nothing: calls hold no white space."""

    def _content(self, written: str) -> Events:
        yield Content("".join(self._raw) + written)


class StreamedCalls(CallSink):
    """Sink of calls that a reader of their format yields as they arrive.

    ``name_group``: the group of the field's first delimiter that has the name; "" if the text has
    it.
    """

    def __init__(
        self, field: Field, offers: Offers, read: CallReader | None, name_group: str = ""
    ) -> None:
        super().__init__(field, offers)
        self._read, self._name_group = read, name_group
        self._parser: OutputParser = PlainParser()
        self._has_begun = False

    def open(self, written: str, captures: Captures) -> Events:
        """Begin a region."""
        yield from super().open(written, captures)
        self._has_begun = False
        read = self._read or partial(_named, name=captures.get(self._name_group, "").strip())
        self._parser = ReaderParser(calls_alone(read, self._offers))

    def feed(self, text: str) -> Events:
        """Yield the calls in the text."""
        yield from super().feed(text)
        yield from self._noted(self._parser.feed(text))

    def close(self, written: str, captures: Captures, *, is_cut: bool = False) -> Events:
        """End the region."""
        del captures
        yield from self._noted(self._parser.end(is_cut=is_cut))
        if not self._has_begun:
            yield from self._content(written)

    def _noted(self, events: Iterable[Event]) -> Events:
        for event in events:
            self._has_begun = True
            yield event


def _named(call: CallState, name: str) -> Reading[None]:
    return named_call(call, call.check(name))


class WholeCalls(CallSink):
    """Sink of calls whose text is parsed when it is complete.

    ``name_group``: the group of the field's first delimiter that has the name, so that the call
    begins at once; "" if no group has it.
    """

    def __init__(self, field: Field, offers: Offers, name_group: str = "") -> None:
        super().__init__(field, offers)
        self._name_group = name_group
        self._name = ""  # the name of the call that has begun

    def open(self, written: str, captures: Captures) -> Events:
        """Begin a region, and its call if its name is known."""
        yield from super().open(written, captures)
        self._name = ""
        written_name = captures.get(self._name_group, "").strip()
        try:
            self._name = CallState(Source(), self._offers).check(written_name)
        except Malformed:
            return
        yield CallBegin(self._name)

    def close(self, written: str, captures: Captures, *, is_cut: bool = False) -> Events:
        """End the region and yield its calls. A call that was cut off does not end."""
        body = "".join(self._raw[1:])
        if is_cut:
            if not self._name:
                yield from self._content(written)
            return
        try:
            calls = list(self._calls(body, {**self._captures, **captures}))
        except (ValueError, TimeoutError, RecursionError, Malformed):
            calls = [(self._name, object_of(body))] if self._name else []
        if not calls and not self._name:
            yield from self._content(written)
        for name, arguments in calls:
            if not self._name:
                yield CallBegin(name)
            yield CallArguments(arguments)
            yield CallEnd()

    def _calls(self, body: str, captures: Captures) -> Iterable[tuple[str, str]]:
        field = self._field
        value = parse(body, field.content, field.args)
        if field.transform_each:
            if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
                raise ValueError("the value is not a list of objects")
            value = [transformed(field.transform, None, {**captures, **each}) for each in value]
        else:
            value = transformed(field.transform, value, captures)
        return calls_of(value, self._offers)


class _StringState:
    """Whether a text ends inside a JSON string; always False if not ``is_json``."""

    def __init__(self, *, is_json: bool) -> None:
        self._is_json = is_json
        self.reset()

    def reset(self) -> None:
        """Begin a new text."""
        self.is_inside = self._is_escaped = False

    def add(self, text: str) -> None:
        """Add text."""
        for char in text if self._is_json else "":
            if self._is_escaped:
                self._is_escaped = False
            elif char == "\\":
                self._is_escaped = self.is_inside
            elif char == '"':
                self.is_inside = not self.is_inside


def call_sink(field: Field, offers: Offers) -> CallSink:
    """Return the sink of a field of calls; calls are streamed if a reader knows their format."""
    group = name_group(field)
    if field.content == "json" and not field.args and json_keys(field) is not None:
        return StreamedCalls(field, offers, json_block)
    if field.content == "json" and not field.args and group:
        return StreamedCalls(field, offers, None, group)
    if field.content == "python-call-list" and json_keys(field) is not None:
        return StreamedCalls(field, offers, read_list)
    return WholeCalls(field, offers, group)


def json_keys(field: Field) -> tuple[str, str] | None:
    """Return the keys of the name and the arguments in the text of a call.

    Returns None if the text is no object with these keys, or if no reader knows the keys.
    """
    transform = field.transform
    if isinstance(transform, dict) and "function" in transform:
        transform = transform["function"]
    if transform is None or placeholder(transform) == "content":
        return "name", "arguments"
    if not isinstance(transform, dict):
        return None
    found = [placeholder(transform.get(key)) or "" for key in ("name", "arguments")]
    if not field.transform_each:
        if not all(each.startswith("content.") for each in found):
            return None
        found = [each.removeprefix("content.") for each in found]
    name, arguments = found
    return (name, arguments) if name in NAME_KEYS and arguments in ARGUMENT_KEYS else None


def name_group(field: Field) -> str:
    """Return the group in a field's first delimiter that has the name of its one call, or "".

    The text of the field is then the call's arguments.
    """
    transform = field.transform
    if isinstance(transform, dict) and "function" in transform:
        transform = transform["function"]
    if not isinstance(transform, dict) or field.open is None or field.transform_each:
        return ""
    group = placeholder(transform.get("name"))
    is_arguments = placeholder(transform.get("arguments")) == "content"
    is_known = group is not None and group in field.open.pattern.groupindex
    return group or "" if is_arguments and is_known else ""
