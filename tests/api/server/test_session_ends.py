"""Sessions end by a route or a header, and tell the engine what they wait for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from foretoken.api.runtime.engine_client import EngineClient
from foretoken.api.runtime.sessions import label_of
from foretoken.api.runtime.turns.idle_prefill import IdlePrefill
from foretoken.api.types.request_context import CONTEXT, RequestContext
from foretoken.api.types.results import Choice, ToolCall
from foretoken.core.errors import (
    DeadlineExceeded,
    ForetokenError,
    InvalidRequest,
    QueueFull,
    Unavailable,
)

TALK = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": TALK, "max_tokens": 9},
    "/v1/completions": {"prompt": "hi", "max_tokens": 1},
    "/v1/messages": {"messages": TALK, "max_tokens": 9},
    "/v1/responses": {"input": "hi", "max_output_tokens": 9},
}
CHATS = [path for path in BODIES if path != "/v1/completions"]
Send = Callable[..., httpx.Response]


@pytest.fixture
def send(serve, say) -> Send:
    """Send a body of a route, with headers."""
    say("ok")
    url = serve(api_keys=("one", "two")).url

    def post(
        path: str = "/v1/chat/completions", key: str = "one", method: str = "POST", **fields: Any
    ) -> httpx.Response:
        headers = {"authorization": f"Bearer {key}", **fields.pop("headers", {})}
        body = {**BODIES[path], **fields} if path in BODIES else None
        return httpx.request(method, url + path, json=body, headers=headers)

    return post


def test_a_session_of_the_key_is_ended(send, engine) -> None:
    send(headers={"x-session-id": "a b"}).raise_for_status()
    answer = send("/v1/sessions/a%20b", method="DELETE")
    assert answer.json() == {"id": "a b", "object": "session.deleted", "deleted": True}
    assert engine.ended_sessions == [engine.requests[-1].cache.session]
    answer = send("/v1/sessions/a%20b", method="DELETE")
    assert (answer.status_code, answer.json()["deleted"]) == (200, False)
    send("/v1/sessions/a%20b", key="two", method="DELETE").raise_for_status()
    assert engine.ended_sessions[1] == engine.ended_sessions[0] != engine.ended_sessions[2]


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1"])
def test_a_session_may_have_any_name(send, engine, encoding: str) -> None:
    send(headers={"x-session-id": "ä/é".encode(encoding)}).raise_for_status()
    answer = send("/v1/sessions/%C3%A4/%C3%A9", method="DELETE")
    assert answer.json()["id"] == "ä/é"
    assert engine.ended_sessions == [engine.requests[-1].cache.session]


def test_ending_a_session_needs_the_key(send, engine) -> None:
    assert send("/v1/sessions/a", key="wrong", method="DELETE").status_code == 401
    assert engine.ended_sessions == []


@pytest.mark.parametrize("header", ["x-session-close", "x-dynamo-session-final"])
@pytest.mark.parametrize("path", BODIES)
def test_a_header_ends_the_session_with_the_request(send, engine, path: str, header: str) -> None:
    for value, ends in [("true", True), ("1", True), ("false", False)]:
        send(path, headers={"x-session-id": "a", header: value}).raise_for_status()
        assert engine.requests[-1].cache.ends_session is ends
    send(path, headers={header: "true"}).raise_for_status()
    assert not engine.requests[-1].cache.ends_session, "it has no session"


@pytest.mark.parametrize("path", BODIES)
def test_a_header_that_is_no_switch_is_refused(send, path: str) -> None:
    answer = send(path, headers={"x-session-id": "a", "x-session-close": "maybe"})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert "x-session-close" in error["message"]
    assert error.get("param", "x-session-close") == "x-session-close"


@pytest.mark.parametrize("path", BODIES)
def test_a_last_request_that_is_refused_for_load_ends_the_session(send, engine, path: str) -> None:
    last = {"x-session-id": "a", "x-session-close": "true"}
    send(path, headers={"x-session-id": "a"}).raise_for_status()
    for refusal in (QueueFull("full"), DeadlineExceeded("late"), Unavailable("no replica")):
        engine.refusal, engine.ended_sessions = refusal, []
        assert send(path, headers={"x-session-id": "a"}).status_code in (408, 429, 503)
        assert engine.ended_sessions == [], "it is not the last request"
        assert send(path, headers=last).status_code in (408, 429, 503)
        assert engine.ended_sessions == [engine.requests[0].cache.session]


@pytest.fixture
def ended(monkeypatch) -> list[str]:
    """Sessions whose next turns are dropped."""
    found: list[str] = []
    monkeypatch.setattr(IdlePrefill, "end_session", lambda _idle, session: found.append(session))
    return found


def test_a_session_that_was_not_ended_keeps_its_next_turn(ended, send, engine, monkeypatch) -> None:
    send(headers={"x-session-id": "a"}).raise_for_status()
    session = engine.requests[0].cache.session
    last = {"x-session-id": "a", "x-session-close": "1"}
    send(headers=last).raise_for_status()
    assert ended == [session]
    engine.refusal = InvalidRequest("prompt is wrong", param="prompt")
    assert send(headers=last).status_code == 400
    assert ended == [session]
    engine.refusal = QueueFull("full")
    assert send(headers=last).status_code == 429
    assert ended == [session] * 2, "the session was ended although the request was refused"

    async def fail(session: str) -> bool:
        raise Unavailable(f"no replica answers about {session}")

    monkeypatch.setattr(engine, "end_session", fail)
    assert send(headers=last).status_code == 429
    assert send("/v1/sessions/a", method="DELETE").status_code == 503
    assert ended == [session] * 2


def test_no_idle_work_begins_while_a_session_is_ended() -> None:
    async def act() -> None:
        llm, answer = EngineClient(), asyncio.get_running_loop().create_future()
        engine: Any = SimpleNamespace(end_session=lambda _session: answer)
        ending = asyncio.create_task(llm.session_ends.end(engine, "a"))
        assert llm.is_idle
        await asyncio.sleep(0)
        assert not llm.is_idle
        answer.set_result(True)
        assert await ending
        assert llm.is_idle

    asyncio.run(act())


def test_a_refused_last_request_gets_its_own_error(send, engine, monkeypatch) -> None:
    async def fail(session: str) -> bool:
        raise ForetokenError(f"no replica answers about {session}")

    monkeypatch.setattr(engine, "end_session", fail)
    engine.refusal = QueueFull("full")
    last = {"x-session-id": "a", "x-session-close": "true"}
    assert send(headers=last).status_code == 429


def test_a_refused_last_request_does_not_wait_for_a_hung_replica(send, engine, monkeypatch) -> None:
    monkeypatch.setattr("foretoken.api.runtime.sessions.END_SECONDS", 0)
    asked = []

    async def hang(session: str) -> bool:
        asked.append(session)
        return await asyncio.Future()

    monkeypatch.setattr(engine, "end_session", hang)
    engine.refusal = QueueFull("full")
    last = {"x-session-id": "a", "x-session-close": "true"}
    assert send(headers=last).status_code == 429
    assert len(asked) == 1


def test_a_last_request_that_is_invalid_ends_no_session(send, engine) -> None:
    last = {"x-session-id": "a", "x-session-close": "true"}
    send(headers={"x-session-id": "a"}).raise_for_status()
    engine.refusal = InvalidRequest("prompt is wrong", param="prompt")
    assert send(headers=last).status_code == 400
    assert send(headers=last, messages=[]).status_code == 400
    assert engine.ended_sessions == []


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", CHATS)
def test_an_answer_without_calls_waits_for_a_person(send, engine, path: str, stream: bool) -> None:
    send(path, stream=stream, prompt_cache_key="a", cache_salt="s").raise_for_status()
    request = engine.requests[-1]
    assert engine.expected == [(request.cache.session, "", request.namespace)]
    send(path, stream=stream).raise_for_status()
    assert len(engine.expected) == 1, "a request without a session tells nothing"


def test_several_choices_tell_nothing(send, engine) -> None:
    send(prompt_cache_key="a", n=2).raise_for_status()
    assert engine.expected == []


def test_a_wait_is_labelled_by_the_tools_that_were_called() -> None:
    calls = [ToolCall(id=f"{at}", name=name, arguments="{}") for at, name in enumerate("bab")]
    both, one = Choice(index=0, tool_calls=calls), Choice(index=0, tool_calls=calls[:1])
    assert label_of(both) == label_of(Choice(index=0, tool_calls=calls[:2])) != label_of(one)
    assert label_of(Choice(index=0)) == ""
    mine = label_of(one)
    token = CONTEXT.set(RequestContext({"type": "http", "headers": []}, caller=b"another"))
    try:
        assert label_of(one) != mine, "the waits of each API key are its own"
        assert label_of(Choice(index=0)) == ""
    finally:
        CONTEXT.reset(token)
