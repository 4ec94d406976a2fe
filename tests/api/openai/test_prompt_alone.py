"""``max_tokens: 0``: prompts that are computed, echoed and judged, and get no token."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from foretoken.api.build.built import Built
from foretoken.api.build.engine_builder import build
from foretoken.core.config import EngineConfig
from foretoken.core.engine.engine import Engine

PROMPT = "def add(a, b):\n    return a + b\n"
BODY = {"prompt": PROMPT, "echo": True, "logprobs": 1, "temperature": 0}
LISTS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


@pytest.fixture
def built() -> Built[Engine]:
    """The engine of the fixture `server`."""
    return build("builtin", EngineConfig(kv_tokens=4096, max_model_len=512, threads=1))


def complete(server: Any, **fields: Any) -> Any:
    answer = httpx.post(f"{server.url}/v1/completions", json=BODY | fields, timeout=60)
    return answer.raise_for_status().json()


def sample(server: Any, name: str) -> float:
    lines = httpx.get(f"{server.url}/metrics").text.splitlines()
    (value,) = [line.split()[-1] for line in lines if line.startswith(f"{name} ")]
    return float(value)


def test_the_echo_has_the_log_probabilities_that_it_has_before_a_token(server: Any) -> None:
    (more,) = complete(server, max_tokens=1)["choices"]
    answer = complete(server, max_tokens=0)
    (alone,) = answer["choices"]
    assert (alone["text"], alone["finish_reason"]) == (PROMPT, "length")
    for name in LISTS:
        assert alone["logprobs"][name] == more["logprobs"][name][:-1]
    assert answer["usage"]["completion_tokens"] == 0
    assert "".join(alone["logprobs"]["tokens"]) == PROMPT


def test_without_an_echo_there_must_be_a_token(server: Any) -> None:
    body = BODY | {"max_tokens": 0, "echo": False}
    refused = httpx.post(f"{server.url}/v1/completions", json=body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "max_tokens")


def test_it_is_streamed_and_repeated(server: Any) -> None:
    whole = complete(server, max_tokens=0)["choices"][0]["logprobs"]
    body = BODY | {"max_tokens": 0, "stream": True}
    text = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).text
    sent = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    choices = [choice for each in sent for choice in each["choices"]]
    assert "".join(each["text"] for each in choices) == PROMPT
    lists = [each["logprobs"] for each in choices if each.get("logprobs")]
    for name in LISTS:
        assert [value for each in lists for value in each[name]] == whole[name]
    twice = complete(server, max_tokens=0, n=2, logprobs=None)["choices"]
    assert [(each["index"], each["text"]) for each in twice] == [(0, PROMPT), (1, PROMPT)]


def test_prompts_alone_count_as_prompts_and_no_tokens_are_counted(server: Any) -> None:
    warm = {"echo": False, "logprobs": None, "prompt_cache_options": {"prewarm": True}}
    complete(server, max_tokens=0)
    usage = complete(server, **warm)["usage"]
    assert sample(server, "foretoken:generation_tokens_total") == 0
    assert sample(server, "foretoken:prompt_tokens_total") == 2 * usage["prompt_tokens"]


def test_a_prompt_that_fills_the_context_is_computed(server: Any) -> None:
    ids = [5] * 512
    answer = complete(server, prompt=ids, max_tokens=0)
    assert len(answer["choices"][0]["logprobs"]["tokens"]) == 512
    body = BODY | {"prompt": ids, "max_tokens": 1}
    refused = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
    assert refused.json()["error"]["code"] == "context_length_exceeded"
