"""Hints of agents' frameworks: ``nvext.agent_hints`` and ``kv_hints``, in every API."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest

from foretoken.api.serving.caching.fields import WHOLE
from foretoken.core.interface.request import MAX_TTL, Request

TALK = [{"role": "user", "content": "hi"}]
SECONDS = 10
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": TALK, "max_tokens": 4},
    "/v1/completions": {"prompt": "hi", "max_tokens": 1},
    "/v1/messages": {"messages": TALK, "max_tokens": 4},
    "/v1/responses": {"input": "hi", "max_output_tokens": 4},
}
CHATS = [path for path in BODIES if path != "/v1/completions"]


@pytest.fixture
def send(server, say) -> Callable[..., httpx.Response]:
    """Send a body of a route."""
    say("ok")

    def post(path: str = "/v1/chat/completions", **fields: Any) -> httpx.Response:
        headers = fields.pop("headers", {})
        return httpx.post(server.url + path, json={**BODIES[path], **fields}, headers=headers)

    return post


def retained(*directives: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """A body's ``kv_hints`` with one action."""
    action = {
        "action_id": "a", "action_type": "kv.retain", "action_version": "1.0",
        "payload": {"scope": None, "directives": list(directives)}, **fields,
    }  # fmt: skip
    return {"protocol_version": "0.1", "message_id": "m", "actions": [action]}


def pins(request: Request) -> list[tuple[int, float]]:
    return [(pin.num_tokens, pin.ttl) for pin in request.cache.pins]


@pytest.mark.parametrize("path", BODIES)
def test_dynamo_s_priority_is_the_opposite_of_ours(send, engine, path: str) -> None:
    send(path, nvext={"agent_hints": {"priority": 3, "osl": 99}}).raise_for_status()
    assert engine.requests[-1].priority == -3
    send(path, priority=2, nvext={"agent_hints": {"priority": 3}}).raise_for_status()
    assert engine.requests[-1].priority == 2
    send(path, nvext={"agent_hints": {}, "annotations": ["x"]}).raise_for_status()
    assert engine.requests[-1].priority == 0


@pytest.mark.parametrize("path", BODIES)
def test_dynamo_s_salt_isolates(send, engine, path: str) -> None:
    send(path, nvext={"cache_salt": "a"}).raise_for_status()
    assert engine.requests[-1].namespace == "a"
    send(path, nvext={"cache_salt": ""}, cache_salt="b").raise_for_status()
    assert engine.requests[-1].namespace == "b"


@pytest.mark.parametrize("path", BODIES)
def test_retained_tokens_are_pinned(send, engine, path: str) -> None:
    hints = retained(
        {"start": 0, "end": 2, "priority": 90, "duration": 60},
        {"start": 2, "priority": 20},
        {"start": 5, "priority": 0},
        {"covers_output": True, "priority": 0},
    )
    send(path, kv_hints=hints).raise_for_status()
    assert pins(engine.requests[-1]) == [(2, 60.0), (WHOLE, MAX_TTL)]
    send(path, kv_hints=retained({"priority": 1}, action_type="kv.prefetch")).raise_for_status()
    assert pins(engine.requests[-1]) == [], "other actions have no effect"


@pytest.mark.parametrize("path", BODIES)
def test_a_few_of_many_retained_prefixes_are_pinned(send, engine, path: str) -> None:
    ends = [{"end": end, "priority": 1, "duration": 60} for end in range(1, 17)]
    hints = retained({"end": 15, "priority": 1, "duration": 90}, *ends[::-1])
    send(path, kv_hints=hints).raise_for_status()
    assert pins(engine.requests[-1]) == [(13, 60.0), (14, 60.0), (15, 90.0), (16, 60.0)]


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"nvext": {"agent_hints": {"priority": "high"}}}, "nvext.agent_hints.priority"),
        ({"nvext": {"agent_hints": {"osl": -1}}}, "nvext.agent_hints.osl"),
        (
            {"nvext": {"agent_hints": {"speculative_prefill": 1}}},
            "nvext.agent_hints.speculative_prefill",
        ),
        ({"nvext": {"cache_salt": "a"}, "cache_salt": "b"}, "nvext.cache_salt"),
        ({"kv_hints": {"message_id": "m", "actions": []}}, "kv_hints.protocol_version"),
        (
            {"kv_hints": retained(action_version="2.0")},
            "kv_hints.actions[0].action_version",
        ),
        (
            {"kv_hints": retained({"priority": 101})},
            "kv_hints.actions[0].payload.directives[0].priority",
        ),
        ({"kv_hints": retained(*[{"priority": 1}] * 33)}, "kv_hints"),
        (
            {"kv_hints": retained({"priority": 1}, {"priority": 1, "start": 4, "end": 4})},
            "kv_hints.actions[0].payload.directives[1].end",
        ),
        (
            {"kv_hints": retained({"priority": 1, "end": 4}, {"priority": 2, "start": 4})},
            "kv_hints.actions[0].payload.directives[1].priority",
        ),
        (
            {"kv_hints": retained({"priority": 1, "covers_output": True, "start": 0})},
            "kv_hints.actions[0].payload.directives[0].covers_output",
        ),
        (
            {"kv_hints": retained({"priority": 1, "keep": True})},
            "kv_hints.actions[0].payload.directives[0]",
        ),
    ],
)
def test_a_bad_hint_is_named(send, engine, path: str, fields: Any, param: str) -> None:
    answer = send(path, **fields)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error.get("param", param) == param
    assert param.rpartition(".")[2] in error["message"]
    assert not engine.requests


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", CHATS)
def test_the_next_turn_is_computed_up_to_its_message(
    send, engine, tokenizer, path: str, stream: bool
) -> None:
    hints = {"agent_hints": {"speculative_prefill": True}}
    send(path, nvext=hints, stream=stream, prompt_cache_key="a").raise_for_status()
    assert all(engine.submitted.acquire(timeout=SECONDS) for _ in range(2))
    first, warmed = engine.requests
    said = tokenizer.decode([*warmed.tokens], skip_special_tokens=False)
    assert said.endswith(
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nok<|im_end|>\n<|im_start|>user\n"
    )
    assert not warmed.sampling.generates
    assert warmed.cache.session == first.cache.session
    send(path, stream=stream).raise_for_status()
    assert len(engine.requests) == 3


@pytest.mark.parametrize("path", CHATS)
def test_no_next_turn_of_a_session_that_ends_is_computed(send, engine, path: str) -> None:
    hints = {"agent_hints": {"speculative_prefill": True}}
    send(path, nvext=hints, headers={"x-session-id": "a", "x-session-close": "1"})
    send(path, nvext=hints, headers={"x-session-id": "a"})
    assert all(engine.submitted.acquire(timeout=SECONDS) for _ in range(3))
    assert [each.sampling.generates for each in engine.requests] == [True, True, False]
