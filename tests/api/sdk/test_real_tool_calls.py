"""Calls of a real model: Qwen2.5-Coder-Instruct as a GGUF file, named by FORETOKEN_QWEN_GGUF."""

from __future__ import annotations

import os

import pytest

from foretoken import LLM, SamplingParams
from support.tool_kit import QUESTIONS, is_usable, offered

FILE = os.environ.get("FORETOKEN_QWEN_GGUF", "")


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.skipif(not FILE, reason="FORETOKEN_QWEN_GGUF names no file")
@pytest.mark.parametrize("temperature", [0, 0.7])
def test_nearly_all_calls_are_usable(temperature):
    num_usable = 0
    with LLM(FILE) as llm:
        for seed, (name, question) in enumerate(QUESTIONS):
            params = SamplingParams(temperature=temperature, seed=seed, max_tokens=256)
            tools = [tool.body for tool in offered(name)]
            out = llm.chat([{"role": "user", "content": question}], params, tools=tools)
            num_usable += is_usable(name, [(call.name, call.arguments) for call in out.tool_calls])
    print(f"{num_usable} of {len(QUESTIONS)} usable")
    assert num_usable >= 0.85 * len(QUESTIONS)
