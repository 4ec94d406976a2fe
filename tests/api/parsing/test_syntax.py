"""Syntax of a model: its family, the marks its text must show, the requests it must refuse."""

from __future__ import annotations

import pytest

from foretoken import InvalidRequest, SamplingParams
from foretoken.api.build.model_files import BUILTIN
from foretoken.api.parsing.families import FAMILIES
from foretoken.api.parsing.output_format import TOOL_PARSERS, Syntax, check_tools
from foretoken.api.parsing.output_parser import CallBegin, Content
from foretoken.api.types.results import Tool, ToolChoice
from support.parse_harness import WEATHER, F, parse, syntax

QWEN = "{% if tools %}<tool_call>\n{{ x }}</tool_call>"


@pytest.mark.parametrize(
    ("template", "family"),
    [
        (QWEN, "hermes"),
        ("{% if tools %}<tool_call>\n<function=example>", "qwen3-coder"),
        ("{% if tools %}[AVAILABLE_TOOLS]{% endif %}[TOOL_CALLS]", "mistral"),
        ("{{ tools }}<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>", "deepseek"),
        ('{% if tools %}<|start_header_id|>{"name": x, "parameters": y}', "llama3"),
        ('{% if tools %}<|start_header_id|>[func_name1(a=b)] "parameters"', "pythonic"),
        ("{{ tools }}<|channel|>analysis", "harmony"),
        ('{{ tools }}<|tool_call>call:<|"|>', "gemma4"),
        ("{{ tools }}<start_function_call><escape>", "function-gemma"),
        ('{{ tools }}<minimax:tool_call><invoke name="x">', "minimax"),
        ("{{ tools }}<tool_call>{name}<arg_key>", "glm"),
        ("{{ tools }}<|tool_calls_section_begin|>", "kimi"),
        ("{{ tools }}<|START_ACTION|>", "cohere"),
        ("{{ tools }}<|tool_call|>", "granite"),
        ("{{ tools }}<|tool|><|/tool|><|tool_call|>", "phi4"),
        ("{{ tools }}<|tool_call_start|>[", "lfm2"),
        ("{{ tools }}<function_calls>", "olmo3"),
        ("{{ tools }}{% set d = '｜DSML｜' %}", "deepseek-dsml"),
        ("{{ tools }}<｜GCML｜tool_calls>", "gigachat-gcml"),
        ("{{ tools }}<|role_sep|><|message_sep|><|function_call|>", "gigachat3.1"),
        ("{{ tools }}<|role_sep|><|message_sep|>", "gigachat"),
        ("{{ tools }}<|open|><|close|>{{ tag('call') }}", "kimi-k3"),
        ("{{ tools }}]<]minimax[>[<tool_call><invoke name=", "minimax-m3"),
        ("{{ tools }}<atem:function_calls>", "muse"),
        ("{{ tools }}<|tools_prefix|>[", "apertus"),
        ("{{ tools }}in a single JSON array [tool_call_name", "xlam"),
        # Step 3.5 and Ling 3
        ("{{ tools }}<tool_call>\n<function=example_function_name>", "qwen3-coder"),
        ("{{ tools }}<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>", "glm"),
        ("{% for message in messages %}<tool_call>", "generic"),
        ("{% if tools %}{{ tools }}", "generic"),
        ("", "none"),
    ],
)
def test_the_template_tells_the_family(template, family):
    found = Syntax.choose(template, {})
    assert found.tool_parser == family
    assert found.has_tools == (family != "none")


def test_the_built_in_pair_speaks_hermes():
    for name in ("target", "draft"):
        template = (BUILTIN / name / "chat_template.jinja").read_text("utf-8")
        assert Syntax.choose(template, {}).tool_parser == "hermes"


def test_a_flag_wins_over_the_template():
    assert Syntax.choose(QWEN, {}, tool_parser="none").has_tools is False
    assert Syntax.choose(QWEN, {}, tool_parser="llama3").tool_parser == "llama3"
    with pytest.raises(ValueError, match="nobody"):
        Syntax.choose(QWEN, {}, tool_parser="nobody")


def test_thinking_is_found_in_the_template_or_the_vocabulary():
    assert Syntax.choose("</think>", {}).thinking is not None
    assert Syntax.choose("", {"<think>": 1, "</think>": 2}).thinking is not None
    assert Syntax.choose("", {"[THINK]": 1, "[/THINK]": 2}).thinking is not None
    assert Syntax.choose("", {"<think>": 1}).thinking is None
    assert Syntax.choose("</think>", {}, reasoning_parser="none").thinking is None


def test_only_special_marks_need_to_be_shown():
    vocab = {"<tool_call>": 1, "</tool_call>": 2, "<think>": 3, "</think>": 4, "<eos>": 5}
    model = Syntax.choose(QWEN, vocab, frozenset({1, 2, 3, 5}))
    assert model.shown_ids(tools=True) == {1, 2, 3}
    assert model.shown_ids(tools=False) == {3}


def test_without_tools_marks_are_words():
    text = '<tool_call>{"name": "f"}</tool_call>'
    assert parse(syntax("hermes").parser(), [text]) == [Content(text)]
    assert parse(syntax("none").parser(tools=[F]), [text]) == [Content(text)]
    assert CallBegin("f") in parse(syntax("hermes").parser(tools=[F]), [text])


@pytest.mark.parametrize(
    ("tools", "choice", "param"),
    [
        ([Tool(name="")], ToolChoice(), "tools"),
        ([Tool(name="a b")], ToolChoice(), "tools"),
        ([Tool(name="x" * 129)], ToolChoice(), "tools"),
        ([Tool(name="f\n")], ToolChoice(), "tools"),
        ([F, F], ToolChoice(), "tools"),
        ([F] * 1025, ToolChoice(), "tools"),
        ([Tool(name="f", parameters={"type": "array"})], ToolChoice(), "tools"),
        ([Tool(name="f", parameters={"properties": []})], ToolChoice(), "tools"),
        ([], ToolChoice(mode="required"), "tool_choice"),
        ([F], ToolChoice(mode="required", name="g"), "tool_choice"),
        ([F], ToolChoice(allowed=frozenset({"g"})), "tool_choice"),
        ([F], ToolChoice(allowed=frozenset()), "tool_choice"),
    ],
)
def test_tools_that_can_not_be_are_refused_by_name(tools, choice, param):
    with pytest.raises(InvalidRequest) as info:
        check_tools(tools, choice)
    assert info.value.param == param


def test_tools_that_can_be_are_not_refused():
    check_tools([F, WEATHER], ToolChoice(mode="required", name="f", allowed=frozenset({"f"})))
    check_tools([], ToolChoice())


def test_calls_can_not_be_forced_from_a_model_without_a_format():
    with pytest.raises(InvalidRequest) as info:
        syntax("none").constrain(SamplingParams(), tools=[F], choice=ToolChoice(mode="required"))
    assert info.value.param == "tools"


@pytest.mark.parametrize("family", ["pythonic", "qwen3-coder"])
@pytest.mark.parametrize(
    "parameters",
    [{"properties": {"a-b": {}}}, {"anyOf": [{"required": ["a"]}]}],
)
def test_what_arguments_one_by_one_can_not_follow_is_refused(family, parameters):
    tool = Tool(name="f", parameters=parameters, strict=True)
    with pytest.raises(InvalidRequest) as info:
        syntax(family).constrain(SamplingParams(), tools=[tool], choice=ToolChoice(mode="required"))
    assert info.value.param == "tools"


def test_every_family_has_a_flag():
    assert set(TOOL_PARSERS) == {"auto", "none", *FAMILIES}
