"""Sessions of requests: named by a header or by ``prompt_cache_key``, in every API, by key."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest

TALK = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": TALK, "max_tokens": 1},
    "/v1/completions": {"prompt": "hi", "max_tokens": 1},
    "/v1/messages": {"messages": TALK, "max_tokens": 1},
    "/v1/responses": {"input": "hi", "max_output_tokens": 1},
}
Session = Callable[..., str | None]


@pytest.fixture
def session(serve, say, engine) -> Session:
    """The session of the engine's request that a body becomes."""
    say("ok")
    url = serve(api_keys=("one", "two")).url

    def send(
        path: str = "/v1/chat/completions", key: str = "one", header: str = "", **fields: Any
    ) -> str | None:
        headers = {"authorization": f"Bearer {key}"} | ({"x-session-id": header} if header else {})
        answer = httpx.post(url + path, json={**BODIES[path], **fields}, headers=headers)
        answer.raise_for_status()
        found: str | None = engine.requests[-1].cache.session
        return found

    return send


@pytest.mark.parametrize("path", BODIES)
def test_a_session_is_named_by_the_header_or_the_cache_key(session, path: str) -> None:
    assert session(path) is None
    named = session(path, header="a")
    assert named is not None
    assert session(path, prompt_cache_key="a") == named
    assert session(path, header="a", prompt_cache_key="b") == named
    assert session(path, prompt_cache_key="b") != named


def test_it_is_one_in_all_apis_and_another_for_each_key(session) -> None:
    assert len({session(path, header="a") for path in BODIES}) == 1
    assert session(key="two", header="a") != session(header="a")


def test_a_long_name_is_kept_as_a_short_one(session) -> None:
    assert len(session(header="a" * 4000) or "") == 32
