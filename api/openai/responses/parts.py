"""Output items while they grow, and their events."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar
from uuid import uuid4

from ...types.results import Body, CallDelta


@dataclass(slots=True, kw_only=True)
class Piece:
    """One output item. Its events come between `opening` and `closing`."""

    index: int  # in the output
    id: str
    text: str = ""
    status: str = "in_progress"

    def body(self) -> Body:
        """The item as it is now."""
        raise NotImplementedError

    def opening(self) -> list[Body]:
        """The events that open the item."""
        return [self._item_event("response.output_item.added")]

    def closing(self, status: str) -> list[Body]:
        """The events that close the item."""
        self.status = status
        return [self._item_event("response.output_item.done")]

    def _item_event(self, kind: str) -> Body:
        return {"type": kind, "output_index": self.index, "item": self.body()}

    def _event(self, kind: str, **fields: object) -> Body:
        return {"type": kind, "item_id": self.id, "output_index": self.index, **fields}


@dataclass(slots=True, kw_only=True)
class TextPiece(Piece):
    """An item with one part of text."""

    kind: ClassVar[str]  # of its events

    def part(self, text: str) -> Body:
        """The content part with this text."""
        raise NotImplementedError

    def opening(self) -> list[Body]:
        """An empty item, then an empty part."""
        added = "response.content_part.added"
        return [
            self._item_event("response.output_item.added"),
            self._event(added, content_index=0, part=self.part("")),
        ]

    def add(self, text: str) -> Body:
        """Append what a step brings."""
        self.text += text
        return self._event(f"{self.kind}.delta", content_index=0, delta=text)

    def closing(self, status: str) -> list[Body]:
        """The complete text, then its part, then the item."""
        self.status = status
        return [
            self._event(f"{self.kind}.done", content_index=0, text=self.text),
            self._event("response.content_part.done", content_index=0, part=self.part(self.text)),
            self._item_event("response.output_item.done"),
        ]

    def _parts(self) -> list[Body]:
        return [] if self.status == "in_progress" else [self.part(self.text)]


@dataclass(slots=True, kw_only=True)
class ReasoningPiece(TextPiece):
    """A reasoning item: the text itself, without a summary."""

    kind: ClassVar[str] = "response.reasoning_text"
    id: str = field(default_factory=lambda: f"rs_{uuid4().hex}")

    def part(self, text: str) -> Body:
        """The part of a reasoning item."""
        return {"type": "reasoning_text", "text": text}

    def body(self) -> Body:
        """The item as it is now."""
        return {
            "id": self.id,
            "type": "reasoning",
            "summary": [],
            "content": self._parts(),
            "status": self.status,
        }


@dataclass(slots=True, kw_only=True)
class MessagePiece(TextPiece):
    """A message item."""

    kind: ClassVar[str] = "response.output_text"
    id: str = field(default_factory=lambda: f"msg_{uuid4().hex}")
    logprobs: list[Body] = field(default_factory=list)

    def part(self, text: str) -> Body:
        """The part of a message item."""
        logprobs = list(self.logprobs)  # as they are now: an event is encoded later
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}

    def say(self, text: str, logprobs: list[Body]) -> Body:
        """Append what a step brings."""
        self.logprobs += logprobs
        return {**self.add(text), "logprobs": logprobs}

    def closing(self, status: str) -> list[Body]:
        """As of any text, with the log-probabilities of all tokens."""
        done, *rest = super(MessagePiece, self).closing(status)
        return [{**done, "logprobs": self.logprobs}, *rest]

    def body(self) -> Body:
        """The item as it is now."""
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "status": self.status,
            "content": self._parts(),
        }


@dataclass(slots=True, kw_only=True)
class CallPiece(Piece):
    """A function call item; its text is the arguments."""

    call: CallDelta  # the first delta of it
    id: str = field(default_factory=lambda: f"fc_{uuid4().hex}")

    def add(self, text: str) -> Body:
        """Append what a step brings."""
        self.text += text
        return self._event("response.function_call_arguments.delta", delta=text)

    def closing(self, status: str) -> list[Body]:
        """The complete arguments, then the item."""
        self.status = status
        kind = "response.function_call_arguments.done"
        return [
            self._event(kind, arguments=self.text, name=self.call.name),
            self._item_event("response.output_item.done"),
        ]

    def body(self) -> Body:
        """The item as it is now."""
        return {
            "id": self.id,
            "type": "function_call",
            "call_id": self.call.id,
            "name": self.call.name,
            "arguments": self.text,
            "status": self.status,
        }
