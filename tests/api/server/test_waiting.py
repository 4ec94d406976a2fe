"""Requests that wait to be read: who leaves, whose time is over, and how many may wait."""

from __future__ import annotations

import json
import socket
import threading
import time
from contextlib import closing

import httpx
import pytest

from foretoken.api.text.chat_template import INLINE_CHARS
from foretoken.api.text.executor import Waiting
from foretoken.api.text.tokenizer import APART_BYTES

SECONDS = 10
LONG = "x" * 2 * INLINE_CHARS
TALK = {"messages": [{"role": "user", "content": LONG}]}
BODIES = {
    "/v1/chat/completions": TALK,
    "/v1/completions": {"prompt": LONG},
    "/v1/responses": {"input": LONG},
    "/v1/responses/input_tokens": {"input": LONG},
    "/v1/messages": {**TALK, "max_tokens": 4},
    "/v1/messages/count_tokens": TALK,
    "/tokenize": {"prompt": LONG},
    "/cache/flush": {"prefix": LONG},
}
PREWARM = {"prompt_cache_options": {"prewarm": True}}
CASES = [*BODIES.items()] + [
    (path, {**BODIES[path], **more})
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses")
    for more in ({"stream": True}, PREWARM)
]


@pytest.fixture
def busy(server):
    """A server that is at a long text which takes for ever; gives the thread."""
    go, begun = threading.Event(), threading.Event()
    server.llm.tokenizer.max_model_len = 10**9
    worker = server.llm.tokenizer._long
    worker.submit(lambda: begun.set() or go.wait(60))
    assert begun.wait(SECONDS)
    yield worker
    go.set()


def until(holds) -> None:
    deadline = time.monotonic() + SECONDS
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def sent(server, path: str, body: dict) -> socket.socket:
    """A client that waits for its answer."""
    client = socket.create_connection(("127.0.0.1", server.port), SECONDS)
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
    client.sendall(head.encode() + data)
    return client


@pytest.mark.parametrize(("path", "body"), CASES)
def test_who_leaves_while_its_text_waits_is_not_waited_for(server, engine, busy, path, body):
    with closing(sent(server, path, body)):
        until(lambda: busy.num_waiting == 1)
    until(lambda: busy.num_waiting == 0)
    assert not engine.requests
    until(lambda: not server.do(lambda: dict(server.llm._answers)))


@pytest.mark.parametrize(("path", "body"), CASES)
def test_the_wait_is_part_of_what_a_request_may_take(server, engine, busy, path, body):
    server.llm.max_request_seconds = 0.05
    answer = httpx.post(server.url + path, json=body, timeout=SECONDS)
    assert answer.status_code == 503
    assert "deadline passed" in answer.json()["error"]["message"]
    assert answer.headers["retry-after"]
    assert busy.num_waiting == 0
    assert not engine.requests


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_a_deadline_of_the_caller_counts_while_it_waits(server, engine, busy, path):
    body = {**BODIES[path], "deadline_ms": 50}
    answer = httpx.post(server.url + path, json=body, timeout=SECONDS)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "deadline_exceeded")
    assert not engine.requests


def test_more_than_may_wait_is_refused(server, busy):
    busy._waiting = Waiting(4 * len(LONG))
    with closing(sent(server, "/tokenize", BODIES["/tokenize"])):
        until(lambda: busy.num_waiting == 1)
        answer = httpx.post(server.url + "/v1/completions", json=BODIES["/v1/completions"])
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "queue_full")
        assert answer.headers["retry-after"]


LARGE = "x" * APART_BYTES
LARGE_BODIES = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": LARGE}]},
    "/v1/responses": {"input": LARGE},
    "/v1/messages": {"messages": [{"role": "user", "content": LARGE}], "max_tokens": 4},
    "/tokenize": {"messages": [{"role": "user", "content": LARGE}]},
}


@pytest.mark.parametrize("path", LARGE_BODIES)
def test_who_leaves_while_a_large_body_is_read_is_not_waited_for(server, engine, busy, path):
    with closing(sent(server, path, LARGE_BODIES[path])):
        until(lambda: busy.num_waiting == 1)
    until(lambda: busy.num_waiting == 0)
    assert not engine.requests
