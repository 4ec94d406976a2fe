"""Formats in which families of models write calls as JSON, and a reader of each.

Sources: the models' published chat templates.
"""

from __future__ import annotations

import re
from collections.abc import Container
from functools import partial

from .calls import CallState, JsonCall, attempt, marked_calls, object_text
from .output_parser import Content, Cut, Malformed, Reading, Source

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
FENCE_BEGIN, FENCE_END = "```json", "```"
_NAME = re.compile(r"[\w.:-]+")
_KIMI_INDEX = re.compile(r":\d+$")
_SLACK = re.compile(r"[\s}]+")  # models close a brace too many


def read_hermes(source: Source) -> Reading[None]:
    """Hermes and Qwen: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``."""
    yield from marked_calls(source, HERMES_BEGIN, _hermes_call, HERMES_END)


def _hermes_call(call: CallState) -> Reading[None]:
    source = call.source
    yield from source.expect(HERMES_BEGIN)
    yield from source.white()
    yield from JsonCall(call, mark=HERMES_END).read()
    yield from source.run(_SLACK)
    yield from source.closing(HERMES_END)


def read_llama3(source: Source, names: Container[str]) -> Reading[None]:
    """Llama 3: the whole answer is ``{"name": ..., "parameters": {...}}``, or several with ";".

    ``names``: without ``<|python_tag|>`` in front only calls of these are calls.
    """
    call = CallState(source)
    is_first = True
    while (yield from attempt(call, partial(_llama3_call, names=names, is_first=is_first))):
        is_first = False
    yield from source.rest(Content)


def _llama3_call(call: CallState, *, names: Container[str], is_first: bool) -> Reading[None]:
    source = call.source
    yield from source.white()
    if not is_first:
        yield from _end_of_answer(source)
        if not (yield from source.literal(";")):
            yield from source.expect(",")
        yield from source.white()
    is_marked = yield from source.literal(PYTHON_TAG)
    yield from source.white()
    call.names = None if is_marked else names
    yield from JsonCall(call, is_bare=not is_marked).read()


def _end_of_answer(source: Source) -> Reading[None]:
    """Space behind the last call is nothing."""
    if not (yield from source.peek()):
        source.keep()
        raise Cut


def read_mistral(source: Source) -> Reading[None]:
    """Mistral: ``[TOOL_CALLS][{...}, ...]``, or ``[TOOL_CALLS]name[ARGS]{...}`` for each call."""
    yield from marked_calls(source, MISTRAL_CALLS, _mistral_calls)


def _mistral_calls(call: CallState) -> Reading[None]:
    source = call.source
    yield from source.expect(MISTRAL_CALLS)
    yield from source.white()
    if (yield from source.literal("[")):
        yield from _mistral_list(call)
        return
    name = call.check((yield from _name(source)))
    if (yield from source.literal(MISTRAL_ID)):
        yield from source.run(_NAME)
    if not (yield from source.literal(MISTRAL_ARGS)) and not (yield from source.ahead("{")):
        raise Malformed
    yield from _named_arguments(call, name)


def _mistral_list(call: CallState) -> Reading[None]:
    source = call.source
    while True:
        yield from source.white()
        yield from JsonCall(call).read()
        yield from source.white()
        if not (yield from source.literal(",")):
            break
    yield from source.closing("]")


def read_json_list(source: Source, begin: str, end: str) -> Reading[None]:
    """Granite, Phi, Cohere and others: a list of calls, or one of them, between marks."""

    def read(call: CallState) -> Reading[None]:
        return _json_list(call, begin, end)

    yield from marked_calls(source, begin, read, end)


def _json_list(call: CallState, begin: str, end: str) -> Reading[None]:
    source = call.source
    yield from source.expect(begin)
    yield from source.white()
    if (yield from source.literal("[")):
        yield from _mistral_list(call)
    else:
        yield from JsonCall(call, mark=end).read()
    if end:
        yield from source.white()
        yield from source.literal(end)


def read_kimi(source: Source) -> Reading[None]:
    """Kimi K2: each call between marks, behind ``functions.name:index``; all between marks."""
    yield from marked_calls(source, KIMI_SECTION, _kimi_calls, KIMI_SECTION_END)


def _kimi_calls(call: CallState) -> Reading[None]:
    source = call.source
    yield from source.expect(KIMI_SECTION)
    while True:
        yield from source.white()
        yield from source.expect(KIMI_CALL)
        yield from source.white()
        written = yield from _name(source)
        name = call.check(_KIMI_INDEX.sub("", written).removeprefix("functions."))
        yield from source.white()
        yield from source.expect(KIMI_ARGUMENTS)
        yield from _named_arguments(call, name, KIMI_CALL_END)
        yield from source.white()
        yield from source.closing(KIMI_CALL_END)
        yield from source.white()
        if not (yield from source.ahead(KIMI_CALL)):
            break
    yield from source.closing(KIMI_SECTION_END)


def read_deepseek(source: Source) -> Reading[None]:
    """DeepSeek: each call between marks, all of them between marks; V3 and V3.1 differ inside."""
    yield from marked_calls(source, DEEPSEEK_CALLS_BEGIN, _deepseek_calls, DEEPSEEK_END)


def _deepseek_calls(call: CallState) -> Reading[None]:
    source = call.source
    yield from source.expect(DEEPSEEK_CALLS_BEGIN)
    while True:
        yield from source.white()
        yield from _deepseek_call(call)
        yield from source.white()
        if not (yield from source.ahead(DEEPSEEK_BEGIN)):
            break
    yield from source.closing(DEEPSEEK_CALLS_END)


def _deepseek_call(call: CallState) -> Reading[None]:
    source = call.source
    yield from source.expect(DEEPSEEK_BEGIN)
    name = yield from _name(source)
    yield from source.expect(DEEPSEEK_SEP)
    if not (yield from source.ahead("{")):  # V3: what was there is the type, "function"
        name = yield from _name(source)
        yield from source.white()
        yield from source.expect(FENCE_BEGIN)
    yield from _named_arguments(call, call.check(name), DEEPSEEK_END)
    yield from source.white()
    yield from source.literal(FENCE_END)
    yield from source.closing(DEEPSEEK_END)


def _name(source: Source) -> Reading[str]:
    name = yield from source.run(_NAME)
    if not name and not (yield from source.peek()):
        raise Cut
    return name


def _named_arguments(call: CallState, name: str, mark: str = "") -> Reading[None]:
    """An object behind a name."""
    yield from call.source.white()
    if not (yield from call.source.ahead("{")):
        if (yield from call.source.peek()):
            raise Malformed
        yield from call.begin(name)
        raise Cut
    yield from call.begin(name)
    yield from object_text(call.source, mark)
    yield from call.end()
