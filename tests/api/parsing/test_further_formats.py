"""Formats of DeepSeek V3.2 and V4, GigaChat, Kimi K3, MiniMax M3, Muse, Apertus, xLAM and Ernie."""

from __future__ import annotations

import json
from typing import Any

import pytest

from foretoken import SamplingParams
from foretoken.api.parsing.families import FAMILIES
from foretoken.api.parsing.output_format import Syntax
from foretoken.api.parsing.output_parser import CallArguments, CallBegin
from foretoken.api.types.results import Tool, ToolChoice
from support.deviations import SI, F, G, check
from support.deviations import TOOLS as PLAIN_TOOLS
from support.format_texts import (
    BOTH,
    NS,
    atem,
    element,
    kimi_argument,
    kimi_k3,
    minimax_m3,
    muse,
    tagged,
)
from support.parse_harness import Read, by_kind, read, syntax

NESTED = Tool(
    name="f",
    parameters={
        "properties": {
            "s": {"type": "string"},
            "n": {"type": "number"},
            "b": {"type": "boolean"},
            "l": {"type": "array", "items": {"type": "integer"}},
            "o": {"$ref": "#/$defs/o"},
            "any": {},
            "either": {"type": ["string", "integer"]},
        },
        "$defs": {
            "o": {
                "type": "object",
                "properties": {
                    "t": {"type": "string"},
                    "l": {"type": "array", "items": {"$ref": "#/$defs/o"}},
                },
            }
        },
    },
)
ODD = 'a "b" \\ \n\n é😀 <b>'


def of(family: str, text: str, *, reasoning: str = "none", tail: str = "", tools=(NESTED,)) -> Read:
    model = syntax(family, reasoning=reasoning)
    return read(lambda: model.parser(tools=tools, prompt_tail=tail), text)


def arguments(found: Read) -> list[Any]:
    assert all(is_done for _, _, is_done in found.calls)
    return [json.loads(text) for _, text, _ in found.calls]


def test_ernie_writes_the_calls_of_hermes_after_thoughts_that_the_prompt_begins():
    call = '<tool_call>\n{"name": "f", "arguments": {"s": %s}}\n</tool_call>\n'
    text = f"Two calls.\n</think>\n\n{call % json.dumps(ODD)}{call % json.dumps('b')}"
    found = of("hermes", text, reasoning="think", tail="<think>\n")
    assert arguments(found) == [{"s": ODD}, {"s": "b"}]
    assert (found.thought.strip(), found.words.strip()) == ("Two calls.", "")


@pytest.mark.parametrize("family", BOTH)
def test_two_calls_as_the_template_writes_them(family):
    check(family, BOTH[family], SI, G)


WORDS = [each for each in BOTH if each not in ("xlam", "muse")]


@pytest.mark.parametrize("family", WORDS)
def test_words_before_calls(family):
    check(family, f"I look.\n\n{BOTH[family]}", SI, G, words="I look.\n\n")


def dsml(*parameters: tuple[str, str, str]) -> str:
    inside = "".join(
        f'<｜DSML｜parameter name="{key}" string="{is_text}">{value}</｜DSML｜parameter>\n'
        for key, is_text, value in parameters
    )
    call = f'<｜DSML｜invoke name="f">\n{inside}</｜DSML｜invoke>'
    return f"<｜DSML｜tool_calls>\n{call}\n</｜DSML｜tool_calls>"


TYPED = {
    "deepseek-dsml": dsml(
        ("s", "true", ODD), ("n", "false", "3"), ("b", "false", "true"), ("l", "false", "[1, 2]"),
        ("o", "false", '{"t": "x"}'), ("any", "false", "[1]"), ("either", "true", "3"),
        ("new", "true", "3"),
    ),
    "kimi-k3": kimi_k3(
        (
            "f",
            kimi_argument("s", "string", ODD)
            + kimi_argument("n", "number", "3")
            + kimi_argument("b", "boolean", "true")
            + kimi_argument("l", "array", "[1, 2]")
            + kimi_argument("o", "object", '{"t": "x"}')
            + kimi_argument("any", "array", "[1]")
            + kimi_argument("either", "string", "3")
            + kimi_argument("new", "string", "3"),
        )
    ),
}  # fmt: skip


@pytest.mark.parametrize("family", TYPED)
def test_a_parameter_that_declares_its_type_has_it_where_the_schema_leaves_it_open(family):
    found = arguments(of(family, TYPED[family]))
    assert found == [
        {"s": ODD, "n": 3, "b": True, "l": [1, 2], "o": {"t": "x"}, "any": [1], "either": "3",
         "new": "3"}
    ]  # fmt: skip
    assert arguments(of("deepseek-dsml", dsml(("either", "false", "3"), ("s", "false", "4")))) == [
        {"either": 3, "s": "4"}
    ]


def test_v32_and_v4_enclose_calls_in_other_tags():
    text = tagged("｜DSML｜", "function_calls")
    check("deepseek-dsml", text, SI, G)
    for template, block in (
        ("'function_calls>'", "function_calls"),
        ("'tool_calls>'", "tool_calls"),
    ):
        model = syntax("deepseek-dsml", template=template)
        grammar = model.constrain(
            SamplingParams(), tools=PLAIN_TOOLS, choice=ToolChoice(mode="required")
        )
        assert grammar is not None
        assert f"<｜DSML｜{block}>" in grammar


DSML_OFF = {
    "no tag around": tagged("｜DSML｜", "tool_calls").partition("\n")[2],
    "no last tag": tagged("｜DSML｜", "tool_calls").removesuffix("\n</｜DSML｜tool_calls>"),
    "no line breaks": tagged("｜DSML｜", "tool_calls").replace("\n", ""),
    "no end of a parameter": tagged("｜DSML｜", "tool_calls").replace(
        "x</｜DSML｜parameter>", "x", 1
    ),
    "no attribute": tagged("｜DSML｜", "tool_calls").replace(' string="true"', ""),
}


@pytest.mark.parametrize("title", DSML_OFF)
def test_dsml_off_its_format(title):
    check("deepseek-dsml", DSML_OFF[title], SI, G)


def test_tags_of_dsml_may_be_part_of_a_value():
    text = dsml(("s", "true", "a </｜DSML｜parameter> b"))
    assert arguments(of("deepseek-dsml", text)) == [{"s": "a </｜DSML｜parameter> b"}]


# -- Kimi K3 --------------------------------------------------------------------------------------

RESPONSE = "<|open|>response<|sep|>Hi.<|close|>response<|sep|>"
LAST = "<|close|>message<|sep|><|end_of_msg|>"


def test_kimi_k3_has_a_thought_a_response_and_calls():
    text = f"hm<|close|>think<|sep|>{RESPONSE}{BOTH['kimi-k3']}{LAST}"
    found = of("kimi-k3", text, reasoning="kimi-k3", tail="<|open|>think<|sep|>", tools=PLAIN_TOOLS)
    assert (found.thought, found.words) == ("hm", "Hi.")
    assert [(name, json.loads(text)) for name, text, _ in found.calls] == [SI, G]


def test_the_tags_of_kimi_k3_are_dropped_without_tools_too():
    assert of("kimi-k3", f"{RESPONSE}{LAST}", tools=()) == Read(words="Hi.")
    assert of("kimi-k3", f"Hi.<|close|>response<|sep|>{LAST}", tools=()) == Read(words="Hi.")
    opened = f"<|open|>think<|sep|>hm<|close|>think<|sep|>{RESPONSE}"
    assert of("kimi-k3", opened, reasoning="kimi-k3", tools=()) == Read(words="Hi.", thought="hm")


@pytest.mark.parametrize(
    "mark",
    ["<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>",
     "<|end_of_msg|>"],
)  # fmt: skip
def test_tags_of_kimi_k3_may_be_part_of_an_argument(mark):
    value = f"a {mark} b"
    for inside in (
        kimi_argument("s", "string", value) + kimi_argument("n", "number", "3"),
        f'<|open|>json type="object"<|sep|>{json.dumps({"s": value, "n": 3})}<|close|>json<|sep|>',
    ):
        found = of("kimi-k3", f"{RESPONSE}{kimi_k3(('f', inside))}{LAST}")
        assert arguments(found) == [{"s": value, "n": 3}]
        assert found.words == "Hi."


KIMI_OFF = {
    "no tag around": BOTH["kimi-k3"].removeprefix("<|open|>tools<|sep|>"),
    "no last tag": BOTH["kimi-k3"].removesuffix("<|close|>tools<|sep|>"),
    "no index": BOTH["kimi-k3"].replace(' index="1"', ""),
    "no end of an argument": BOTH["kimi-k3"].replace("x<|close|>argument<|sep|>", "x"),
    "no end of a call": BOTH["kimi-k3"].replace("<|close|>call<|sep|>", "", 1),
    "arguments as JSON": kimi_k3(
        ("f", '<|open|>json type="object"<|sep|>{"s": "x", "i": 3}<|close|>json<|sep|>'), ("g", "")
    ),
}


@pytest.mark.parametrize("title", KIMI_OFF)
def test_kimi_k3_off_its_format(title):
    check("kimi-k3", KIMI_OFF[title], SI, G)


def test_a_form_of_kimi_k3_stands_in_the_response():
    model = syntax("kimi-k3", reasoning="kimi-k3")
    grammar = model.constrain(SamplingParams(choice=("yes", "no")))
    assert grammar is not None
    assert "response" in grammar


# -- MiniMax M3 -----------------------------------------------------------------------------------


def test_elements_of_minimax_m3_are_of_the_types_of_the_schema():
    inner = element("l", element("item", element("t", "7")))
    inside = (
        element("s", ODD)
        + element("n", "3.5")
        + element("b", "true")
        + element("l", element("item", "1") + element("item", "2"))
        + element("o", element("t", "5") + inner)
        + element("any", element("item", "x"))
        + element("either", "3")
        + element("new", element("k", "v"))
    )
    assert arguments(of("minimax-m3", minimax_m3(("f", inside)))) == [
        {"s": ODD, "n": 3.5, "b": True, "l": [1, 2], "o": {"t": "5", "l": [{"t": "7"}]},
         "any": ["x"], "either": "3", "new": {"k": "v"}}
    ]  # fmt: skip
    empty = element("l", "") + element("o", "") + element("s", "")
    assert arguments(of("minimax-m3", minimax_m3(("f", empty)))) == [{"l": [], "o": {}, "s": ""}]


M3_OFF = {
    "no block": BOTH["minimax-m3"].removeprefix(f"{NS}<tool_call>\n"),
    "no last tag": BOTH["minimax-m3"].removesuffix(f"\n{NS}</tool_call>"),
    "no end of an element": BOTH["minimax-m3"].replace(f"x{NS}</s>", "x"),
    "no end of a call": BOTH["minimax-m3"].replace(f"{NS}</invoke>", "", 1),
    "no quotes": BOTH["minimax-m3"].replace('"', ""),
    "text between elements": BOTH["minimax-m3"].replace(f"{NS}<i>", f" and {NS}<i>"),
    "an end of nothing": BOTH["minimax-m3"].replace(f"{NS}<i>", f"{NS}</k>{NS}<i>"),
}


@pytest.mark.parametrize("title", M3_OFF)
def test_minimax_m3_off_its_format(title):
    check("minimax-m3", M3_OFF[title], SI, G)


def test_an_element_of_minimax_m3_streams_and_deep_ones_are_closed():
    parser = syntax("minimax-m3").parser(tools=[NESTED])
    begin = f'{NS}<tool_call>\n{NS}<invoke name="f">{NS}<s>'
    assert parser.feed(begin + "ab") == [CallBegin("f"), CallArguments('{"s": "ab')]
    deep = minimax_m3(("f", f"{NS}<a>" * 100))
    [(name, text, is_done)] = of("minimax-m3", deep).calls
    assert (name, is_done) == ("f", True)
    json.loads(text)


def test_an_answer_of_minimax_m3_without_a_thought_may_begin_with_its_end():
    found = of("minimax-m3", "</mm:think>Hi.", reasoning="minimax-m3")
    assert found == Read(words="Hi.")
    found = of("minimax-m3", "<mm:think>hm</mm:think>Hi.", reasoning="minimax-m3", tools=())
    assert found == Read(words="Hi.", thought="hm")


# -- Muse -----------------------------------------------------------------------------------------

THOUGHT = " to=self<|message|>hm<|eom|><|start|>assistant"
SAID = " to=user<|message|>Hi.<|eom|><|start|>assistant"


def test_muse_has_messages_to_itself_the_user_and_tools():
    found = of("muse", THOUGHT + SAID + BOTH["muse"], tools=PLAIN_TOOLS)
    assert (found.thought, found.words) == ("hm", "Hi.")
    assert [(name, json.loads(text)) for name, text, _ in found.calls] == [SI, G]
    assert of("muse", f"{THOUGHT} to=user<|message|>Hi.<|eot|>", tools=()) == Read(
        words="Hi.", thought="hm"
    )
    assert of("muse", " to=self<|message|>h <|eom|> m") == Read(thought="h <|eom|> m")
    assert of("muse", "Just words.") == Read(words="Just words.")


def test_words_of_muse_without_a_header_are_not_held_back():
    for words in ("Just words, without any mark, ", " to be or not to be, " * 40):
        parser = syntax("muse").parser(tools=PLAIN_TOOLS)
        found = by_kind(parser.feed(words * 2))
        assert found.words.strip().startswith(words.strip())
        found = by_kind([*parser.feed("more"), *parser.end()])
        assert found.words.endswith("more")
    header = f"<|start|>assistant{' to=user' * 100}<|message|>Hi."
    assert of("muse", header).words.endswith("Hi.")


def test_tags_of_muse_in_a_message_to_the_user_are_content():
    call = muse(("f", atem("s", "x"))).partition("<|message|>")[2]
    text = f"You write:\n{call}"
    assert of("muse", f" to=user<|message|>{text}<|eot|>") == Read(words=text)
    assert arguments(of("muse", call)) == [{"s": "x"}]


# -- lists and objects ----------------------------------------------------------------------------

APERTUS_OFF = {
    "one object": '<|tools_prefix|>{"f": {"s": "x", "i": 3}, "g": {}}<|tools_suffix|>',
    "no end": '<|tools_prefix|>[{"f": {"s": "x", "i": 3}}, {"g": {}',
    "names as values": '<|tools_prefix|>[{"name": "f", "arguments": {"s": "x", "i": 3}}, '
    '{"name": "g", "arguments": {}}]<|tools_suffix|>',
    "no braces between": '<|tools_prefix|>[{"f": {"s": "x", "i": 3}, {"g": {}}]<|tools_suffix|>',
    "null": '<|tools_prefix|>[{"f": {"s": "x", "i": 3}}, {"g": null}]<|tools_suffix|>',
}


@pytest.mark.parametrize("title", APERTUS_OFF)
def test_apertus_off_its_format(title):
    check("apertus", APERTUS_OFF[title], SI, G)


def test_apertus_has_thoughts():
    text = "<|inner_prefix|>hm<|inner_suffix|>Hi."
    assert of("apertus", text, reasoning="apertus") == Read(words="Hi.", thought="hm")


def test_gigachat_writes_a_call_as_a_message_or_after_a_mark():
    call = '{"name": "f", "arguments": {"s": "x"}}'
    for begin in ("<|message_sep|>\n\nfunction call<|role_sep|>\n", "function call<|role_sep|>"):
        check("gigachat", f"Hi.{begin}{call}<|message_sep|>", F, words="Hi.")
    check("gigachat3.1", f"Hi.<|function_call|>{call}", F, words="Hi.")
    assert of("gigachat", "Hi.<|message_sep|>\n\n").words == "Hi.<|message_sep|>\n\n"


def test_xlam_writes_a_list_that_is_the_whole_answer():
    call = '{"name": "f", "arguments": {"s": "x"}}'
    check("xlam", f"\n[\n  {call}\n]", F)
    check("xlam", call, F)
    for text in ("[]", "[1, 2]", '[{"a": 1}]', f"See [{call}] here."):
        assert of("xlam", text) == Read(words=text)


@pytest.mark.parametrize("family", BOTH)
def test_special_tokens_inside_marks_are_shown(family):
    marks = FAMILIES[family].marks
    vocab = {mark: number for number, mark in enumerate(marks)}
    special = frozenset(vocab.values())
    found = Syntax.choose("", vocab, special, tool_parser=family, reasoning_parser="none")
    assert found.shown_ids(tools=True) == special
