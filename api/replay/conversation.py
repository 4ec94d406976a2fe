"""Conversation: the bodies of a changed replay.

Answers that differ from the recorded ones take their places in the later bodies, with the results
of their calls. Everything else of a body stays as the client sent it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...core.errors import InvalidRequest
from .changes import Change, Changes
from .forms import Call, Form, Item, by_call
from .sessions import Turn


@dataclass(frozen=True, slots=True)
class Edit:
    """Recorded items from ``start`` to before ``stop``, and the ones that replace them.

    ``turn``: index of the only turn that has these items; None if all later turns repeat them.
    """

    start: int
    stop: int
    items: list[Item]
    turn: int | None = None


@dataclass(frozen=True, slots=True)
class Answered:
    """The answer to a turn as the next recorded body has it.

    ``start``: index of its first item; ``calls`` are its calls, ``results`` their recorded results,
    and ``stop`` is the index of the first item after both.
    """

    start: int
    end: int
    stop: int
    calls: list[Call]
    results: list[Item]


class Conversation:
    """The turns of one conversation with the changes in effect, and the edits so far."""

    def __init__(self, turns: Sequence[Turn], changes: Changes) -> None:
        """Apply the changes to all turns. Raises `InvalidRequest` if one of them has no effect."""
        form = turns[0].form
        if form is None or any(turn.form is not form for turn in turns):
            missing = next(turn for turn in turns if turn.form is None or turn.form is not form)
            raise InvalidRequest(
                f"turn {missing.number} ({missing.id}) can be verified, but not changed: it has no "
                "recorded body of chat completions, completions, Anthropic Messages, Responses, "
                "Ollama or Gemini",
                param="change",
            )
        self.form: Form = form
        self.turns, self._changes = turns, changes
        self._edits: list[Edit] = []
        self._has_parted = False  # whether an answer was replaced
        self._bodies = [dict(turn.body or {}) for turn in turns]
        self._changed: set[int] = set()  # indices of turns whose own body was changed
        for change in changes.bodies:
            hits = [self._apply(change, at) for at in range(len(turns))]
            if not any(hits):
                raise self._nothing(change)
            for at in self._changed:
                form.check(self._bodies[at])
        self._change_results()

    def _apply(self, change: Change, at: int) -> bool:
        """Change a turn. Return whether it has the value."""
        found = change.apply(self._bodies[at], self.turns[at].number)
        if found is None:
            return False
        if found != self._bodies[at]:
            self._changed.add(at)
        self._bodies[at] = found
        return True

    def _nothing(self, change: Change) -> InvalidRequest:
        numbers = [turn.number for turn in self.turns]
        if change.turn is not None and change.turn not in numbers:
            why = f"the conversation has turns {numbers[0]} to {numbers[-1]}"
        else:
            at = len(self.turns) - 1 if change.turn is None else numbers.index(change.turn)
            why = f"in turn {numbers[at]}, {change.missing(self._bodies[at])}"
        return InvalidRequest(f"--change {change.text} names nothing: {why}", param="change")

    def _change_results(self) -> None:
        """Replace results of tools. Raises `InvalidRequest` for a call without a result."""
        left, most = set(self._changes.results), 0
        for at in range(len(self.turns)):
            first = most if self.continues_by_id(at) else 0
            items, most, used = self._with_results(self.form.items(self._bodies[at]), first)
            if used:
                self._bodies[at] = {**self._bodies[at], self.form.field: items}
                self._changed.add(at)
                left -= used
        if left:
            names = ", ".join(sorted(left))
            message = (
                f"--tool-result {names}: the conversation has {most} results of tools, which are "
                "numbered from 1, and no call with this id"
            )
            raise InvalidRequest(message, param="tool_result")

    def _with_results(self, items: list[Item], first: int) -> tuple[list[Item], int, set[str]]:
        number, used = first, set[str]()
        wanted, form = self._changes.results, self.form

        def other(part: Item) -> Item:
            nonlocal number
            number += 1
            for name in (str(number), form.part_id(part)):
                if name in wanted:
                    used.add(name)
                    return form.with_text(part, wanted[name])
            return part

        found = [form.map_parts(item, other) if form.is_result(item) else item for item in items]
        return found, number, used

    # -- bodies ---------------------------------------------------------------------------------

    def continues_by_id(self, at: int) -> bool:
        """Whether a turn names the response that it continues, instead of sending all items."""
        return self._bodies[at].get("previous_response_id") is not None

    def is_same(self, at: int) -> bool:
        """Whether a turn is as recorded."""
        changes = self._changes
        if changes.sampling or changes.system is not None or changes.other_model:
            return False
        first = 0 if self.continues_by_id(at) else at
        return not (self._has_parted or self._changed & {*range(first, at + 1)})

    def items(self, at: int) -> list[Item]:
        """Return the items of a turn with all edits."""
        items, found, begin = self.form.items(self._bodies[at]), list[Item](), 0
        for edit in self._edits:
            if edit.turn in (None, at) and edit.start <= len(items):
                found += [*items[begin : edit.start], *edit.items]
                begin = edit.stop
        return [*found, *items[begin:]]

    def body(
        self, at: int, items: Sequence[Item], previous_id: str | None = None
    ) -> dict[str, Any]:
        """Return the body of a turn with these items.

        ``previous_id``: the id, in this replay, of the response that it continues; None if it sends
        all items.
        """
        body = self.form.body(self._bodies[at], items)
        if previous_id is not None:
            body["previous_response_id"] = previous_id
        if self._changes.system is not None:
            return self.form.with_system(body, self._changes.system)
        return body

    # -- answers --------------------------------------------------------------------------------

    def answered(self, at: int, calls: Sequence[Call]) -> Answered | None:
        """Return how the next turn has the answer of turn ``at``; None after the last turn.

        ``calls``: the calls of the recorded answer, for a next turn that does not send them.
        """
        if at + 1 >= len(self.turns):
            return None
        items, form = self.form.items(self._bodies[at + 1]), self.form
        start = end = 0 if self.continues_by_id(at + 1) else self.turns[at + 1].place
        while end < len(items) and form.is_answer(items[end]):
            end += 1
        stop = end
        while stop < len(items) and form.is_result(items[stop]):
            stop += 1
        sent = form.calls(items[start:end])
        return Answered(start, end, stop, sent or list(calls), items[end:stop])

    def recorded_results(self, answered: Answered) -> list[Item | None]:
        """Return the recorded result of each recorded call."""
        return by_call(self.form, answered.calls, answered.results)

    def replace(
        self, at: int, answered: Answered, items: Sequence[Item], parts: Sequence[Item]
    ) -> None:
        """Replace the answer of turn ``at`` and the results of its calls."""
        results = self.form.results(answered.results, parts)
        self._put(at + 1, answered.start, answered.stop, items, results)
        self._has_parted = True

    def rename(self, at: int, answered: Answered, parts: Sequence[Item]) -> None:
        """Give the recorded results of turn ``at`` the ids of the calls of this replay."""
        results = self.form.results(answered.results, parts)
        self._put(at + 1, answered.end, answered.stop, (), results)

    def skip(self, later: int, start: int, stop: int, items: Sequence[Item]) -> None:
        """Put an answer into the place of all items from ``start`` to before ``stop``.

        ``later``: index of the next turn to replay.
        """
        self._put(later, start, stop, items, ())
        self._has_parted = True

    def _put(
        self, later: int, start: int, stop: int, answer: Sequence[Item], results: Sequence[Item]
    ) -> None:
        if self.continues_by_id(later):  # the server has the answer
            self._edits.append(Edit(0, stop, list(results), later))
        else:
            self._edits.append(Edit(start, stop, [*answer, *results]))
            self._edits.sort(key=lambda each: each.start)

    def next_words(self, at: int, start: int) -> tuple[int, int] | None:
        """Return the next turn after ``at`` with a message of the user, and that message's index.

        ``start``: index of the first item after the turn's own. None if there is no such turn.
        """
        for later in range(at + 1, len(self.turns)):
            items = self.form.items(self._bodies[later])
            begin = 0 if self.continues_by_id(later) else start
            for index in range(begin, len(items)):
                item = items[index]
                if not (self.form.is_answer(item) or self.form.is_result(item)):
                    return later, index
        return None


def texts_of(changes: Changes, sources: Mapping[str, str]) -> list[str]:
    """Return a line for each change. ``sources``: names of files and of the other model."""
    found = [f"{each.text} = {_short(each.value)}" for each in changes.bodies]
    found += [f"{name} = {value}" for name, value in changes.sampling.items()]
    found += [f"result {name} = {_short(text)}" for name, text in changes.results.items()]
    return found + [f"{name}: {text}" for name, text in sources.items()]


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
