"""Answers read by a checkpoint's response template: the same parts, however they are cut."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretoken import InvalidRequest, SamplingParams
from foretoken.api.parsing.output_format import Syntax
from foretoken.api.parsing.output_parser import CallArguments, CallBegin, Content
from foretoken.api.parsing.response_template.contents import parse as parse_field
from foretoken.api.types.results import Tool, ToolChoice
from support.parse_harness import TOOLS, Read, by_kind, parse, read

TYPED = Tool(
    name="f",
    parameters={
        "properties": {
            "s": {"type": "string"},
            "n": {"type": "integer"},
            "b": {"type": "boolean"},
            "l": {"type": "array"},
            "o": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        }
    },
)
FUNCTION = {"type": "function", "function": "{content}"}
NAMED = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
THINK = {"open": "<think>", "close": "</think>"}


def template(calls: dict[str, Any], anchor: str = "assistant\n", **fields: Any) -> dict[str, Any]:
    """Return a response template with a field of calls."""
    known = {"thinking": THINK, "content": {"close": "<|im_end|>"}, **fields}
    return {
        "defaults": {"role": "assistant"},
        "start_anchor": anchor,
        "fields": {**known, "tool_calls": {"repeats": True, **calls}},
    }


JSON = template(
    {"open_pattern": r"\s*<tool_call>", "close": "</tool_call>", "content": "json",
     "transform": FUNCTION}
)  # fmt: skip
LITERAL = template(
    {"open": "<tool_call>", "close": "</tool_call>", "content": "json", "transform": FUNCTION}
)
XML = template(
    {
        "open_pattern": r"\s*<tool_call>\s*<function=(?P<name>[^>\n]+)>",
        "close_pattern": r"</function>\s*</tool_call>",
        "content": "xml-inline",
        "content_args": {
            "tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\s*(?P<value>.*?)\s*</parameter>"
        },
        "transform": NAMED,
    }
)
GEMMA = template(
    {
        "open_pattern": r"<\|tool_call>call:(?P<name>\w+)",
        "close": "<tool_call|>",
        "content": "json",
        "content_args": {"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
        "transform": NAMED,
    },
    thinking={"open": "<|channel>thought\n", "close": "<channel|>"},
)
HARMONY = template(
    {
        "open_pattern": r"<\|channel\|>commentary to=functions\.(?P<name>\w+).*?<\|message\|>",
        "close": "<|call|>",
        "content": "json",
        "transform": NAMED,
    },
    anchor="<|start|>assistant",
    thinking={"open": "<|channel|>analysis<|message|>", "close": "<|end|>"},
    content={"open": "<|channel|>final<|message|>", "close": ["<|end|>", "<|return|>"]},
)
EACH = template(
    {
        "open": "<|START_ACTION|>",
        "close": "<|END_ACTION|>",
        "content": "json",
        "transform_each": True,
        "transform": {"function": {"name": "{tool_name}", "arguments": "{parameters}"}},
    }
)
PYTHON = template(
    {
        "open": "<|tool_call_start|>",
        "close": "<|tool_call_end|>",
        "content": "python-call-list",
        "transform_each": True,
        "transform": {"function": {"name": "{name}", "arguments": "{arguments}"}},
    }
)
LINES = template(
    {
        "open_pattern": r"<call (?P<name>\w+)>",
        "close": "</call>",
        "content": "kv-lines",
        "transform": NAMED,
    }
)
CALLS = {
    "json": (JSON, '\n<tool_call>\n{"name": "f", "arguments": {"s": "é\\n\\"x\\""}}\n</tool_call>'),
    "literal": (LITERAL, '<tool_call>{"name": "f", "arguments": {}}</tool_call>'),
    "xml": (
        XML,
        "<tool_call>\n<function=f>\n<parameter=s>\nx 'y'\nz\n</parameter>\n"
        "<parameter=n>\n3\n</parameter>\n</function>\n</tool_call>",
    ),
    "gemma": (GEMMA, '<|tool_call>call:f{s:<|"|>x {a: "é"}<|"|>,n:3,l:[1,{k:true}]}<tool_call|>'),
    "harmony": (
        HARMONY,
        '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"n": 1}<|call|>',
    ),
    "each": (
        EACH,
        '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "f", "parameters": {"n": 1}}, '
        '{"tool_name": "f", "parameters": {}}]<|END_ACTION|>',
    ),
    "python": (PYTHON, "<|tool_call_start|>[f(s='x', l=[1, None]), f()]<|tool_call_end|>"),
    "lines": (LINES, "<call f>\ns: a: b\nn: 3\n</call>"),
}


def syntax(spec: object, chat_template: str = "") -> Syntax:
    return Syntax.choose(chat_template, {}, response_template=spec)


def of(spec: object, text: str, *, tools=(TYPED,), tail: str = "") -> Read:
    found = syntax(spec)
    assert found.tool_parser == "response-template"
    return read(lambda: found.parser(tools=tools, prompt_tail=tail), text)


def arguments(found: Read) -> list[Any]:
    assert all(is_done for _, _, is_done in found.calls)
    return [json.loads(text) for _, text, _ in found.calls]


ODDS = ["<think>", "</think>", "<|im_end|>", '"', "\\", "{", "}", "<", "\n", " ", "é😀", "f", "<|"]
ODDS += ["```", "</tool_call>", "<tool_call>", "<|channel|>", "<|end|>", "<|channel|>final<|messa"]
ODDS += ['{"name": "f", "arguments": {"s": "x"}}', "</parameter>", "<|message|>", "<call f>"]


@pytest.mark.parametrize("name", CALLS)
@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(data=st.data())
def test_parts_do_not_depend_on_the_cuts(name, data):
    spec, call = CALLS[name]
    piece = st.sampled_from([call, call[: len(call) // 2], *ODDS]) | st.text(max_size=4)
    text = "".join(data.draw(st.lists(piece, max_size=8)))
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=10)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    tail = data.draw(st.sampled_from(["", "assistant\n", "assistant\n<think>\n"]))
    is_cut = data.draw(st.booleans())
    model = syntax(spec)
    whole, by_chars, cut = (
        parse(model.parser(tools=[TYPED], prompt_tail=tail), each, is_cut=is_cut)
        for each in ([text], list(text), pieces)
    )
    assert whole == by_chars == cut
    for called, written, is_done in by_kind(whole).calls:
        assert called
        assert not is_done or isinstance(json.loads(written), dict)


@pytest.mark.parametrize("name", CALLS)
def test_a_call_cut_anywhere_is_whole_or_open(name):
    spec, call = CALLS[name]
    model = syntax(spec)
    whole = arguments(of(spec, call))
    for length in range(len(call)):
        for is_cut in (True, False):
            events = parse(model.parser(tools=[TYPED]), [call[:length]], is_cut=is_cut)
            done = [json.loads(text) for _, text, is_done in by_kind(events).calls if is_done]
            assert not is_cut or done == whole[: len(done)]


def test_thought_content_and_calls():
    call = CALLS["json"][1]
    text = f"<think>\nhm\n</think>\n\nHi \nthere.\n{call}{call}\nBye.<|im_end|>"
    found = of(JSON, text)
    assert (found.thought, found.words) == ("hm", "Hi \nthere.\nBye.")
    assert arguments(found) == [{"s": 'é\n"x"'}] * 2
    assert [name for name, _, _ in found.calls] == ["f", "f"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("xml", [{"s": "x 'y'\nz", "n": 3}]),
        ("gemma", [{"s": 'x {a: "é"}', "n": 3, "l": [1, {"k": True}]}]),
        ("harmony", [{"n": 1}]),
        ("each", [{"n": 1}, {}]),
        ("python", [{"s": "x", "l": [1, None]}, {}]),
        ("lines", [{"s": "a: b", "n": 3}]),
    ],
)
def test_arguments_have_the_types_of_the_schema(name, expected):
    spec, call = CALLS[name]
    found = of(spec, call)
    assert arguments(found) == expected
    assert found.words == ""
    assert arguments(of(spec, f"{call}{call}")) == expected * 2


def test_values_of_tags_are_of_the_types_of_the_schema():
    def typed(key: str, value: str) -> Any:
        text = f"<tool_call><function=f><parameter={key}>{value}</parameter></function></tool_call>"
        return arguments(of(XML, text))[0][key]

    assert typed("s", "3") == "3"
    assert typed("n", "x") == "x"
    assert typed("b", "True") is True
    assert typed("l", "[1, 'a',]") == [1, "a"]
    assert typed("o", "null") is None
    assert typed("o", "3") == "3"
    assert typed("new", "3") == "3"


def test_a_value_parser_is_used_where_the_schema_says_nothing():
    spec = json.loads(json.dumps(XML))
    args = spec["fields"]["tool_calls"]["content_args"]
    args["value_parser"] = {"name": "json", "args": {"allow_non_json": True}}
    args["merge_duplicates"] = True
    tags = "".join(f"<parameter={key}>{value}</parameter>" for key, value in
                   (("new", "3"), ("s", "3"), ("t", "x y"), ("t", "[1]")))  # fmt: skip
    text = f"<tool_call><function=f>{tags}</function></tool_call>"
    assert arguments(of(spec, text)) == [{"new": 3, "s": "3", "t": ["x y", [1]]}]


def test_arguments_stream():
    parser = syntax(JSON).parser(tools=[TYPED])
    assert parser.feed('<tool_call>{"name": "f", "arguments": {"s": "x') == [
        CallBegin("f"), CallArguments('{"s": "x'),
    ]  # fmt: skip
    parser = syntax(HARMONY).parser(tools=[TYPED])
    header = "<|channel|>commentary to=functions.f<|message|>"
    assert parser.feed(header + '{"n": ') == [CallBegin("f"), CallArguments('{"n":')]
    parser = syntax(XML).parser(tools=[TYPED])
    assert parser.feed("<tool_call><function=f>\n<para") == [CallBegin("f")]
    parser = syntax(JSON).parser(tools=[TYPED])
    assert parser.feed("Hello <tool") == [Content("Hello")]
    assert parser.feed("s") == [Content(" <tools")]


def test_a_delimiter_inside_a_string_is_text():
    for value in ("a </tool_call> b", "<think>", "\n</tool_call>\n\n{"):
        call = json.dumps({"name": "f", "arguments": {"s": value}})
        text = f"<tool_call>{call}</tool_call>"
        found = of(LITERAL, f"{text}\n{text}\nSo.")
        assert arguments(found) == [{"s": value}] * 2
        assert found.words == "So."


@pytest.mark.timeout(30)  # a quadratic search takes much longer
@pytest.mark.parametrize(
    ("body", "value"),
    [(r'{a: "' + r"\"" * 100_000, r'{a: "' + r"\"" * 100_000),
     ("{a: 1} " + "<s>" * 200_000, {"a": 1}),
     ("{a: <s>b</s>, c: <s></s>}", {"a": "b", "c": ""})],
    ids=["quotes", "delimiters", "closed"],
)  # fmt: skip
def test_strings_without_an_end_are_read_in_linear_time(body, value):
    args = {"unquoted_keys": True, "string_delims": [["<s>", "</s>"]], "allow_non_json": True}
    found = parse_field(body, "json", args)
    assert found == value


@pytest.mark.timeout(30)  # without a limit this search takes days
def test_a_slow_pattern_is_given_up_inside_a_string_too():
    slow = r"<t>|(?:a|aa)+x"
    spec = template(
        {"open_pattern": slow, "close": "</t>", "content": "json", "transform": FUNCTION}
    )
    text = '<t>{"name": "f", "arguments": {"s": "</t>' + "a" * 90 + '"}}</t>'
    found = syntax(spec).parser(tools=(TYPED,))
    [(_, written, _)] = by_kind(parse(found, [text])).calls
    assert json.loads(written) == {"s": "</t>" + "a" * 90}


def test_calls_off_their_format_are_read():
    repaired = "<tool_call>{'name': 'f', 'arguments': {'s': 'x',}</tool_call>"
    assert arguments(of(LITERAL, repaired)) == [{"s": "x"}]
    assert arguments(of(LITERAL, '<tool_call>{"name": "f", "arguments": {}}')) == [{}]
    plain = '{"name": "f", "arguments": {"s": "x"}}'
    assert arguments(of(LITERAL, plain)) == [{"s": "x"}]
    assert of(HARMONY, f"<|channel|>final<|message|>{plain}<|return|>").calls
    assert of(LITERAL, f"`{plain}`").words == f"`{plain}`"


def test_text_between_delimiters_that_is_no_call_is_content():
    for text in ("<tool_call>nothing</tool_call>", "<tool_call>[1, 2]", "<tool_call>"):
        assert of(LITERAL, text) == Read(words=text)
    text = "<|START_ACTION|>[1]<|END_ACTION|>"
    assert of(EACH, text) == Read(words=text)
    broken = "<|tool_call>call:f{s:<tool_call|>"
    assert arguments(of(GEMMA, broken)) == [{"INVALID_JSON": "{s:"}]


def test_without_tools_marks_are_words():
    call = CALLS["literal"][1]
    assert of(LITERAL, f"Hi {call}", tools=()) == Read(words=f"Hi {call}")
    assert of(LITERAL, "<think>hm</think>Hi", tools=()) == Read(words="Hi", thought="hm")


def test_the_end_of_the_prompt_belongs_to_the_answer():
    before = "user\nWhy <think>?\nassistant\n"
    assert of(JSON, "hm</think>Hi", tail=f"{before}<think>\n") == Read(words="Hi", thought="hm")
    assert of(JSON, "Hi", tail=f"{before}<think>\n\n</think>\n\n") == Read(words="Hi")
    assert of(JSON, "Hi", tail=before) == Read(words="Hi")
    assert of(JSON, "Hi", tail="no anchor <think>") == Read(words="Hi")
    assert of(JSON, "world", tail=f"{before}Hello ") == Read(words="world")
    assert of(JSON, '"x"}}</tool_call>', tail=f'{before}<tool_call>{{"name": "f", ') == Read(
        words='"x"}}</tool_call>'
    )


def test_a_slow_anchor_is_given_up():
    """Without the limit this search would take years."""
    spec = {key: each for key, each in JSON.items() if key != "start_anchor"}
    found = of({**spec, "start_anchor_pattern": "(a|aa)+b"}, "hm</think>Hi", tail="a" * 80)
    assert found.words.endswith("Hi")


def test_several_regions_of_content_are_joined():
    spec = template(
        {"open": "<c>", "close": "</c>", "content": "json"},
        content={"open": "[", "close": "]", "repeats": True, "join": " | "},
    )
    assert of(spec, "x[ a ]y[]z[b]").words == "a | b"
    kept = template(
        {"open": "<c>", "close": "</c>", "content": "json"},
        content={"content_args": {"strip": False}},
    )
    assert of(kept, "\n Hi \n").words == "\n Hi \n"


def broken(**changes: Any) -> dict[str, Any]:
    return {**JSON, **changes}


def with_calls(**changes: Any) -> dict[str, Any]:
    fields = JSON["fields"]
    return {**JSON, "fields": {**fields, "tool_calls": {**fields["tool_calls"], **changes}}}


def with_field(name: str, field: object) -> dict[str, Any]:
    return {**JSON, "fields": {**JSON["fields"], name: field}}


UNUSABLE = [
    ("text", "it is not an object"),
    (broken(version=2), "version 2"),
    (broken(more=1), "unknown key more"),
    (broken(fields={}), "fields must be"),
    (broken(start_anchor=None), "start_anchor is missing"),
    (broken(start_anchor_pattern="x"), "both start_anchor and"),
    (broken(fields={"content": {}}), "content and tool_calls are required"),
    (with_field("citations", {}), "citations is not known"),
    (with_field("thinking", []), "thinking is not an object"),
    (with_field("thinking", {}), "more than one field"),
    (with_field("thinking", {"open": ""}), "a text or a list of texts"),
    (with_field("thinking", {"open": []}), "open is empty"),
    (with_field("thinking", {"open": "x", "content": "json"}), "cannot have the content json"),
    (with_field("thinking", {"open": "x", "transform": "{content}"}), "cannot have a transform"),
    (with_calls(kind=1), "unknown key kind"),
    (with_calls(open_pattern="("), "not a regular expression"),
    (with_calls(open_pattern="x*"), "matches the empty text"),
    (with_calls(open_pattern="(?R)"), "calls a group"),
    (with_calls(open_pattern="(?P<name>x|(?&name))"), "calls a group"),
    (with_calls(open_pattern="(?P<name>x|(?P>name))"), "calls a group"),
    (with_calls(open_pattern="(?P<name>x|(?P&name))"), "calls a group"),
    (
        with_calls(
            content="xml-inline", content_args={"tag_pattern": "<(?P<key>a)(?P<value>b|(?1))>"}
        ),
        "tag_pattern calls a group",
    ),
    (with_calls(open_pattern="x" * 5000), "at most 4096 characters"),
    (with_calls(content="yaml"), "'yaml' is not known"),
    (with_calls(content="xml-inline"), "tag_pattern must be a text"),
    (with_calls(content="xml-inline", content_args={"tag_pattern": "<(?P<key>a)>"}), "groups key"),
    (with_calls(content_args={"string_delims": ["a"]}), "pairs of texts"),
    (with_calls(transform={"name": "a {content}"}), "mixes a placeholder"),
    (with_calls(transform=None, transform_each=True), "needs a transform"),
    (with_calls(join=1), "join is not a text"),
]


@pytest.mark.parametrize(("spec", "reason"), UNUSABLE, ids=[reason for _, reason in UNUSABLE])
def test_an_unusable_template_is_logged_and_our_formats_are_used(spec, reason, caplog):
    chat_template = "{% if tools %}<tool_call>\n{{ x }}</tool_call>"
    with caplog.at_level(logging.WARNING):
        found = syntax(spec, chat_template)
    assert found.tool_parser == "hermes"
    [record] = caplog.records
    assert record.getMessage().startswith("not using the model's response_template: ")
    assert reason in record.getMessage()


def test_a_named_parser_wins_over_the_template():
    for names in ({"tool_parser": "hermes"}, {"reasoning_parser": "none"}):
        found = Syntax.choose("{{ tools }}<tool_call>", {}, response_template=JSON, **names)
        assert found.tool_parser == "hermes"


REQUIRED = ToolChoice(mode="required")


def test_forced_calls_follow_the_form_of_the_template():
    for spec in (LITERAL, EACH):
        grammar = syntax(spec).constrain(SamplingParams(), tools=TOOLS, choice=REQUIRED)
        assert grammar is not None
        assert spec["fields"]["tool_calls"]["open"] in grammar
    assert '"tool_name": ' in grammar.replace("\\", "")
    known = syntax(JSON, "{{ tools }}<tool_call>")
    assert "<tool_call>" in str(known.constrain(SamplingParams(), tools=TOOLS, choice=REQUIRED))


def test_calls_of_an_unknown_form_cannot_be_forced():
    for tools, choice in (
        (TOOLS, REQUIRED),
        ([Tool(name="f", strict=True)], ToolChoice()),
    ):
        with pytest.raises(InvalidRequest, match="cannot be forced") as info:
            syntax(XML).constrain(SamplingParams(), tools=tools, choice=choice)
        assert info.value.param == "tools"
    assert syntax(XML).constrain(SamplingParams(), tools=TOOLS, choice=ToolChoice()) is None


def test_special_tokens_in_delimiters_are_shown():
    vocab = {"<|channel|>": 1, "<|message|>": 2, "<|call|>": 3, "<eos>": 4, "call": 5}
    found = Syntax.choose("", vocab, frozenset({1, 2, 3, 4}), response_template=HARMONY)
    assert found.shown_ids(tools=True) == {1, 2, 3}
