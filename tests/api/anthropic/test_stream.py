"""Streamed messages over plain HTTP: which events, in which order."""

from __future__ import annotations

import json

import httpx

BODY = {
    "model": "tiny/model",
    "max_tokens": 50,
    "stream": True,
    "messages": [{"role": "user", "content": "hi"}],
}


def test_the_events_of_a_text_come_in_order(stream, say, engine):
    say("naïve café, 東京 and 😀.")
    engine.tokens_per_step = 3
    start, opened, *deltas, closed, last, stop = stream()
    assert start["type"] == "message_start"
    assert start["message"]["content"] == []
    assert start["message"]["stop_reason"] is None
    assert start["message"]["usage"]["input_tokens"] == engine.requests[0].prompt_len
    assert (opened["type"], opened["index"]) == ("content_block_start", 0)
    assert opened["content_block"] == {"type": "text", "text": ""}
    assert {each["type"] for each in deltas} == {"content_block_delta"}
    assert {each["delta"]["type"] for each in deltas} == {"text_delta"}
    assert "".join(each["delta"]["text"] for each in deltas) == "naïve café, 東京 and 😀."
    assert len(deltas) <= engine.requests[0].usage.verify_steps, "a step is one delta"
    assert closed == {"type": "content_block_stop", "index": 0}
    assert last["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert last["usage"]["output_tokens"] == engine.requests[0].usage.completion_tokens
    assert stop == {"type": "message_stop"}


def test_a_stop_sequence_is_told_and_never_shown(stream, say):
    say("hello there. Stop here. And more")
    events = stream(stop_sequences=["Stop here"])
    shown = "".join(e["delta"]["text"] for e in events if e["type"] == "content_block_delta")
    assert shown == "hello there. "
    assert events[-2]["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": "Stop here"}


def test_a_call_is_streamed_piece_by_piece(stream, say):
    say('<tool_call>\n{"name": "sun", "arguments": {"at": "noon"}}\n</tool_call>')
    tools = [{"name": "sun", "input_schema": {"type": "object"}}]
    _, opened, *deltas, _, last, _ = stream(tools=tools)
    assert opened["content_block"]["name"] == "sun"
    assert opened["content_block"]["input"] == {}
    assert opened["content_block"]["id"].startswith("toolu_")
    assert len(deltas) > 1
    pieces = [each["delta"]["partial_json"] for each in deltas]
    assert "".join(pieces).replace(" ", "") == '{"at":"noon"}'
    assert last["delta"]["stop_reason"] == "tool_use"


def test_a_warmed_prompt_is_a_message_of_nothing(stream):
    start, last, stop = stream(max_tokens=0)
    assert start["message"]["usage"]["output_tokens"] == 0
    assert last["delta"]["stop_reason"] == "max_tokens"
    assert last["usage"]["output_tokens"] == 0
    assert stop == {"type": "message_stop"}


def test_pings_keep_a_stream_warm_before_anything_is_said(serve, engine):
    engine.by_hand = True
    server = serve(ping_seconds=0.01)
    with httpx.stream("POST", f"{server.url}/v1/messages", json=BODY, timeout=20) as answer:
        lines = answer.iter_lines()
        assert next(lines) == "event: ping"
        assert next(lines) == 'data: {"type":"ping"}'


def test_an_error_in_a_stream_is_an_event(http, engine):
    engine.row_error = "broken row"
    answer = http.post("/v1/messages", json=BODY)
    assert answer.status_code == 200
    name, data = answer.text.strip().split("\n\n")[-1].split("\n")
    assert name == "event: error"
    error = json.loads(data.removeprefix("data: "))
    assert (error["type"], error["error"]["type"]) == ("error", "api_error")
    assert error["request_id"] == answer.headers["request-id"]


def test_a_client_that_leaves_ends_its_answer(serve, engine):
    server = serve(ping_seconds=0.01)
    engine.by_hand = True
    with httpx.stream("POST", f"{server.url}/v1/messages", json=BODY, timeout=20) as answer:
        next(answer.iter_bytes())
    assert engine.was_aborted.acquire(timeout=20)
