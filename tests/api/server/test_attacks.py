"""Attacks of a hostile client on a real server, socket by socket.

Each deadline is a second, so that those tests wait on their socket about that long.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import pytest

from support.raw_http import SECONDS, RawClient, head, post
from support.server_process import running

FLAGS = [
    "--draft", "none", "--threads", "1", "--api-key", "k", "--api-key", "clé", "--admin-key", "a",
    "--header-seconds", "1", "--body-seconds", "1", "--idle-seconds", "1", "--write-seconds", "1",
    "--max-connections", "24", "--max-body-bytes", "64KiB",
]  # fmt: skip
GOOD = head()  # answered with 200
LISTENING = "0A"  # as the kernel's table of sockets has it
ERROR_FIELDS = {"message", "type", "param", "code"}


@pytest.fixture(scope="module")
def server():
    with running(FLAGS) as server:
        yield server


@pytest.fixture
def client(server):
    with RawClient(server.url) as client:
        yield client


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def has_ended_alone(client, status) -> bool:
    """Whether there is one answer of this status, and the connection is closed behind it."""
    answer = client.answer()
    assert answer.status == status, answer.body
    assert set(answer.json["error"]) == ERROR_FIELDS
    return client.rest() == b""


# -- who may pass -------------------------------------------------------------------------------

CLOSED_TARGETS = [
    "/v1/models", "//v1/models", "/v1/models/foretoken-builtin", "/metrics", "/ready", "/ui/events",
    "/version", "/openapi.json", "/cache", "/cache/explain", "/debug/audit", "/debug/", "/nowhere",
    "/health/", "//health", "/./health", "/v1/../health", "/v1/%2e%2e/health", "/%2e%2e/health",
    "/health/..", "/health%00", "/health%20", "/health%2f", "/%2fhealth", "/health;x", "/HEALTH",
    "/Health", "/health%3f", "/version/../health", "/version?/health", "/version#/health",
    "http://x/health/", "http://x/version", "http://x/v1/models?/health", "//x/health",
    "http:/health", "ftp://x/health", "http://x/http://x/health", "*",
]  # fmt: skip
FORGED = [
    "Host: x/health", "X-Original-URL: /health", "X-Rewrite-URL: /health",
    "X-Forwarded-Path: /health", "X-HTTP-Method-Override: GET", "X-Forwarded-For: 127.0.0.1",
    "Authorization: Bearer",
    "Authorization: Basic az==", "Authorization: k", "Authorization: Bearer a b", "X-Api-Key: kk",
    "X-Api-Key: K", "X-Api-Key: cle", "Cookie: key=k",
]  # fmt: skip


@pytest.mark.parametrize("method", ["GET", "POST", "HEAD", "DELETE", "OPTIONS"])
def test_without_a_key_nothing_is_served_but_health_and_the_page(client, method):
    for target in CLOSED_TARGETS:
        client.send(head(target, "Content-Length: 0", method=method, key=""))
        assert client.answer(is_head=method == "HEAD").status == 401, target


def test_health_needs_no_key_however_it_is_written(client):
    for target in ("/health", "/health?x=1", "/%68ealth", "http://x/health", "HTTPS://x/health"):
        assert client.send(head(target, key="")).answer().status == 200
    assert client.send(head("/health", method="POST", key="")).answer().status == 405


def test_the_page_needs_no_key_and_takes_nothing(client):
    assert client.send(head("/", key="")).answer().status == 200
    assert client.send(head("/", method="POST", key="")).answer().status == 405


@pytest.mark.parametrize("line", FORGED)
def test_no_other_field_stands_for_the_key(client, line):
    lines = [] if line.startswith("Host") else ["Host: x"]
    request = "\r\n".join(["GET /version HTTP/1.1", *lines, line, "", ""])
    assert client.send(request.encode()).answer().status == 401


@pytest.mark.parametrize(
    ("lines", "status"),
    [
        (["X-Api-Key: k"], 200), (["Authorization: Bearer k"], 200), (["X-Api-Key: clé"], 200),
        (["Authorization: Bearer k", "X-Api-Key: no"], 200), (["X-Api-Key: a"], 200),
        (["Authorization: Bearer no", "X-Api-Key: k"], 200),
        (["Authorization: Bearer no", "X-Api-Key: no"], 401), (["X-Api-Key: \xff"], 401),
        (["X-Api-Key: " + "k" * 8000], 401),
    ],
    ids=range(9),
)  # fmt: skip
def test_one_right_key_of_the_two_that_may_be_shown_is_enough(client, lines, status):
    assert client.send(head("/version", *lines, key="")).answer().status == status


def test_operators_routes_and_a_flush_of_everything_need_the_admin_key(client):
    def flush(body, key):
        return client.send(post("/cache/flush", body, key=key)).answer()

    refused = flush(b"", "k")
    assert (refused.status, refused.json["error"]["code"]) == (403, "admin_key_needed")
    assert flush(b"{}", "k").status == 403
    assert flush(b'{"cache_salt": "mine"}', "k").status == 200
    assert flush(b"", "a").status == 200
    for target in ("/cache", "/debug/audit", "/debug/nothing"):
        assert client.send(head(target, key="k")).answer().status == 403
        assert client.send(head(target, key="a")).answer().status != 403


# -- what is no HTTP, or two messages in one ----------------------------------------------------

CHUNKED = "Transfer-Encoding: chunked"
NO_CHUNKS = b"0\r\n\r\n"  # read as chunks nothing would be wrong
MALFORMED = {
    "both lengths": (head("/version", "Content-Length: 5", CHUNKED) + NO_CHUNKS, 400),
    "both lengths, the other order": (
        head("/version", CHUNKED, "Content-Length: 5") + NO_CHUNKS, 400,
    ),
    "two lengths": (post("/tokenize", b"{}", "Content-Length: 3"), 400),
    "two lengths in one": (head("/tokenize", "Content-Length: 2, 3"), 400),
    "a negative length": (head("/tokenize", "Content-Length: -1"), 400),
    "a signed length": (head("/tokenize", "Content-Length: +2"), 400),
    "a hexadecimal length": (head("/tokenize", "Content-Length: 0x2"), 400),
    "a length of words": (head("/tokenize", "Content-Length: 2 2"), 400),
    "a huge length": (head("/tokenize", "Content-Length: " + "9" * 100), 400),
    "an unknown coding": (head("/tokenize", "Transfer-Encoding: gzip"), 501),
    "two codings": (head("/tokenize", "Transfer-Encoding: gzip, chunked"), 501),
    "a coding with a tab": (head("/tokenize", "Transfer-Encoding: \x0bchunked"), 400),
    "chunks in HTTP/1.0": (
        head("/version", CHUNKED).replace(b"/1.1", b"/1.0", 1) + NO_CHUNKS, 400,
    ),
    "a chunk of no size": (head("/tokenize", CHUNKED, method="POST") + b"zz\r\n", 400),
    "a negative chunk": (head("/tokenize", CHUNKED, method="POST") + b"-1\r\n", 400),
    "an endless chunk": (head("/tokenize", CHUNKED, method="POST") + b"f" * 40 + b"\r\n", 400),
    "a chunk that goes on": (head("/tokenize", CHUNKED, method="POST") + b"2\r\n{}xx0\r\n", 400),
    "a bare line feed in chunks": (head("/tokenize", CHUNKED, method="POST") + b"2\n{}\n0\n", 400),
    "NUL in a value": (head("/version", "X-A: a\0b"), 400),
    "NUL in a name": (head("/version", "X\0A: b"), 400),
    "a bare carriage return": (head("/version", "X-A: a\rX-B: b"), 400),
    "a space before the colon": (head("/version", "Transfer-Encoding : chunked"), 400),
    "no colon": (head("/version", "X-A"), 400),
    "no name": (head("/version", ": x"), 400),
    "a folded first line": (GOOD.replace(b"Host", b" Host", 1), 400),
    "no host": (b"GET /version HTTP/1.1\r\n\r\n", 400),
    "two hosts": (head("/version", "Host: y"), 400),
    "a space in the target": (head("/ver sion"), 400),
    "a control character in the target": (head("/ver\x01sion"), 400),
    "a letter beyond ASCII in the target": (head("/versión"), 400),
    "HTTP/2 at once": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505),
    "HTTP/9": (GOOD.replace(b"/1.1", b"/9.9", 1), 505),
    "TLS": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400),
    "no request line": (b"\r\n\r\n", 400),
}  # fmt: skip


@pytest.mark.parametrize(("data", "status"), MALFORMED.values(), ids=MALFORMED)
def test_what_is_malformed_is_refused_and_nothing_behind_it_is_served(client, data, status):
    assert has_ended_alone(client.send(data + GOOD), status)


def test_a_message_that_is_odd_and_legal_is_read_as_one(client):
    odd = [
        head("/version", "X-A: 1", " Content-Length: 50"),  # folded: a part of the value above
        GOOD.replace(b"\r\n", b"\n"),
        post("/version", b"GET /nowhere HTTP/1.1\r\n\r\n"),
        head("/version", CHUNKED) + b"3;x=y\r\nabc\r\n0\r\nX-Trailer: 1\r\n\r\n",
        post("/version", b"{}", "Content-Length: 2"),
    ]
    for data in odd:
        statuses = [client.send(data + GOOD).answer().status, client.answer().status]
        assert statuses in ([200, 200], [405, 200]), data


def test_a_body_that_breaks_off_is_refused_in_the_dialect_of_its_path_and_counted(server):
    counted = 'http_requests_total{method="POST",route="/v1/messages",status="400"}'
    before = sample(server, counted)
    broken = head("/v1/messages", CHUNKED, "X-Request-Id: r1", method="POST")
    for sent in ([broken + b"zz\r\n"], [broken + chunk(b"{"), b"zz\r\n"]):
        with RawClient(server.url) as client:
            for part in sent:
                client.send(part)
                sample(server, "ready")  # it has been read
            answer = client.answer()
            assert (answer.status, answer.json["type"]) == (400, "error")
            assert {answer.headers["x-request-id"], answer.headers["request-id"]} == {"r1"}
            assert answer.json["request_id"] == "r1"
            assert client.rest() == b""
    assert sample(server, counted) == before + 2
    assert sample(server, 'request_refusals_total{reason="invalid"}') >= 2


def sample(server, name: str) -> float:
    """One sample of /metrics; 0 where it is not there yet."""
    with RawClient(server.url) as client:
        text = client.send(head("/metrics")).answer().body.decode()
    found = [line.split()[1] for line in text.splitlines() if line.startswith(f"foretoken:{name} ")]
    return float(found[0]) if found else 0.0


@pytest.mark.parametrize(
    ("lines", "named"),
    [
        ([f"X-A: {'a' * 70_000}"], "--max-header-bytes"),
        ([f"X-{index}: {'a' * 1000}" for index in range(70)], "--max-header-bytes"),
        ([f"X-{index}: 1" for index in range(101)], "--max-header-fields"),
    ],
)
def test_a_header_over_a_limit_is_a_431_that_names_it(client, lines, named):
    answer = client.send(head("/version", *lines)).answer()
    assert answer.status == 431
    assert named in answer.message


def test_a_target_over_the_limit_is_a_431(client):
    assert client.send(head("/" + "a" * 70_000)).answer().status == 431


def test_a_header_that_never_ends_is_refused_before_it_fills_the_memory(client):
    client.send(b"GET / HTTP/1.1\r\n")
    for _ in range(64):
        client.send(b"X-A: " + b"a" * 2**15 + b"\r\n")
    assert client.rest().startswith(b"HTTP/1.1 431 ")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/embeddings"])
def test_a_gigabyte_of_base64_is_refused_at_its_header(client, path):
    """Nothing of it is waited for, nor decoded."""
    image = b'{"messages": [{"role": "user", "content": "data:image/png;base64,'
    client.send(head(path, f"Content-Length: {2**30}", method="POST") + image)
    answer = client.answer()
    assert answer.status == 413
    assert "--max-body-bytes" in answer.json["error"]["message"]


DEEP = {
    "lists": b'{"messages": ' + b"[" * 30_000 + b"]" * 30_000 + b"}",
    "objects": b'{"messages": ' + b'{"a":' * 9000 + b"1" + b"}" * 9000 + b"}",
    "lists without an end": b'{"input": ' + b"[" * 60_000,
    "a schema": b'{"messages": [], "tools": [{"type": "function", "function": {"name": "f", '
    b'"parameters": ' + b'{"items":' * 6000 + b"{}" + b"}" * 6000 + b"}}]}",
    "a part of a message": b'{"messages": [{"role": "user", "content": [{"type": "image_url", '
    b'"image_url": ' + b'{"url":' * 7000 + b"1" + b"}" * 7000 + b"}]}]}",
}


@pytest.mark.parametrize("body", DEEP.values(), ids=DEEP)
def test_deep_json_is_refused_and_the_next_request_is_served(client, body):
    for path in ("/v1/chat/completions", "/v1/messages", "/v1/responses", "/v1/embeddings",
                 "/v1/rerank", "/v1/score", "/tokenize"):  # fmt: skip
        assert client.send(post(path, body) + GOOD).answer().status == 400, path
        assert client.answer().status == 200


# -- many messages on one connection ------------------------------------------------------------


def test_pipelined_requests_are_answered_in_their_order(client):
    names = [f"r{index}" for index in range(20)]
    client.send(b"".join(head("/version", f"X-Request-Id: {name}") for name in names))
    assert [client.answer().headers["x-request-id"] for _ in names] == names


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (post("/tokenize", b"{"), 400), (post("/tokenize", b"[]"), 400),
        (post("/tokenize", b'{"prompt": "x"}', key="no"), 401),
        (post("/tokenize", b"x" * 70_000), 413), (post("/nowhere", b"x" * 70_000), 404),
        (head("/tokenize", CHUNKED, method="POST") + chunk(b"x" * 70_000) + chunk(b""), 413),
        (post("/version", b"GET /x HTTP/1.1\r\n\r\n"), 405),
    ],
    ids=range(7),
)  # fmt: skip
def test_a_request_behind_a_refused_one_is_read_from_where_that_one_ends(client, data, status):
    client.send(data + GOOD)
    assert (client.answer().status, client.answer().status) == (status, 200)


def test_http_1_0_is_answered_and_closed(client):
    client.send(GOOD.replace(b"/1.1", b"/1.0", 1) + GOOD)
    assert client.answer().status == 200
    assert client.rest() == b""


def test_who_asks_before_it_sends_is_told_to_or_refused(server):
    expects = ("Content-Length: 15", "Expect: 100-continue")
    with RawClient(server.url) as client:
        client.send(head("/tokenize", *expects, method="POST"))
        assert client.answer().status == 100
        assert client.send(b'{"prompt": "x"}' + GOOD).answer().status == 200
        assert client.answer().status == 200
    for refused, status in (
        (head("/tokenize", *expects, method="POST", key=""), 401),
        (head("/tokenize", "Content-Length: 70000", expects[1], method="POST"), 413),
    ):
        with RawClient(server.url) as client:
            assert client.send(refused).answer().status == status


@pytest.mark.parametrize(
    "lines",
    [
        ["Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABk"],
        ["Connection: upgrade", "Upgrade: websocket", "Sec-WebSocket-Key: eA=="],
        ["Connection: upgrade"],
    ],
)
def test_an_upgrade_is_passed_over(client, lines):
    client.send(head("/version", *lines) + GOOD)
    assert (client.answer().status, client.answer().status) == (200, 200)
    assert client.send(head("/version", *lines, key="")).answer().status == 401


# -- clients that owe something -----------------------------------------------------------------


@pytest.mark.parametrize("sent", [GOOD[:-2], b"G", b"GET /version HTTP/1.1\r\nX-A: "])
def test_half_a_header_is_a_408_at_its_deadline(client, sent):
    client.send(sent)
    answer = client.answer()
    assert answer.status == 408
    assert "--header-seconds" in answer.message
    assert client.rest() == b""


def test_a_header_that_trickles_has_the_same_deadline_as_one_that_stops(client):
    client.socket.settimeout(0.05)
    began, sent = time.monotonic(), 0
    client.send(b"GET / HTTP/1.1\r\nX-A: ")
    while time.monotonic() < began + SECONDS:
        client.send(b"a")
        sent += 1
        try:
            if client.answer().status == 408:
                break
        except TimeoutError:
            continue
    assert 1 < sent < 200


def test_a_connection_without_a_word_is_closed(client):
    assert client.rest() == b""


def test_a_connection_that_is_idle_behind_its_answer_is_closed(client):
    assert client.send(GOOD).answer().status == 200
    assert client.rest() == b""


@pytest.mark.parametrize("key", ["", "k"])
@pytest.mark.parametrize(
    ("lines", "body"), [(["Content-Length: 2"], b"{}"), ([CHUNKED], b"2\r\n{}\r\n0\r\n\r\n")]
)
def test_nor_may_a_connection_be_idle_behind_a_body_that_came_after_its_answer(
    client, key, lines, body
):
    client.send(head("/nowhere", *lines, method="POST", key=key))
    assert client.answer().status == (404 if key else 401)
    client.send(body)
    assert client.rest() == b""


@pytest.mark.parametrize("lines", [["Content-Length: 50"], [CHUNKED]])
def test_a_body_that_does_not_come_is_a_408_at_its_deadline(client, lines):
    answer = client.send(head("/tokenize", *lines, method="POST")).answer()
    assert answer.status == 408
    assert "--body-seconds" in answer.message
    assert client.rest() == b""


def test_the_rest_of_a_body_that_nobody_reads_has_a_deadline_too(client):
    client.send(head("/tokenize", "Content-Length: 50", method="POST", key=""))
    assert client.answer().status == 401
    client.send(b"x")
    assert client.rest() == b""


def test_a_body_behind_one_that_nobody_read_has_a_time_of_its_own(client):
    client.send(head("/tokenize", "Content-Length: 2", method="POST", key=""))
    assert client.answer().status == 401
    client.send(b"{}" + post("/tokenize", b'{"prompt": "x"}')[:-1])
    assert client.answer().status == 408  # the time of the first, which ends before, is no more


@pytest.mark.parametrize("sent", [b"no HTTP\r\n\r\n", head("/tokenize", "Content-Length: x")])
def test_who_was_refused_and_does_not_close_is_dropped(server, sent):
    with RawClient(server.url) as client:
        local = client.socket.getsockname()[1]
        assert client.send(sent).answer().status == 400
        deadline = time.monotonic() + SECONDS
        while num_open(server, local):
            assert time.monotonic() < deadline


def test_a_client_that_reads_nothing_is_dropped(server):
    with RawClient(server.url, receive_buffer=4096) as client:
        local = client.socket.getsockname()[1]
        client.send(head("/openapi.json") * 200)
        deadline = time.monotonic() + SECONDS
        while num_open(server, local):
            assert time.monotonic() < deadline
            with RawClient(server.url) as other:  # served all the while
                assert other.send(head("/health", key="")).answer().status == 200


def num_open(server, client_port: int | None = None) -> int:
    """Connections that the server's process holds, of all clients or of one."""
    held = set()
    for entry in Path(f"/proc/{server.process.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            held.add(str(entry.readlink()))
    table = Path(f"/proc/{server.process.pid}/net/tcp").read_text().splitlines()[1:]
    here = f":{int(server.url.rpartition(':')[2]):04X}"
    there = "" if client_port is None else f":{client_port:04X}"
    return sum(
        local.endswith(here) and remote.endswith(there) and f"socket:[{inode}]" in held
        for _, local, remote, state, *_, inode in (line.split()[:10] for line in table)
        if state != LISTENING
    )


def test_beyond_the_limit_on_connections_there_is_a_503_at_once_and_health_is_answered():
    """On a server that closes no idle connection meanwhile, however slow the machine is."""
    flags = ["--draft", "none", "--threads", "1", "--api-key", "k", "--max-connections", "24"]
    with running(flags) as patient, contextlib.ExitStack() as clients:
        held = [clients.enter_context(RawClient(patient.url)) for _ in range(24)]
        assert [client.send(GOOD).answer().status for client in held] == [200] * 24
        beyond = clients.enter_context(RawClient(patient.url))
        answer = beyond.send(GOOD).answer()
        assert (answer.status, answer.headers["retry-after"]) == (503, "1")
        assert "--max-connections" in answer.message
        assert answer.headers["x-request-id"].startswith("req_")
        assert beyond.rest() == b""
        balancer = clients.enter_context(RawClient(patient.url))
        answer = balancer.send(head("/health", key="")).answer()
        assert (answer.status, answer.headers["connection"]) == (200, "close")
        assert balancer.rest() == b""
        assert held[0].send(GOOD).answer().status == 200
        clients.close()
        wait_until_free(patient)
        assert sample(patient, 'request_refusals_total{reason="connections"}') == 1


def wait_until_free(server):
    deadline = time.monotonic() + SECONDS
    while num_open(server):
        assert time.monotonic() < deadline


def test_after_all_that_the_server_lives_and_lets_go_of_every_connection(server):
    wait_until_free(server)
    with RawClient(server.url) as client:
        assert client.send(GOOD).answer().status == 200
    assert server.stop() == 0
