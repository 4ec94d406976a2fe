"""No text of a caller or of a model takes more than time in proportion to its length.

Each text is made to let a pattern or a reader go back again and again. The bounds are some ten
times what it takes; with the square of its length it would be many times more.
"""

from __future__ import annotations

import re
import time
from itertools import cycle, islice

import pytest

from foretoken.api.parsing.families import FAMILIES, reader_of
from foretoken.api.parsing.output_parser import ReaderParser
from foretoken.api.parsing.reasoning import THINK, ThinkingState, thinking_parser
from foretoken.api.runtime.conversation.normalize import steady
from foretoken.api.serving.errors import _param
from foretoken.api.structured import grammar_text
from foretoken.api.text.detokenizer import StopStrings
from foretoken.api.types.results import Tool
from support.format_texts import BEGINNINGS as FIRST
from support.format_texts import BOTH

pytestmark = pytest.mark.slow

LENGTH = 2**18
SECONDS = 2.0
LINES = [
    "x-request-id: -", "request id _", "request-id -_", "trace-id: a", "-", "- \n", "\n",
    "current time is ", "current time 2026-11-21T", "x-anthropic-billing-header:", " \t",
]  # fmt: skip
RULES = ["a", " ", "!", "a[", "a[b\n", "a.1", " \n", "a ", "\\", "::", "a:\n"]


def filled(piece: str, length: int = LENGTH) -> str:
    """A text that begins like this and goes on with its last character."""
    return piece + piece[-1] * length


def repeated(piece: str, length: int = LENGTH) -> str:
    """A text of nothing else."""
    return "".join(islice(cycle(piece), length))


def seconds(work, *args) -> float:
    """Processor time."""
    began = time.thread_time()
    work(*args)
    return time.thread_time() - began


@pytest.mark.parametrize("make", [filled, repeated])
def test_patterns_on_what_callers_write(make):
    for piece in LINES:
        assert seconds(steady, make(piece) + "!") < SECONDS, piece
    for piece in RULES:
        for pattern in (grammar_text._LARK_RULE, grammar_text._ESCAPE):
            assert seconds(pattern.findall, make(piece)) < SECONDS, (pattern, piece)
    for piece in ("`$", "`$.", "missing required field `", "unknown field `a"):
        assert seconds(_param, make(piece)) < SECONDS, piece


BEGINNINGS = {
    "hermes": ['<tool_call>{"name": "f", "arguments": {', "<tool_call>"],
    "generic": ["<tool_call>"],
    "qwen3-coder": ["<tool_call>\n<function=f>\n<parameter=a>\n", "<tool_call><function="],
    "mistral": ["[TOOL_CALLS][", "[TOOL_CALLS]f[ARGS]{", "[TOOL_CALLS]"],
    "deepseek": [
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{",
        "<｜tool▁calls▁begin｜>",
    ],
    "pythonic": ["[f(a=", "[f(", "["],
    "llama3": ['{"name": "f", "parameters": {', "<|python_tag|>{"],
}
PIECES = ["a", " ", "<", "[", "{", '"', "\\", "<tool_call>", "</parameter>"]
NUM_CHARS, NUM_TOGETHER = 2**14, 16


@pytest.mark.parametrize("family", FAMILIES)
def test_readers_of_calls_that_come_in_pieces(family):
    tools = [Tool(name="f", parameters={"type": "object"})]
    marks = FAMILIES[family].marks
    first = FIRST.get(family) or marks[0]
    for beginning in ["", *BEGINNINGS.get(family, [first, "".join(marks), BOTH.get(family, "")])]:
        for piece in PIECES:
            parser = ReaderParser(reader_of(FAMILIES[family], tools))
            text = beginning + repeated(piece, NUM_CHARS)
            assert seconds(_feed, parser, text) < SECONDS, (beginning, piece)


def test_a_reader_of_thoughts_that_come_in_pieces():
    for piece in ("<", "</think", "</think>", " "):
        parser = thinking_parser(
            THINK, ThinkingState.OPEN, ReaderParser(reader_of(FAMILIES["hermes"], []))
        )
        assert seconds(_feed, parser, repeated(piece, NUM_CHARS)) < SECONDS, piece


def _feed(parser, text: str) -> None:
    for start in range(0, len(text), NUM_TOGETHER):
        parser.feed(text[start : start + NUM_TOGETHER])
    parser.end()


def test_stop_strings_that_nearly_match_all_the_time():
    stops = StopStrings(["a" * 255 + "b", "a" * 128 + "c", "ab" * 127 + "c", "b"])
    assert seconds(lambda: stops.feed("a" * LENGTH)) < SECONDS


def test_these_bounds_would_show_a_pattern_that_goes_back():
    squared = re.compile(r"\s+$")
    assert seconds(squared.search, " " * 8_000 + "x") > 16 * seconds(
        squared.search, " " * 1_000 + "x"
    )
