"""The input of a custom tool, read while the model writes its arguments."""

from __future__ import annotations

import json

import pytest

from foretoken import InvalidRequest
from foretoken.api.runtime.conversation.custom_tools import (
    MAX_DEFINITION,
    InputReader,
    custom_tool,
    input_of,
)
from support.patches import PATCH_GRAMMAR

TEXTS = ("", "ls", 'say "hi"\n\\ \t/', "é 😀 \u2028", '{"input": "x"}', "a\\u0041")


def streamed(pieces: list[str]) -> tuple[str, InputReader]:
    reader = InputReader()
    return "".join([*(reader.add(piece) for piece in pieces), reader.end()]), reader


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize("ascii", [True, False])
def test_the_parts_of_an_input_are_the_input_however_it_is_cut(text, size, ascii):
    arguments = json.dumps({"input": text}, ensure_ascii=ascii)
    pieces = [arguments[at : at + size] for at in range(0, len(arguments), size)]
    parts, reader = streamed(pieces)
    assert parts == reader.whole() == input_of(arguments) == text


def test_an_input_is_told_before_its_end():
    reader = InputReader()
    assert reader.add('{"inp') == ""
    assert reader.add('ut": "ls\\') == "ls"
    assert reader.add('n"') == "\n"
    assert reader.whole() == "ls\n"


@pytest.mark.parametrize("arguments", ['{"other": "a"}', '{"input": [1]}', '{"input" = a, }', "[]"])
def test_arguments_without_an_input_are_the_input(arguments):
    parts, reader = streamed([*arguments])
    assert parts == reader.whole() == input_of(arguments) == arguments


def test_an_input_that_is_cut_ends_at_its_last_whole_character():
    for rest in ("\\ud83d", "\\ud83d\\n", "\\udc00", "\\"):
        parts, reader = streamed(['{"input": "a' + rest])
        assert parts == reader.whole() == "a"


def test_the_model_sees_the_grammar_in_the_description():
    tool = custom_tool("patch", "Edits.", "lark", PATCH_GRAMMAR, param="tools[0]")
    assert tool.body["function"]["description"].startswith("Edits.\n\nThe input follows this lark")
    assert tool.strict
    assert "pattern" not in json.dumps(tool.body)
    free = custom_tool("sh", None, param="tools[0]")
    assert not free.strict
    assert free.input_pattern is None


@pytest.mark.parametrize(
    ("syntax", "definition"),
    [
        ("gbnf", 'root ::= "a"'),
        (None, 'start: "a"'),
        ("lark", "start: ("),
        ("lark", "start: <[1]>"),
        ("lark", f'start: "{"a" * MAX_DEFINITION}"'),
        ("regex", "(a"),
    ],
)
def test_a_grammar_that_cannot_be_enforced_names_its_field(syntax, definition):
    with pytest.raises(InvalidRequest) as info:
        custom_tool("t", None, syntax, definition, param="tools[3].custom.format.grammar")
    assert info.value.param == "tools[3].custom.format.grammar"
