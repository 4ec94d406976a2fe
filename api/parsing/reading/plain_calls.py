"""Calls without the delimiters of a format: JSON on its own lines, in a fence, or between other
tags.

Models write such calls if their training had few calls, or calls in other formats. Each call must
name an offered tool and have arguments that fit the tool, and must have no keys but the keys of a
call.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial

from ..output_parser import Malformed, Reading, Source
from .answer import Beginning, Where
from .call_state import CallState
from .ends import Ends
from .json_call import FENCE, JsonCall, json_block, json_calls, surplus

TAGS = tuple(f"<{name}>" for name in (
    "tools", "tool", "tool_calls", "function_calls", "function_call", "function"
))  # fmt: skip
_TICKS = re.compile(r"`+")
_INFO = re.compile(r"[^\n`]+")
_CALL_INFO = re.compile(r"(json\w*|xml|text|plaintext|(tool|function)\w*)?", re.ASCII)
_BLANKS = re.compile(r"[^\S\n]+")


def plain_beginnings(own: Sequence[Beginning]) -> list[Beginning]:
    """Return beginnings of calls that lack the delimiters of their format.

    ``own``: the format's own beginnings. A plain call ends at their delimiters.
    """
    marked = [each for each in own if each.where is Where.ANYWHERE]
    ends = Ends(begins={each.mark: () for each in marked})
    alone = [each for each in own if each.where is Where.LINE]
    readers = {
        "{": partial(_object, ends=ends),
        "[": partial(_list, ends=ends),
        FENCE: partial(_fenced, marked=marked, alone=alone, ends=ends),
        **dict.fromkeys(TAGS, partial(_between_tags, ends=ends)),
    }
    return [
        Beginning(mark=mark, read=read, where=Where.LINE, is_plain=True, is_sure=False)
        for mark, read in readers.items()
    ]


def _object(call: CallState, ends: Ends) -> Reading[None]:
    """Read one object; objects after it, perhaps separated by a comma, are further calls."""
    source = call.source
    yield from JsonCall(call, ends).read()
    yield from surplus(call)
    at = yield from source.after_white()
    after = at
    if (yield from source.char(at)) in (",", ";"):
        after = yield from source.after_white(at + 1)
    if (yield from source.char(after)) == "{":
        source.take(after)
    else:
        yield from _line_end(call)


def _list(call: CallState, ends: Ends) -> Reading[None]:
    yield from json_calls(call, ends)
    yield from _line_end(call)


def _between_tags(call: CallState, ends: Ends) -> Reading[None]:
    source = call.source
    tag = yield from source.which(TAGS)
    end = tag.replace("<", "</")
    source.take(len(tag))
    yield from json_block(call, Ends((end,), ends.begins))
    yield from source.close(end)
    yield from _line_end(call)


def _fenced(
    call: CallState, marked: Sequence[Beginning], alone: Sequence[Beginning], ends: Ends
) -> Reading[None]:
    """Read a block of code that contains only calls.

    ``marked``: beginnings of the format that may be anywhere. ``alone``: beginnings that must be at
    the start of a line.
    """
    source = call.source
    fence = yield from source.run(_TICKS)
    info = yield from source.run(_INFO)
    yield from source.expect("\n")
    yield from source.white()
    if call.is_first and (own := (yield from _which(source, marked))):
        call.is_final = True  # if content follows, the block is a quotation
        while (yield from source.ahead(own.mark)):
            yield from own.read(call)
            yield from source.white()
    elif own := (yield from _which(source, alone)):
        yield from own.read(call)
    elif not _CALL_INFO.fullmatch(info.strip().lower()):
        raise Malformed
    elif (yield from source.which(TAGS)):
        yield from _between_tags(call, ends)
    else:
        yield from json_calls(call, Ends((FENCE,), ends.begins))
    if not (yield from source.close(fence)) and (yield from source.peek()):
        raise Malformed
    yield from _line_end(call)


def _which(source: Source, beginnings: Sequence[Beginning]) -> Reading[Beginning | None]:
    for each in beginnings:
        if (yield from each.comes(source)):
            return each
    return None


def _line_end(call: CallState) -> Reading[None]:
    """Raise `Malformed` if other text follows on the same line."""
    yield from call.source.run(_BLANKS)
    if (yield from call.source.peek()) not in ("", "\n"):
        raise Malformed
