"""TemplateFacts: what a chat template writes, found out by short conversations.

Templates differ in what they take: a system message in mid-conversation, two messages of the user
in a row, a result without its call. Some raise an error, others leave the message out without a
word. So nothing is believed that a probe has not shown: each is a conversation of words that occur
nowhere else, and the template takes it if it writes all of them in their order.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from ...text.chat_template import NULL

Messages = Sequence[Mapping[str, Any]]
Write = Callable[..., Awaitable[str]]
"""Writes messages and ``tools`` (in OpenAI's form) by the template; "" where it fails."""

PROBE = "foretoken"  # a text whose place in the prompt is looked for
PROBES: dict[bool, list[dict[str, Any]]] = {  # conversations with calls and without
    False: [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": PROBE},
        {"role": "user", "content": "hi"},
    ],
    True: [
        {"role": "user", "content": "hi"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {
                    "id": "call00001",
                    "type": "function",
                    "function": {"name": PROBE, "arguments": {}},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "call00001", "name": PROBE, "content": "hi"},
        {"role": "user", "content": "hi"},
    ],
}
CALL_ID = "call00001"  # nine letters and digits, as Mistral's templates want it
OTHER_ID = "call00002"
NAME, OTHER_NAME, KEY, VALUE = "probe_name", "probe_other", "probe_key", "probe_value"
OBJECT = {KEY: VALUE}
OBJECT_TEXT = f'{{"{KEY}": "{VALUE}"}}'
CUT_TEXT = f'{{"{KEY}": "{VALUE}'
REPR = f"'{KEY}'"  # an object as Python writes it, which is no JSON
TOOL = {
    "type": "function",
    "function": {
        "name": "probe_tool",
        "description": "A probe.",
        "parameters": {"type": "object", "properties": {}, "required": []},
    },
}
FORMS: tuple[Literal["object", "text"], ...] = ("object", "text")
CONTENTS: tuple[Mapping[str, Any], ...] = ({"content": ""}, {"content": NULL}, {})
"""Ways to say that a message with calls has no words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateFacts:
    """Abilities of a chat template; messages that need one that is False take another form."""

    parts_alone: bool = False  # content only as a list of parts
    system: bool = False  # a system message at the beginning
    system_alone: bool = False  # also where no message follows
    later_system: bool = False  # also at any later place
    assistant_first: bool = False
    repeated_user: bool = False  # two messages of the user in a row
    repeated_assistant: bool = False
    calls: bool = False  # calls of tools
    parallel_calls: bool = False  # several in one message
    calls_beside_words: bool = False  # a message with both
    lone_results: bool = False  # without a call before them
    unanswered_calls: bool = False
    user_behind_results: bool = False
    no_words: Mapping[str, Any]  # the content of a message that has only calls
    arguments: Literal["object", "text"] = "object"
    cut_arguments: bool = False  # text that is no JSON, as it is
    # Whether token ids can stand for a message of the assistant, with calls and without.
    splices: Mapping[bool, bool] = field(default_factory=dict)

    def strictest(self) -> TemplateFacts:
        """The same template, as if it took nothing but the plainest conversation."""
        return TemplateFacts(
            parts_alone=self.parts_alone,
            calls=self.calls,
            no_words=self.no_words,
            arguments=self.arguments,
            cut_arguments=self.cut_arguments,
            splices=self.splices,
        )

    def without_calls(self) -> TemplateFacts:
        """The same template where calls and results are written as text."""
        return replace(self, calls=False, lone_results=False)


async def probe(write: Write) -> TemplateFacts:
    """Find out what a template writes."""
    prober = _Prober(write)
    await prober.find_parts()
    facts = await prober.find_calls()
    writes = prober.writes
    user, later = _user("probe-a"), _user("probe-b")
    words, more = _words("probe-c"), _words("probe-d")
    system, late_system = (
        {"role": "system", "content": content} for content in ("probe-e", "probe-f")
    )
    calls = [_calling(facts, _call(facts, CALL_ID, NAME))] if facts.calls else [words]
    result = _result("probe-g", CALL_ID, NAME)
    return replace(
        facts,
        parts_alone=prober.parts_alone,
        system=await prober.shows(system, user),
        system_alone=await writes(system),
        later_system=await writes(user, system, later, words, late_system),
        assistant_first=await writes(words, user),
        repeated_user=await writes(user, later),
        repeated_assistant=await writes(user, words, more, later),
        lone_results=await writes(user, result, later),
        unanswered_calls=await writes(user, *calls, later),
        user_behind_results=await writes(user, *calls, result, later),
    )


class _Prober:
    """Writes probes by one template."""

    def __init__(self, write: Write) -> None:
        self._write = write
        self.parts_alone = False

    async def writes(self, *messages: Mapping[str, Any], extra: Sequence[str] = ()) -> bool:
        """Whether the template writes the words of all messages in their order."""
        text = await self.text(messages)
        at = 0
        for message in messages:
            at = text.find(_word(message), at) + 1
            if not at:
                return False
        return all(word in text for word in extra)

    async def shows(self, *messages: Mapping[str, Any]) -> bool:
        """Whether the template writes the word of the first message."""
        return _word(messages[0]) in await self.text(messages)

    async def text(self, messages: Messages) -> str:
        """Return the text that the template writes, "" where it fails.

        Some templates write nothing at all without tools.
        """
        if self.parts_alone:
            messages = [_in_parts(message) for message in messages]
        return await self._write(messages) or await self._write(messages, tools=[TOOL])

    async def find_parts(self) -> None:
        """Find out whether the template writes content only if it is a list of parts."""
        user = _user("probe-a")
        if not await self.writes(user):
            self.parts_alone = True
            self.parts_alone = await self.writes(user)

    async def find_calls(self) -> TemplateFacts:
        """Find out how the template writes calls, if it writes them."""
        user, result = _user("probe-a"), _result("probe-g", CALL_ID, NAME)
        other = _result("probe-h", OTHER_ID, OTHER_NAME)
        for no_words in CONTENTS:
            found = await self._form_of_arguments(user, result, no_words)
            if found is not None:
                break
        else:
            return TemplateFacts(no_words=CONTENTS[0])
        first, second = _call(found, CALL_ID, NAME), _call(found, OTHER_ID, OTHER_NAME)
        cut = {**first, "function": {"name": NAME, "arguments": CUT_TEXT}}
        both = _calling(found, first, second)
        spoken = {**_calling(found, first), **_words("probe-c")}
        text = await self.text([user, _calling(found, cut), result])
        return replace(
            found,
            calls=True,
            cut_arguments=CUT_TEXT in text and f'"{CUT_TEXT}' not in text,
            calls_beside_words=NAME in await self.text([user, spoken, result]),
            parallel_calls=await self.writes(user, both, result, other, extra=[OTHER_NAME]),
        )

    async def _form_of_arguments(
        self, user: Mapping[str, Any], result: Mapping[str, Any], no_words: Mapping[str, Any]
    ) -> TemplateFacts | None:
        """Return the form in which the template writes arguments; None if it writes no call."""
        forms = [TemplateFacts(no_words=no_words, arguments=each) for each in FORMS]
        texts = [
            await self.text([user, _calling(facts, _call(facts, CALL_ID, NAME)), result])
            for facts in forms
        ]
        written = [all(word in text for word in (NAME, KEY, VALUE)) for text in texts]
        is_json = REPR not in texts[0] or OBJECT_TEXT not in texts[1]
        if written[0] and is_json:
            return forms[0]
        return forms[1] if written[1] else None


def _calling(facts: TemplateFacts, *calls: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"role": "assistant", **facts.no_words, "tool_calls": list(calls)}


def _user(word: str) -> Mapping[str, Any]:
    return {"role": "user", "content": word}


def _words(word: str) -> Mapping[str, Any]:
    return {"role": "assistant", "content": word}


def _result(word: str, call_id: str, name: str) -> Mapping[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "name": name, "content": word}


def _call(facts: TemplateFacts, call_id: str, name: str) -> dict[str, Any]:
    arguments: object = OBJECT if facts.arguments == "object" else OBJECT_TEXT
    function = {"name": name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


def _word(message: Mapping[str, Any]) -> str:
    """Return the word of a message that its text must have: that of its content, or the name it
    calls.
    """
    content = message.get("content")
    return content if isinstance(content, str) and content else NAME


def _in_parts(message: Mapping[str, Any]) -> Mapping[str, Any]:
    content = message.get("content")
    if not isinstance(content, str) or not content:
        return message
    return {**message, "content": [{"type": "text", "text": content}]}
