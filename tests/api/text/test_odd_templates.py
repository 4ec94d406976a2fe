"""Templates as families write them: dates, namespaces, tools of which little is said, refusals."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from foretoken import InvalidRequest
from foretoken.api.parsing.formats.harmony import with_thinking
from foretoken.api.text.chat_template import completed
from foretoken.api.text.tokenizer import Tokenizer

TALK = [{"role": "user", "content": "hi"}]
BARE = {"type": "function", "function": {"name": "f"}}
FULL = {
    "type": "function",
    "function": {
        "name": "g",
        "description": "Does.",
        "parameters": {"type": "object", "properties": {"a": {"type": "string"}}, "required": []},
    },
}


@pytest.fixture
def own(byte_level_folder: Path):
    tokenizer = Tokenizer.load(byte_level_folder, max_model_len=4096)
    yield tokenizer
    tokenizer.close()


def render(own: Tokenizer, template: str, messages=TALK, tools=(), **options) -> str:
    own._template._hf.chat_template = template
    ids = asyncio.run(own.encode_chat(messages, options, tools=tools))
    return own.decode(ids, skip_special_tokens=False)


def test_dates_are_there(own):
    """Granite, Llama 3.2 and gpt-oss write today's."""
    text = render(own, "Today: {{ strftime_now('%Y') }}.")
    assert text.startswith("Today: 2")
    assert len(text) == len("Today: 2026.")


def test_namespaces_keep_what_a_loop_found(own):
    template = (
        "{%- set ns = namespace(last=-1) -%}{%- for m in messages -%}"
        "{%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}"
        "last {{ ns.last }}"
    )
    assert render(own, template, TALK * 3) == "last 2"


def test_loops_may_break_and_texts_be_cut(own):
    template = (
        "{%- for m in messages -%}{%- if loop.index0 == 1 -%}{%- break -%}{%- endif -%}"
        "{{ m.content.split('</think>')[-1].lstrip('\\n') }}{%- endfor -%}"
        "{%- generation -%}!{%- endgeneration -%}"
    )
    talk = [{"role": "assistant", "content": "<think>x</think>\nyes"}, *TALK]
    assert render(own, template, talk) == "yes!"


# As gpt-oss's: it adds to a description, and goes through the properties.
TYPESCRIPT = (
    "{%- macro tool_text(tools) -%}{%- for tool in tools -%}{%- set tool = tool.function -%}"
    "{{- '// ' + tool.description + ' ' }}type {{ tool.name }} = (_: <"
    "{%- for name, spec in tool.parameters.properties.items() -%}{{ name }}: {{ spec.type }},"
    "{%- endfor -%}>) {% endfor -%}{%- endmacro -%}{{ tool_text(tools) }}"
)


def test_tools_of_which_little_is_said_are_completed_where_a_template_fails(own):
    text = render(own, TYPESCRIPT, tools=[BARE, FULL])
    assert "type f = (_: <>)" in text
    assert "// Does. type g = (_: <a: string,>)" in text


@pytest.mark.parametrize("parameters", [{}, {"type": "object"}, {"properties": {}}])
def test_parameters_are_completed_where_a_template_fails(own, parameters):
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    template = (
        "{% for t in tools %}{{ t.function.parameters.properties | dictsort }}"
        "{{ 'a' in t.function.parameters.required }}{% endfor %}"
    )
    assert render(own, template, tools=[tool]) == "[]False"


def test_tools_stay_as_they_are_where_the_template_takes_them(own):
    text = render(own, "{{ tools[0] | tojson }}", tools=[BARE])
    assert "description" not in text
    assert completed([FULL]) is None


def test_a_template_that_fails_on_whole_tools_too_says_so(own):
    with pytest.raises(InvalidRequest, match="the chat template rejects"):
        render(own, "{{ '' + tools[0].function.nothing }}", tools=[BARE])


def test_what_a_template_raises_is_what_the_caller_reads(own):
    template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(InvalidRequest, match="roles must alternate"):
        render(own, template)


def test_thoughts_stand_where_harmonys_template_looks():
    thought = {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": []}
    both = {"role": "assistant", "content": "Hi", "reasoning_content": "hm"}
    found = with_thinking([TALK[0], thought, both])
    assert found == [TALK[0], {**thought, "thinking": "hm"}, both]


CALLED = {
    "role": "assistant",
    "tool_calls": [
        {"id": "1", "type": "function", "function": {"name": "f", "arguments": {}}},
        {"id": "2", "type": "function", "function": {"name": "g", "arguments": "[1]"}},
    ],
}
READS_ITEMS = (
    "{% set first = messages[0] %}{% for m in messages %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{% for k, v in c.function.arguments | items %}{{ k }}"
    "{% endfor %}{% endfor %}{% endfor %}"
)


def test_an_error_names_the_message_and_the_call_at_which_the_template_failed(own):
    with pytest.raises(InvalidRequest) as info:
        render(own, READS_ITEMS, [*TALK, CALLED, *TALK])
    assert "messages[1].tool_calls[1]: TypeError: Can only get item pairs" in str(info.value)


def test_an_error_in_no_message_names_none(own):
    with pytest.raises(InvalidRequest, match="rejects these messages: no luck"):
        render(own, "{{ raise_exception('no luck') }}")


def test_a_template_that_goes_through_tools_gets_an_empty_list_where_there_are_none(own):
    assert render(own, "{% for t in tools %}{{ t }}{% endfor %}hi") == "hi"
