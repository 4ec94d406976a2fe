"""Adapt conversations to the forms that a chat template accepts.

Clients send messages that some templates reject or drop: system messages in mid-conversation,
several messages of one role in a row, results without calls, arguments that are not objects. `fit`
replaces each by the nearest accepted form, in place, so that a growing conversation keeps its
prompt prefix. Messages that the template accepts stay unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, takewhile
from typing import Any

from ...parsing.formats.generic import RESULT_BEGIN, RESULT_END, as_text, needs_text
from ...parsing.reading.json_text import INVALID
from ...types.results import Tool
from .call_text import with_call_text
from .chat_input import is_splice_mark
from .template_facts import TemplateFacts
from .tools import json_text

Message = Mapping[str, Any]

LATER_SYSTEM = "<system_message>\n{}\n</system_message>"
NO_RESULT = "This call has no result."
NO_USER = "..."  # stands for the missing user message before a first answer
_CALLS = frozenset({"tool_calls"})
_INDEX = "foretoken_index"  # index of a message while the conversation is converted to text


@dataclass(frozen=True, slots=True)
class Turn:
    """A message of the rendered conversation.

    ``index``: its index in the request's conversation; None for an inserted message.
    """

    message: Message
    index: int | None

    @property
    def role(self) -> str:
        """The role of the message."""
        return str(self.message.get("role"))

    @property
    def text(self) -> str:
        """The text of the message, "" if the content is not text."""
        content = self.message.get("content")
        return content if isinstance(content, str) else ""

    @property
    def calls(self) -> Sequence[Message]:
        """The tool calls of the message."""
        return self.message.get("tool_calls") or ()

    @property
    def is_result(self) -> bool:
        """Whether the message is the result of a tool call."""
        return self.role == "tool"

    def with_text(self, text: str) -> Turn:
        """Return a copy of the turn with another text."""
        return Turn({**self.message, "content": text}, self.index)


def fit(messages: Sequence[Message], facts: TemplateFacts, family: str) -> list[Turn]:
    """Return the turns to render. ``family``: the format of the model's tool calls.

    O(messages).
    """
    turns = [Turn(message, index) for index, message in enumerate(messages)]
    if _is_common(messages):
        return turns
    if any(turn.calls or turn.is_result for turn in turns):
        turns = _with_calls(turns, facts, family)
        turns = _with_results(turns, facts)
    return _alternating(_with_systems(turns, facts), facts)


def _is_common(messages: Sequence[Message]) -> bool:
    """Whether user and assistant take turns, without calls, which every template renders."""
    roles = [message.get("role") for message in messages]
    return (
        {*roles[::2]} == {"user"}
        and {*roles[1::2]} <= {"assistant"}
        and not ({*chain.from_iterable(messages)} & _CALLS)
    )


def fit_as_text(
    messages: Sequence[Message], tools: Sequence[Tool], facts: TemplateFacts
) -> list[Turn]:
    """Return the turns for a template without tools: tools, calls and results become text."""
    turns = [Turn(message, index) for index, message in enumerate(messages)]
    if needs_text(messages, tools):
        turns = _as_text(turns, tools)
    return _alternating(_with_systems(turns, facts), facts)


def _as_text(turns: Sequence[Turn], tools: Sequence[Tool]) -> list[Turn]:
    numbered = [{**turn.message, _INDEX: turn.index} for turn in turns]
    found: list[Turn] = []
    for each in as_text(numbered, tools, has_system_role=True):
        message = dict(each)
        index = message.pop(_INDEX, None)
        if index is None and found and found[-1].index is not None:
            index = found[-1].index + 1  # the index of the first result that the message contains
        found.append(Turn(message, index))
    return found


# -- calls and results ----------------------------------------------------------------------------


def _with_calls(turns: Sequence[Turn], facts: TemplateFacts, family: str) -> list[Turn]:
    """Convert calls to the form that the template renders, each followed by its results."""
    found: list[Turn] = []
    at = 0
    while at < len(turns):
        turn = turns[at]
        at += 1
        if not turn.calls:
            found.append(turn)
        elif not facts.calls:
            found.append(Turn(with_call_text(turn.message, family), turn.index))
        else:
            results = [*takewhile(lambda each: each.is_result, turns[at:])]
            at += len(results)
            found += _calling(turn, results, facts, is_last=at == len(turns))
    return found


def _calling(
    turn: Turn, results: Sequence[Turn], facts: TemplateFacts, *, is_last: bool
) -> list[Turn]:
    """Return a message with calls, followed by the results of the calls.

    ``is_last``: the conversation ends after them.
    """
    calls = [_formed(call, facts) for call in turn.calls]
    results = _identified(results, calls)
    if len(results) < len(calls) and not (is_last or facts.unanswered_calls):
        answered = {_id_of(result.message, "tool_call_id") for result in results}
        missing = [call for call in calls if _id_of(call) not in answered]
        results = [*results, *map(_no_result, missing)]
    found: list[Turn] = []
    message = {key: each for key, each in turn.message.items() if key != "tool_calls"}
    if turn.text.strip() and not facts.calls_with_content:
        found.append(Turn(message, turn.index))
        message = {"role": "assistant", **facts.empty_content}
    elif not turn.message.get("content") or not facts.calls_with_content:
        message.pop("content", None)
        message |= facts.empty_content
    if len(calls) == 1 or facts.parallel_calls:
        return [*found, Turn({**message, "tool_calls": calls}, turn.index), *results]
    left = list(results)
    for number, call in enumerate(calls):
        message = message if number == 0 else {"role": "assistant", **facts.empty_content}
        found.append(Turn({**message, "tool_calls": [call]}, turn.index))
        own = next((r for r in left if r.message["tool_call_id"] == _id_of(call)), None)
        if own is not None:
            left.remove(own)
            found.append(own)
    return [*found, *left]


def _formed(call: Message, facts: TemplateFacts) -> dict[str, Any]:
    """Return a call with its arguments in the form that the template renders."""
    arguments = call["function"]["arguments"]
    if isinstance(arguments, str) and not (facts.cut_arguments or is_splice_mark(arguments)):
        arguments = {INVALID: arguments}
    if not isinstance(arguments, str) and facts.arguments == "text":
        arguments = json_text(arguments)
    return {**call, "function": {**call["function"], "arguments": arguments}}


def _identified(results: Sequence[Turn], calls: Sequence[Message]) -> list[Turn]:
    """Return the results with call ids. Results without an id are assigned to calls in order."""
    if all(isinstance(each.message.get("tool_call_id"), str) for each in results):
        return list(results)
    given = {_id_of(each.message, "tool_call_id") for each in results}
    ids = iter([_id_of(call) for call in calls if _id_of(call) not in given])
    return [
        each
        if isinstance(each.message.get("tool_call_id"), str)
        else Turn({**each.message, "tool_call_id": next(ids, "")}, each.index)
        for each in results
    ]


def _id_of(message: Message, name: str = "id") -> str:
    found = message.get(name)
    return found if isinstance(found, str) else ""


def _no_result(call: Message) -> Turn:
    message = {"role": "tool", "tool_call_id": _id_of(call), "content": NO_RESULT}
    return Turn({**message, "name": call["function"]["name"]}, None)


def _with_results(turns: Sequence[Turn], facts: TemplateFacts) -> list[Turn]:
    """Convert results that the template does not accept to user messages."""
    found: list[Turn] = []
    for turn in turns:
        follows = bool(found) and (found[-1].is_result or bool(found[-1].calls))
        if turn.is_result and not follows and not facts.lone_results:
            text = f"{RESULT_BEGIN}\n{turn.text}\n{RESULT_END}"
            found.append(Turn({"role": "user", "content": text}, turn.index))
        else:
            found.append(turn)
    return found


# -- roles ----------------------------------------------------------------------------------------


def _with_systems(turns: Sequence[Turn], facts: TemplateFacts) -> list[Turn]:
    """Convert system messages that the template does not accept to user messages."""
    front = [*takewhile(lambda turn: turn.role == "system", turns)]
    rest = turns[len(front) :]
    if not facts.later_system:
        rest = [_as_user(turn) if turn.role == "system" else turn for turn in rest]
        if len(front) > 1:
            front = [front[0].with_text("\n\n".join(turn.text for turn in front))]
    if not front or (facts.system if rest else facts.system_alone):
        return [*front, *rest]
    text = "\n\n".join(turn.text for turn in front)
    if rest and rest[0].role == "user":
        return [rest[0].with_text(f"{text}\n\n{rest[0].text}"), *rest[1:]]
    return [Turn({"role": "user", "content": text}, front[0].index), *rest]


def _as_user(turn: Turn) -> Turn:
    return Turn({"role": "user", "content": LATER_SYSTEM.format(turn.text)}, turn.index)


def _alternating(turns: Sequence[Turn], facts: TemplateFacts) -> list[Turn]:
    """Merge consecutive turns that the template rejects, or insert a turn between them."""
    found: list[Turn] = []
    for turn in turns:
        last = found[-1] if found else None
        is_first = last is None or (last.role == "system" and len(found) == 1)
        if is_first and turn.role == "assistant" and not facts.assistant_first:
            found.append(Turn({"role": "user", "content": NO_USER}, None))
        elif last is None:
            pass
        elif last.is_result and turn.role == "user" and not facts.user_behind_results:
            found[-1] = last.with_text(f"{last.text}\n\n{turn.text}")
            continue
        elif _clashes(last, turn, facts):
            found[-1] = _joined(last, turn)
            continue
        found.append(turn)
    return found


def _clashes(last: Turn, turn: Turn, facts: TemplateFacts) -> bool:
    """Whether the template rejects these two consecutive turns of the same role."""
    if last.role != turn.role:
        return False
    if turn.role == "user":
        return not facts.repeated_user
    has_calls = bool(last.calls or turn.calls)  # templates check turns with calls separately
    return turn.role == "assistant" and not facts.repeated_assistant and not has_calls


def _joined(first: Turn, second: Turn) -> Turn:
    """Return one turn that contains the text of two turns of the same role."""
    texts = [turn.text for turn in (first, second) if turn.text]
    message = {**first.message, **second.message}
    thoughts = [
        str(turn.message["reasoning_content"])
        for turn in (first, second)
        if turn.message.get("reasoning_content")
    ]
    if thoughts:
        message["reasoning_content"] = "\n\n".join(thoughts)
    message["content"] = "\n\n".join(texts)
    return Turn(message, second.index if first.index is None else first.index)
