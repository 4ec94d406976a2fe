"""The parts of a model's text, and the protocol of what tells them apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Thought:
    """Text between the marks of thinking, without them."""

    text: str


@dataclass(frozen=True, slots=True)
class Words:
    """Text for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """A call of a tool begins. Calls do not overlap: what follows belongs to it until its end."""

    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the JSON text of the call's arguments; the pieces add up to one JSON object."""

    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """The call is complete."""


Event = Thought | Words | CallBegin | CallArguments | CallEnd


class OutputParser(Protocol):
    """Reads one answer as it grows.

    What `feed` and `end` return adds up to the same parts however the text is cut into pieces.
    Text that turns out to be no call after all is given as words; nothing is lost.
    """

    def feed(self, text: str) -> Sequence[Event]:
        """What is certain now; the possible beginning of a mark is held back."""

    def end(self) -> Sequence[Event]:
        """What is left when nothing follows. A call that is cut short has no `CallEnd`."""


class PlainParser:
    """Everything is words."""

    def feed(self, text: str) -> Sequence[Event]:
        """The text."""
        return [Words(text)] if text else []

    def end(self) -> Sequence[Event]:
        """Nothing is held back."""
        return []
