"""The output of a response: deltas in, items and their events out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec import UNSET

from ....core.interface.output import TokenLogprob
from ...parsing.reading.json_text import INVALID
from ...runtime.conversation.tools import plain_arguments
from ...types.request_context import random_id
from ...types.results import CallDelta, TextDelta
from ..openai.answers import TokenInfo
from .answers import (
    ArgumentsDelta,
    ArgumentsDone,
    ContentPart,
    CustomCallItem,
    Event,
    FunctionCallItem,
    InputDelta,
    InputDone,
    ItemAdded,
    ItemDone,
    MessageItem,
    OutputItem,
    OutputText,
    OutputTextDelta,
    OutputTextDone,
    PartAdded,
    PartDone,
    ReasoningItem,
    ReasoningText,
    ReasoningTextDelta,
    ReasoningTextDone,
    SearchCallItem,
    Status,
)
from .tools import ServedTool

NO_TOOLS: Mapping[str, ServedTool] = {}
Spell = Callable[[Sequence[TokenLogprob]], list[TokenInfo]]
"""Writes logprobs down."""


@dataclass(slots=True, kw_only=True)
class ItemBuilder:
    """One output item while it grows. Its events come between `opening` and `closing`.

    Events are encoded later: they hold the item as it was.
    """

    index: int  # in the output
    id: str
    text: str = ""
    status: Status = "in_progress"

    def item(self) -> OutputItem:
        """The item as it is now."""
        raise NotImplementedError

    def add(self, text: str) -> list[Event]:
        """Append the text of a step."""
        raise NotImplementedError

    def opening(self) -> list[Event]:
        """The events that open the item."""
        return [ItemAdded(output_index=self.index, item=self.item())]

    def closing(self, status: Status) -> list[Event]:
        """The events that close the item."""
        self.status = status
        return [*self._done(), ItemDone(output_index=self.index, item=self.item())]

    def _done(self) -> list[Event]:
        """The complete text."""
        raise NotImplementedError

    @property
    def _place(self) -> dict[str, Any]:
        return {"output_index": self.index, "item_id": self.id}


@dataclass(slots=True, kw_only=True)
class TextBuilder(ItemBuilder):
    """An item with one part of text, which the item has once it is complete."""

    def part(self, text: str) -> ContentPart:
        """The content part with this text."""
        raise NotImplementedError

    def opening(self) -> list[Event]:
        """An empty item, then an empty part."""
        added = super(TextBuilder, self).opening()
        return [*added, PartAdded(**self._place, part=self.part(""))]


@dataclass(slots=True, kw_only=True)
class ReasoningBuilder(TextBuilder):
    """A reasoning item."""

    id: str = field(default_factory=lambda: f"rs_{random_id()}")

    def part(self, text: str) -> ReasoningText:
        """The part of a reasoning item."""
        return ReasoningText(text=text)

    def item(self) -> ReasoningItem:
        """The item as it is now."""
        content = [] if self.status == "in_progress" else [self.part(self.text)]
        return ReasoningItem(id=self.id, status=self.status, content=content)

    def add(self, text: str) -> list[Event]:
        """Append the reasoning of a step."""
        self.text += text
        return [ReasoningTextDelta(**self._place, delta=text)]

    def _done(self) -> list[Event]:
        done = ReasoningTextDone(**self._place, text=self.text)
        return [done, PartDone(**self._place, part=self.part(self.text))]


@dataclass(slots=True, kw_only=True)
class MessageBuilder(TextBuilder):
    """A message item."""

    id: str = field(default_factory=lambda: f"msg_{random_id()}")
    logprobs: list[TokenInfo] = field(default_factory=list)

    def part(self, text: str) -> OutputText:
        """The part of a message item."""
        return OutputText(text=text, logprobs=list(self.logprobs))

    def item(self) -> MessageItem:
        """The item as it is now."""
        content = [] if self.status == "in_progress" else [self.part(self.text)]
        return MessageItem(id=self.id, status=self.status, content=content)

    def add(self, text: str, logprobs: list[TokenInfo] | None = None) -> list[Event]:
        """Append the text of a step and the log-probabilities of its tokens."""
        self.text += text
        self.logprobs += logprobs or []
        return [OutputTextDelta(**self._place, delta=text, logprobs=logprobs or [])]

    def _done(self) -> list[Event]:
        done = OutputTextDone(**self._place, text=self.text, logprobs=self.logprobs)
        return [done, PartDone(**self._place, part=self.part(self.text))]


@dataclass(slots=True, kw_only=True)
class CallBuilder(ItemBuilder):
    """A function call item; its text is the arguments."""

    call: CallDelta  # its first delta
    name: str
    namespace: str | None = None
    id: str = field(default_factory=lambda: f"fc_{random_id()}")

    def item(self) -> OutputItem:
        """The item as it is now."""
        return FunctionCallItem(arguments=self.text, **self._named)

    def add(self, text: str) -> list[Event]:
        """Append the arguments of a step."""
        self.text += text
        return [ArgumentsDelta(**self._place, delta=text)]

    def _done(self) -> list[Event]:
        return [ArgumentsDone(**self._place, arguments=self.text, name=self.name)]

    @property
    def _named(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "status": self.status,
            "call_id": self.call.id,
            "name": self.name,
            "namespace": UNSET if self.namespace is None else self.namespace,
        }


@dataclass(slots=True, kw_only=True)
class CustomCallBuilder(CallBuilder):
    """A call of a custom tool, whose input is the one argument that the model wrote."""

    id: str = field(default_factory=lambda: f"ctc_{random_id()}")

    def item(self) -> OutputItem:
        """The item as it is now."""
        return CustomCallItem(input=self._input, **self._named)

    def add(self, text: str) -> list[Event]:
        """Append the arguments of a step."""
        self.text += text
        return []

    def _done(self) -> list[Event]:
        given = self._input
        delta = [InputDelta(**self._place, delta=given)] if given else []
        return [*delta, InputDone(**self._place, input=given)]

    @property
    def _input(self) -> str:
        """The argument, or what could not be read; all of the text where it is no such object."""
        if self.status == "in_progress":
            return ""
        given = plain_arguments(self.text)
        found = given.get("input", given.get(INVALID)) if isinstance(given, dict) else None
        return found if isinstance(found, str) else self.text


@dataclass(slots=True, kw_only=True)
class SearchCallBuilder(CallBuilder):
    """A search for tools."""

    id: str = field(default_factory=lambda: f"tsc_{random_id()}")

    def item(self) -> OutputItem:
        """The item as it is now."""
        given = {} if self.status == "in_progress" else plain_arguments(self.text)
        arguments = given if isinstance(given, dict) else {"query": self.text}
        named = self._named
        kept = {name: named[name] for name in ("id", "status", "call_id")}
        return SearchCallItem(arguments=arguments, **kept)

    def add(self, text: str) -> list[Event]:
        """Append the arguments of a step."""
        self.text += text
        return []

    def _done(self) -> list[Event]:
        return []


BUILDERS: Mapping[str, type[CallBuilder]] = {
    "function": CallBuilder,
    "custom": CustomCallBuilder,
    "tool_search": SearchCallBuilder,
}
"""The item builders of calls, by the kind of tool."""


class Output:
    """Builds the output items; at most one item is open at a time, the last."""

    def __init__(self, spell: Spell, served: Mapping[str, ServedTool] = NO_TOOLS) -> None:
        self._builders: list[ItemBuilder] = []
        self._served = served  # by the names that the model uses
        self.num_reasoning_tokens = 0
        self._spell = spell
        self._open: ItemBuilder | None = None
        self._unplaced: list[TokenInfo] = []  # logprobs of tokens that have shown no text yet

    @property
    def items(self) -> list[OutputItem]:
        """All output items."""
        return [builder.item() for builder in self._builders]

    def add(self, delta: TextDelta) -> list[Event]:
        """The events of a step: the open call, then reasoning, then text, then new calls."""
        events: list[Event] = []
        if delta.logprobs:
            self._unplaced += self._spell(delta.logprobs)
        for call in delta.tool_calls:
            if not call.id:
                events += self._continue(call)
        if delta.reasoning:
            # A step that ends the thinking counts for it: where in it the end lies is not known.
            self.num_reasoning_tokens += len(delta.token_ids)
            events += self._think(delta.reasoning)
        if delta.text or (self._unplaced and isinstance(self._open, MessageBuilder)):
            events += self._say(delta.text)
        for call in delta.tool_calls:
            if call.id:
                events += self._begin(self._calling(call))
                events += self._continue(call)
        return events

    def end(self, *, is_whole: bool) -> list[Event]:
        """The events of the end. An answer without text and calls gets an empty message."""
        events: list[Event] = []
        if is_whole and all(isinstance(builder, ReasoningBuilder) for builder in self._builders):
            events += self._say("")
        return events + self._leave(is_whole=is_whole)

    def _think(self, text: str) -> list[Event]:
        self._unplaced.clear()
        events: list[Event] = []
        builder = self._open
        if not isinstance(builder, ReasoningBuilder):
            builder = ReasoningBuilder(index=len(self._builders))
            events += self._begin(builder)
        return events + builder.add(text)

    def _say(self, text: str) -> list[Event]:
        events: list[Event] = []
        builder = self._open
        if not isinstance(builder, MessageBuilder):
            builder = MessageBuilder(index=len(self._builders))
            events += self._begin(builder)
        logprobs, self._unplaced = self._unplaced, []
        if text or logprobs:
            events += builder.add(text, logprobs)
        return events

    def _continue(self, call: CallDelta) -> list[Event]:
        """Continue the open call, and end it."""
        self._unplaced.clear()
        builder = self._open
        if not isinstance(builder, CallBuilder):
            raise RuntimeError("a call goes on that was not begun")
        events = builder.add(call.arguments) if call.arguments else []
        return events + (self._close("completed") if call.is_done else [])

    def _calling(self, call: CallDelta) -> CallBuilder:
        """The builder of a new call."""
        index, served = len(self._builders), self._served.get(call.name)
        if served is None:
            return CallBuilder(index=index, call=call, name=call.name)
        build = BUILDERS[served.kind]
        return build(index=index, call=call, name=served.name, namespace=served.namespace)

    def _begin(self, builder: ItemBuilder) -> list[Event]:
        """Close the open item and open the next."""
        events = self._leave(is_whole=True)
        self._builders.append(builder)
        self._open = builder
        return events + builder.opening()

    def _leave(self, *, is_whole: bool) -> list[Event]:
        """Close the open item; a complete call is closed already."""
        is_cut = isinstance(self._open, CallBuilder)
        return self._close("completed" if is_whole and not is_cut else "incomplete")

    def _close(self, status: Status) -> list[Event]:
        builder, self._open = self._open, None
        return [] if builder is None else builder.closing(status)
