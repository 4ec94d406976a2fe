"""Next turns whose beginning is computed while the engine is idle: tokens, metrics, bounds."""

from __future__ import annotations

import contextlib
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.plain_http import metrics, opened
from support.server_process import running

SCRIPTED = Path(__file__).parents[1] / "support" / "scripted_server.py"
PAGE = 8
FLAGS = ["--page-size", str(PAGE), "--kv-tokens", "4096", "--reasoning-parser", "think"]
THOUGHT = "The user wants a greeting, which may well be a short one."
WORDS = "Hello to you, and to all who are with you, on every single day of the year and more."
ASK = {"role": "user", "content": f"[[<think>\n{THOUGHT}\n</think>\n{WORDS}]]"}
SAID = {"role": "assistant", "content": WORDS}
ON = {"role": "user", "content": "And now the same once more, please: [[Goodbye.]]"}
CLOSE = {"x-session-id": "g", "x-session-close": "true"}
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
    num_ended = ended(url, "ready") + ended(url, "needless")
    num_cached = usage_of(chat(url, ASK, SAID, ON, headers=headers, cache_salt="a"))[1]
    num_before, _ = usage_of(chat(url, ASK, SAID, cache={"write": False}))
    assert num_cached > num_before - 2 * PAGE > num_asked, "cached up to the new message"
    deadline = time.monotonic() + SECONDS  # no next turn is left for the next test
    while ended(url, "ready") + ended(url, "needless") == num_ended:
        assert time.monotonic() < deadline, metrics(url)


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


@contextlib.contextmanager
def busy(url: str) -> Iterator[None]:
    """Keep the server busy, so that next turns wait."""
    body = {"messages": [ON], "max_tokens": 3000, "ignore_eos": True, "stream": True}
    with opened(url, "POST", "/v1/chat/completions", body) as stream:
        assert stream.readline()
        yield


def close_by_completion(url: str) -> None:
    body = {"prompt": "a", "max_tokens": 1, "cache_salt": "g"}
    httpx.post(f"{url}/v1/completions", json=body, headers=CLOSE).raise_for_status()


def close_by_message(url: str) -> None:
    messages = [{"role": "user", "content": "another conversation"}]
    body = {"model": "foretoken-builtin", "messages": messages, "max_tokens": 1}
    httpx.post(f"{url}/v1/messages", json=body, headers=CLOSE).raise_for_status()


def delete(url: str) -> None:
    httpx.delete(f"{url}/v1/sessions/g").raise_for_status()


def flush(url: str) -> None:
    httpx.post(f"{url}/cache/flush", json={"cache_salt": "g"}).raise_for_status()


def go_on(url: str) -> None:
    chat(
        url, ASK, SAID, ON, headers={"x-session-id": "g", "x-session-close": "true"}, cache_salt="g"
    )


@pytest.mark.parametrize("end", [close_by_completion, close_by_message, delete, flush, go_on])
def test_a_next_turn_that_waits_is_dropped_by(url: str, end: Callable[[str], None]) -> None:
    chunks = count(url, "idle_prefill_chunks_total")
    with busy(url):
        chat(url, ASK, headers={"x-session-id": "g"}, cache_salt="g")
        dropped = ended(url, "dropped")
        end(url)
        assert ended(url, "dropped") == dropped + 1
        assert count(url, "idle_prefill_chunks_total") == chunks


@pytest.mark.parametrize("end", [close_by_completion, close_by_message, delete])
def test_an_answer_whose_session_ended_has_no_next_turn(
    url: str, end: Callable[[str], None]
) -> None:
    """A flush would drop the next turn, which waits while the server is busy."""
    body = {"messages": [ASK], "max_tokens": 1500, "ignore_eos": True, "cache_salt": "g"}
    body |= {"stream": True}
    with busy(url):
        with opened(url, "POST", "/v1/chat/completions", body, {"x-session-id": "g"}) as stream:
            assert stream.readline()
            end(url)
            assert b"[DONE]" in stream.read()
        dropped = ended(url, "dropped")
        flush(url)
        assert ended(url, "dropped") == dropped


def refuse_completion(url: str) -> httpx.Response:
    body = {"prompt": [65] * 5000, "max_tokens": 1, "cache_salt": "g"}
    return httpx.post(f"{url}/v1/completions", json=body, headers=CLOSE)


def refuse_next_turn(url: str) -> httpx.Response:
    messages = [ASK, SAID, {"role": "user", "content": "long " * 5000}]
    body = {"messages": messages, "max_tokens": 1, "cache_salt": "g"}
    return httpx.post(f"{url}/v1/chat/completions", json=body, headers=CLOSE)


@pytest.mark.parametrize("refuse", [refuse_completion, refuse_next_turn])
def test_a_refused_last_request_drops_no_next_turn(
    url: str, refuse: Callable[[str], httpx.Response]
) -> None:
    with busy(url):
        chat(url, ASK, headers={"x-session-id": "g"}, cache_salt="g")
        dropped = ended(url, "dropped")
        assert refuse(url).status_code == 400
        assert ended(url, "dropped") == dropped
        delete(url)
        assert ended(url, "dropped") == dropped + 1


def test_a_client_that_leaves_has_no_next_turn(url: str) -> None:
    """The second conversation is computed behind the first one's turn, which is missing."""
    ready = ended(url, "ready")
    body = {"messages": [ASK, SAID, ON], "max_tokens": 3000, "ignore_eos": True, "stream": True}
    with opened(url, "POST", "/v1/chat/completions", body, {"x-session-id": "h"}) as stream:
        assert stream.readline()
    chat(url, ASK, headers={"x-session-id": "i"}, cache_salt="i")
    wait_for(url, "ready", ready + 1)
    assert ended(url, "ready") == ready + 1


def test_a_salt_s_next_turn_is_of_no_use_to_others(url: str) -> None:
    ready = ended(url, "ready")
    chat(url, ASK, headers={"x-session-id": "j"}, cache_salt="j")
    wait_for(url, "ready", ready + 1)
    assert usage_of(chat(url, ASK, SAID, ON, cache_salt="k"))[1] == 0
    assert usage_of(chat(url, ASK, SAID, ON, cache_salt="j"))[1] > 0
