"""TurnReader: the text of one choice, told apart into thoughts, words and calls."""

from __future__ import annotations

from uuid import uuid4

from .output.events import (
    CallArguments,
    CallBegin,
    CallEnd,
    Event,
    OutputParser,
    Thought,
    Words,
)
from .results import TextDelta
from .talk import Call, ToolChoice, TurnDelta


class TurnReader:
    """Turns the text of one choice into parts."""

    def __init__(self, index: int, parser: OutputParser, choice: ToolChoice) -> None:
        self.is_done = False
        self._index = index
        self._parser = parser
        self._is_single = choice.is_single  # the choice ends with its first call
        self._has_words = choice.mode != "required"  # else it is what a cut left of a call's mark
        self._num_calls = 0
        self._is_called = False  # whether the last call is whole

    def read(self, delta: TextDelta) -> list[TurnDelta]:
        """What a step adds: one delta, more where words or thoughts follow a call in it.

        Nothing once the choice has ended, though the engine may not know of that yet.
        """
        if self.is_done:
            return []
        events = list(self._parser.feed(delta.text))
        reason = delta.finish_reason
        if reason is not None:
            events += self._parser.end()
        turned = TurnDelta(
            index=self._index,
            token_ids=delta.token_ids,
            sources=delta.sources,
            logprobs=delta.logprobs,
            prompt_logprobs=delta.prompt_logprobs,
        )
        parts = [turned]
        for event in events:
            if isinstance(event, Words | Thought) and not _keeps_order(event, parts[-1]):
                parts.append(TurnDelta(index=self._index))
            if self._take(event, parts[-1]):
                self.is_done = True
                break
        self._end(parts[-1], delta)
        return parts

    def _end(self, last: TurnDelta, delta: TextDelta) -> None:
        """Say how the choice ended, if it did: with its only call, or with its text."""
        reason, last.stop_reason = delta.finish_reason, delta.stop_reason
        if self.is_done:
            last.finish_reason = "tool_calls"
        elif reason is not None:
            self.is_done = True
            last.finish_reason = "tool_calls" if self._ends_called(delta) else reason

    def _ends_called(self, delta: TextDelta) -> bool:
        """Whether the caller shall run the calls: not one that its own stop string has cut."""
        was_cut = isinstance(delta.stop_reason, str) and not self._is_called
        return delta.finish_reason == "stop" and self._num_calls > 0 and not was_cut

    def _take(self, event: Event, turned: TurnDelta) -> bool:
        """Whether the choice ends with this."""
        match event:
            case Thought(text):
                turned.reasoning += text
            case Words(text):
                turned.words += text if self._has_words else ""
            case CallBegin(name):
                call_id = f"call_{uuid4().hex[:24]}"
                turned.calls.append(Call(index=self._num_calls, id=call_id, name=name))
                self._num_calls += 1
                self._is_called = False
            case CallArguments(text):
                self._call(turned).arguments += text
            case CallEnd():
                self._call(turned).is_done = self._is_called = True
                return self._is_single
        return False

    def _call(self, turned: TurnDelta) -> Call:
        """The delta of the call under way."""
        index = self._num_calls - 1
        if not turned.calls or turned.calls[-1].index != index:
            turned.calls.append(Call(index=index))
        return turned.calls[-1]


def _keeps_order(event: Words | Thought, turned: TurnDelta) -> bool:
    """Whether it may join a delta, which is read as a thought, then words, then calls."""
    if turned.calls:
        return False
    return isinstance(event, Words) or not turned.words
