"""How the families of models write calls in JSON, and how each is read.

Sources: the models' published chat templates.
"""

from __future__ import annotations

import re
from collections.abc import Container
from functools import partial

from .calls import CallState, attempt, marked_calls
from .events import Words
from .input_buffer import Cut, Malformed, Reading, Source
from .json_calls import JsonCall, object_text

HERMES_BEGIN, HERMES_END = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"
MISTRAL_CALLS, MISTRAL_ID, MISTRAL_ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
DEEPSEEK_CALLS_BEGIN, DEEPSEEK_CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
DEEPSEEK_BEGIN, DEEPSEEK_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
DEEPSEEK_SEP = "<｜tool▁sep｜>"
FENCE_BEGIN, FENCE_END = "```json", "```"
_NAME = re.compile(r"[\w.:-]+")
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
    yield from source.rest(Words)


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
