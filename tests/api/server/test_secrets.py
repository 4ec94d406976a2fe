"""The text of an unexpected exception is for the log; a client learns that there was one."""

from __future__ import annotations

import httpx
import pytest

from foretoken.api.runtime.conversation.prompt_history import PromptLog
from foretoken.api.runtime.engine_client import EngineClient
from foretoken.api.runtime.generation import Generation
from foretoken.api.serving.serving_context import Service

SECONDS = 20
SECRET = "/srv/secret: password 1234"
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
BODIES = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": "hi", "max_tokens": 3},
    "/v1/responses": {"input": "hi", "max_output_tokens": 3},
    "/v1/messages": CHAT,
}
OTHERS = [
    ("GET", "/v1/models"), ("GET", "/v1/models/x"), ("POST", "/tokenize"), ("POST", "/detokenize"),
    ("GET", "/metrics"), ("GET", "/cache"), ("POST", "/cache/flush"), ("GET", "/ready"),
    ("GET", "/health"), ("GET", "/cache/explain?response_id=x"),
    ("POST", "/v1/messages/count_tokens"), ("POST", "/v1/responses/input_tokens"),
]  # fmt: skip


@pytest.fixture
def http(server):
    with httpx.Client(base_url=server.url, timeout=SECONDS) as client:
        yield client


def fail(*args, **kwargs):
    raise RuntimeError(SECRET)


def check(answer, status=500):
    assert answer.status_code == status, answer.text
    assert "internal error" in answer.text
    assert not any(word in answer.text + str(answer.headers) for word in ("secret", "Traceback"))
    assert answer.headers["x-request-id"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
def test_an_exception_before_the_answer_is_a_500_without_its_text(
    http, engine, monkeypatch, caplog, path, stream
):
    monkeypatch.setattr(engine, "submit", fail)
    check(http.post(path, json={**BODIES[path], "stream": stream}))
    assert SECRET in caplog.text


@pytest.mark.parametrize("path", BODIES)
def test_an_exception_inside_a_stream_is_an_event_without_its_text(http, monkeypatch, caplog, path):
    read = Generation.__anext__

    async def broken(self):
        await read(self)
        fail()

    monkeypatch.setattr(Generation, "__anext__", broken)
    check(http.post(path, json={**BODIES[path], "stream": True}), status=200)
    assert SECRET in caplog.text
    check(http.post(path, json=BODIES[path]))


@pytest.mark.parametrize(("method", "path"), OTHERS)
def test_no_other_route_tells_what_went_wrong_inside(http, monkeypatch, method, path):
    for owner, name in (
        (Service, "model"),
        (Service, "outage"),
        (EngineClient, "engine"),
        (EngineClient, "tokenizer"),
    ):
        monkeypatch.setattr(owner, name, property(fail))
    monkeypatch.setattr(PromptLog, "find", fail)
    body = {"cache_salt": "x"} if path == "/cache/flush" else {**CHAT, "prompt": "x", "input": "hi"}
    check(http.request(method, path, json=body if method == "POST" else None))
