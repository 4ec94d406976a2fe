"""Mistral: ``[TOOL_CALLS][{...}, ...]``, or ``[TOOL_CALLS]name[ARGS]{...}`` for each call.

Source: the models' published chat templates.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from ..call_grammars import CallGrammar, Marked, after_name, between, several
from ..family import Family
from ..grammars import Lark
from ..output_parser import Reading, Source
from ..reading.answer import Beginning
from ..reading.call_state import CallState
from ..reading.ends import Ends
from ..reading.json_call import json_block, named_call
from ..reading.names import NAME, expect_arguments, read_name

if TYPE_CHECKING:
    from ...types.results import Tool

MISTRAL_CALLS, MISTRAL_ID, MISTRAL_ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"


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
        name = call.check((yield from read_name(source)))
        if (yield from source.literal(MISTRAL_ID)):
            yield from source.run(NAME)
        if not (yield from source.close(MISTRAL_ARGS)):
            yield from expect_arguments(source)
        yield from named_call(call, name, ends)
        is_first = False


def _is_mistral_name(source: Source) -> Reading[bool]:
    """Whether another call follows without its delimiter; consumes white space before it."""
    at = yield from source.after_white()
    end = yield from source.after(NAME, at)
    if end == at or not (yield from source.which((MISTRAL_ARGS, MISTRAL_ID), end)):
        return False
    source.take(at)
    return True


MISTRAL = (Beginning(mark=MISTRAL_CALLS, read=_mistral),)


def _mistral_list(lark: Lark, tools: Sequence[Tool], parallel: bool) -> str:
    one = lark.each(tools, between('{"name": "%s", "arguments": ', "}"))
    return f'" [" {several(one, ", ", parallel=parallel)} "]"'


def _mistral_args(lark: Lark, tools: Sequence[Tool], _: bool) -> str:
    return lark.each(tools, after_name(lark.mark(MISTRAL_ARGS)))


MISTRAL_LIST = Marked(MISTRAL_CALLS, _mistral_list, repeats=False)
MISTRAL_BY_ARGS = Marked(MISTRAL_CALLS, _mistral_args)
_SHORT = re.compile(r"[a-zA-Z0-9]{9}")


def with_short_ids(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the conversation with call ids of 9 letters and digits, for Mistral's templates.

    An id is shortened in the same way in every turn, so a growing conversation keeps its cached
    prefix.
    """
    return [_shortened(message) for message in messages]


def _shortened(message: Mapping[str, Any]) -> Mapping[str, Any]:
    changed = dict(message)
    if isinstance(changed.get("tool_call_id"), str):
        changed["tool_call_id"] = _short(changed["tool_call_id"])
    if changed.get("tool_calls"):
        calls = changed["tool_calls"]
        changed["tool_calls"] = [{**call, "id": _short(str(call.get("id", "")))} for call in calls]
    return changed


def _short(call_id: str) -> str:
    if _SHORT.fullmatch(call_id):
        return call_id
    return blake2b(call_id.encode(), digest_size=5).hexdigest()[:9]


def _grammar(_: str, vocab: Mapping[str, int]) -> CallGrammar:
    return MISTRAL_BY_ARGS if MISTRAL_ARGS in vocab else MISTRAL_LIST


MISTRAL_FAMILY = Family(
    (MISTRAL_CALLS, MISTRAL_ID, MISTRAL_ARGS),
    (MISTRAL_CALLS,),
    MISTRAL,
    _grammar,
    prepare=with_short_ids,
)
