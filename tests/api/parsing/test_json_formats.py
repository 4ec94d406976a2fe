"""Hermes, Llama 3, Mistral, DeepSeek: what is a call, and what is words."""

from __future__ import annotations

import pytest

from foretoken.api.parsing.output_parser import CallArguments, CallBegin, CallEnd
from support.parse_harness import TOOLS, Read, parse, read, syntax

PARIS = '{"city": "Paris"}'
V3 = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n{}\n```<｜tool▁call▁end｜>"


def hermes(text: str) -> Read:
    return read(lambda: syntax("hermes").parser(tools=TOOLS), text)


def llama(text: str) -> Read:
    return read(lambda: syntax("llama3").parser(tools=TOOLS), text)


def mistral(text: str) -> Read:
    return read(lambda: syntax("mistral").parser(tools=TOOLS), text)


def deepseek(text: str) -> Read:
    return read(lambda: syntax("deepseek").parser(tools=TOOLS), text)


def block(body: str) -> str:
    return f"<tool_call>\n{body}\n</tool_call>"


def test_words_alone_stay_as_they_are():
    for family in (hermes, llama, mistral, deepseek):
        assert family(" Hello <b>, {x} [y]\n") == Read(words=" Hello <b>, {x} [y]\n")


def test_calls_of_hermes_with_words_before_and_behind():
    first = block(f'{{"name": "get_weather", "arguments": {PARIS}}}')
    second = block('{"name": "f", "arguments": {"a": ["}", {"b": null}]}}')
    found = hermes(f"Let me see.\n{first}\n{second}\nDone.")
    assert found.words == "Let me see.\n\nDone."
    assert found.calls == [("get_weather", PARIS, True), ("f", '{"a": ["}", {"b": null}]}', True)]


def test_space_around_calls_is_nobodys():
    call = block('{"name": "f", "arguments": {}}')
    assert hermes(f"\n\n{call}\n{call}\n").words == ""


def test_arguments_may_come_before_the_name():
    found = hermes(block(f'{{"arguments": {PARIS}, "name": "get_weather"}}'))
    assert found == Read(calls=[("get_weather", PARIS, True)])


def test_arguments_stream_once_the_name_is_known():
    parser = syntax("hermes").parser(tools=TOOLS)
    assert parser.feed('<tool_call>{"name": "f", "arguments": ') == []
    assert parser.feed('{"a": "x') == [CallBegin("f"), CallArguments('{"a": "x')]
    assert parser.feed('y"}') == [CallArguments('y"}'), CallEnd()]


@pytest.mark.parametrize("body", ['{"name": "f"}', '{"name": "f", "arguments": null}'])
def test_missing_arguments_are_an_empty_object(body):
    assert hermes(block(body)) == Read(calls=[("f", "{}", True)])


def test_arguments_inside_a_string_are_taken_out_of_it():
    found = hermes(block('{"name": "f", "arguments": "{\\"a\\": 1}"}'))
    assert found == Read(calls=[("f", '{"a": 1}', True)])


def test_other_keys_are_passed_over():
    body = '{"id": 7, "x": {"name": "g"}, "name": "f", "arguments": {}, "y": [1, "]"], "z": true}'
    assert hermes(block(body)) == Read(calls=[("f", "{}", True)])


def test_a_tool_that_is_not_there_is_called_all_the_same():
    assert hermes(block('{"name": "nobody", "arguments": {}}')).calls == [("nobody", "{}", True)]


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>oops</tool_call>",
        "\n<tool_call>\n[1, 2]",
        block('{"arguments": {"a": 1}}'),
        block('{"name": "", "arguments": {}}'),
        block('{"name": "f\\ud800", "arguments": {}}'),
        block('{"name": "f", "arguments": 3}'),
        block("{name: 'f'}"),
        '<tool_call>{"na',
        "<tool_call",
        "a < b <tool",
    ],
)
def test_what_is_no_call_is_words_to_the_letter(text):
    assert hermes(text) == Read(words=text)


def test_a_call_may_follow_what_is_none():
    found = hermes("<tool_call>" + block('{"name": "f"}'))
    assert found == Read(words="<tool_call>", calls=[("f", "{}", True)])


@pytest.mark.parametrize("brace", ["", "}", "}}}"])
def test_a_brace_too_few_or_too_many_behind_the_arguments_is_forgiven(brace):
    assert hermes(block(f'{{"name": "f", "arguments": {{}}{brace}')) == Read(
        calls=[("f", "{}", True)]
    )


def test_a_call_whose_arguments_a_mark_cuts_is_closed_and_words_go_on_behind_it():
    found = hermes('<tool_call>{"name": "f", "arguments": {"a": 1</tool_call> hm')
    assert found == Read(words=" hm", calls=[("f", '{"a": 1}', True)])


def test_a_mark_inside_a_string_is_text():
    body = '{"name": "f", "arguments": {"a": "</tool_call>"}}'
    assert hermes(block(body)).calls == [("f", '{"a": "</tool_call>"}', True)]


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ('<tool_call>{"name": "f", "arg', [("f", "", False)]),
        ('<tool_call>{"name": "f", "arguments": {"a\\', [("f", '{"a\\', False)]),
        ('<tool_call>{"name": "f", "arguments": {}', [("f", "{}", True)]),
        ('<tool_call>{"name": "f", "arguments": {}}</tool', [("f", "{}", True)]),
    ],
)
def test_a_call_that_the_end_cuts_short_keeps_what_it_has(text, calls):
    assert hermes(text) == Read(calls=calls)


def test_junk_behind_complete_arguments_is_words():
    found = hermes('<tool_call>{"name": "f", "arguments": {}} junk')
    assert found == Read(words=" junk", calls=[("f", "{}", True)])


def test_llamas_call_is_the_whole_answer():
    call = f'{{"name": "get_weather", "parameters": {PARIS}}}'
    assert llama(call) == Read(calls=[("get_weather", PARIS, True)])
    assert llama(f"\n{call}; {call}\n").calls == [("get_weather", PARIS, True)] * 2
    assert llama(f"See: {call}") == Read(words=f"See: {call}")


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "Bob", "age": 5}',
        '{"name": "f", "age": 5}',
        '{"name": "f"}',
        '{"answer": 42}',
        "{",
        '<|python_tag|>print("hi")',
    ],
)
def test_an_answer_of_llama_that_only_looks_like_a_call_is_words(text):
    assert llama(text) == Read(words=text)


def test_behind_its_tag_llama_may_call_what_is_not_there():
    found = llama('<|python_tag|>{"name": "nobody", "parameters": {}}')
    assert found == Read(calls=[("nobody", "{}", True)])


def test_calls_of_mistral_as_a_list():
    text = f'Ok. [TOOL_CALLS] [{{"name": "get_weather", "arguments": {PARIS}, "id": "1"}}, '
    found = mistral(text + '{"name": "f"}]')
    assert found == Read(words="Ok. ", calls=[("get_weather", PARIS, True), ("f", "{}", True)])


def test_calls_of_mistral_one_by_one():
    found = mistral(f"[TOOL_CALLS]get_weather[ARGS]{PARIS}[TOOL_CALLS]f[CALL_ID]x1[ARGS]{{}}")
    assert found == Read(calls=[("get_weather", PARIS, True), ("f", "{}", True)])
    assert mistral("[TOOL_CALLS]f{}").calls == [("f", "{}", True)]


@pytest.mark.parametrize("text", ["[TOOL_CALLS] what?", "[TOOL_CALLS][", "[TOOL_CALLS]"])
def test_a_mark_of_mistral_alone_is_words(text):
    assert mistral(text) == Read(words=text)


def test_calls_of_deepseek_v3():
    inside = V3.replace("{}", "get_weather", 1).replace("{}", PARIS)
    text = f"I see.<｜tool▁calls▁begin｜>{inside}\n{inside}<｜tool▁calls▁end｜>"
    found = deepseek(text)
    assert found == Read(words="I see.", calls=[("get_weather", PARIS, True)] * 2)


def test_calls_of_deepseek_v31():
    inside = f"<｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{PARIS}<｜tool▁call▁end｜>"
    found = deepseek(f"<｜tool▁calls▁begin｜>{inside}{inside}<｜tool▁calls▁end｜>")
    assert found == Read(calls=[("get_weather", PARIS, True)] * 2)


@pytest.mark.parametrize("name", ["arguments", "name"])
def test_long_arguments_take_linear_time(name):
    """Two hundred thousand pieces of a character: one more look at the whole text for each would
    take minutes."""
    value = '{"a": "' + "x" * 200_000 + '"}'
    members = {"arguments": f'"arguments": {value}', "name": '"name": "f"'}
    first, (second,) = members.pop(name), members.values()
    events = parse(
        syntax("hermes").parser(tools=TOOLS), f"<tool_call>{{{first}, {second}}}</tool_call>"
    )
    assert events == [CallBegin("f"), CallArguments(value), CallEnd()]
