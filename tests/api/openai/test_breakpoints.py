"""prompt_cache_breakpoint and prompt_cache_options: where pins stand, and what usage tells."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from foretoken.api.serving.caching.breakpoints import Breakpoints, write_details
from foretoken.api.serving.caching.fields import WHOLE, CacheWriteDetails
from foretoken.core.interface.request import Pin, Usage

HALF, LONG = 1800.0, 43200.0
HERE = {"prompt_cache_breakpoint": {"mode": "explicit"}}
LATER = {"prompt_cache_breakpoint": {"mode": "explicit", "ttl": "12h"}}
EXPLICIT = {"mode": "explicit"}
ROUTES = ("/v1/chat/completions", "/v1/responses")
Send = Callable[..., httpx.Response]


def message(role: str, *parts: tuple[str, dict[str, Any]] | str) -> dict[str, Any]:
    """A message with text parts, each with its mark, in both APIs' forms."""
    pairs = [(part, {}) if isinstance(part, str) else part for part in parts]
    return {"role": role, "content": [{"type": "text", "text": t, **mark} for t, mark in pairs]}


def talk(path: str, *messages: dict[str, Any]) -> dict[str, Any]:
    if path != "/v1/responses":
        return {"messages": [*messages], "max_tokens": 4}
    items = [
        {**each, "content": [{**part, "type": "input_text"} for part in each["content"]]}
        for each in messages
    ]
    return {"input": items, "max_output_tokens": 4}


@pytest.fixture
def send(server, say) -> Send:
    say("ok")

    def post(path: str, *messages: dict[str, Any], **fields: Any) -> httpx.Response:
        messages = messages or (message("user", "hi"),)
        return httpx.post(server.url + path, json={**talk(path, *messages), **fields})

    return post


@pytest.fixture
def pinned(send, engine, tokenizer) -> Callable[..., list[tuple[str, float]]]:
    """The texts that a body pins, with their times."""

    def ask(*args: Any, **fields: Any) -> list[tuple[str, float]]:
        send(*args, **fields).raise_for_status()
        request = engine.requests[-1]
        ids = [*request.tokens][: request.prompt_len]
        return [
            (tokenizer.decode(ids[: pin.num_tokens], skip_special_tokens=False), pin.ttl)
            for pin in request.cache.pins
        ]

    return ask


TURNS = (
    message("system", "Be good.", ("Be kind.", LATER)),
    message("user", ("hello", HERE), "there"),
    message("user", "again"),
)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ROUTES)
def test_a_part_is_pinned_with_all_before_it(pinned, path: str, stream: bool) -> None:
    [(system, long), (first, half)] = pinned(path, *TURNS, stream=stream)
    assert system.endswith("system\nBe good.\nBe kind.<|im_end|>\n<|im_start|>user\n")
    assert first.endswith("user\nhello")
    assert (long, half) == (LONG, HALF)


@pytest.mark.parametrize("path", ROUTES)
def test_a_breakpoint_changes_no_prompt(send, engine, path: str) -> None:
    plain = [
        {**each, "content": [{"type": "text", "text": part["text"]} for part in each["content"]]}
        for each in TURNS
    ]
    for turns in (TURNS, plain):
        send(path, *turns).raise_for_status()
    marked, unmarked = engine.requests
    assert marked.tokens == unmarked.tokens


@pytest.mark.parametrize("path", ROUTES)
def test_a_breakpoint_inherits_the_time_of_the_options(pinned, path: str) -> None:
    options = {"ttl": "12h", **EXPLICIT}
    [(_, first), (_, second)] = pinned(path, *TURNS, prompt_cache_options=options)
    assert (first, second) == (LONG, LONG)


@pytest.mark.parametrize("path", ROUTES)
def test_the_whole_prompt_is_pinned_only_in_the_implicit_mode(send, engine, path: str) -> None:
    for mode, num_whole in (("implicit", 1), (None, 1), ("explicit", 0)):
        send(path, *TURNS, prompt_cache_options={"ttl": "30m", "mode": mode}).raise_for_status()
        pins = engine.requests[-1].cache.pins
        assert sum(pin.num_tokens == WHOLE for pin in pins) == num_whole
        assert len(pins) == 2 + num_whole


@pytest.mark.parametrize("path", [*ROUTES, "/v1/completions"])
def test_the_explicit_mode_without_a_breakpoint_uses_no_cache(
    server, send, engine, path: str
) -> None:
    if path == "/v1/completions":
        body = {"prompt": "hi", "max_tokens": 1, "prompt_cache_options": EXPLICIT}
        httpx.post(server.url + path, json=body).raise_for_status()
    else:
        send(path, prompt_cache_options={"ttl": "12h", **EXPLICIT}).raise_for_status()
    cache = engine.requests[-1].cache
    assert (cache.read, cache.write, cache.pins) == (False, False, ())


@pytest.mark.parametrize("path", ROUTES)
def test_who_writes_nothing_pins_nothing(pinned, path: str) -> None:
    assert pinned(path, *TURNS, cache={"write": False}) == []


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize(("options", "count"), [({}, 3), (EXPLICIT, 4)])
def test_the_latest_breakpoints_count(pinned, path: str, options: Any, count: int) -> None:
    parts = [(word, HERE) for word in ("one", "two", "three", "four", "five")]
    found = pinned(path, message("user", *parts), prompt_cache_options=options)
    assert len(found) == count
    assert found[0][0].endswith("five" if count == 1 else "two" if count == 4 else "three")


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize(
    "mark", [{"ttl": "30m"}, {"mode": "implicit"}, {"mode": "explicit", "ttl": "1h"}, "explicit"]
)
def test_a_bad_breakpoint_is_named(send, engine, path: str, mark: Any) -> None:
    answer = send(path, message("user", ("hi", {"prompt_cache_breakpoint": mark})))
    assert answer.status_code == 400
    error = answer.json()["error"]
    place = "messages[0].content[0]" if path == ROUTES[0] else "input[0].content[0]"
    assert error["param"].startswith(place)
    assert "prompt_cache_breakpoint" in error["message"]
    assert not engine.requests


@pytest.mark.parametrize("path", ROUTES)
def test_bad_options_are_named(send, path: str) -> None:
    for options, field in (({"mode": "none"}, "mode"), ({"ttl": "1h"}, "ttl")):
        error = send(path, prompt_cache_options=options)
        assert error.status_code == 400
        assert error.json()["error"]["param"] == f"prompt_cache_options.{field}"


@pytest.mark.parametrize("stream", [False, True])
def test_usage_tells_what_was_written_by_lifetime(send, stream: bool) -> None:
    more = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    for path in ROUTES:
        fields = {} if path == "/v1/responses" and not stream else more
        if path == "/v1/responses" and stream:
            fields = {"stream": True}
        answer = send(path, *TURNS, **fields)
        assert _details(path, answer, stream)["cache_write_tokens_details"] == {
            "ttl_30m_tokens": 0, "ttl_12h_tokens": 0,
        }  # fmt: skip
        answer = send(path, message("user", "plain"), **fields)
        assert "cache_write_tokens_details" not in _details(path, answer, stream)


def _details(path: str, answer: httpx.Response, stream: bool) -> dict[str, Any]:
    body = answer.json() if not stream else None
    if body is None:
        lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
        body = json.loads(lines[-1])
        body = body.get("response", body)
    names = ("input_tokens_details",) if path == "/v1/responses" else ("prompt_tokens_details",)
    found: dict[str, Any] = body["usage"][names[0]]
    return found


def test_written_tokens_are_of_the_lifetime_of_their_breakpoint() -> None:
    usage = Usage(prompt_tokens=100, cached_tokens=16, cache_write_tokens=80)
    pins = (Pin(32, LONG), Pin(64, HALF), Pin(WHOLE, HALF))
    assert write_details(usage, Breakpoints(pins, 16)) == CacheWriteDetails(
        ttl_12h_tokens=16, ttl_30m_tokens=64
    )
    whole = Breakpoints((Pin(WHOLE, LONG),), 16)
    assert write_details(usage, whole).ttl_12h_tokens == 80
    nothing = write_details(usage, Breakpoints((), 16))
    assert (nothing.ttl_12h_tokens, nothing.ttl_30m_tokens) == (0, 80)


def test_a_response_tells_the_options_that_were_applied(send) -> None:
    found = send("/v1/responses", prompt_cache_options={"mode": "explicit"}).json()
    assert found["prompt_cache_options"] == {
        "mode": "explicit", "ttl": "30m", "comparison_response_id": None,
    }  # fmt: skip
    assert "prompt_cache_options" not in send("/v1/responses").json()
