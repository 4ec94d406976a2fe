"""Usage in every chunk, metrics of drafts as vLLM has them, and chunks that are never empty."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from foretoken.api.dialects.openai.writing import metrics_body
from foretoken.core.interface.request import Usage

HI = [{"role": "user", "content": "hi"}]
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
BODIES = {CHAT: {"messages": HI}, TEXT: {"prompt": "hi"}}
BOTH = {"include_usage": True, "continuous_usage_stats": True}
paths = pytest.mark.parametrize("path", BODIES)


def chunks(server: Any, path: str, **fields: Any) -> list[dict[str, Any]]:
    body = {**BODIES.get(path, {}), "max_tokens": 9, "stream": True, **fields}
    answer = httpx.post(f"{server.url}{path}", json=body, timeout=20)
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


@paths
@pytest.mark.parametrize("per_step", [1, 4])
def test_usage_in_every_chunk_counts_the_tokens_so_far(
    server: Any, engine: Any, path: str, per_step: int
) -> None:
    engine.tokens_per_step = per_step
    *found, last = chunks(server, path, stream_options=BOTH)
    counts = [each["usage"]["completion_tokens"] for each in found]
    assert counts == sorted(counts)
    assert counts[0] == (0 if path == CHAT else min(per_step, 9)), "a role is no token"
    assert counts[-1] == last["usage"]["completion_tokens"] == 9
    assert len({*counts}) > 2  # a reader that is late gets several steps in one chunk
    assert last["choices"] == []
    for each in found:
        usage = each["usage"]
        assert usage["prompt_tokens"] == last["usage"]["prompt_tokens"] > 0
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


@paths
def test_usage_in_every_chunk_is_of_all_answers(server: Any, path: str) -> None:
    *found, last = chunks(server, path, n=3, stream_options=BOTH)
    counts = [each["usage"]["completion_tokens"] for each in found]
    assert counts == sorted(counts)
    assert counts[-1] == last["usage"]["completion_tokens"] == 27


@paths
def test_usage_comes_once_or_never_where_nothing_else_is_asked_for(server: Any, path: str) -> None:
    assert not any("usage" in each for each in chunks(server, path))
    *found, last = chunks(server, path, stream_options={"include_usage": True})
    assert [each["usage"] for each in found] == [None] * len(found)
    assert last["usage"]["completion_tokens"] == 9
    found = chunks(server, path, stream_options={"continuous_usage_stats": True})
    assert all(each["choices"] and each["usage"] for each in found), "there is no last one"


def test_a_response_refuses_usage_in_every_event(server: Any) -> None:
    body = {"input": "hi", "stream": True, "stream_options": BOTH}
    answer = httpx.post(f"{server.url}/v1/responses", json=body)
    assert answer.json()["error"]["param"] == "stream_options.continuous_usage_stats"


def test_no_chunk_of_a_completion_is_empty(server: Any) -> None:
    for fields in ({"n": 3}, {"prompt": ["a", "b"]}, {"echo": True, "logprobs": 0}, {"echo": True}):
        found = [choice for each in chunks(server, TEXT, **fields) for choice in each["choices"]]
        assert all(choice["text"] for choice in found)


def test_choices_of_a_chat_begin_with_their_role_in_order(server: Any) -> None:
    found = [choice for each in chunks(server, CHAT, n=3) for choice in each["choices"]]
    assert [each["index"] for each in found[:3]] == [0, 1, 2]
    assert [each["delta"] for each in found[:3]] == [{"role": "assistant", "content": ""}] * 3
    assert not any("role" in each["delta"] for each in found[3:])
    assert all(each["delta"] or each["finish_reason"] for each in found)


# -- metrics --------------------------------------------------------------------------------------


@paths
def test_metrics_say_what_the_usage_says(server: Any, engine: Any, path: str) -> None:
    engine.tokens_per_step = 3
    body = {**BODIES[path], "max_tokens": 9}
    whole = httpx.post(f"{server.url}{path}", json=body).json()
    usage, found = whole["usage"], whole["metrics"]["speculative_decoding"]
    spoken = usage["speculation"]
    assert found["num_draft_tokens"] == spoken["proposed_tokens"] > 0
    assert found["num_accepted_draft_tokens"] == spoken["accepted_tokens"]
    assert sum(found["acceptance_histogram"]) == found["num_spec_steps"]
    assert len(found["acceptance_histogram"]) == found["num_spec_tokens"] + 1
    *_, last = chunks(server, path, stream_options={"include_usage": True})
    assert last["metrics"] == whole["metrics"]
    assert not any("metrics" in each for each in chunks(server, path))
    several = httpx.post(f"{server.url}{path}", json={**body, "n": 2}).json()
    assert "metrics" not in several, "they are of one answer"


def test_metrics_leave_out_steps_without_a_draft() -> None:
    usage = Usage(
        proposed_tokens=12, accepted_tokens=5, verify_steps=9, draft_steps=4,
        steps_by_accepted={0: 6, 1: 2, 3: 1},
    )  # fmt: skip
    found = metrics_body(usage, "auto").speculative_decoding
    assert found.acceptance_histogram == [1, 2, 0, 1]
    assert (found.num_spec_steps, found.num_spec_tokens) == (4, 3)
    assert found.mean_acceptance_length == 1 + 5 / 4
    assert found.draft_acceptance_rate == 5 / 12
    fixed = metrics_body(usage, 5).speculative_decoding
    assert fixed.acceptance_histogram == [1, 2, 0, 1, 0, 0]
    assert fixed.num_spec_tokens == 5


def test_there_are_no_metrics_where_nothing_was_drafted(server: Any, engine: Any) -> None:
    engine.tokens_per_step = 1
    answer = httpx.post(f"{server.url}{CHAT}", json={"messages": HI, "max_tokens": 2}).json()
    assert "metrics" not in answer
