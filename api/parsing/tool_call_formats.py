"""Formats in which families of models write calls as JSON: what they begin with, and readers.

Sources: the models' published chat templates.
"""

from __future__ import annotations

import re

from .output_parser import Cut, Malformed, Reading, Source
from .reading.answer import Beginning, Where
from .reading.call_state import CallState
from .reading.ends import Ends
from .reading.json_call import json_block, json_calls, named_call
from .tagged import read_block

HERMES_BEGIN, HERMES_END = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"
MISTRAL_CALLS, MISTRAL_ID, MISTRAL_ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
DEEPSEEK_CALLS_BEGIN, DEEPSEEK_CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
DEEPSEEK_BEGIN, DEEPSEEK_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
DEEPSEEK_SEP = "<｜tool▁sep｜>"
KIMI_SECTION, KIMI_SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
KIMI_CALL, KIMI_CALL_END = "<|tool_call_begin|>", "<|tool_call_end|>"
KIMI_ARGUMENTS = "<|tool_call_argument_begin|>"
GRANITE_CALLS = "<|tool_call|>"
PHI_CALLS_END = "<|/tool_call|>"
COHERE_CALLS, COHERE_CALLS_END = "<|START_ACTION|>", "<|END_ACTION|>"
HUNYUAN_CALLS, HUNYUAN_CALLS_END = "<tool_calls>", "</tool_calls>"
LFM2_CALLS, LFM2_CALLS_END = "<|tool_call_start|>", "<|tool_call_end|>"
OLMO_CALLS, OLMO_CALLS_END = "<function_calls>", "</function_calls>"
FENCE_BEGIN = "```json"
_NAME = re.compile(r"[\w.:-]+")
_KIMI_INDEX = re.compile(r":\d*$")

# Hermes and Qwen: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``.
HERMES = (Beginning(mark=HERMES_BEGIN, read=read_block, ends=(HERMES_END,)),)


def _llama3(call: CallState) -> Reading[None]:
    source = call.source
    if (yield from source.literal(PYTHON_TAG)):
        yield from source.white()
    yield from json_calls(call, Ends(begins={PYTHON_TAG: ()}))


# Llama 3: the whole answer is ``{"name": ..., "parameters": {...}}``, or several with ";".
LLAMA3 = (
    Beginning(mark="{", read=_llama3, where=Where.START, ends=(";",), is_plain=True),
    Beginning(mark=PYTHON_TAG, read=_llama3, ends=(";",)),
)


def _mistral(call: CallState) -> Reading[None]:
    source = call.source
    named = (f'{name}{MISTRAL_ARGS}{{"' for name in call.offers.names)
    ends = Ends(begins={MISTRAL_CALLS: ('[{"', *named)})
    yield from source.expect(MISTRAL_CALLS)
    yield from source.white()
    if (yield from source.peek()) in ("[", "{", "`"):
        yield from json_block(call, ends)
        return
    is_first = True
    while is_first or (yield from _is_mistral_name(source)):
        name = call.check((yield from _name(source)))
        if (yield from source.literal(MISTRAL_ID)):
            yield from source.run(_NAME)
        if not (yield from source.close(MISTRAL_ARGS)):
            yield from _see_arguments(source)
        yield from named_call(call, name, ends)
        is_first = False


def _is_mistral_name(source: Source) -> Reading[bool]:
    """Whether another call comes without the mark before it; takes the white space before it."""
    at = yield from source.behind_white()
    end = yield from source.behind(_NAME, at)
    if end == at or not (yield from source.which((MISTRAL_ARGS, MISTRAL_ID), end)):
        return False
    source.take(at)
    return True


# Mistral: ``[TOOL_CALLS][{...}, ...]``, or ``[TOOL_CALLS]name[ARGS]{...}`` for each call.
MISTRAL = (Beginning(mark=MISTRAL_CALLS, read=_mistral),)


def json_list(begin: str, end: str) -> tuple[Beginning, ...]:
    """Return the beginning of calls between marks: Granite's, Phi's, Cohere's and others'."""

    def read(call: CallState) -> Reading[None]:
        yield from call.source.expect(begin)
        yield from call.source.white()
        yield from json_block(call, Ends((end,) if end else (), {begin: ('[{"', '{"name"')}))
        if end:
            yield from call.source.close(end)

    return (Beginning(mark=begin, read=read, ends=(end,) if end else ()),)


def _kimi(call: CallState) -> Reading[None]:
    source = call.source
    begins = {KIMI_CALL: tuple(f"functions.{name}:" for name in call.offers.names)}
    ends = Ends((KIMI_CALL_END, KIMI_SECTION_END), begins)
    is_first = yield from source.literal(KIMI_SECTION)
    yield from source.white()
    while (yield from source.literal(KIMI_CALL)) or is_first:
        yield from source.white()
        if (yield from source.peek()) in ("{", "["):
            yield from json_block(call, ends)
            break
        written = yield from _name(source)
        name = call.check(_KIMI_INDEX.sub("", written).removeprefix("functions."))
        if not (yield from source.close(KIMI_ARGUMENTS)):
            yield from _see_arguments(source)
        yield from named_call(call, name, ends)
        yield from source.close(KIMI_CALL_END)
        yield from _to(source, KIMI_CALL)
        is_first = False
    yield from source.close(KIMI_SECTION_END)


# Kimi K2: each call between marks, behind ``functions.name:index``; all between marks.
KIMI = tuple(
    Beginning(mark=mark, read=_kimi, ends=(KIMI_CALL_END, KIMI_SECTION_END))
    for mark in (KIMI_SECTION, KIMI_CALL)
)


def _deepseek(call: CallState) -> Reading[None]:
    source = call.source
    names = ("function", *call.offers.names)
    begins = {DEEPSEEK_BEGIN: tuple(f"{name}{DEEPSEEK_SEP}" for name in names)}
    ends = Ends((DEEPSEEK_END, DEEPSEEK_CALLS_END), begins)
    is_first = yield from source.literal(DEEPSEEK_CALLS_BEGIN)
    yield from source.white()
    while (yield from source.literal(DEEPSEEK_BEGIN)) or is_first:
        yield from source.white()
        if (yield from source.peek()) in ("{", "["):
            yield from json_block(call, ends)
            break
        name = yield from _deepseek_name(call)
        yield from named_call(call, call.check(name), ends)
        yield from source.close(DEEPSEEK_END)
        yield from _to(source, DEEPSEEK_BEGIN)
        is_first = False
    yield from source.close(DEEPSEEK_CALLS_END)


def _deepseek_name(call: CallState) -> Reading[str]:
    """Read the name, before which V3 writes the type, "function"."""
    source = call.source
    name = yield from _name(source)
    if not (yield from source.close(DEEPSEEK_SEP)):
        yield from _see_arguments(source)
        return name
    yield from source.white()
    second = source.text(0, (yield from source.behind(_NAME, 0)))
    if second and (name == "function" or second in call.offers):
        source.take(len(second))
        yield from source.close(DEEPSEEK_SEP)
        return second
    return name


# DeepSeek: each call between marks, all of them between marks; V3 and V3.1 differ inside.
DEEPSEEK = tuple(
    Beginning(mark=mark, read=_deepseek, ends=(DEEPSEEK_END, DEEPSEEK_CALLS_END))
    for mark in (DEEPSEEK_CALLS_BEGIN, DEEPSEEK_BEGIN)
)


def _see_arguments(source: Source) -> Reading[None]:
    """See that arguments come although no mark is before them. Raises `Malformed`."""
    at = yield from source.behind_white()
    if (yield from source.char(at)) not in ("{", "`"):
        raise Malformed


def _to(source: Source, mark: str) -> Reading[None]:
    """Take white space, if a mark is behind it."""
    at = yield from source.behind_white()
    if (yield from source.ahead(mark, at)):
        source.take(at)


def _name(source: Source) -> Reading[str]:
    name = yield from source.run(_NAME)
    if not name and not (yield from source.peek()):
        raise Cut
    return name
