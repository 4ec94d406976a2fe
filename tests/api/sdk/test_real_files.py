"""A real model as a GGUF file: Qwen2.5-Coder-Instruct, named by FORETOKEN_QWEN_GGUF."""

from __future__ import annotations

import json
import os
from dataclasses import replace

import pytest

from foretoken import LLM, SamplingParams
from support.tool_kit import QUESTIONS, is_usable, offered

FILE = os.environ.get("FORETOKEN_QWEN_GGUF", "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(7200),
    pytest.mark.skipif(not FILE, reason="FORETOKEN_QWEN_GGUF names no file"),
]
CHATS = (
    "Name three colours.",
    "Write a Python function that reverses a string.",
    "Repeat this list twice: alpha, beta, gamma, delta, epsilon, zeta, eta, theta.",
)
CITY = {
    "type": "object",
    "properties": {"zip": {"type": "string"}, "city": {"type": "string"}},
    "required": ["zip", "city"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def llm():
    with LLM(FILE) as loaded:
        yield loaded


def asked(llm: LLM, question: str, params: SamplingParams):
    return llm.chat([{"role": "user", "content": question}], params)


@pytest.mark.parametrize("temperature", [0, 0.7])
def test_nearly_all_calls_are_usable(llm, temperature):
    num_usable = 0
    for seed, (name, question) in enumerate(QUESTIONS):
        params = SamplingParams(temperature=temperature, seed=seed, max_tokens=256)
        tools = [tool.body for tool in offered(name)]
        out = llm.chat([{"role": "user", "content": question}], params, tools=tools)
        num_usable += is_usable(name, [(call.name, call.arguments) for call in out.tool_calls])
    print(f"{num_usable} of {len(QUESTIONS)} usable")
    assert num_usable >= 0.85 * len(QUESTIONS)


@pytest.mark.parametrize("temperature", [0, 0.7])
def test_drafts_change_no_token(llm, temperature):
    num_drafted = 0
    for question in CHATS:
        params = SamplingParams(temperature=temperature, seed=7, max_tokens=96)
        drafted = asked(llm, question, params)
        plain = asked(llm, question, replace(params, speculation="off"))
        assert drafted.token_ids == plain.token_ids, question
        num_drafted += drafted.usage.proposed_tokens
    assert num_drafted > 0, "nothing was drafted: there was nothing to compare"


def test_an_answer_ends_by_itself_and_shows_no_mark(llm):
    for question in CHATS:
        out = asked(llm, question, SamplingParams(temperature=0, max_tokens=512))
        assert out.finish_reason == "stop"
        assert "<|" not in out.text


def test_json_mode_answers_a_question_that_does_not_name_json(llm):
    params = SamplingParams(temperature=0, max_tokens=256, json_schema={"type": "object"})
    out = asked(llm, "What is the capital of France, and how many people live there?", params)
    assert out.finish_reason == "stop"
    assert "Paris" in json.dumps(json.loads(out.text), ensure_ascii=False)


def test_a_form_keeps_the_order_of_its_properties(llm):
    params = SamplingParams(temperature=0, max_tokens=128, json_schema=CITY)
    out = asked(llm, "Invent an address in Berlin.", params)
    assert list(json.loads(out.text)) == ["zip", "city"]


def test_what_a_request_leaves_out_is_sampled_as_the_family_publishes(llm):
    answers = {
        asked(llm, CHATS[0], SamplingParams(seed=seed, max_tokens=24)).text for seed in range(4)
    }
    assert len(answers) > 1, "it is not greedy"
    assert all(text.isascii() for text in answers), "at temperature 1 other scripts turn up"
