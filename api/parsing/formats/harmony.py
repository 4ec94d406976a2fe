"""Reads harmony: the channels in which gpt-oss reasons, calls tools and answers.

``<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...``; a call
is a message in the commentary channel to ``functions.f``. Source: OpenAI's harmony response format.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from ...structured.grammar_text import lark_text
from ..family import Family
from ..grammars import Lark, arguments
from ..output_parser import (
    Content,
    Cut,
    Event,
    Malformed,
    ReaderParser,
    Reading,
    Reasoning,
    Source,
    collected,
)
from ..reading.answer import Beginning, read_content
from ..reading.call_state import CallState, followed
from ..reading.ends import Ends
from ..reading.json_call import FENCE, fence, surplus
from ..reading.json_text import object_of, object_text
from ..reading.offers import Offers
from ..reasoning import Thinking

if TYPE_CHECKING:
    from collections.abc import Callable

    from ...types.results import Tool

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
MARKS = (START, CHANNEL, MESSAGE, CONSTRAIN, END, CALL, RETURN)
HARMONY_THINK = Thinking(f"{CHANNEL}analysis{MESSAGE}", f"{END}{START}assistant")
MAX_HEADER_CHARS = 512
_ENDS = (END, CALL, RETURN)
_ALL_BEGIN = "<|"
_NAMED = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto\s*=\s*([\w.-]+)")
_FUNCTIONS = "functions."
_ROLE = re.compile(r"[\w.=:, -]+")
_BARE_HEADERS = tuple(f"{before}to={_FUNCTIONS}" for before in ("", "commentary ", "analysis "))


def with_thinking(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the conversation with reasoning copied to the field that the template reads.

    In a message with calls, harmony's template accepts either content or reasoning.
    """
    return [
        {**message, "thinking": message["reasoning_content"]}
        if message.get("reasoning_content") and not message.get("content")
        else message
        for message in messages
    ]


def marked_call(message: Mapping[str, Any], mark: str) -> dict[str, Any]:
    """Return the message's call with ``mark`` in place of its arguments.

    The template refuses a tool result without a call before it, and writes the call's name into the
    result.
    """
    call = message["tool_calls"][0]
    function = {**(call.get("function") or call), "arguments": mark}
    return {"role": "assistant", "tool_calls": [{"type": "function", "function": function}]}


def without_calls(text: str, marks: Sequence[str]) -> str:
    """Return the template's text with each `marked_call` reduced to its ``mark``."""
    alone = "|".join(map(re.escape, marks))
    header = rf" to={re.escape(_FUNCTIONS)}[^<]*<\|channel\|>[^<]*<\|message\|>"
    return re.sub(rf'{header}"({alone})"', r"\1", text)


def read_harmony(source: Source, beginnings: Sequence[Beginning], offers: Offers) -> Reading[None]:
    """Read reasoning, calls and content, and drop the delimiters; text without delimiters is
    content.

    ``beginnings`` are the texts that begin calls within content.
    """
    while (yield from source.peek()):
        header = yield from _header(source)
        channel = _NAMED.search(header or "")
        recipient = _RECIPIENT.search(header or "")
        is_analysis = channel is not None and channel[1] == "analysis"
        if recipient is not None and offers.names and not (
            is_analysis and not recipient[1].startswith(_FUNCTIONS)
        ):  # fmt: skip
            yield from _call(source, recipient[1].rpartition(_FUNCTIONS)[2], offers)
        elif is_analysis:
            yield from _body(source, Reasoning)
        else:
            yield from _content(source, beginnings if offers.names else (), offers)


def _content(source: Source, beginnings: Sequence[Beginning], offers: Offers) -> Reading[None]:
    """Read the content of a message, and calls in it."""
    inner = ReaderParser(partial(read_content, beginnings=beginnings, offers=offers))
    for event in _body(source, Content):
        if event is None:
            yield None
        else:
            assert isinstance(event, Content)
            yield from inner.feed(event.text)
    yield from inner.end(is_cut=source.is_cut)


def _header(source: Source) -> Reading[str | None]:
    """Read the header of a message; None if the message has no header."""
    if not (yield from source.which((START, CHANNEL))):
        if not (yield from _is_bare_header(source)):
            return None
        yield from source.white()
    pieces: list[str] = []
    while sum(map(len, pieces)) < MAX_HEADER_CHARS:
        if (yield from source.literal(MESSAGE)):
            return "".join(pieces)
        mark = yield from _mark(source, (START, CHANNEL, CONSTRAIN))
        if mark:
            pieces.append(mark)
        elif run := (yield from source.run(_ROLE)):
            pieces.append(run)
        else:
            break
    return "".join(pieces)


def _is_bare_header(source: Source) -> Reading[bool]:
    """Whether the end of a header comes next. The prompt contains the beginning of the header."""
    at = yield from source.after_white()
    if not (yield from source.which(_BARE_HEADERS, at)):
        return False
    at = yield from source.after(_ROLE, at)
    return bool((yield from source.which((CHANNEL, CONSTRAIN, MESSAGE), at)))


def _mark(source: Source, marks: Sequence[str]) -> Reading[str]:
    """Consume and return the next delimiter if it is one of ``marks``, else return ""."""
    for mark in marks:
        if (yield from source.literal(mark)):
            return mark
    return ""


def _body(source: Source, wrap: Callable[[str], Event]) -> Reading[None]:
    """Yield the text of a message, and consume the delimiter after it."""
    while (yield from source.until(_ALL_BEGIN, wrap)):
        if (yield from _mark(source, _ENDS)):
            return
        for mark in (START, CHANNEL):
            if (yield from source.ahead(mark)):
                return
        if (yield from _mark(source, (MESSAGE, CONSTRAIN))):
            continue
        yield wrap(source.take(len(_ALL_BEGIN)))


def _call(source: Source, name: str, offers: Offers) -> Reading[None]:
    call = CallState(source, offers)
    source.keep()
    with suppress(Malformed, Cut):
        yield from followed(call, partial(_called, name=name))
    kept = source.release()
    if not call.has_begun and kept:
        yield Content(kept)
    yield from source.white()
    yield from _mark(source, _ENDS)


def _called(call: CallState, *, name: str) -> Reading[None]:
    source, name = call.source, call.check(name)
    channels = ("analysis", "commentary", "final")
    ends = Ends(_ENDS, {START: ("assistant",), CHANNEL: channels})
    is_fenced = yield from fence(source)
    yield from source.white()
    first = yield from source.peek()
    if first == "{":
        yield from call.begin(name)
        yield from object_text(source, ends)
        yield from call.end()
        yield from surplus(call)
        if is_fenced:
            yield from source.close(FENCE)
    else:
        text = yield from _text(source)
        if source.is_cut and not (yield from source.peek()):
            yield from call.begin(name)
            raise Cut
        yield from call.whole(name, object_of(text))


def _text(source: Source) -> Reading[str]:
    """Read the text up to the delimiter that ends a message."""
    pieces = [(yield from collected(source.until(_ALL_BEGIN, Content)))]
    while (yield from source.peek()) and not (yield from source.which((*_ENDS, START, CHANNEL))):
        pieces.append(source.take(1))
        pieces.append((yield from collected(source.until(_ALL_BEGIN, Content))))
    return "".join(pieces)


# -- grammars -------------------------------------------------------------------------------------


class HarmonyGrammar:
    """Grammar rules for answers: optional reasoning, then text, a call or structured output."""

    def calls(self, lark: Lark, tools: Sequence[Tool], *, parallel: bool) -> str:
        """Return the rule for one call; a call ends the answer, so there is never a second one."""
        del parallel
        return lark.rule("calls", f"{_thought(lark)} {self._call(lark, tools)}")

    def mixed(self, lark: Lark, tools: Sequence[Tool], *, parallel: bool) -> str:
        """Return the rule for either free text or one valid call."""
        del parallel
        text = f"{_opened(lark, 'final')} {lark.without_any(MARKS, 'inside')}"
        free = lark.not_beginning((CHANNEL,), "words")
        call = self._call(lark, tools)
        return lark.rule("mixed", f"{_thought(lark)} ({text} | {call}) | {free}")

    def around(self, lark: Lark, structured: str) -> str:
        """Return the rule for structured output in the final channel."""
        return lark.rule("final", f"{_thought(lark)} {_opened(lark, 'final')} {structured}")

    def _call(self, lark: Lark, tools: Sequence[Tool]) -> str:
        def written(tool: Tool) -> str:
            to = lark_text(f"{_FUNCTIONS}{tool.name} ")
            return f'{to} {lark.mark(CONSTRAIN)} "json" {lark.mark(MESSAGE)} {arguments(tool)}'

        channel = f'{lark.mark(CHANNEL)} "commentary to="'
        return lark.rule("call", f"{channel} {lark.each(tools, written)}")


def _opened(lark: Lark, channel: str) -> str:
    return f"{lark.mark(CHANNEL)} {lark_text(channel)} {lark.mark(MESSAGE)}"


def _thought(lark: Lark) -> str:
    thought = lark.up_to(END, "thought", marks=MARKS)
    opened = _opened(lark, "analysis")
    again = f'{lark.mark(START)} "assistant"'
    return f"({lark.rule('analysis', f'{opened} {thought} {again}')})?"


HARMONY = HarmonyGrammar()
HARMONY_FAMILY = Family(
    MARKS,
    (CHANNEL, "analysis"),
    (),
    lambda *_: HARMONY,
    read_harmony,
    reads_thoughts=True,
    thinking=HARMONY_THINK,
    around=HARMONY.around,
    prepare=with_thinking,
)
