"""TemplateFacts: what a chat template supports, found by rendering short conversations.

Templates differ in what they accept: a system message in mid-conversation, two user messages in a
row, a result without a call. Some raise an error, others silently drop the message. Each ability is
therefore probed with a conversation of unique words: the template supports it if it renders all
words in order.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from ...text.chat_template import NULL

Messages = Sequence[Mapping[str, Any]]
Write = Callable[..., Awaitable[str]]
"""Renders messages and ``tools`` (in OpenAI's form) with the template; "" if it fails."""

PROBE = "foretoken"  # a text to find in the rendered prompt
PROBES: dict[bool, list[dict[str, Any]]] = {  # conversations without (False) and with (True) calls
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
CALL_ID = "call00001"  # Mistral's templates require nine letters and digits.
OTHER_ID = "call00002"
NAME, OTHER_NAME, KEY, VALUE = "probe_name", "probe_other", "probe_key", "probe_value"
OBJECT = {KEY: VALUE}
OBJECT_TEXT = f'{{"{KEY}": "{VALUE}"}}'
CUT_TEXT = f'{{"{KEY}": "{VALUE}'
REPR = f"'{KEY}'"  # the object as Python prints it, which is not JSON
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
"""Ways to express that a message with calls has no content."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateFacts:
    """Abilities of a chat template. Messages that need an ability it lacks are converted."""

    parts_only: bool = False  # content must be a list of parts
    system: bool = False  # a system message at the beginning
    system_alone: bool = False  # a system message without any other message
    later_system: bool = False  # a system message at a later place
    assistant_first: bool = False
    repeated_user: bool = False  # two consecutive user messages
    repeated_assistant: bool = False
    calls: bool = False  # tool calls
    parallel_calls: bool = False  # several calls in one message
    calls_with_content: bool = False  # a message with both content and calls
    lone_results: bool = False  # a result without a call
    unanswered_calls: bool = False
    user_behind_results: bool = False
    empty_content: Mapping[str, Any]  # the content field of a message that has only calls
    arguments: Literal["object", "text"] = "object"
    cut_arguments: bool = False  # arguments that are not JSON, which are rendered unchanged
    # whether token ids can replace an assistant's message, by whether it has calls
    splices: Mapping[bool, bool] = field(default_factory=dict)

    def strictest(self) -> TemplateFacts:
        """Return facts that allow only the plainest conversations."""
        return TemplateFacts(
            parts_only=self.parts_only,
            calls=self.calls,
            empty_content=self.empty_content,
            arguments=self.arguments,
            cut_arguments=self.cut_arguments,
            splices=self.splices,
        )

    def without_calls(self) -> TemplateFacts:
        """Return the facts without support of calls: calls and results are rendered as text."""
        return replace(self, calls=False, lone_results=False)


async def probe(write: Write) -> TemplateFacts:
    """Find out what a template supports."""
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
        parts_only=prober.parts_only,
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
    """Renders probe conversations with one template."""

    def __init__(self, write: Write) -> None:
        self._write = write
        self.parts_only = False

    async def writes(self, *messages: Mapping[str, Any], extra: Sequence[str] = ()) -> bool:
        """Whether the template renders the words of all messages in order, and all of ``extra``."""
        text = await self.text(messages)
        at = 0
        for message in messages:
            at = text.find(_word(message), at) + 1
            if not at:
                return False
        return all(word in text for word in extra)

    async def shows(self, *messages: Mapping[str, Any]) -> bool:
        """Whether the template renders the word of the first message."""
        return _word(messages[0]) in await self.text(messages)

    async def text(self, messages: Messages) -> str:
        """Return the rendered text, "" if the template fails.

        Some templates render nothing without tools, so the rendering is repeated with a tool.
        """
        if self.parts_only:
            messages = [_in_parts(message) for message in messages]
        return await self._write(messages) or await self._write(messages, tools=[TOOL])

    async def find_parts(self) -> None:
        """Find out whether the template requires content as a list of parts."""
        user = _user("probe-a")
        if not await self.writes(user):
            self.parts_only = True
            self.parts_only = await self.writes(user)

    async def find_calls(self) -> TemplateFacts:
        """Find out whether and how the template renders calls."""
        user, result = _user("probe-a"), _result("probe-g", CALL_ID, NAME)
        other = _result("probe-h", OTHER_ID, OTHER_NAME)
        for empty_content in CONTENTS:
            found = await self._form_of_arguments(user, result, empty_content)
            if found is not None:
                break
        else:
            return TemplateFacts(empty_content=CONTENTS[0])
        first, second = _call(found, CALL_ID, NAME), _call(found, OTHER_ID, OTHER_NAME)
        cut = {**first, "function": {"name": NAME, "arguments": CUT_TEXT}}
        both = _calling(found, first, second)
        spoken = {**_calling(found, first), **_words("probe-c")}
        text = await self.text([user, _calling(found, cut), result])
        return replace(
            found,
            calls=True,
            cut_arguments=CUT_TEXT in text and f'"{CUT_TEXT}' not in text,
            calls_with_content=NAME in await self.text([user, spoken, result]),
            parallel_calls=await self.writes(user, both, result, other, extra=[OTHER_NAME]),
        )

    async def _form_of_arguments(
        self, user: Mapping[str, Any], result: Mapping[str, Any], empty_content: Mapping[str, Any]
    ) -> TemplateFacts | None:
        """Return the form of arguments that the template renders; None if it renders no calls."""
        forms = [TemplateFacts(empty_content=empty_content, arguments=each) for each in FORMS]
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
    return {"role": "assistant", **facts.empty_content, "tool_calls": list(calls)}


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
    """Return the word that the rendered message must contain: its content or its function's
    name.
    """
    content = message.get("content")
    return content if isinstance(content, str) and content else NAME


def _in_parts(message: Mapping[str, Any]) -> Mapping[str, Any]:
    content = message.get("content")
    if not isinstance(content, str) or not content:
        return message
    return {**message, "content": [{"type": "text", "text": content}]}
