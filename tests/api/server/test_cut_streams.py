"""A stream that a shutdown cuts contains all words that the model wrote until then."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

SAID = "Look at <tool_c"
HI = [{"role": "user", "content": "Hello"}]
FUNCTION = {"name": "f", "description": "", "parameters": {"type": "object", "properties": {}}}
TOOLS = [{"type": "function", "function": FUNCTION}]
CLAUDE_TOOLS = [{"name": "f", "description": "", "input_schema": {"type": "object"}}]
BODIES = {
    "/v1/chat/completions": {"messages": HI, "tools": TOOLS},
    "/v1/messages": {"messages": HI, "max_tokens": 99, "tools": CLAUDE_TOOLS},
    "/v1/responses": {"input": "Hello", "tools": [{"type": "function", **FUNCTION}]},
    "/api/chat": {"messages": HI, "tools": TOOLS},
}


def texts(path, event):
    """Return the text of the answer in an event of a stream."""
    match path:
        case "/v1/chat/completions":
            return [each["delta"].get("content") or "" for each in event.get("choices", [])]
        case "/v1/messages":
            return [event.get("delta", {}).get("text", "")]
        case "/v1/responses":
            is_text = event["type"] == "response.output_text.delta"
            return [event["delta"]] if is_text else []
    return [event.get("message", {}).get("content", "")]


def events(body):
    """Return the JSON values of a stream, either of server-sent events or of lines."""
    found = [line.removeprefix("data: ") for line in body.splitlines()]
    return [json.loads(line) for line in found if line.startswith("{")]


@pytest.mark.parametrize("path", BODIES)
def test_text_that_might_have_become_a_call_is_sent_before_the_error(
    path, serve, say, engine, tokenizer
):
    server = serve(tool_parser="hermes")
    engine.by_hand = True
    say(SAID)

    def shut_down():
        engine.draining = True
        engine.abort(engine.requests[0].request_id)

    with ThreadPoolExecutor() as pool:
        body = {**BODIES[path], "stream": True}
        asked = pool.submit(httpx.post, f"{server.url}{path}", json=body, timeout=20)
        assert engine.submitted.acquire(timeout=20)
        for _ in tokenizer.encode_word(SAID):
            server.do(engine.step)
        server.do(shut_down)
        answer = asked.result(20)
    engine.draining = False
    received = events(answer.text)
    assert "".join(text for event in received for text in texts(path, event)) == SAID
    assert "the server is shutting down" in json.dumps(received[-1])
