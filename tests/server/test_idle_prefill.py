"""Next turns whose beginning is computed while the engine is idle: tokens, metrics, bounds."""

from __future__ import annotations

import re
import sys
import time
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
WORDS = "Hello to you, and to all who are with you, on every single day of the year and more."
ASK = {"role": "user", "content": f"[[<think>\n{THOUGHT}\n</think>\n{WORDS}]]"}
SAID = {"role": "assistant", "content": WORDS}
ON = {"role": "user", "content": "And now the same once more, please: [[Goodbye.]]"}
SECONDS = 60


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with running(started_by=[sys.executable, str(SCRIPTED), "--port", "0", *FLAGS]) as server:
        yield server.url


def chat(url: str, *messages: dict[str, Any], headers: Any = None, **fields: Any) -> dict[str, Any]:
    body = {"messages": messages, "max_tokens": 200, **fields}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, headers=headers, timeout=SECONDS)
    found: dict[str, Any] = answer.raise_for_status().json()
    return found


def count(url: str, name: str) -> float:
    found = re.search(rf"^foretoken:{re.escape(name)} (\S+)$", metrics(url), re.MULTILINE)
    return float(found[1]) if found else 0.0


def ended(url: str, end: str) -> float:
    return count(url, f'idle_prefill_turns_total{{end="{end}"}}')


def wait_for(url: str, end: str, number: float) -> None:
    """Wait until this many next turns have ended in this way."""
    deadline = time.monotonic() + SECONDS
    while ended(url, end) < number:
        assert time.monotonic() < deadline, metrics(url)


def usage_of(body: dict[str, Any]) -> tuple[int, int]:
    usage = body["usage"]
    return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


def test_the_next_turn_computes_its_new_message_alone(url: str) -> None:
    ready, tokens = ended(url, "ready"), count(url, "idle_prefill_tokens_total")
    headers = {"x-session-id": "a"}
    num_asked, _ = usage_of(chat(url, ASK, headers=headers, cache_salt="a"))
    wait_for(url, "ready", ready + 1)
    assert count(url, "idle_prefill_tokens_total") > tokens
    num_cached = usage_of(chat(url, ASK, SAID, ON, headers=headers, cache_salt="a"))[1]
    num_before, _ = usage_of(chat(url, ASK, SAID, cache_salt="other"))
    assert num_cached > num_before - 2 * PAGE > num_asked, "cached up to the new message"


def test_answers_are_equal_with_and_without_it(url: str) -> None:
    fields = {"seed": 5, "temperature": 1.0, "max_tokens": 24}
    ready = ended(url, "ready")
    chat(url, ASK, headers={"x-session-id": "b"}, cache_salt="b")
    wait_for(url, "ready", ready + 1)
    on = {"role": "user", "content": "no marks"}
    warm = chat(url, ASK, SAID, on, cache_salt="b", **fields)
    cold = chat(url, ASK, SAID, on, cache={"read": False, "write": False}, **fields)
    assert warm["choices"][0]["message"] == cold["choices"][0]["message"]
    assert usage_of(warm)[1] > usage_of(cold)[1] == 0


@pytest.mark.parametrize(
    ("fields", "headers"),
    [
        ({}, {}),
        ({"cache": {"write": False}}, {"x-session-id": "c"}),
        ({"cache": {"read": False}}, {"x-session-id": "c"}),
        ({}, {"x-session-id": "c", "x-session-close": "true"}),
        ({"n": 2}, {"x-session-id": "c"}),
    ],
)
def test_nothing_is_computed_for_a_conversation_that_is_not_kept(
    url: str, fields: dict[str, Any], headers: dict[str, str]
) -> None:
    """A later turn that is computed shows that the queue has passed the earlier one."""
    ready, chunks = ended(url, "ready"), count(url, "idle_prefill_chunks_total")
    chat(url, ASK, headers=headers, cache_salt="c", **fields)
    assert count(url, "idle_prefill_chunks_total") == chunks
    other = {"role": "user", "content": f"{ASK['content']} {fields} {headers}"}
    chat(url, other, headers={"x-session-id": "d"}, cache_salt="d")
    wait_for(url, "ready", ready + 1)
    assert ended(url, "ready") == ready + 1


def test_an_answer_that_is_rendered_as_it_was_generated_needs_nothing(url: str) -> None:
    needless, chunks = ended(url, "needless"), count(url, "idle_prefill_chunks_total")
    chat(url, ON, headers={"x-session-id": "e"}, cache_salt="e")
    wait_for(url, "needless", needless + 1)
    assert count(url, "idle_prefill_chunks_total") == chunks


def test_statistics_of_requests_leave_it_out(url: str) -> None:
    names = (
        "prompt_tokens_total", "prefix_cache_queries_total", "prefix_cache_hits_total",
        'request_success_total{finished_reason="length"}', "request_prompt_tokens_count",
    )  # fmt: skip
    ready = ended(url, "ready")
    chat(url, ASK, headers={"x-session-id": "f"}, cache_salt="f")
    before = [count(url, name) for name in names]
    wait_for(url, "ready", ready + 1)
    assert [count(url, name) for name in names] == before
