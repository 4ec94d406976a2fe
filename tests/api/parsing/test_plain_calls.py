"""Calls without the marks of a format: what is certainly one, and what only looks like one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

import pytest

from foretoken.api.parsing.families import FAMILIES
from foretoken.api.parsing.output_parser import CallArguments, CallBegin, CallEnd, Content
from foretoken.api.types.results import Tool
from support.parse_harness import Read, by_kind, parse, read, syntax
from support.tool_kit import QUESTIONS, is_usable, offered, recorded

WEATHER = Tool(
    name="get_weather",
    parameters={
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "unit": {"enum": ["C", "F"]},
        },
        "required": ["city"],
        "additionalProperties": False,
    },
)
LIST = Tool(name="list_files")
TOOLS = (WEATHER, LIST)
OWN = ("llama3", "pythonic", "xlam")  # formats without marks, which begin as other answers may
CALL = '{"name": "get_weather", "arguments": {"city": "Paris"}}'
PARIS = ("get_weather", {"city": "Paris"})
INDENTED = json.dumps(json.loads(CALL), indent=2)


def of(
    text: str, family: str = "hermes", *, has_form: bool = False, tools: Sequence[Tool] = TOOLS
) -> Read:
    model = syntax(family)
    return read(lambda: model.parser(tools=tools, has_form=has_form), text)


def calls_of(found: Read) -> list[tuple[str, dict]]:
    assert all(is_whole for _, _, is_whole in found.calls)
    return [(name, json.loads(arguments)) for name, arguments, _ in found.calls]


# -- a real model ---------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0, 0.7])
def test_nearly_all_calls_of_a_real_model_are_usable(temperature):
    texts = [each for each in recorded() if each["temperature"] == temperature]
    assert len(texts) == len(QUESTIONS) == 60
    num_usable = 0
    for each in texts:
        parser = syntax("hermes").parser(tools=offered(each["tool"]))
        found = by_kind(parse(parser, [each["text"]]))
        num_usable += is_usable(each["tool"], [call[:2] for call in found.calls])
    assert num_usable >= 59


def test_what_a_real_model_writes_besides_is_no_call():
    texts = recorded("-other")
    assert len(texts) >= 40
    for each in texts:
        found = of(each["text"], tools=offered(each["tool"]))
        assert found == Read(words=each["text"])


# -- calls ----------------------------------------------------------------------------------------

ALONE = {
    "an object": (CALL, [PARIS]),
    "an object on several lines": (INDENTED, [PARIS]),
    "an object between breaks": (f"\n\n{CALL}\n", [PARIS]),
    "two braces for one": ("{" + CALL + "}", [PARIS]),
    "a fence": (f"```json\n{INDENTED}\n```", [PARIS]),
    "a fence of no language": (f"```\n{CALL}\n```", [PARIS]),
    "a fence of calls": (f"```tool_call\n{CALL}\n```", [PARIS]),
    "a fence that is not closed": (f"```json\n{CALL}", [PARIS]),
    "a fence without the last brace": (f"```json\n{CALL[:-1]}\n```", [PARIS]),
    "a fence of two": (f"```json\n{CALL}\n{CALL}\n```", [PARIS, PARIS]),
    "a fence of a list": (f"```json\n[{CALL}, {CALL}]\n```", [PARIS, PARIS]),
    "two fences": (f"```json\n{CALL}\n```\n\n```json\n{CALL}\n```", [PARIS, PARIS]),
    "the marks of the tools": (f"<tools>\n{CALL}\n</tools>", [PARIS]),
    "a tag of calls": (f"<tool_calls>[{CALL}, {CALL}]</tool_calls>", [PARIS, PARIS]),
    "a tag of a function": (f"<function_call>{CALL}</function_call>", [PARIS]),
    "a fence between tags": (f"<tools>\n```json\n{CALL}\n```\n</tools>", [PARIS]),
    "two on a line": (f"{CALL} {CALL}", [PARIS, PARIS]),
    "a list": (f"[{CALL}, {CALL}]", [PARIS, PARIS]),
    "a line each": (f"{CALL}\n{CALL}", [PARIS, PARIS]),
    "a comma between them": (f"{CALL},\n{CALL}", [PARIS, PARIS]),
    "a semicolon between them": (f"{CALL}; {CALL}", [PARIS, PARIS]),
    "a function": ('{"function": ' + CALL + "}", [PARIS]),
    "a function of a type": ('{"type": "function", "function": ' + CALL + "}", [PARIS]),
    "the name as the function": (CALL.replace('"name"', '"function"'), [PARIS]),
    "parameters": (CALL.replace("arguments", "parameters"), [PARIS]),
    "arguments as a text": (
        json.dumps({"name": "get_weather", "arguments": '{"city": "Paris"}'}),
        [PARIS],
    ),
    "arguments first": ('{"arguments": {"city": "Paris"}, "name": "get_weather"}', [PARIS]),
    "an id": (CALL[:-1] + ', "id": "call_1"}', [PARIS]),
    "Python's quotes": (CALL.replace('"', "'"), [PARIS]),
    "a comma too many": (CALL.replace("}}", ",}}"), [PARIS]),
    "a break in a text": (CALL.replace("Paris", "Pa\nris"), [("get_weather", {"city": "Pa\nris"})]),
    "null for what may be left out": (
        CALL.replace('"}', '", "days": null}'),
        [("get_weather", {"city": "Paris", "days": None})],
    ),
    "a whole number with a point": (
        CALL.replace('"}', '", "days": 3.0}'),
        [("get_weather", {"city": "Paris", "days": 3.0})],
    ),
    "a tool without a schema": ('{"name": "list_files", "arguments": {}}', [("list_files", {})]),
    "a function of tags": (
        "<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</function>",
        [PARIS],
    ),
    "a function of attributes": (
        '<function name="get_weather">\n<parameter name="city">Paris</parameter>\n</function>',
        [PARIS],
    ),
    "the name before the arguments": (
        '<tool_call>\nget_weather\n{"city": "Paris"}\n</tool_call>',
        [PARIS],
    ),
    "a function of JSON": ('<function=get_weather>{"city": "Paris"}</function>', [PARIS]),
    "marks of another format": (f"<tool_call>\n{CALL}\n</tool_call>", [PARIS]),
}


@pytest.mark.parametrize("title", ALONE)
@pytest.mark.parametrize("family", ["hermes", "generic", "mistral", "gemma4", "qwen3-coder"])
def test_a_call_alone(family, title):
    text, calls = ALONE[title]
    found = of(text, family)
    assert calls_of(found) == calls
    assert found.words == ""


@pytest.mark.parametrize("title", ALONE)
def test_a_call_that_ends_an_answer(title):
    text, calls = ALONE[title]
    found = of(f"I look it up.\n\n{text.lstrip()}")
    assert calls_of(found) == calls
    assert found.words == "I look it up.\n\n"


@pytest.mark.parametrize("family", FAMILIES)
def test_every_reader_takes_them(family):
    for text in (CALL, f"```json\n{INDENTED}\n```", f"[{CALL}]"):
        assert calls_of(of(text, family)) == [PARIS]
    if family not in ("harmony", "muse"):
        assert calls_of(of(f"Well.\n{CALL}", family)) == [PARIS]


def test_words_may_follow_a_call_that_begins_an_answer():
    assert of(f"```json\n{CALL}\n```\n\nI wait.") == Read(
        words="\n\nI wait.", calls=[("get_weather", '{"city": "Paris"}', True)]
    )


def test_calls_of_both_kinds_may_follow_each_other():
    own = f"<tool_call>\n{CALL}\n</tool_call>"
    assert calls_of(of(f"{CALL}\n{own}")) == [PARIS, PARIS]
    assert calls_of(of(f"{own}\n{CALL}")) == [PARIS, PARIS]
    assert calls_of(of(f"Well.\n{CALL}\n{own}")) == [PARIS, PARIS]


def test_words_stream_and_a_call_comes_as_soon_as_it_is_certain():
    parser = syntax("hermes").parser(tools=TOOLS)
    assert parser.feed("Well, {so}.\n{") == [Content("Well, {so}.\n")]
    assert parser.feed('"answer"') == [Content('{"answer"')]
    assert parser.feed(": 42}") == [Content(": 42}")]
    parser = syntax("hermes").parser(tools=TOOLS)
    assert parser.feed(f"{CALL[:-1]}") == []
    assert parser.feed("}\nSo") == [
        CallBegin("get_weather"),
        CallArguments('{"city": "Paris"}'),
        CallEnd(),
        Content("\nSo"),
    ]


# -- no calls -------------------------------------------------------------------------------------

UNFIT = {
    "another tool": CALL.replace("get_weather", "get_time"),
    "the name in capitals": CALL.replace("get_weather", "Get_Weather"),
    "an argument left out": CALL.replace('"city": "Paris"', '"days": 3'),
    "an argument that the tool lacks": CALL.replace('"}', '", "town": "x"}'),
    "a wrong type": CALL.replace('"Paris"', "3"),
    "a number in quotes": CALL.replace('"}', '", "days": "3"}'),
    "a value that is not listed": CALL.replace('"}', '", "unit": "K"}'),
    "null for what is required": CALL.replace('"Paris"', "null"),
    "no arguments": '{"name": "get_weather"}',
    "arguments that are a list": CALL.replace('{"city": "Paris"}', '["Paris"]'),
    "a key that no call has": CALL[:-1] + ', "result": "sunny"}',
    "a description of the tool": json.dumps({"type": "function", "function": {
        "name": "get_weather", "description": "d", "parameters": WEATHER.parameters}}),
    "its schema for its arguments": json.dumps(
        {"name": "list_files", "parameters": {"type": "object", "properties": {"a": {}}}}),
    "data": '{"city": "Paris", "weather": "sunny"}',
    "a person": '{"name": "Bob", "age": 5}',
    "a call inside of data": '{"request": ' + CALL + "}",
    "a list with something else": f'[{CALL}, {{"x": 1}}]',
    "an empty list": "[]",
    "arguments that cannot be read": CALL.replace('"city"', '"city" of'),
}  # fmt: skip
QUOTED = {
    "in a sentence": f"For example you could call {CALL} to get it.",
    "behind a colon": f"Call it so: {CALL}",
    "before words on its line": f"{CALL} is what you send.",
    "in backticks": f"Write `{CALL}` and wait.",
    "alone in backticks": f"`{CALL}`",
    "words behind its fence": f"You could write:\n```json\n{CALL}\n```\nand wait.",
    "words behind its line": f"You could write\n{CALL}\nand wait.",
    "an example": f"An example:\n\n{CALL}",
    "an example in a fence": f"For instance:\n```json\n{CALL}\n```",
    "what it looks like": f"A call looks like this:\n{CALL}",
    "an item of a list": f"- {CALL}\n- done",
    "a numbered item": f"1. {CALL}\n2. done",
    "a quotation": f"> {CALL}",
    "a table": f"| call | {CALL} |",
    "a fence of Python": f"```python\n{CALL}\n```",
    "a value in Python": f"```python\ncall = {CALL}\n```",
    "a list in JavaScript": f"```js\nconst calls = [\n{CALL}\n];\n```",
    "a fence with more in it": f"```json\n{CALL}\n// and so on\n```",
    "a fence in a fence": f"```markdown\n```json\n{CALL}\n```\n```",
    "tildes": f"So:\n~~~json\n{CALL}\n~~~\nand wait.",
    "a call in a test": f'```python\nassert parse("""{CALL}""")\n```',
    "marks in backticks": f"Write `<tool_call>{CALL}</tool_call>` and wait.",
    "marks in a fence": f"Write\n```\n<tool_call>\n{CALL}\n</tool_call>\n```\nand wait.",
    "marks in a fence at the end": f"The format:\n```xml\n<tool_call>\n{CALL}\n</tool_call>\n```",
    "a function in backticks": "`<function=get_weather><parameter=city>x</parameter></function>`",
    "a function in a fence": "Use\n```\n<function=list_files>\n</function>\n```\nfor it.",
    "a function that nothing follows": "The tag <function=list_files> begins it.",
    "a function that is not offered": "<function=get>\n<parameter=a>\n1\n</parameter>\n</function>",
    "a closing mark": "It ends with </tool_call>, or </function>.",
    "XML in code": '```xml\n<function name="f">\n  <parameter name="a"/>\n</function>\n```',
    "Python that looks like a list of calls": "```python\nx = [f(a=1), g()]\n```",
    "the mark of the tools": "<tools> holds the tools.",
}


@pytest.mark.parametrize("text", [*UNFIT.values(), *QUOTED.values()], ids=[*UNFIT, *QUOTED])
def test_what_is_no_call_is_words_to_the_letter(text):
    for family in FAMILIES:
        if family in OWN and text in (*UNFIT.values(), QUOTED["before words on its line"]):
            continue
        assert of(text, family) == Read(words=text), family


@pytest.mark.parametrize("text", UNFIT.values(), ids=UNFIT)
def test_nor_is_it_in_a_fence_or_behind_words(text):
    for written in (f"```json\n{text}\n```", f"Well.\n{text}", f"<tools>\n{text}\n</tools>"):
        assert of(written) == Read(words=written)


@pytest.mark.parametrize("text", QUOTED.values(), ids=QUOTED)
def test_a_call_may_follow_a_quoted_one(text):
    found = of(f"{text}\n\n<tool_call>\n{CALL}\n</tool_call>")
    assert calls_of(found) == [PARIS]
    assert found.words.rstrip() == text


def test_json_that_was_asked_for_is_content():
    for text in (CALL, f"[{CALL}]", f"```json\n{CALL}\n```"):
        assert of(text, has_form=True) == Read(words=text)
        assert of(text, "harmony", has_form=True) == Read(words=text)
    marked = f"<tool_call>{CALL}</tool_call>"
    assert calls_of(of(marked, has_form=True)) == [PARIS]


def test_behind_words_a_limit_makes_no_call_certain():
    model = syntax("hermes")
    for text, num_calls in ((CALL, 1), (f"Well.\n{CALL}", 0), (CALL[:-2], 0)):
        parser = model.parser(tools=TOOLS)
        events = [*parser.feed(text), *parser.end(is_cut=True)]
        assert len(by_kind(events).calls) == num_calls


def test_a_code_block_that_a_call_follows_and_never_closes_holds_a_call():
    own = f"<tool_call>\n{CALL}\n</tool_call>"
    assert calls_of(of(f"So:\n```bash\nls\n{own}")) == [PARIS]
    assert calls_of(of(f"So:\n```bash\nls\n```\n{own}\nDone.")) == [PARIS]
    assert calls_of(of(f"So:\n```bash\nls\n```{own}")) == [PARIS]
    assert of(f"So:\n```\n{own}\nls\n```").calls == []


def test_of_a_strict_tool_only_what_is_checked_whole_is_a_call():
    strict = replace(WEATHER, strict=True)
    longer = {**WEATHER.parameters, "properties": {"city": {"type": "string", "pattern": "^P"}}}
    for tool, num_calls in ((strict, 1), (replace(strict, parameters=longer), 0)):
        parser = syntax("hermes").parser(tools=[tool])
        assert len(by_kind(parse(parser, [CALL])).calls) == num_calls
    parser = syntax("hermes").parser(tools=[strict])
    assert by_kind(parse(parser, [CALL.replace('"}', '", "days": null}')])).calls == []


NESTED = Tool(
    name="save",
    parameters={
        "$defs": {"item": {"type": "object", "properties": {"n": {"type": "integer"}}}},
        "properties": {
            "items": {"type": "array", "items": {"$ref": "#/$defs/item"}},
            "more": {"additionalProperties": {"type": "string"}},
            "any": {"anyOf": [{"type": "integer"}, {"const": "all"}]},
            "loop": {"$ref": "#/properties/loop"},
        },
    },
)


@pytest.mark.parametrize(
    ("arguments", "fits"),
    [
        ({"items": [{"n": 1}, {}], "more": {"a": "b"}, "any": "all", "loop": 3}, True),
        ({"items": [{"n": "1"}]}, False),
        ({"items": {"n": 1}}, False),
        ({"more": {"a": 1}}, False),
        ({"any": "some"}, False),
        ({"any": True}, False),
        ({"other": 1}, True),
    ],
)
def test_arguments_are_checked_inside_of_lists_and_objects(arguments, fits):
    text = json.dumps({"name": "save", "arguments": arguments})
    parser = syntax("hermes").parser(tools=[NESTED])
    assert bool(by_kind(parse(parser, [text])).calls) == fits
