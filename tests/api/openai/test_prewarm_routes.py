"""``prompt_cache_options.prewarm`` in the bodies that take it, and in those that do not."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest

TALK = [{"role": "user", "content": "hi"}]
WARM = {"prompt_cache_options": {"prewarm": True}}
USAGE = {"stream_options": {"include_usage": True}}
BODIES = {
    "/v1/chat/completions": {"messages": TALK},
    "/v1/responses": {"input": "hi"},
    "/v1/completions": {"prompt": "hi"},
}


@pytest.fixture
def http(server):
    with httpx.Client(base_url=server.url, timeout=20) as client:
        yield client


def events(answer: httpx.Response) -> list[Any]:
    assert answer.headers["content-type"].startswith("text/event-stream")
    lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_a_chat_that_is_prewarmed_is_streamed_where_that_is_asked(http, engine):
    body = {"messages": TALK, "stream": True, **WARM, **USAGE}
    role, end, usage = events(http.post("/v1/chat/completions", json=body))
    assert role["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert (end["choices"][0]["delta"], end["choices"][0]["finish_reason"]) == ({}, "length")
    assert usage["usage"]["completion_tokens"] == 0
    assert usage["usage"]["prompt_tokens"] == engine.requests[0].prompt_len
    quiet = http.post("/v1/chat/completions", json={"messages": TALK, "stream": True, **WARM})
    assert len(events(quiet)) == 2


def test_the_openai_client_reads_such_a_stream(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client:
        chunks = list(
            client.chat.completions.create(
                model="tiny/model", messages=TALK, stream=True, extra_body=WARM
            )
        )
    assert chunks[-1].choices[0].finish_reason == "length"


def test_tools_are_checked_before_a_prompt_is_prewarmed(http, engine):
    tools = [{"type": "function", "function": {"name": "f"}}] * 2
    asked = http.post("/v1/chat/completions", json={"messages": TALK, "tools": tools})
    warmed = http.post("/v1/chat/completions", json={"messages": TALK, "tools": tools, **WARM})
    assert asked.status_code == warmed.status_code == 400
    assert asked.json() == warmed.json()
    assert engine.requests == []


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/chat/completions/render"])
def test_a_chat_that_is_too_long_to_be_prewarmed_names_its_field(http, route):
    # So few characters that they are tokenised: the tokens are too many.
    room = http.get("/model_info").json()["max_model_len"]
    talk = [{"role": "user", "content": "a " * room}]
    answer = http.post(route, json={"messages": talk, **WARM})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "messages"


@pytest.mark.parametrize("path", BODIES)
def test_a_prompt_that_is_prewarmed_has_the_deadline_and_priority_of_its_body(http, engine, path):
    body = {**BODIES[path], **WARM, "deadline_ms": 5000, "priority": 3}
    assert http.post(path, json=body).is_success
    [request] = engine.requests
    assert (4 < request.deadline <= 5, request.priority) == (True, 3)


@pytest.mark.parametrize("path", [*BODIES, "/v1/messages"])
def test_a_prompt_that_was_given_up_is_not_said_to_be_warm(server, http, engine, path):
    engine.by_hand = True
    submit = engine.submit

    def submit_and_end(request):
        stream = submit(request)
        engine._end(request.request_id)
        return stream

    engine.submit = submit_and_end
    body = {"messages": TALK, "max_tokens": 0} if path == "/v1/messages" else BODIES[path] | WARM
    answer = http.post(path, json=body)
    assert answer.status_code == 503
    assert "deadline" in answer.json()["error"]["message"]


def test_a_list_of_prompts_is_prewarmed_one_by_one(http, engine):
    body = {"prompt": ["one", "two"], "max_tokens": 5, "n": 3, **WARM}
    answer = http.post("/v1/completions", json=body).json()
    assert [request.sampling.params.max_tokens for request in engine.requests] == [0, 0]
    assert [(c["index"], c["text"], c["finish_reason"]) for c in answer["choices"]] == [
        (0, "", "length"),
        (1, "", "length"),
    ]
    assert answer["usage"]["completion_tokens"] == 0
    assert answer["usage"]["prompt_tokens"] == sum(r.prompt_len for r in engine.requests)
    *chunks, last = events(http.post("/v1/completions", json={**body, "stream": True, **USAGE}))
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == ["length", "length"]
    assert last["usage"]["completion_tokens"] == 0


def test_where_nothing_is_prewarmed_the_field_is_refused(http, engine):
    path = "/v1/messages"
    answer = http.post(path, json={"messages": TALK, "max_tokens": 5, **WARM})
    assert answer.status_code == 400
    assert "prompt_cache_options.prewarm" in answer.json()["error"]["message"]
    assert engine.requests == []
    off = {"prompt_cache_options": {"prewarm": False}}
    assert http.post(path, json={"messages": TALK, "max_tokens": 1, **off}).is_success


def test_a_prewarmed_response_that_is_to_be_kept_is_kept_and_can_go_on(http, say, engine):
    say("ok")
    warm = http.post("/v1/responses", json={"input": "hi", "store": True, **WARM}).json()
    assert warm["store"] is True
    assert http.get(f"/v1/responses/{warm['id']}").json() == warm
    body = {"input": "there", "previous_response_id": warm["id"]}
    assert http.post("/v1/responses", json=body).is_success
    unkept = http.post("/v1/responses", json={"input": "hi", "store": False, **WARM}).json()
    assert unkept["store"] is False
    assert http.get(f"/v1/responses/{unkept['id']}").status_code == 404


def test_each_of_several_prompts_is_told_why_it_missed(http):
    body = {"prompt": ["one", "two"], "max_tokens": 1, "explain_cache": True}
    answer = http.post("/v1/completions", json=body).json()
    told = answer["usage"]["cache_explanations"]
    assert len(told) == 2
    query = {"response_id": f"{answer['id']}-p1"}
    assert http.get("/cache/explain", params=query).json() == told[1]
