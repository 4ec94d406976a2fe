"""The tenant that the scheduler charges for a request, whichever route it came by."""

from __future__ import annotations

import hashlib
from typing import Any

import httpx
import pytest

KEY = "key-of-alice"
TALK = [{"role": "user", "content": "hi"}]
WARM = {"prompt_cache_options": {"prewarm": True}}
ROUTES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": TALK, "max_tokens": 1}),
    "several choices": ("/v1/chat/completions", {"messages": TALK, "max_tokens": 1, "n": 3}),
    "a stream": ("/v1/chat/completions", {"messages": TALK, "max_tokens": 1, "stream": True}),
    "prewarm": ("/v1/chat/completions", {"messages": TALK, **WARM}),
    "several prompts": ("/v1/completions", {"prompt": ["a", "b"], "max_tokens": 1}),
    "responses": ("/v1/responses", {"input": "hi", "max_output_tokens": 1}),
}


def ask(server, route: str, **fields: Any) -> None:
    path, body = ROUTES[route]
    headers = {"authorization": f"Bearer {KEY}"}
    with httpx.Client(base_url=server.url, timeout=20) as client:
        client.post(path, json={**body, **fields}, headers=headers).raise_for_status()


@pytest.mark.parametrize("route", ROUTES)
def test_a_request_is_charged_to_its_key_by_a_short_hash(serve, engine, say, route) -> None:
    say("ok")
    ask(serve(api_keys=(KEY,)), route)
    expected = f"key-{hashlib.sha256(KEY.encode()).hexdigest()[:16]}"
    assert engine.requests
    assert {request.tenant for request in engine.requests} == {expected}


@pytest.mark.parametrize("route", ROUTES)
def test_a_cache_salt_goes_before_the_key(serve, engine, say, route) -> None:
    say("ok")
    ask(serve(api_keys=(KEY,)), route, cache_salt="team")
    assert {request.tenant for request in engine.requests} == {"team"}


def test_messages_are_charged_to_their_key(serve, engine, say) -> None:
    say("ok")
    body = {"messages": TALK, "max_tokens": 1}
    with httpx.Client(base_url=serve(api_keys=(KEY,)).url, timeout=20) as client:
        client.post("/v1/messages", json=body, headers={"x-api-key": KEY}).raise_for_status()
    assert (engine.requests[0].tenant or "").startswith("key-")


def test_whoever_comes_without_a_key_and_a_salt_is_one_of_all_those(llm, engine) -> None:
    llm.generate("hi")
    assert engine.requests[0].tenant is None
