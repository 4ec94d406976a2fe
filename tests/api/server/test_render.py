"""The render routes over an engine that keeps what it is given: the very ids, and nothing else."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from foretoken.core.errors import QueueFull

HI = [{"role": "user", "content": "hi"}]
WARM = {"prompt_cache_options": {"prewarm": True}}
DATED = [{"role": "system", "content": "Current time: 2026-11-21T13:34:26Z\nBe brief."}, *HI]
MARKED = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
CHAT, TEXT, RESPONSES, MESSAGES = (
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages",
)  # fmt: skip
BODIES: list[tuple[str, dict[str, Any]]] = [
    (TEXT, {"prompt": "hello"}),
    (TEXT, {"prompt": ["hello", "world"], "n": 2, "best_of": 2}),
    (TEXT, {"prompt": [5, 6], "echo": True, "logprobs": 1}),
    (TEXT, {"prompt": [[5, 6], [7]]}),
    (TEXT, {"prompt": "hello", **WARM}),
    (CHAT, {"messages": HI, "n": 2}),
    (CHAT, {"messages": DATED}),
    (CHAT, {"messages": HI, "json_schema": {"type": "object"}}),
    (CHAT, {"messages": HI, **WARM}),
    (RESPONSES, {"input": [{"role": "user", "content": "hi"}], "instructions": "Be brief."}),
    (RESPONSES, {"input": "hi", **WARM}),
    (MESSAGES, {"messages": HI, "system": MARKED, "max_tokens": 2}),
    (MESSAGES, {"messages": HI, "max_tokens": 0}),
]


@pytest.fixture
def http(server):
    with httpx.Client(base_url=server.url, timeout=20) as client:
        yield client


def rendered(http: httpx.Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    found = http.post(f"{path}/render", json=body).raise_for_status().json()
    return found if path == TEXT else [found]


@pytest.mark.parametrize("normalize", ["off", "all"])
@pytest.mark.parametrize(("path", "body"), BODIES)
def test_the_engine_is_given_the_rendered_ids(serve, engine, path, body, normalize):
    with httpx.Client(base_url=serve(normalize=normalize).url, timeout=20) as http:
        found = rendered(http, path, body)
        assert engine.requests == []
        fields = {"max_tokens": 1} if path in (CHAT, TEXT) else {}
        http.post(path, json={**body, **fields}).raise_for_status()
    sent = [list(each.tokens[: each.prompt_len]) for each in engine.requests]
    times = len(sent) // len(found)
    assert sent == [one["token_ids"] for one in found for _ in range(times)]
    assert times == (1 if WARM.items() <= body.items() else body.get("n", 1))


def test_nothing_of_a_rendered_request_is_remembered(server, http, engine):
    ids = [one["request_id"] for path, body in BODIES for one in rendered(http, path, body)]
    assert len(set(ids)) == len(ids)
    assert engine.requests == []
    assert server.do(lambda: (len(server.llm._answers), len(server.llm.prompts))) == (0, 0)


def test_a_full_queue_refuses_a_request_and_not_the_question_for_its_ids(http, engine):
    engine.refusal = QueueFull("the queue is full")
    for path, body in BODIES:
        assert http.post(path, json=body).status_code == 429
        rendered(http, path, body)


def test_a_server_that_is_going_renders_nothing_either(server, http, engine):
    server.do(lambda: setattr(engine, "draining", True))
    for path, body in BODIES:
        answers = [http.post(each, json=body) for each in (path, f"{path}/render")]
        assert [each.status_code for each in answers] == [503, 503]
        assert answers[0].json()["error"] == answers[1].json()["error"]


def test_limits_of_a_body_hold_for_the_question_for_its_ids(serve):
    server = serve(max_prompts=1, max_messages=1, max_body_bytes=4000, api_keys=("k",))
    key = {"x-api-key": "k"}
    for path, body, status in (
        (TEXT, {"prompt": ["a", "b"]}, 400),
        (CHAT, {"messages": [*HI, *HI]}, 400),
        (RESPONSES, {"input": [*HI, *HI]}, 400),
        (MESSAGES, {"messages": [*HI, *HI], "max_tokens": 1}, 400),
        (CHAT, {"messages": HI, "user": "x" * 5000}, 413),
    ):
        url = f"{server.url}{path}/render"
        assert httpx.post(url, json=body).status_code == 401
        assert httpx.post(url, json=body, headers=key).status_code == status
        assert httpx.get(url, headers=key).status_code == (404 if path == RESPONSES else 405)
