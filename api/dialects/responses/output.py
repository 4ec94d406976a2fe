"""The output of a response: deltas are converted to items and their events."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec import UNSET

from ....core.interface.output import TokenLogprob
from ...runtime.conversation.custom_tools import InputReader
from ...runtime.conversation.tools import plain_arguments
from ...runtime.segments import Change, Close, Grow, GrowingText, Open, Segment, Segments
from ...types.request_context import random_id
from ...types.results import TextDelta
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
"""Encodes log-probabilities."""


@dataclass(slots=True, kw_only=True)
class ItemBuilder:
    """An output item that is being built. Its events come between `opening` and `closing`.

    Events are encoded later, so each holds a copy of the item as it is when the event is made.
    """

    index: int  # index in the output
    id: str
    written: GrowingText = field(default_factory=GrowingText)
    status: Status = "in_progress"

    @property
    def text(self) -> str:
        """The text so far."""
        return str(self.written)

    def item(self) -> OutputItem:
        """Return the item as generated so far."""
        raise NotImplementedError

    def add(self, text: str) -> list[Event]:
        """Append the text of a step and return its events."""
        raise NotImplementedError

    def opening(self) -> list[Event]:
        """Return the events that open the item."""
        return [ItemAdded(output_index=self.index, item=self.item())]

    def closing(self, status: Status) -> list[Event]:
        """Return the events that close the item."""
        self.status = status
        return [*self._done(), ItemDone(output_index=self.index, item=self.item())]

    def _done(self) -> list[Event]:
        """Return the events with the complete text."""
        raise NotImplementedError

    @property
    def _place(self) -> dict[str, Any]:
        return {"output_index": self.index, "item_id": self.id}


@dataclass(slots=True, kw_only=True)
class TextBuilder(ItemBuilder):
    """An item with one content part of text. The item contains the part once it is complete."""

    def part(self, text: str) -> ContentPart:
        """Return a content part with this text."""
        raise NotImplementedError

    def opening(self) -> list[Event]:
        """Return the events that begin an empty item and its empty content part."""
        added = super(TextBuilder, self).opening()
        return [*added, PartAdded(**self._place, part=self.part(""))]


@dataclass(slots=True, kw_only=True)
class ReasoningBuilder(TextBuilder):
    """A reasoning item."""

    id: str = field(default_factory=lambda: f"rs_{random_id()}")

    def part(self, text: str) -> ReasoningText:
        """Return the part of a reasoning item."""
        return ReasoningText(text=text)

    def item(self) -> ReasoningItem:
        """Return the item as generated so far."""
        content = [] if self.status == "in_progress" else [self.part(self.text)]
        return ReasoningItem(id=self.id, status=self.status, content=content)

    def add(self, text: str) -> list[Event]:
        """Append the reasoning of a step and return its events."""
        self.written.add(text)
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
        """Return the part of a message item."""
        return OutputText(text=text, logprobs=list(self.logprobs))

    def item(self) -> MessageItem:
        """Return the item as generated so far."""
        content = [] if self.status == "in_progress" else [self.part(self.text)]
        return MessageItem(id=self.id, status=self.status, content=content)

    def add(self, text: str, logprobs: Sequence[TokenInfo] = ()) -> list[Event]:
        """Append the text and the log-probabilities of a step, and return its events."""
        self.written.add(text)
        self.logprobs += logprobs
        return [OutputTextDelta(**self._place, delta=text, logprobs=list(logprobs))]

    def _done(self) -> list[Event]:
        done = OutputTextDone(**self._place, text=self.text, logprobs=self.logprobs)
        return [done, PartDone(**self._place, part=self.part(self.text))]


@dataclass(slots=True, kw_only=True)
class CallBuilder(ItemBuilder):
    """A function call item. Its text is the JSON text of the arguments."""

    call_id: str
    name: str
    namespace: str | None = None
    id: str = field(default_factory=lambda: f"fc_{random_id()}")

    def item(self) -> OutputItem:
        """Return the item as generated so far."""
        return FunctionCallItem(arguments=self.text, **self._named)

    def add(self, text: str) -> list[Event]:
        """Append the arguments of a step and return its events."""
        self.written.add(text)
        return [ArgumentsDelta(**self._place, delta=text)]

    def _done(self) -> list[Event]:
        return [ArgumentsDone(**self._place, arguments=self.text, name=self.name)]

    @property
    def _named(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "status": self.status,
            "call_id": self.call_id,
            "name": self.name,
            "namespace": UNSET if self.namespace is None else self.namespace,
        }


@dataclass(slots=True, kw_only=True)
class CustomCallBuilder(CallBuilder):
    """A custom tool call. Its input is the argument ``input`` that the model generates."""

    id: str = field(default_factory=lambda: f"ctc_{random_id()}")
    _input: InputReader = field(default_factory=InputReader)

    def item(self) -> OutputItem:
        """Return the item as generated so far."""
        given = "" if self.status == "in_progress" else self._input.whole()
        return CustomCallItem(input=given, **self._named)

    def add(self, text: str) -> list[Event]:
        """Append the arguments of a step, and return the events of the input that they contain."""
        self.written.add(text)
        return self._grown(self._input.add(text))

    def _grown(self, text: str) -> list[Event]:
        return [InputDelta(**self._place, delta=text)] if text else []

    def _done(self) -> list[Event]:
        last = self._grown(self._input.end())
        return [*last, InputDone(**self._place, input=self._input.whole())]


@dataclass(slots=True, kw_only=True)
class SearchCallBuilder(CallBuilder):
    """A tool search call."""

    id: str = field(default_factory=lambda: f"tsc_{random_id()}")

    def item(self) -> OutputItem:
        """Return the item as generated so far."""
        given = {} if self.status == "in_progress" else plain_arguments(self.text)
        arguments = given if isinstance(given, dict) else {"query": self.text}
        named = self._named
        kept = {name: named[name] for name in ("id", "status", "call_id")}
        return SearchCallItem(arguments=arguments, **kept)

    def add(self, text: str) -> list[Event]:
        """Append the arguments of a step. They are sent when the item is complete."""
        self.written.add(text)
        return []

    def _done(self) -> list[Event]:
        return []


BUILDERS: Mapping[str, type[CallBuilder]] = {
    "function": CallBuilder,
    "custom": CustomCallBuilder,
    "tool_search": SearchCallBuilder,
}
"""The builders of call items, by type of tool."""


class Output:
    """Builds the output items: one per segment of reasoning, of text, or of a call."""

    def __init__(self, spell: Spell, served: Mapping[str, ServedTool] = NO_TOOLS) -> None:
        self._segments = Segments()
        self._builders: list[ItemBuilder] = []
        self._served = served  # tools by the name that the model calls them by
        self.num_reasoning_tokens = 0
        self._spell = spell

    @property
    def items(self) -> list[OutputItem]:
        """All output items."""
        return [builder.item() for builder in self._builders]

    def add(self, delta: TextDelta) -> list[Event]:
        """Add the output of one step and return its events."""
        if delta.reasoning:
            # All tokens of the step that ends the reasoning count, since its end is not known
            # exactly.
            self.num_reasoning_tokens += len(delta.token_ids)
        return self._events(self._segments.take(delta))

    def end(self, *, is_complete: bool) -> list[Event]:
        """Return the last events. An answer without text and calls gets an empty message."""
        return self._events(self._segments.end(is_complete=is_complete, needs_text=is_complete))

    def _events(self, changes: Sequence[Change]) -> list[Event]:
        return [event for change in changes for event in self._events_of(change)]

    def _events_of(self, change: Change) -> list[Event]:
        match change:
            case Open(segment):
                self._builders.append(self._builder(segment))
                return self._builders[-1].opening()
            case Grow(segment, text, logprobs):
                builder = self._builders[segment.index]
                if isinstance(builder, MessageBuilder):
                    return builder.add(text, self._spell(logprobs))
                return builder.add(text)
            case Close(segment, is_complete):
                status: Status = "completed" if is_complete else "incomplete"
                return self._builders[segment.index].closing(status)

    def _builder(self, segment: Segment) -> ItemBuilder:
        match segment.kind:
            case "reasoning":
                return ReasoningBuilder(index=segment.index)
            case "text":
                return MessageBuilder(index=segment.index)
            case "call":
                return self._calling(segment)

    def _calling(self, call: Segment) -> CallBuilder:
        served = self._served.get(call.name)
        if served is None:
            return CallBuilder(index=call.index, call_id=call.id, name=call.name)
        build = BUILDERS[served.kind]
        return build(
            index=call.index, call_id=call.id, name=served.name, namespace=served.namespace
        )
