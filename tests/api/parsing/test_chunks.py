"""Whatever a model writes, and wherever it is cut: the same parts, no error, nothing lost.

Each call that ends has a whole object of arguments.
"""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretoken.api.parsing.families import FAMILIES
from support.format_texts import BOTH, WRAPPED
from support.parse_harness import WEATHER, F, by_kind, parse, syntax

CALLS = {
    "hermes": '<tool_call>\n{"name": "f", "arguments": {"a": ["\\"}", {}]}}\n</tool_call>',
    "generic": '<tool_call>\n{"name": "f", "arguments": {"b": 1}}\n</tool_call>',
    "qwen3-coder": "<tool_call>\n<function=f>\n<parameter=a>\nx\n</parameter>\n</function>\n"
    "</tool_call>",
    "llama3": '{"name": "f", "parameters": {"a": "é\\n"}}; {"name": "f", "parameters": {}}',
    "pythonic": "[f(a='it\\'s', b=[1, {'c': None}]), get_weather(city=\"Pa\\u00e9\", days=3)]",
    "mistral": '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"name": "f"}]',
    "deepseek": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n"
    '{"a": 1}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
}
CALLS |= BOTH
CALLS["xlam"] = '[{"name": "f", "arguments": {"a": "é]"}}, {"name": "f", "arguments": {}}]'
CALLS |= {
    "harmony": "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary "
    'to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>',
    "gemma4": '<|tool_call>call:f{a:<|"|>x, "y"<|"|>,b:[1,{c:true}]}<tool_call|>',
    "function-gemma": "<start_function_call>call:f{a:<escape>x<escape>}<end_function_call>",
    "minimax": '<minimax:tool_call>\n<invoke name="f">\n<parameter name="a">x</parameter>\n'
    '</invoke>\n<invoke name="f">\n</invoke>\n</minimax:tool_call>',
    "seed": "<seed:tool_call>\n<function=f>\n<parameter=a>\nx\n</parameter>\n</function>\n"
    "</seed:tool_call>",
    "glm": "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>x</arg_value>\n</tool_call>",
    "kimi": "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0"
    '<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|><|tool_calls_section_end|>',
    "cohere": '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "f", "parameters": '
    '{"a": 1}}\n]<|END_ACTION|>',
    "phi4": '<|tool_call|>[{"name": "f", "arguments": {"a": 1}}]<|/tool_call|>',
    "granite": '<|tool_call|>[{"name": "f", "arguments": {"a": 1}}, {"name": "f"}]',
    "hunyuan": '<tool_calls>[{"name": "f", "arguments": {}}]</tool_calls>',
    "lfm2": "<|tool_call_start|>[f(a='x'), f()]<|tool_call_end|>",
    "olmo3": "<function_calls>\nf(a='x')\nf()\n</function_calls>",
}
ODDS = [
    "{",
    "}",
    '"',
    "\\",
    "[",
    "]",
    "(",
    ")",
    "=",
    ",",
    ":",
    ";",
    "'",
    "\n",
    " ",
    "f",
    "x<",
    "</",
]
ODDS += ['"name"', '"arguments": ', "<think>", "</think>", "null", "é😀", "[ARGS]"]
ODDS += ["<function=f>", "</function>", "<parameter=a>", "</parameter>", "</arg_value>", "<tools>"]
ODDS += ["```", "```json\n", "`", "~~~\n", "\n\n", "{{", "True", '"a": 1', ", ", "[1, 2", "say "]
ODDS += ['\n{"name": "f", "arguments": {"a": "x"}}', "{'name': 'f', 'arguments': {'a': None,}}"]
THOUGHTS = st.sampled_from(["", "<think>", "<think>hm</think>\n"])


@st.composite
def answers(draw: st.DrawFn, family: str) -> str:
    """Something like what a model of this family writes, spoilt here and there."""
    piece = st.sampled_from([CALLS[family], *FAMILIES[family].marks, *ODDS]) | st.text(max_size=5)
    text = draw(THOUGHTS) + "".join(draw(st.lists(piece, max_size=8)))
    begin, end = sorted((draw(st.integers(0, len(text))), draw(st.integers(0, len(text)))))
    return text[begin:] if draw(st.booleans()) else text[:begin] + text[end:]


@pytest.mark.parametrize("reasoning", ["none", "think"])
@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(data=st.data())
def test_parts_do_not_depend_on_the_cuts(family, reasoning, data):
    model = syntax(family, reasoning=reasoning)
    text = data.draw(answers(family))
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=12)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    is_cut, has_form = data.draw(st.booleans()), data.draw(st.booleans())
    whole, by_chars, cut = (
        parse(model.parser(tools=(F, WEATHER), has_form=has_form), each, is_cut=is_cut)
        for each in ([text], list(text), pieces)
    )
    assert whole == by_chars == cut
    found = by_kind(whole)
    assert all(isinstance(json.loads(each), dict) for _, each, is_done in found.calls if is_done)
    if reasoning == "none" and not found.calls and family not in WRAPPED:
        assert found.words == text
    assert all(name for name, _, _ in found.calls)


@pytest.mark.parametrize("family", CALLS)
def test_the_calls_of_this_test_are_whole_ones(family):
    found = by_kind(parse(syntax(family).parser(tools=(F, WEATHER)), [CALLS[family]]))
    assert found.calls
    assert all(is_done for _, _, is_done in found.calls)
    assert found.words == ""


def test_every_family_is_tested():
    assert set(CALLS) == set(FAMILIES)
