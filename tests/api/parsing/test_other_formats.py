"""Calls written in Python or between tags become JSON as they come; thoughts stand before all."""

from __future__ import annotations

import json

import pytest

from foretoken.api.parsing.output_parser import CallArguments, CallBegin
from foretoken.api.types.results import Tool
from support.parse_harness import TOOLS, Read, read, syntax

TYPED = Tool(
    name="f",
    parameters={
        "type": "object",
        "properties": {
            "n": {"type": "integer"},
            "s": {"type": "string"},
            "o": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "l": {"type": "array"},
            "b": {"enum": [True, False]},
        },
    },
)


def pythonic(text: str) -> Read:
    return read(lambda: syntax("pythonic").parser(tools=TOOLS), text)


def coder(text: str) -> Read:
    return read(lambda: syntax("qwen3-coder").parser(tools=[TYPED]), text)


def think(text: str, *, tail: str = "", family: str = "hermes") -> Read:
    model = syntax(family, reasoning="think")
    return read(lambda: model.parser(tools=TOOLS, prompt_tail=tail), text)


def test_pythonic_calls():
    found = pythonic('\n[get_weather(city="Paris", days=2), f()]\n')
    assert found == Read(
        calls=[("get_weather", '{"city": "Paris", "days": 2}', True), ("f", "{}", True)]
    )
    assert pythonic("<|python_start|>[f()]<|python_end|>") == Read(calls=[("f", "{}", True)])


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("'it\\'s \"\\n\\x41\\u00e9\\U0001F600\\d\\/'", "it's \"\nAé😀\\d/"),
        ('"""a "b" c"""', 'a "b" c'),
        ("'\\ud83d\\ude00'", "😀"),
        ("-1.5e3", -1500.0),
        (".5", 0.5),
        ("[True, False, None, true, null]", [True, False, None, True, None]),
        ("(1, [2, ()],)", [1, [2, []]]),
        ("{'a': {'b': 1,}, \"c\": {}}", {"a": {"b": 1}, "c": {}}),
        ("12345678901234567890", 12345678901234567890),
    ],
)
def test_pythonic_values_become_json(written, value):
    [(_, arguments, is_done)] = pythonic(f"[f(x={written})]").calls
    assert json.loads(arguments) == {"x": value}
    assert is_done


@pytest.mark.parametrize("number", ["inf", "-Infinity", "nan", "1 + 2", "g(2)", "Color.RED", "007"])
def test_an_expression_that_json_does_not_have_is_a_text(number):
    assert pythonic(f"[f(x={number})]").calls == [("f", f'{{"x": "{number}"}}', True)]


def test_pythonic_arguments_stream():
    parser = syntax("pythonic").parser(tools=TOOLS)
    assert parser.feed('[f(a="x') == [CallBegin("f"), CallArguments('{"a": "x')]


@pytest.mark.parametrize(
    "text",
    ["[see](http://x)", "[nobody(x=1)]", "[1, 2]", "[f", "f(x=1)", "[f(x)]", "[]", "[f (x=1)]"],
)
def test_brackets_that_are_no_calls_are_words(text):
    assert pythonic(text) == Read(words=text)


def test_a_pythonic_call_that_breaks_off_is_closed_or_stays_open():
    deep = pythonic("[f(a=" + "[" * 100 + "]" * 100 + ")]").calls
    assert deep == [("f", '{"a": ' + "[" * 65 + "]" * 65 + "}", True)]
    assert pythonic("[f(") == Read(calls=[("f", "", False)])
    assert pythonic('[f(a="x') == Read(calls=[("f", '{"a": "x', False)])


def test_calls_of_qwen_coder_by_the_types_of_the_schema():
    found = coder(
        "Hm.\n<tool_call>\n<function=f>\n<parameter=n>\n3\n</parameter>\n<parameter=s>\n"
        'one\n"two"\n\n</parameter>\n<parameter=o>\nnull\n</parameter>\n<parameter=l>[1, 2]'
        "</parameter>\n<parameter=b>\nTrue\n</parameter>\n<parameter=new>\n7\n</parameter>\n"
        "</function>\n</tool_call>"
    )
    [(name, arguments, is_done)] = found.calls
    assert (found.words, name, is_done) == ("Hm.\n", "f", True)
    assert json.loads(arguments) == {
        "n": 3, "s": 'one\n"two"\n', "o": None, "l": [1, 2], "b": True, "new": "7",
    }  # fmt: skip


def test_a_value_of_qwen_coder_that_its_type_does_not_fit_is_a_string():
    [(_, arguments, _)] = coder(
        "<tool_call><function=f><parameter=n>NaN</parameter></function></tool_call>"
    ).calls
    assert json.loads(arguments) == {"n": "NaN"}


@pytest.mark.parametrize(
    "text", ["<tool_call>x", "<tool_call>\n<function=>", "<tool_call><function=f"]
)
def test_tags_of_qwen_coder_that_are_no_call_are_words(text):
    assert coder(text) == Read(words=text)


def test_a_thought_is_told_apart_at_its_mark():
    assert think("<think>\nhm\n</think>\n\nHi\n") == Read(thought="hm\n", words="Hi\n")


def test_a_thought_that_the_prompt_opened_needs_no_mark():
    found = think("hm</think>\n\nHi", tail="<|im_start|>assistant\n<think>\n")
    assert found == Read(thought="hm", words="Hi")


def test_a_thought_that_the_prompt_closed_does_not_open_again():
    found = think("<think> is a tag", tail="<think>\n\n</think>\n\n")
    assert found == Read(words="<think> is a tag")


def test_a_mark_behind_the_first_word_is_a_word():
    assert think("\nUse <think> here") == Read(words="\nUse <think> here")


def test_a_thought_without_an_end_is_all_thought():
    assert think("<think>hm</thin") == Read(thought="hm</thin")


def test_calls_inside_a_thought_are_thought():
    call = '<tool_call>{"name": "f"}</tool_call>'
    found = think(f"<think>{call}</think>\n{call}")
    assert found == Read(thought=call, calls=[("f", "{}", True)])


def test_mistrals_thoughts_have_marks_of_their_own():
    model = syntax("none", reasoning="mistral")
    assert read(model.parser, "[THINK]hm[/THINK]Hi") == Read(thought="hm", words="Hi")


# -- formats with readers of their own ------------------------------------------------------------


def of(family: str, text: str, *, reasoning: str = "none", tail: str = "", tools=TOOLS) -> Read:
    model = syntax(family, reasoning=reasoning)
    return read(lambda: model.parser(tools=tools, prompt_tail=tail), text)


ANALYSIS = "<|channel|>analysis<|message|>Need it.<|end|><|start|>assistant"


def test_harmony_has_thoughts_calls_and_words_in_channels():
    call = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>'
    assert of("harmony", ANALYSIS + call) == Read(
        thought="Need it.", calls=[("f", '{"a": 1}', True)]
    )
    final = "<|channel|>final<|message|>It is <|x|> 3.<|return|>"
    assert of("harmony", ANALYSIS + final) == Read(thought="Need it.", words="It is <|x|> 3.")
    preamble = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
    assert of("harmony", preamble + call).words == "I look."


def test_harmony_takes_the_recipient_from_the_role_too():
    text = ' to=functions.f<|channel|>commentary json<|message|>{"a": 1}'
    assert of("harmony", "<|start|>assistant" + text).calls == [("f", '{"a": 1}', True)]
    assert of("harmony", "<|channel|>commentary to=functions.f<|message|><|call|>").calls == [
        ("f", "{}", True)
    ]


def test_harmony_that_breaks_off_stays_open():
    text = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": '
    assert of("harmony", text).calls == [("f", '{"a": ', False)]
    assert of("harmony", "<|channel|>analysis<|message|>Need").thought == "Need"


def test_harmony_without_tools_tells_thoughts_apart_and_gives_words():
    final = "<|channel|>final<|message|>Hi"
    assert of("harmony", ANALYSIS + final, tools=()) == Read(thought="Need it.", words="Hi")
    assert of("harmony", "Just words.", tools=()) == Read(words="Just words.")


def test_gemmas_arguments_become_json():
    found = of(
        "gemma4",
        'Well.\n<|tool_call>call:f{city:<|"|>Pa"ris\n<|"|>,n:-3.5,on:true,none:null,'
        'l:[1,<|"|>x<|"|>,{}],o:{k:{j:2}},w:word}<tool_call|>',
    )
    [(name, arguments, is_done)] = found.calls
    assert (found.words, name, is_done) == ("Well.\n", "f", True)
    assert json.loads(arguments) == {
        "city": 'Pa"ris\n', "n": -3.5, "on": True, "none": None, "l": [1, "x", {}],
        "o": {"k": {"j": 2}}, "w": "word",
    }  # fmt: skip
    assert of("gemma4", "<|tool_call>call:f{a:").calls == [("f", '{"a": ', False)]
    assert of("gemma4", "<|tool_call>tell:f{}") == Read(words="<|tool_call>tell:f{}")


def test_gemmas_thoughts_stand_in_a_channel():
    text = "<|channel>thought\nhm\n<channel|>Hi"
    assert of("gemma4", text, reasoning="gemma4") == Read(thought="hm\n", words="Hi")
    closed = of("gemma4", "Hi", reasoning="gemma4", tail="<|channel>thought\n<channel|>")
    assert closed == Read(words="Hi")


GLM_CALL = (
    "<tool_call>f\n<arg_key>n</arg_key>\n<arg_value>3</arg_value>\n<arg_key>s</arg_key>\n"
    "<arg_value>one\n two\n</arg_value>\n<arg_key>l</arg_key>\n<arg_value>[1, 2]</arg_value>\n"
    "</tool_call>"
)


def test_glms_values_are_of_the_types_of_the_schema():
    for text in (GLM_CALL, GLM_CALL.replace(">\n<", "><").replace("f\n", "f")):
        [(name, arguments, is_done)] = of("glm", text, tools=[TYPED]).calls
        assert (name, is_done) == ("f", True)
        assert json.loads(arguments) == {"n": 3, "s": "one\n two\n", "l": [1, 2]}
    assert of("glm", "<tool_call>f</tool_call>", tools=[TYPED]).calls == [("f", "{}", True)]


def test_minimax_writes_several_calls_between_one_pair_of_marks():
    call = '<invoke name="f">\n<parameter name="n">3</parameter>\n</invoke>\n'
    text = f"<minimax:tool_call>\n{call}{call}</minimax:tool_call>"
    assert of("minimax", text, tools=[TYPED]) == Read(calls=[("f", '{"n": 3}', True)] * 2)
    thought = of("minimax", f"hm</think>\n\n{text}", reasoning="think", tail="<think>\n")
    assert thought.thought == "hm"
    assert thought.calls


def test_kimis_names_lose_what_is_written_around_them():
    call = "<|tool_call_begin|>functions.f:{}<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
    text = f"<|tool_calls_section_begin|>{call.format(0)}{call.format(1)}<|tool_calls_section_end|>"
    assert of("kimi", f"Hm.{text}") == Read(words="Hm.", calls=[("f", "{}", True)] * 2)
    thought = of("kimi", "◁think▷hm◁/think▷Hi", reasoning="kimi")
    assert thought == Read(thought="hm", words="Hi")


def test_lists_of_calls_between_marks():
    call = '{"name": "f", "arguments": {"a": 1}}'
    one = ("f", '{"a": 1}', True)
    assert of("granite", f"<|tool_call|>[{call}, {call}]") == Read(calls=[one, one])
    assert of("granite", f"<|tool_call|>{call}") == Read(calls=[one])
    assert of("phi4", f"<|tool_call|>[{call}]<|/tool_call|>") == Read(calls=[one])
    assert of("hunyuan", f"<tool_calls>[{call}]</tool_calls>") == Read(calls=[one])
    cohere = '{"tool_call_id": "0", "tool_name": "f", "parameters": {"a": 1}}'
    text = f"<|START_THINKING|>hm<|END_THINKING|><|START_ACTION|>[{cohere}]<|END_ACTION|>"
    assert of("cohere", text, reasoning="cohere") == Read(thought="hm", calls=[one])


def test_python_between_marks():
    one = ("f", '{"a": "x"}', True)
    assert of("lfm2", "<|tool_call_start|>[f(a='x')]<|tool_call_end|>Done") == Read(
        words="Done", calls=[one]
    )
    text = "<function_calls>\nf(a='x')\nf(a='x')\n</function_calls>"
    assert of("olmo3", f"Sure.\n{text}") == Read(words="Sure.\n", calls=[one, one])
