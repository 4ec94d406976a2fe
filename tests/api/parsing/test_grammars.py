"""Grammars and readers agree: what the one lets through, the other reads into valid calls."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace

import pytest

from foretoken import InvalidRequest, SamplingParams
from foretoken.api.parsing.call_grammars import MAX_CALLS
from foretoken.api.parsing.families import FAMILIES
from foretoken.api.parsing.formats.gemma import GEMMA
from foretoken.api.parsing.formats.tagged import TAGGED
from foretoken.api.parsing.grammars import value
from foretoken.api.parsing.reading.offers import kinds
from foretoken.api.runtime.conversation.custom_tools import custom_tool, input_of
from foretoken.api.structured.grammar_text import json_rule
from foretoken.api.types.results import Tool, ToolChoice
from support.format_texts import BEGINNINGS, UNMARKED
from support.parse_harness import WEATHER, F, Read, read, syntax
from support.patches import SHORT, SHORT_GRAMMAR
from support.random_walk_model import Model

NODE = Tool(
    name="tree",
    strict=True,
    parameters={
        "type": "object",
        "properties": {
            "root": {"$ref": "#/$defs/node"},
            "flag": {"type": "boolean"},
            "kind": {"enum": ["a b", "c"]},
        },
        "required": ["root", "kind"],
        "additionalProperties": False,
        "$defs": {
            "node": {
                "type": "object",
                "properties": {"next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
                "required": ["next"],
                "additionalProperties": False,
            }
        },
    },
)
STRICT = replace(WEATHER, strict=True)
TEXT = Tool(name="say", parameters={"properties": {"text": {"type": "string"}}})
TOOLS = (STRICT, NODE, F)
REQUIRED, AUTO = ToolChoice(mode="required"), ToolChoice()
ANY = SamplingParams()


DEEPSEEK = "<｜tool▁calls▁begin｜>%s<｜tool▁calls▁end｜>"
CALL = "<｜tool▁call▁begin｜>%s<｜tool▁call▁end｜>"
V31 = (DEEPSEEK, CALL % "f<｜tool▁sep｜>{}")
V3 = (DEEPSEEK, CALL % "function<｜tool▁sep｜>f\n```json\n{}\n```")
KIMI = (
    "<|tool_calls_section_begin|>%s<|tool_calls_section_end|>",
    "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}<|tool_call_end|>",
)


def hermes(body: str) -> str:
    return f"<tool_call>\n{body}\n</tool_call>"


GEMMAS = {name: family for name, family in FAMILIES.items() if name in (*GEMMA, "minimax-m3")}
WHOLE = [name for name in FAMILIES if name not in GEMMAS]  # whose values are JSON, or nearly
TEXTS = {*TAGGED, "deepseek-dsml", "gigachat-gcml", "kimi-k3", "muse"}  # strings are texts
TYPED = Tool(
    name="typed",
    parameters={
        "properties": {
            "text": {"type": "string"},
            "count": {"type": "integer"},
            "is_on": {"type": "boolean"},
            "kind": {"enum": ["a b", "c"]},
            "more": {},
        },
        "required": ["text", "kind"],
    },
)


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module", params=["spelt", "special", "added"])
def model(request, runner) -> Iterator[Model]:
    model = Model(request.param, runner)
    yield model
    model.close()


@pytest.fixture(scope="module")
def plain(runner) -> Iterator[Model]:
    model = Model("spelt", runner)
    yield model
    model.close()


def check_calls(calls: list[tuple[str, str, bool]]) -> None:
    for name, arguments, is_done in calls:
        assert is_done
        value = json.loads(arguments)
        if name == "get_weather":
            assert set(value) <= {"city", "days"}
            assert len(value["city"]) <= 12
            assert 1 <= value.get("days", 1) <= 14
        elif name == "tree":
            assert set(value) <= {"root", "flag", "kind"}
            assert value["kind"] in ("a b", "c")
            assert value.get("flag", True) in (True, False)
            node = value["root"]
            while node is not None:
                [node] = node.values()
        elif name == "say":
            assert isinstance(value.get("text", ""), str)
        else:
            assert name == "f"
            assert isinstance(value, dict)


@pytest.mark.parametrize(
    ("family", "template"), [*((family, "") for family in WHOLE), ("deepseek", "```json")]
)
def test_forced_calls_are_read_as_valid_calls(model, family, template):
    tools = (TEXT, NODE, F) if family in TEXTS else (STRICT, NODE, F)
    syntax = model.syntax(family, template=template)
    text = syntax.constrain(ANY, tools=tools, choice=REQUIRED)
    for seed in range(6):
        answer = model.spell(model.walk(text, seed), syntax.shown_ids(tools=True))
        found = read(lambda: syntax.parser(tools=tools), answer)
        assert found.words == "", answer
        assert found.calls
        check_calls(found.calls)


@pytest.mark.parametrize(
    ("family", "template", "around", "one", "comma"),
    [
        ("hermes", "", "%s", hermes('{"name": "f", "arguments": {}}'), "\n"),
        ("qwen3-coder", "", "%s", hermes("<function=f>\n</function>"), "\n"),
        ("llama3", "", "%s", '{"name": "f", "parameters": {}}', "; "),
        ("pythonic", "", "[%s]", "f()", ", "),
        ("mistral", "", "%s", "[TOOL_CALLS]f[ARGS]{}", ""),
        ("deepseek", "", *V31, ""),
        ("deepseek", "```json", *V3, "\n"),
        ("kimi", "", *KIMI, ""),
        ("granite", "", "<|tool_call|>[%s]", '{"name": "f", "arguments": {}}', ", "),
    ],
)
def test_several_calls_only_where_they_may_be_and_not_without_end(
    model, family, template, around, one, comma
):
    if family == "mistral" and "[ARGS]" not in model.tokenizer.vocab:
        around, one, comma = "[TOOL_CALLS] [%s]", '{"name": "f", "arguments": {}}', ", "
    syntax = model.syntax(family, template=template)
    two, most, more = (around % comma.join([one] * n) for n in (2, MAX_CALLS, MAX_CALLS + 1))
    assert read(lambda: syntax.parser(tools=[F]), two).calls == [("f", "{}", True)] * 2
    forced = syntax.constrain(ANY, tools=[F], choice=REQUIRED)
    assert model.accepts(forced, two)
    assert model.accepts(forced, most)
    assert not model.accepts(forced, more)
    single = ToolChoice(mode="required", parallel=False)
    assert not model.accepts(syntax.constrain(ANY, tools=[F], choice=single), two)


@pytest.mark.parametrize("family", WHOLE)
def test_one_call_of_one_tool_where_that_is_what_is_asked(plain, family):
    syntax = plain.syntax(family)
    choice = ToolChoice(mode="required", name="tree", parallel=False)
    text = syntax.constrain(ANY, tools=(NODE, F), choice=choice)
    for seed in range(3):
        answer = plain.spell(plain.walk(text, seed), frozenset())
        found = read(lambda: syntax.parser(tools=(NODE, F)), answer)
        assert [name for name, _, _ in found.calls] == ["tree"]
        check_calls(found.calls)


@pytest.mark.parametrize("family", WHOLE)
def test_words_are_free_and_calls_among_them_valid(model, family):
    syntax = model.syntax(family)
    text = syntax.constrain(ANY, tools=(NODE, F), choice=AUTO)
    assert model.accepts(text, "Plain words, <b>tags</b> and (brackets).")
    assert model.accepts(text, "")
    begin = (BEGINNINGS.get(family) or FAMILIES[family].marks[0]).replace("{tool}", "tree")
    begin = begin if family in UNMARKED else f"Hm.\n{begin}"
    for seed in range(3):
        ids = model.walk(text, seed, begin)
        answer = model.spell(ids, syntax.shown_ids(tools=True))
        found = read(lambda: syntax.parser(tools=(NODE, F)), answer)
        assert found.calls, answer
        check_calls(found.calls)


PARIS = hermes('{"name": "get_weather", "arguments": {"city": "Paris"}}')


@pytest.mark.parametrize(
    ("choice", "answer", "fits"),
    [
        (REQUIRED, PARIS, True),
        (REQUIRED, f"{PARIS}\n{PARIS}", True),
        (REQUIRED, "no", False),
        (REQUIRED, "", False),
        (REQUIRED, PARIS.replace("get_weather", "nobody"), False),
        (REQUIRED, PARIS.replace("city", "town"), False),
        (REQUIRED, PARIS.replace(": {", ":  {"), False),
        (REQUIRED, PARIS.replace('{"city": "Paris"}', "{}"), False),
        (ToolChoice(mode="required", parallel=False), f"{PARIS}\n{PARIS}", False),
        (ToolChoice(mode="required", name="f"), PARIS, False),
        (ToolChoice(mode="required", allowed=frozenset({"f"})), PARIS, False),
        (ToolChoice(mode="required", name="get_weather"), PARIS, True),
        (AUTO, "no", True),
        (AUTO, f"Well.\n{PARIS}\n{PARIS} So.", True),
        (AUTO, f"Well.\n{PARIS.replace('city', 'town')}", False),
        (AUTO, "Well. <tool_call>", False),
        (ToolChoice(parallel=False), f"Well.\n{PARIS}", True),
        (ToolChoice(parallel=False), f"{PARIS}\n{PARIS}", False),
    ],
)
def test_what_a_grammar_for_hermes_allows(model, choice, answer, fits):
    text = model.syntax("hermes").constrain(ANY, tools=TOOLS, choice=choice)
    assert model.accepts(text, answer) == fits


def test_arguments_of_any_tool_are_forced_strict_or_not(plain):
    text = plain.syntax("hermes").constrain(ANY, tools=[WEATHER], choice=REQUIRED)
    assert plain.accepts(text, PARIS)
    assert not plain.accepts(text, PARIS.replace("city", "town"))


def test_what_a_loose_schema_says_beyond_the_known_is_left_out(plain):
    odd = {"type": "object", "properties": {"a": {"type": "string", "format": "of-my-own"}}}
    loose, strict = Tool(name="f", parameters=odd), Tool(name="f", parameters=odd, strict=True)
    syntax = plain.syntax("hermes")
    answer = hermes('{"name": "f", "arguments": {"a": "x"}}')
    assert plain.accepts(syntax.constrain(ANY, tools=[loose], choice=REQUIRED), answer)
    with pytest.raises(InvalidRequest):
        plain.grammar(syntax.constrain(ANY, tools=[strict], choice=REQUIRED))


@pytest.mark.parametrize(
    ("params", "answer"),
    [
        (SamplingParams(json_schema={"type": "object", "required": ["x/y"]}), '{"x/y": 1}'),
        (SamplingParams(json_schema='{"type": "integer"}'), "12"),
        (SamplingParams(regex=r"a/b\/c\d+\\"), "a/b/c12\\"),
        (SamplingParams(regex="a\nb"), "a\nb"),
        (SamplingParams(choice=['say "no"\n', "yes"]), 'say "no"\n'),
        (SamplingParams(grammar='start: call\ncall: "call" // }\n'), "call"),
        (SamplingParams(grammar='root ::= "a" b\nb ::= "b"+'), "abb"),
    ],
)
def test_words_in_a_form_or_calls(plain, params, answer):
    syntax = plain.syntax("hermes", reasoning="think")
    text = syntax.constrain(params, tools=[WEATHER], choice=AUTO)
    assert plain.accepts(text, answer)
    assert plain.accepts(text, PARIS)
    assert not plain.accepts(text, "else")
    assert not plain.accepts(text, answer + PARIS)
    assert plain.accepts(text, f"<think>hm</think>\n\n{answer}")
    without = syntax.constrain(params)
    assert plain.accepts(without, f"<think>hm</think>\n\n{answer}")
    assert not plain.accepts(without, PARIS)


def test_a_thought_is_free_and_what_follows_is_not(model):
    syntax = model.syntax("hermes", reasoning="think")
    text = syntax.constrain(ANY, tools=TOOLS, choice=REQUIRED)
    assert model.accepts(text, PARIS)
    assert model.accepts(text, f"<think>\n<tool_call> hm\n</think>\n\n{PARIS}")
    assert not model.accepts(text, "<think>hm</think>\n\nno")
    assert not model.accepts(text, "<think>hm")
    opened = syntax.constrain(ANY, tools=TOOLS, choice=REQUIRED, prompt_tail="<think>\n")
    assert model.accepts(opened, f"hm\n</think>\n\n{PARIS}")
    assert not model.accepts(opened, PARIS)
    closed = syntax.constrain(ANY, tools=TOOLS, choice=REQUIRED, prompt_tail="</think>\n\n")
    assert model.accepts(closed, PARIS)
    assert not model.accepts(closed, f"<think>hm</think>{PARIS}")


def test_nothing_is_constrained_that_need_not_be():
    model = syntax("hermes", reasoning="think")
    form = SamplingParams(json_schema={})
    assert model.constrain(ANY, tools=[WEATHER, F], choice=AUTO) is None
    assert model.constrain(ANY) is None
    assert model.constrain(ANY, tools=[STRICT], choice=ToolChoice(mode="none")) is None
    assert model.constrain(form, prompt_tail="</think>") is None
    assert syntax("hermes").constrain(form) is None


@pytest.mark.parametrize("family", ["pythonic", "qwen3-coder"])
def test_what_is_required_comes_even_if_it_is_described_nowhere(plain, family):
    tool = Tool(name="f", parameters={"required": ["a"], "properties": {"b": {"type": "null"}}})
    syntax = plain.syntax(family)
    text = syntax.constrain(ANY, tools=[tool], choice=REQUIRED)
    found = read(lambda: syntax.parser(tools=[tool]), plain.spell(plain.walk(text, 0), frozenset()))
    assert all("a" in json.loads(arguments) for _, arguments, _ in found.calls)
    assert found.calls


def test_a_text_of_qwen_coder_can_not_be_held_to_a_length(plain):
    model = plain.syntax("qwen3-coder")
    with pytest.raises(InvalidRequest) as info:
        model.constrain(ANY, tools=[STRICT], choice=REQUIRED)
    assert info.value.param == "tools"
    assert model.constrain(ANY, tools=[WEATHER], choice=REQUIRED)


CIRCLE = {"anyOf": [{"$ref": "#/$defs/a"}] * 10}


@pytest.mark.parametrize("family", ["pythonic", "qwen3-coder"])
def test_a_schema_that_refers_to_itself_ten_times_over_is_read_once(plain, family):
    parameters = {"$defs": {"a": CIRCLE}, "properties": {"p": {"$ref": "#/$defs/a"}}}
    tool = Tool(name="f", parameters=parameters)
    assert plain.syntax(family).constrain(ANY, tools=[tool], choice=REQUIRED)


def test_types_are_found_behind_references_and_alternatives():
    deep = {"type": "integer"}
    for _ in range(30):
        deep = {"oneOf": [deep]}
    listed = {"anyOf": [{"enum": [None, True]}, {"$ref": "#/$defs/b"}, {"$ref": "#/$defs/lost"}]}
    root = {"$defs": {"a": listed, "b": {"anyOf": [deep, {"$ref": "#/$defs/a"}]}}}
    assert kinds({"$ref": "#/$defs/a"}, root) == {"null", "boolean", "integer"}
    assert kinds({"$ref": "#" + "/a" * 10**6}, root) == frozenset()


@pytest.mark.parametrize("family", ["pythonic", "qwen3-coder"])
def test_definitions_that_each_argument_would_repeat_are_refused_before_they_are(family):
    shared = {"$defs": {f"d{i}": {"type": "string"} for i in range(500)}}
    many = {f"p{i}": {"$ref": "#/$defs/d1"} for i in range(1000)}
    for parameters in (
        {**shared, "properties": many},
        {"properties": {f"p{i}": {} for i in range(5000)}},
    ):
        tool = Tool(name="f", parameters=parameters)
        with pytest.raises(InvalidRequest) as info:
            syntax(family).constrain(ANY, tools=[tool], choice=REQUIRED)
        assert info.value.param == "tools"
    texts = {"p": {"$ref": "#/$defs/d1"}, **{f"q{i}": {"type": "string"} for i in range(100)}}
    tool = Tool(name="f", parameters={**shared, "properties": texts})
    text = syntax(family).constrain(ANY, tools=[tool], choice=REQUIRED)
    assert text is not None
    assert text.count('"d499"') <= 1, "only where they are referred to"


@pytest.mark.parametrize("write", [json_rule, lambda schema: value(schema, strict=False)])
def test_a_schema_that_is_too_long_is_refused_before_it_is_written(monkeypatch, write):
    fits = {"enum": ["x" * 8] * 20_000}
    assert len(write(fits)) > 200_000
    monkeypatch.setattr(json, "dumps", lambda *_, **__: pytest.fail("written"))
    with pytest.raises(InvalidRequest, match="at most"):
        write({"properties": {f"p{i}": {"type": "string"} for i in range(60_000)}})


@pytest.mark.parametrize("family", GEMMAS)
def test_calls_without_json_are_of_the_types_of_the_schema(model, family):
    syntax = model.syntax(family)
    text = syntax.constrain(ANY, tools=[TYPED], choice=REQUIRED)
    for seed in range(6):
        answer = model.spell(model.walk(text, seed), syntax.shown_ids(tools=True))
        found = read(lambda: syntax.parser(tools=[TYPED]), answer)
        assert found.words == "", answer
        assert found.calls
        for _, arguments, is_done in found.calls:
            assert is_done
            values = json.loads(arguments)
            assert isinstance(values["text"], str)
            assert values["kind"] in ("a b", "c")
            assert isinstance(values.get("count", 1), int)
            assert values.get("is_on", True) in (True, False)
    auto = syntax.constrain(ANY, tools=[replace(F, strict=True)], choice=AUTO)
    assert model.accepts(auto, "Plain words.")


@pytest.mark.parametrize("family", GEMMAS)
def test_what_gemmas_form_can_not_follow_is_refused(plain, family):
    with pytest.raises(InvalidRequest, match="cannot be strict"):
        plain.syntax(family).constrain(ANY, tools=[STRICT], choice=REQUIRED)


def test_a_form_of_harmony_stands_in_the_last_channel(model):
    syntax = model.syntax("harmony")
    form = SamplingParams(choice=("yes", "no"))
    text = syntax.constrain(form)
    final = "<|channel|>final<|message|>yes"
    thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    assert model.accepts(text, final)
    assert model.accepts(text, thought + final)
    assert not model.accepts(text, "yes")
    assert read(syntax.parser, thought + final) == Read(words="yes", thought="Hm.")
    with_tools = syntax.constrain(form, tools=[F], choice=AUTO)
    call = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}"
    assert model.accepts(with_tools, call)
    assert model.accepts(with_tools, final)


@pytest.mark.parametrize("choice", [REQUIRED, AUTO], ids=["required", "auto"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_input_of_a_custom_tool_follows_its_grammar_in_every_format(model, family, choice):
    patch = custom_tool("apply-patch", None, "lark", SHORT_GRAMMAR, param="tools[0]")
    syntax = model.syntax(family)
    text = syntax.constrain(ANY, tools=(patch,), choice=choice)
    begin = (BEGINNINGS.get(family) or FAMILIES[family].marks[0]).replace("{tool}", patch.name)
    for seed in range(2):
        ids = model.walk(text, seed, "" if choice is REQUIRED else begin)
        answer = model.spell(ids, syntax.shown_ids(tools=True))
        found = read(lambda: syntax.parser(tools=(patch,)), answer)
        assert found.calls, answer
        for name, arguments, is_done in found.calls:
            assert (name, is_done) == ("apply-patch", True)
            assert SHORT.fullmatch(input_of(arguments)), answer
