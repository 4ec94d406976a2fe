"""Thoughts that are not in the prompt any more: what is cached, what is computed, and who says so.

The model is the real one; it says what the conversation asks it to.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.plain_http import metrics
from support.server_process import running

SCRIPTED = Path(__file__).parents[1] / "support" / "scripted_server.py"
PAGE = 8
FLAGS = ["--page-size", str(PAGE), "--kv-tokens", "4096", "--reasoning-parser", "think"]
THOUGHT = "The user wants a greeting, which may well be a short one."
WORDS = "Hello to you, and to all who are with you."
ASK = {"role": "user", "content": f"[[<think>\n{THOUGHT}\n</think>\n{WORDS}]]"}
ON = {"role": "user", "content": "And now the same once more, please: [[Goodbye.]]"}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with running(started_by=[sys.executable, str(SCRIPTED), "--port", "0", *FLAGS]) as server:
        yield server.url


def chat(url: str, *messages: dict[str, Any], **fields: Any) -> dict[str, Any]:
    body = {"messages": messages, "max_tokens": 200, "explain_cache": True, **fields}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
    found: dict[str, Any] = answer.raise_for_status().json()
    return found


def cached(body: dict[str, Any]) -> int:
    found: int = body["usage"]["prompt_tokens_details"]["cached_tokens"]
    return found


@pytest.mark.parametrize("has_handle", [False, True], ids=["text", "token_ids"])
def test_the_next_turn_hits_up_to_a_thought_that_is_left_out_and_computes_what_is_behind(
    url: str, has_handle: bool
) -> None:
    options = {"cache_salt": f"thoughts-{has_handle}", "return_token_ids": True}
    first = chat(url, ASK, **options)
    said = first["choices"][0]["message"]
    assert said["reasoning_content"].strip() == THOUGHT
    assert said["content"].strip() == WORDS
    num_asked = first["usage"]["prompt_tokens"]
    kept = said if has_handle else {"role": "assistant", "content": said["content"]}
    second = chat(url, ASK, kept, ON, **options)
    assert cached(second) == num_asked // PAGE * PAGE
    found = second["usage"]["cache_explanation"]
    assert found["cause"] == "thinking_stripped"
    assert found["first_token"]["position"] == found["reusable_tokens"] >= num_asked
    assert found["first_token"]["before"]["text"] in "<think>"
    assert found["missed_tokens"] == second["usage"]["prompt_tokens"] - found["reusable_tokens"]

    third = chat(url, ASK, kept, ON, {"role": "assistant", "content": "Goodbye."}, ON, **options)
    assert cached(third) > second["usage"]["prompt_tokens"] - PAGE, "from now on all is hit"
    assert third["usage"]["cache_explanation"]["cause"] == "hit"

    branch = [*first["prompt_token_ids"], *said["token_ids"]]
    again = {"prompt": [*branch, branch[-1]], "max_tokens": 1, **options}
    answer = httpx.post(f"{url}/v1/completions", json=again, timeout=60).json()
    assert cached(answer) == len(branch) // PAGE * PAGE, "the thought's own branch is still there"


def test_causes_are_counted_in_the_metrics_in_the_cache_s_report_and_for_the_page(url: str) -> None:
    def counted() -> dict[str, int]:
        causes: dict[str, int] = httpx.get(f"{url}/cache").json()["causes"]
        return causes

    before = counted()
    chat(url, ASK, cache_salt="counted")
    chat(url, ASK, {"role": "assistant", "content": WORDS}, ON, cache_salt="counted")
    chat(url, ASK, cache_salt="counted as well")
    now = counted()
    grown = {name: number - before[name] for name, number in now.items() if number > before[name]}
    assert grown.pop("thinking_stripped") == 1
    assert sum(grown.values()) == 2
    assert grown["other_salt"] >= 1, "the same prompt was there under another salt"
    for cause, number in now.items():
        line = f'foretoken:prefix_cache_prompts_total{{cause="{cause}"}} {float(number)}'
        assert line in metrics(url)
    with httpx.stream("GET", f"{url}/ui/events", timeout=60) as events:
        assert f'"thinking_stripped":{now["thinking_stripped"]}' in next(events.iter_lines())
