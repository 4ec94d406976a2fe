"""Arguments as JSON: what is valid passes to the letter, what nearly is becomes valid."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretoken.api.parsing.reading.json_text import JsonTail, object_of, repaired
from support.parse_harness import TOOLS, by_kind, parse, read, syntax

BEGIN, END = '<tool_call>\n{"name": "f", "arguments": ', "}\n</tool_call>"
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.text(max_size=8)
    | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)
WRITTEN = [
    ('{"a": "x\ny\tz"}', {"a": "x\ny\tz"}),
    (r'{"a": "C:\dir\q", "b": "\x41"}', {"a": r"C:\dir\q", "b": r"\x41"}),
    (r'{"a": "it\'s"}', {"a": "it's"}),
    (r'{"a": "\u12"}', {"a": r"\u12"}),
    ('{"a": "say "hi" now"}', {"a": 'say "hi" now'}),
    ('{"a": "say "hi", he said", "b": 1}', {"a": 'say "hi", he said', "b": 1}),
    ('{"a": "x["k"] = 1", "b": ["it"s", "y"]}', {"a": 'x["k"] = 1', "b": ['it"s', "y"]}),
    ('{"a": {"b": "x = {"z"}"}}', {"a": {"b": 'x = {"z"}'}}),
    ("{'a': 'x', 'b': 'it's', 'c': 'say \"x\"'}", {"a": "x", "b": "it's", "c": 'say "x"'}),
    ('{"a": True, "b": False, "c": None}', {"a": True, "b": False, "c": None}),
    ('{"a": NaN, "b": -Infinity}', {"a": "NaN", "b": "-Infinity"}),
    ('{"a": +1, "b": .5, "c": 5., "d": 1_000}', {"a": 1, "b": 0.5, "c": 5.0, "d": 1000}),
    ('{"a": 007}', {"a": "007"}),
    ('{"a": [1, 2,], "b": {"c": 3,},}', {"a": [1, 2], "b": {"c": 3}}),
    ('{,"a": 1,, "b": [,2]}', {"a": 1, "b": [2]}),
    ('{"a": 1 , }', {"a": 1}),
    ('{"a": "x" "b": 2, "c": [1 2]}', {"a": "x", "b": 2, "c": ["1 2"]}),
    ('{"a": "x"\n"b": {"c": 1} "d": 2}', {"a": "x", "b": {"c": 1}, "d": 2}),
    ("{a: 1, b-c: 'x', d.e: y}", {"a": 1, "b-c": "x", "d.e": "y"}),
    ('{a: "x", b: "y"}', {"a": "x", "b": "y"}),
    ('{"a": Paris, "b": 1 + 2, "c": g(x)}', {"a": "Paris", "b": "1 + 2", "c": "g(x)"}),
    ('{"a": , "b": }', {"a": None, "b": None}),
    ('{"a": [1, 2}', {"a": [1, 2]}),
    ('{"a": {"b": [1}', {"a": {"b": [1]}}),
    ('{"a": 1]}', {"a": 1}),
    ('{"a": "<b>[x]</b>", "b": <c>}', {"a": "<b>[x]</b>", "b": "<c>"}),
    ('{"a": {}, "b": []}', {"a": {}, "b": []}),
]  # fmt: skip
UNREADABLE = [
    ('{"a": 1, {"b": 2}}', {"a": 1, "INVALID_JSON": '{"b": 2}'}),
    ('{"a": 1, "b" 2}', {"a": 1, "INVALID_JSON": '"b" 2'}),
    ('{"a": {"b": 1, !}, "c": 2}', {"a": {"b": 1}, "INVALID_JSON": '!}, "c": 2'}),
    ("{print(1)}", {"INVALID_JSON": "{print(1)}"}),
]


def arguments_of(text: str) -> tuple[str, bool]:
    """The arguments of a call, however its text is cut, and whether it came to its end."""
    found = read(lambda: syntax("hermes").parser(tools=TOOLS), BEGIN + text + END)
    [(_, arguments, is_whole)] = found.calls
    assert found.words == ""
    return arguments, is_whole


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(data=st.data())
def test_valid_arguments_are_the_models_own_text(data):
    value = data.draw(st.dictionaries(st.text(max_size=5), VALUES, max_size=4))
    indent = data.draw(st.sampled_from([None, 0, 2]))
    separators = data.draw(st.sampled_from([None, (",", ":"), (" ,", " : ")]))
    text = json.dumps(
        value, indent=indent, separators=separators, ensure_ascii=data.draw(st.booleans())
    )
    assert arguments_of(text) == (text, True)


@pytest.mark.parametrize(("text", "value"), [*WRITTEN, *UNREADABLE])
def test_arguments_that_are_nearly_json_become_json(text, value):
    arguments, is_whole = arguments_of(text)
    assert json.loads(arguments) == value
    assert is_whole


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(text=st.text(alphabet="{}[]\",:'\\ \n\tau1-.Tx</>", max_size=24))
def test_whatever_is_written_becomes_an_object_if_the_call_ends(text):
    found = read(
        lambda: syntax("hermes").parser(tools=TOOLS), BEGIN + "{" + text + "\n</tool_call>"
    )
    for _, arguments, is_whole in found.calls:
        assert not is_whole or isinstance(json.loads(arguments), dict)


@pytest.mark.parametrize("text", [text for text, _ in WRITTEN])
def test_every_beginning_can_be_closed(text):
    for length in range(1, len(text)):
        tail, parser = JsonTail(), syntax("hermes").parser(tools=TOOLS)
        [(_, arguments, _)] = by_kind(parser.feed(BEGIN + text[:length])).calls
        tail.add(arguments)
        assert isinstance(json.loads(arguments + tail.closing()), dict)


def test_strings_stream():
    parser = syntax("hermes").parser(tools=TOOLS)
    text = BEGIN + '{"a": "one\ntwo "three'
    assert by_kind(parser.feed(text)).calls == [("f", '{"a": "one\\ntwo \\"three', False)]


def test_a_mark_ends_arguments_wherever_they_are():
    for text, value in [
        ('{"a": 1', {"a": 1}),
        ('{"a": [1, {"b": "x', {"a": [1, {"b": "x"}]}),
        ('{"a":', {"a": None}),
        ('{"a": [1,', {"a": [1]}),
        ("{", {}),
    ]:
        [(_, arguments, is_whole)] = by_kind(
            parse(syntax("hermes").parser(tools=TOOLS), [f"{BEGIN}{text}\n</tool_call>"])
        ).calls
        assert (json.loads(arguments), is_whole) == (value, True)


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ('{"a": 1}', '{"a": 1}'),
        ('"{\\"a\\": 1}"', '{"a": 1}'),
        ("", "{}"),
        ("null", "{}"),
        ("[]", "{}"),
        ('{"a": 1', '{"a": 1}'),
        ("print(1)", '{"INVALID_JSON": "print(1)"}'),
        ("[1]", '{"INVALID_JSON": "[1]"}'),
        ("3", '{"INVALID_JSON": "3"}'),
        ('{"a', '{"INVALID_JSON": "{\\"a"}'),
    ],
)
def test_arguments_that_are_no_object_are_kept_in_one(text, written):
    assert object_of(text) == written


def test_what_ends_inside_a_member_cannot_be_repaired():
    assert repaired("[1,") == "[1]"
    assert repaired('{"a": "x') is None
    assert repaired("{'a': 1") == '{"a": 1}'
