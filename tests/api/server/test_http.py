"""The server as a socket sees it: disconnects, limits, keys, odd bodies, other routes."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import socket
import threading
import time
import weakref
from contextlib import closing
from types import SimpleNamespace

import h11
import httpx
import pytest

import foretoken
from foretoken.api.server.guards.connection import Connection, QuickSends
from foretoken.api.serving.sse import EventStream, UnlessGone
from foretoken.core.errors import ForetokenError, InvalidRequest

SECONDS = 10
CHAT = {"messages": [{"role": "user", "content": "hi"}]}
PATHS = [
    ("POST", "/v1/chat/completions"), ("POST", "/v1/completions"), ("GET", "/v1/models"),
    ("GET", "/v1/models/tiny/model"), ("POST", "/tokenize"), ("POST", "/detokenize"),
    ("GET", "/ready"), ("GET", "/version"), ("GET", "/metrics"), ("GET", "/cache"),
    ("GET", "/server_info"), ("GET", "/model_info"), ("POST", "/v1/completions/render"),
    ("POST", "/v1/chat/completions/render"), ("POST", "/v1/responses/render"),
    ("POST", "/cache/flush"), ("GET", "/nowhere"), ("GET", "/health/"), ("GET", "/.//health"),
]  # fmt: skip


@pytest.fixture
def http(server):
    with httpx.Client(base_url=server.url, timeout=SECONDS) as client:
        yield client


def raw_request(path: str, body: bytes, *headers: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: x", f"Content-Length: {len(body)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


def connect(server) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), SECONDS)


# -- disconnects --------------------------------------------------------------------------------


@pytest.mark.parametrize("body", [{**CHAT, "stream": True}, {**CHAT, "n": 2}, CHAT])
def test_a_client_that_leaves_before_the_first_byte_aborts_its_request(server, engine, body):
    engine.by_hand = True
    with closing(connect(server)) as client:
        client.sendall(raw_request("/v1/chat/completions", json.dumps(body).encode()))
        for _ in range(body.get("n", 1)):
            assert engine.submitted.acquire(timeout=SECONDS)
    for _ in range(body.get("n", 1)):
        assert engine.was_aborted.acquire(timeout=SECONDS)
    deadline = time.monotonic() + SECONDS
    while server.do(lambda: dict(server.llm._answers)):
        assert time.monotonic() < deadline, "the answer was never forgotten"


BEHIND = b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n"
ONE = raw_request("/v1/completions", b'{"prompt": [5], "max_tokens": 1}')


@pytest.mark.parametrize("sent", [BEHIND, BEHIND[:9], b"\r\n", BEHIND * 2000])
def test_who_leaves_having_said_more_behind_a_request_is_noticed_too(server, engine, sent):
    engine.by_hand = True
    with closing(connect(server)) as client:
        client.sendall(ONE)
        assert engine.submitted.acquire(timeout=SECONDS)
        client.sendall(sent)
    assert engine.was_aborted.acquire(timeout=SECONDS)


def test_what_comes_while_a_request_is_worked_for_is_answered_behind_it(server, engine):
    engine.by_hand = True
    with closing(connect(server)) as client:
        client.sendall(ONE)
        assert engine.submitted.acquire(timeout=SECONDS)
        for part in (BEHIND[:9], BEHIND[9:] + ONE[:9], ONE[9:]):
            client.sendall(part)
            assert httpx.get(f"{server.url}/health").status_code == 200  # it has been read
        server.do(engine.step)
        assert engine.submitted.acquire(timeout=SECONDS)
        server.do(engine.step)
        seen = b""
        while seen.count(b"HTTP/1.1 200 ") < 3:
            seen += client.recv(2**16)
    assert seen.index(b"text_completion") < seen.index(b'"version"')


def test_who_says_more_behind_a_request_than_the_next_may_have_is_dropped(serve, engine):
    engine.by_hand = True
    with closing(connect(serve(max_header_bytes=1024, max_body_bytes=1000))) as client:
        client.sendall(ONE)
        assert engine.submitted.acquire(timeout=SECONDS)
        client.sendall(b"x" * 2024)
        assert not engine.was_aborted.acquire(timeout=0.05)
        client.sendall(b"x")
        assert engine.was_aborted.acquire(timeout=SECONDS)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_a_client_that_leaves_in_the_middle_aborts_its_request_while_nothing_is_sent(
    server, engine, path
):
    engine.by_hand = True
    body = {**CHAT, "prompt": [[5], [6]], "stream": True}
    count = 1 if "chat" in path else 2
    with closing(connect(server)) as client:
        client.sendall(raw_request(path, json.dumps(body).encode()))
        for _ in range(count):
            assert engine.submitted.acquire(timeout=SECONDS)
        server.do(engine.step)
        seen = b""
        while b"data: " not in seen:
            seen += client.recv(4096)
    for _ in range(count):
        assert engine.was_aborted.acquire(timeout=SECONDS)


def test_a_client_that_never_reads_costs_the_others_nothing(server, engine, http):
    engine.answers = lambda request: iter(int, 1) if request.prompt_len > 1 else [7]
    with closing(connect(server)) as stuck:
        body = json.dumps({"prompt": [5, 6], "stream": True, "max_tokens": 200}).encode()
        stuck.sendall(raw_request("/v1/completions", body))
        assert engine.submitted.acquire(timeout=SECONDS)
        answer = http.post("/v1/completions", json={"prompt": [5], "max_tokens": 1})
        assert answer.status_code == 200


def test_a_long_prefill_is_bridged_by_pings(serve, engine):
    engine.by_hand = True
    server = serve(ping_seconds=0.01)
    with closing(connect(server)) as client:
        body = json.dumps({**CHAT, "stream": True, "max_tokens": 1}).encode()
        client.sendall(raw_request("/v1/chat/completions", body))
        seen = b""
        while seen.count(b": ping\n\n") < 2:
            seen += client.recv(4096)
        assert b"data: " not in seen
        server.do(engine.step)
        while b"[DONE]" not in seen:
            seen += client.recv(4096)
    assert b'"finish_reason":"length"' in seen
    assert not engine.aborted


def test_a_stream_is_sent_step_by_step(server, engine):
    engine.by_hand = True
    with closing(connect(server)) as client:
        client.sendall(
            raw_request("/v1/completions", b'{"prompt":[5],"stream":true,"max_tokens":3}')
        )
        assert engine.submitted.acquire(timeout=SECONDS)
        seen = b""
        for count in (1, 2, 3):
            server.do(engine.step)
            while seen.count(b"text_completion") < count:
                seen += client.recv(4096)
            assert (b"[DONE]" in seen) <= (count == 3)


def test_an_event_stream_says_what_it_is(http):
    answer = http.post("/v1/chat/completions", json={**CHAT, "stream": True, "max_tokens": 1})
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["cache-control"] == "no-cache"
    assert answer.text.endswith("data: [DONE]\n\n")
    assert '"error"' not in answer.text


# -- clients that owe something ------------------------------------------------------------------


def connections(server):
    return server.do(lambda: list(server._server.server_state.connections))


def wait_until_dropped(server):
    deadline = time.monotonic() + SECONDS
    while connections(server):
        assert time.monotonic() < deadline, "the connection is still held"


def ended(client) -> bool:
    """Whether the server closes, with a 408 or without a word."""
    seen = b""
    with contextlib.suppress(ConnectionResetError):
        while more := client.recv(4096):
            seen += more
    return not seen or seen.startswith(b"HTTP/1.1 408 ")


@pytest.fixture
def stuck():
    """A client that reads nothing, and whose kernel takes in little."""
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.settimeout(SECONDS)
        yield client


def send_unread(stuck, server, request: bytes):
    """Connect, let the server's kernel take in little too, and send."""
    stuck.connect(("127.0.0.1", server.port))
    deadline = time.monotonic() + SECONDS
    while not (found := connections(server)):
        assert time.monotonic() < deadline
    sock = found[0].transport.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    stuck.sendall(request)


def test_a_stream_that_nobody_reads_is_aborted_and_its_connection_dropped(serve, engine, stuck):
    server = serve(write_seconds=0.05)
    engine.by_hand = True
    body = {"prompt": [5], "stream": True, "max_tokens": 250, "logprobs": 20}
    send_unread(stuck, server, raw_request("/v1/completions", json.dumps(body).encode()))
    assert engine.submitted.acquire(timeout=SECONDS)
    for _ in range(240):  # more than the kernels hold
        server.do(engine.step)
        if engine.was_aborted.acquire(timeout=0.02):
            break
    else:
        pytest.fail("the request was never aborted")
    wait_until_dropped(server)


@pytest.mark.parametrize("header", ["Connection: close", "Connection: keep-alive"])
@pytest.mark.parametrize("n", [1, 8])  # less and more than what uvicorn calls a full buffer
def test_a_whole_answer_that_nobody_reads_does_not_keep_its_connection(serve, stuck, header, n):
    server = serve(write_seconds=0.05)
    body = json.dumps({"prompt": [5], "n": n, "max_tokens": 100, "logprobs": 20}).encode()
    send_unread(stuck, server, raw_request("/v1/completions", body, header))
    wait_until_dropped(server)


@pytest.mark.parametrize(
    ("method", "status", "body"), [("GET", 200, b"{}"), ("HEAD", 200, b""), ("GET", 204, b"")]
)
def test_the_header_of_a_whole_answer_goes_out_with_its_body_and_with_nothing_else(
    method, status, body
):
    conn = QuickSends(h11.SERVER)
    for _ in range(2):  # the second one behind the first
        conn.receive_data(f"{method} / HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        while conn.their_state is not h11.DONE:
            conn.next_event()
        length = [] if status == 204 else [("content-length", "2")]
        assert conn.send(h11.Response(status_code=status, headers=length)) == b""
        sent = conn.send(h11.Data(data=body))
        head, _, rest = sent.partition(b"\r\n\r\n")
        assert head.startswith(f"HTTP/1.1 {status}".encode())
        assert rest == body
        assert conn.send(h11.EndOfMessage()) == b""
        conn.start_next_cycle()


def test_the_header_of_a_stream_does_not_wait_for_its_first_piece():
    conn = QuickSends(h11.SERVER)
    conn.receive_data(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    while conn.their_state is not h11.DONE:
        conn.next_event()
    assert conn.send(h11.Response(status_code=200, headers=[])).startswith(b"HTTP/1.1 200")
    assert conn.send(h11.Data(data=b"one")) == b"3\r\none\r\n"
    assert conn.send(h11.EndOfMessage()) == b"0\r\n\r\n"


def test_a_slow_reader_is_not_dropped_while_it_reads():
    timers, size = [], 100
    loop = SimpleNamespace(call_later=lambda *args: timers.append(args) or SimpleNamespace())
    transport = SimpleNamespace(
        get_write_buffer_size=lambda: size, abort=lambda: timers.append("abort")
    )
    connection = Connection.__new__(Connection)
    connection.loop, connection.transport = loop, transport
    connection._expect_reading()
    size = 50
    for _ in range(2):
        _seconds, check, *args = timers.pop()
        check(*args)
        if "abort" not in timers:
            assert len(timers) == 1
    assert timers == ["abort"]


@pytest.mark.parametrize("sent", [b"", b"GET /version HTTP/1.1\r\nHost: x\r\n"])
def test_a_header_that_does_not_come_ends_the_connection(serve, sent):
    with closing(connect(serve(header_seconds=0.05))) as client:
        client.sendall(sent)
        assert ended(client)


def test_half_a_second_header_ends_the_connection_and_silence_may_last_longer(serve):
    with closing(connect(serve(header_seconds=0.05))) as client:
        client.sendall(b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n")
        while b"}" not in client.recv(4096):
            pass
        client.settimeout(0.2)
        with pytest.raises(TimeoutError):
            client.recv(1)
        client.settimeout(SECONDS)
        client.sendall(b"GET")
        assert ended(client)


def test_a_request_that_has_come_may_take_longer_than_its_header(serve, engine):
    engine.by_hand = True
    server = serve(header_seconds=0.05, ping_seconds=0.02)
    with closing(connect(server)) as client:
        body = json.dumps({**CHAT, "stream": True, "max_tokens": 1}).encode()
        client.sendall(raw_request("/v1/chat/completions", body))
        seen = b""
        while seen.count(b": ping") < 6:
            seen += client.recv(4096)
        server.do(engine.step)
        while b"[DONE]" not in seen:
            seen += client.recv(4096)


def test_more_than_a_hundred_header_fields_are_refused(http):
    few = {f"x-{index}": "1" for index in range(80)}
    assert http.get("/version", headers=few).status_code == 200
    many = http.get("/version", headers=few | {f"y-{index}": "1" for index in range(30)})
    assert many.status_code == 431
    assert set(many.json()["error"]) == {"message", "type", "param", "code"}


# -- bodies -------------------------------------------------------------------------------------


def test_arguments_of_a_tool_call_that_are_nested_deep_are_text(http):
    function = {"name": "f", "arguments": "[" * 100_000 + "]" * 100_000}
    call = {"id": "c", "type": "function", "function": function}
    turn = {"role": "assistant", "content": None, "tool_calls": [call]}
    answer = http.post("/v1/chat/completions", json={"messages": [*CHAT["messages"], turn]})
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded", "as any text of the length"


def test_a_body_over_the_limit_is_413_with_or_without_its_length(server, http):
    big = b'{"prompt": "' + b"x" * (4 * 2**20) + b'"}'

    def chunks():
        for start in range(0, len(big), 2**16):
            yield big[start : start + 2**16]

    for content in (big, chunks()):
        answer = http.post("/v1/completions", content=content)
        assert answer.status_code == 413
        assert answer.json()["error"]["code"] == "body_too_large"


def test_a_client_that_asks_first_is_told_at_once_that_its_body_is_too_large(server):
    with closing(connect(server)) as client:
        headers = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999\r\n"
        client.sendall((headers + "Expect: 100-continue\r\n\r\n").encode())
        assert client.recv(100).startswith(b"HTTP/1.1 413")


def test_a_body_with_two_lengths_is_refused_and_the_connection_closed(server):
    with closing(connect(server)) as client:
        client.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
        )
        seen = b""
        while more := client.recv(4096):
            seen += more
    assert seen.startswith(b"HTTP/1.1 400")


# -- routes and errors --------------------------------------------------------------------------


def test_every_answer_has_a_request_id_and_a_good_one_of_the_client_is_kept(http):
    assert (
        http.get("/version").headers["x-request-id"] != http.get("/version").headers["x-request-id"]
    )
    assert (
        http.get("/nowhere", headers={"x-request-id": "abc-1"}).headers["x-request-id"] == "abc-1"
    )
    odd = http.get("/version", headers={"x-request-id": "a b\tc" + "x" * 200})
    assert odd.headers["x-request-id"].startswith("req_")


def test_an_unexpected_exception_tells_nothing(http, engine):
    engine.cache_info = lambda: 1 / 0
    answer = http.get("/cache")
    assert answer.status_code == 500
    assert answer.json()["error"]["message"] == "internal error"
    assert answer.headers["x-request-id"]


def test_keys_open_every_route_and_only_health_needs_none(serve):
    server = serve(api_keys=("k1", "ключ-2"))
    good = [
        {"authorization": "Bearer k1"}, {"authorization": "bearer  k1"}, {"x-api-key": "k1"},
        {"authorization": "BEARER ключ-2".encode()}, {"x-api-key": "ключ-2".encode()},
        {"authorization": "Bearer wrong", "x-api-key": "k1"},
    ]  # fmt: skip
    bad = [
        {}, {"authorization": "k1"}, {"authorization": "Basic k1"}, {"authorization": "Bearer"},
        {"authorization": "Bearer k"}, {"authorization": "Bearer k11"}, {"x-api-key": ""},
        {"x-api-key": b"\xff\xfe"}, {"host": "x/health?", "x-api-key": "no"},
    ]  # fmt: skip
    with httpx.Client(base_url=server.url, timeout=SECONDS) as http:
        assert http.get("/health").status_code == 200
        for method, path in PATHS:
            for headers in bad:
                answer = http.request(method, path, headers=headers)
                assert answer.status_code == 401, (path, headers)
                assert answer.json()["error"]["code"] == "invalid_api_key"
                assert "k1" not in answer.text
            for headers in good:
                assert http.request(method, path, headers=headers).status_code != 401
        assert http.get("/version", headers={"x-api-key": "k1"}).status_code == 200


def test_health_and_readiness_follow_the_engine(server, http, engine):
    assert http.get("/health").status_code == 200
    assert http.get("/ready").status_code == 200
    server.do(engine.die)
    assert http.get("/health").status_code == 503
    answer = http.get("/ready")
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    answer = http.post("/v1/chat/completions", json=CHAT)
    assert answer.status_code == 503
    assert "secret" not in answer.text


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": [[5]] * 11, "n": 4}, "prompt"),
        ("/v1/completions", {"prompt": [[5]] * 41}, "prompt"),
        ("/v1/completions", {"prompt": "x", "n": 5}, "n"),
        ("/v1/chat/completions", {**CHAT, "n": 5}, "n"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_body_of_more_requests_than_an_idle_engine_takes_is_a_400(
    http, engine, path, body, param, stream
):
    limits = engine.limits
    limits.max_running, limits.max_queued = (8, 32) if param == "prompt" else (4, 0)
    answer = http.post(path, json={**body, "stream": stream, "max_tokens": 1})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert not engine.requests
    most = {"prompt": [[5]] * (limits.max_running + limits.max_queued), "max_tokens": 1}
    assert http.post("/v1/completions", json=most).status_code == 200


def test_an_engine_that_drains_is_not_ready_and_says_so_everywhere(server, http, engine):
    engine.by_hand = True
    answers = []
    asker = threading.Thread(
        target=lambda: answers.append(http.post("/v1/chat/completions", json={**CHAT, "seed": 0}))
    )
    asker.start()
    assert engine.submitted.acquire(timeout=SECONDS)
    engine.draining = True
    server.do(engine.step)
    server.do(lambda: engine.abort(engine.requests[0].request_id))
    asker.join(SECONDS)
    for answer in (answers[0], httpx.get(f"{server.url}/ready")):
        assert answer.status_code == 503
        assert answer.json()["error"]["message"] == "the server is shutting down"


def test_while_draining_new_requests_are_503_and_running_ones_finish(server, http, engine):
    engine.by_hand = True
    answers = []

    def ask():
        with httpx.Client(base_url=server.url, timeout=SECONDS) as other:
            answers.append(other.post("/v1/completions", json={"prompt": [5], "max_tokens": 1}))

    asker = threading.Thread(target=ask)
    asker.start()
    assert engine.submitted.acquire(timeout=SECONDS)
    closing_ = asyncio.run_coroutine_threadsafe(server.llm.close(drain_seconds=10), server.loop)
    server.do(lambda: None)
    refused = http.post("/v1/completions", json={"prompt": [5]})
    assert (refused.status_code, http.get("/ready").status_code) == (503, 503)
    assert "retry-after" in refused.headers
    server.do(engine.step)
    asker.join(SECONDS)
    closing_.result(SECONDS)
    assert answers[0].status_code == 200
    assert answers[0].json()["choices"][0]["finish_reason"] == "length"


def test_a_request_given_up_before_it_began_is_a_503(server, http, engine):
    engine.by_hand = True
    answers = []
    asker = threading.Thread(
        target=lambda: answers.append(http.post("/v1/chat/completions", json=CHAT))
    )
    asker.start()
    assert engine.submitted.acquire(timeout=SECONDS)
    server.do(lambda: engine.abort(engine.requests[0].request_id))
    asker.join(SECONDS)
    assert answers[0].status_code == 503


def test_a_request_whose_deadline_cuts_it_short_ends_by_length(server, http, engine):
    engine.by_hand = True
    answers = []
    asker = threading.Thread(
        target=lambda: answers.append(http.post("/v1/chat/completions", json={**CHAT, "seed": 0}))
    )
    asker.start()
    assert engine.submitted.acquire(timeout=SECONDS)
    server.do(engine.step)
    server.do(lambda: engine.abort(engine.requests[0].request_id))
    asker.join(SECONDS)
    assert answers[0].json()["choices"][0]["finish_reason"] == "length"


# -- the small routes ---------------------------------------------------------------------------


def test_tokenize_renders_conversations(http):
    tokens = http.post("/tokenize", json=CHAT).json()["tokens"]
    text = http.post("/detokenize", json={"tokens": tokens}).json()["prompt"]
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_the_cache_is_shown_and_flushed_by_salt_or_whole(http, engine):
    shown = http.get("/cache").json()
    assert set(shown.pop("causes").values()) == {0}
    assert shown == {"total_pages": 10, "free_pages": 999, "evictable_pages": 0}
    assert http.post("/cache/flush").json() == {"flushed_pages": 3}
    http.post("/cache/flush", json={})
    http.post("/cache/flush", json={"cache_salt": "a"})
    assert engine.flushed == [(), (), ("a",)]
    assert http.post("/cache/flush", json={"cache_salt": 5}).status_code == 400


def test_version_and_metrics_are_told(http):
    assert http.get("/version").json() == {"version": foretoken.__version__}
    told = http.get("/metrics").text
    assert told.startswith("foretoken:x 1\n")  # the engine's, then the server's
    assert "foretoken:ready 1.0\n" in told


# -- the event stream by itself -----------------------------------------------------------------


def test_a_client_that_leaves_during_a_send_has_its_events_closed():
    ended = []

    async def events():
        try:
            while True:
                yield b"data: {}\n\n"
        finally:
            ended.append("events")

    async def body():
        sending = asyncio.Event()

        async def send(message):
            if message["type"] == "http.response.body":
                sending.set()
                await asyncio.Event().wait()

        async def receive():
            await sending.wait()
            return {"type": "http.disconnect"}

        await EventStream(events(), close=lambda: ended.append("closed"))({}, receive, send)

    asyncio.run(body())
    assert ended == ["events", "closed"]


def test_a_stream_that_was_never_begun_is_closed_too():
    ended = []

    async def gone_at_once():
        return {"type": "http.disconnect"}

    async def send(message):
        await asyncio.Event().wait()

    async def events():
        yield b""

    stream = EventStream(events(), close=lambda: ended.append("closed"))
    asyncio.run(stream({}, gone_at_once, send))
    assert ended == ["closed"]


def test_a_finished_request_is_freed_without_a_collection_of_garbage():
    freed = []

    async def body():
        async def stays():
            await asyncio.Event().wait()

        async with UnlessGone(stays) as block:
            weakref.finalize(block, freed.append, "block")
            await asyncio.sleep(0)  # the watcher begins
        del block
        await asyncio.sleep(0)  # it is cancelled
        return list(freed)

    gc.disable()
    try:
        assert asyncio.run(body()) == ["block"]
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("path", "body", "most"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}, 2),
        ("/v1/completions", {"prompt": "hi"}, 2),
        ("/v1/responses", {"input": "hi"}, 2),
        ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}, 1),
    ],
)
def test_temperatures_beyond_an_apis_own_are_refused_if_strict_and_no_model_need_be_named(
    serve, say, path, body, most
):
    say("hello")
    lenient, strict = serve().url, serve(strict=True).url
    for url, temperature, status in (
        (lenient, most + 0.5, 200), (strict, most, 200), (strict, most + 0.5, 400),
    ):  # fmt: skip
        answer = httpx.post(f"{url}{path}", json={**body, "temperature": temperature})
        assert answer.status_code == status, answer.text
    assert "temperature" in answer.text


def test_a_server_that_starts_no_replicas_refuses_to_change_them(http):
    for body in (
        {"replicas": 2},
        {"min": 1, "max": 2},
        {"options": {}},
        {"replica": 1},
        {"min": 1},
    ):
        answer = http.post("/replicas", json=body)
        assert answer.status_code == 400, body
    assert "--ray" in http.post("/replicas", json={"replicas": 2}).json()["error"]["message"]


def test_a_number_of_replicas_that_cannot_be_is_unavailable(http, server, monkeypatch):
    async def refuse(least, most):
        raise ForetokenError(f"no room for {most}")

    monkeypatch.setattr(server.llm, "change_replicas", refuse)
    answer = http.post("/replicas", json={"min": 1, "max": 500})
    assert (answer.status_code, answer.json()["error"]["message"]) == (503, "no room for 500")


@pytest.mark.parametrize(
    ("body", "param"), [({"replicas": 9}, "replicas"), ({"min": 1, "max": 9}, "max")]
)
def test_a_number_of_replicas_that_is_refused_is_named_as_the_body_has_it(
    http, server, monkeypatch, body, param
):
    async def refuse(least, most):
        raise InvalidRequest(f"replicas must be at most 2, not {most}", param="replicas")

    monkeypatch.setattr(server.llm, "change_replicas", refuse)
    answer = http.post("/replicas", json=body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["param"], error["message"]) == (param, f"{param} must be at most 2, not 9")
