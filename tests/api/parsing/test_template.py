"""The built-in pair's chat template: ChatML as it was, and tools in the form of Hermes."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from foretoken.api.build.model_files import BUILTIN
from support.parse_harness import TOOLS, read, syntax

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
WEATHER = {
    "type": "function",
    "function": {"name": "get_weather", "parameters": {"type": "object"}},
}
CALL = {"type": "function", "function": {"name": "get_weather", "arguments": {"city": "Zürich <3"}}}
HI = {"role": "user", "content": "hi"}


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(BUILTIN / "target")


def render(tokenizer, messages, tools=None, **options) -> str:
    return tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, **options)


def test_both_models_have_the_same_template():
    target, draft = (BUILTIN / name / "chat_template.jinja" for name in ("target", "draft"))
    assert target.read_bytes() == draft.read_bytes()


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(data=st.data())
def test_a_conversation_without_tools_is_what_it_was(tokenizer, data):
    role = st.sampled_from(["system", "user", "assistant"])
    message = st.fixed_dictionaries({"role": role, "content": st.text(alphabet="a \n{%<'")})
    messages = data.draw(st.lists(message, min_size=1, max_size=5))
    for generate in (True, False):
        before = render(tokenizer, messages, chat_template=CHATML, add_generation_prompt=generate)
        assert render(tokenizer, messages, add_generation_prompt=generate) == before


def test_tools_stand_in_the_system_message(tokenizer):
    alone = render(tokenizer, [HI], [WEATHER])
    assert alone.startswith("<|im_start|>system\n")
    assert f"<tools>\n{json.dumps(WEATHER)}\n</tools>" in alone
    behind = render(tokenizer, [{"role": "system", "content": "Be brief."}, HI], [WEATHER])
    assert behind == alone.replace("system\n", "system\nBe brief.\n\n", 1)
    assert behind.count("Be brief.") == 1


def test_calls_are_written_as_they_are_read(tokenizer):
    for content in (None, "One moment."):
        messages = [HI, {"role": "assistant", "content": content, "tool_calls": [CALL, CALL]}]
        text = render(tokenizer, messages).split("assistant\n")[-1].removesuffix("<|im_end|>\n")
        found = read(lambda: syntax("hermes").parser(tools=TOOLS), text)
        assert found.words.strip() == (content or "")
        call = ("get_weather", '{"city": "Zürich <3"}', True)
        assert found.calls == [call, call]


def test_arguments_may_be_text(tokenizer):
    written = {"function": {"name": "get_weather", "arguments": '{"city": "Zürich <3"}'}}
    as_text, as_object = (
        render(tokenizer, [{"role": "assistant", "content": "", "tool_calls": [call]}])
        for call in (written, CALL)
    )
    assert as_text == as_object


def test_results_of_one_turn_share_a_turn_of_the_user(tokenizer):
    results = [{"role": "tool", "content": "1"}, {"role": "tool", "content": "2"}]
    assert render(tokenizer, [*results, HI]) == (
        "<|im_start|>user\n<tool_response>\n1\n</tool_response>\n"
        "<tool_response>\n2\n</tool_response><|im_end|>\n"
        "<|im_start|>user\nhi<|im_end|>\n"
    )
