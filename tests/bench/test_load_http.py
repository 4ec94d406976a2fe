"""HTTP answers out of bytes that are cut anywhere."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from foretoken.bench.load.http import AnswerParser, Failure, Http

CHUNKED = (
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nServer: x\r\n\r\n"
    b"5;extension=1\r\nhello\r\n7\r\n, world\r\n0\r\n\r\n"
)
WITH_LENGTH = b"HTTP/1.1 429 Too Many Requests\r\nContent-Length: 12\r\n\r\nhello, world"
UNTIL_END = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\nhello, world"


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize(("answer", "status"), [(CHUNKED, 200), (WITH_LENGTH, 429)])
def test_an_answer_is_the_same_however_it_was_cut(answer, status, size):
    parser = AnswerParser()
    pieces = [parser.feed(answer[at : at + size]) for at in range(0, len(answer), size)]
    assert b"".join(pieces) == b"hello, world"
    assert (parser.status, parser.done, parser.can_reuse) == (status, True, True)


def test_a_body_without_a_length_ends_with_the_connection():
    parser = AnswerParser()
    assert parser.feed(UNTIL_END) == b"hello, world"
    assert not parser.done
    parser.end()
    assert parser.done
    assert not parser.can_reuse


@pytest.mark.parametrize("length", [0, 10, 60, len(CHUNKED) - 1])
def test_an_answer_that_ends_too_early_is_a_connection_cut(length):
    parser = AnswerParser()
    parser.feed(CHUNKED[:length])
    with pytest.raises(Failure, match="connection cut"):
        parser.end()


@pytest.mark.parametrize("junk", [b"SSH-2.0\r\n\r\n", b"HTTP/1.1 abc\r\n\r\n", b"x" * 70_000])
def test_what_is_no_http_is_named(junk):
    with pytest.raises(Failure, match="invalid HTTP"):
        AnswerParser().feed(junk)


def test_a_chunk_without_a_size_is_no_http():
    with pytest.raises(Failure, match="invalid HTTP: Invalid character in chunk size"):
        AnswerParser().feed(CHUNKED.replace(b"5;extension=1", b"five"))


def test_a_server_that_closes_is_not_asked_again_on_that_connection():
    parser = AnswerParser()
    parser.feed(WITH_LENGTH.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
    assert parser.done
    assert not parser.can_reuse


@pytest.mark.parametrize(
    ("url", "host", "port"),
    [
        ("http://127.0.0.1:8000/v1", "127.0.0.1", 8000),
        ("localhost:9", "localhost", 9),
        ("https://example.org", "example.org", 443),
        ("http://[::1]:80/", "::1", 80),
    ],
)
def test_an_address_may_be_written_in_several_ways(url, host, port):
    http = Http(url)
    assert (http.host, http.port) == (host, port)


@pytest.mark.parametrize(
    ("url", "path"), [("a", "/v1/models"), ("a/x/v1/", "/x/v1/models"), ("a/v3", "/v3/models")]
)
def test_a_version_of_the_address_is_that_of_all_paths(url, path):
    http = Http(url)
    assert http._full("/v1/models") == path
    assert http._full("/health") == path.replace("/v1/models", "/health").replace(
        "/v3/models", "/health"
    )


def test_an_interim_answer_is_not_the_answer():
    parser = AnswerParser()
    assert parser.feed(b"HTTP/1.1 100 Continue\r\nserver: x\r\n\r\n") == b""
    assert (parser.status, parser.done) == (0, False)
    assert parser.feed(WITH_LENGTH) == b"hello, world"
    assert (parser.status, parser.done, parser.can_reuse) == (429, True, True)


@pytest.mark.parametrize("url", ["ftp://x", "http://", "file:///tmp"])
def test_what_is_no_address_is_refused(url):
    with pytest.raises(ValueError, match="not an address"):
        Http(url)


# -- connections --------------------------------------------------------------------------------


def served(answers_per_connection: int, work):
    """Run ``work(http)`` on a server that closes when it is asked once more; its connections."""
    handlers: list[asyncio.Task] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        handlers.append(asyncio.current_task())
        with contextlib.suppress(ConnectionError), contextlib.closing(writer):
            for _ in range(answers_per_connection):
                if not await reader.read(10_000):
                    return
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
            await reader.read(10_000)

    async def inner():
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        http = Http(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        try:
            return await work(http)
        finally:
            http.close()
            await asyncio.gather(*handlers)
            server.close()
            await server.wait_closed()

    return asyncio.run(inner()), len(handlers)


def test_a_kept_connection_that_the_server_closed_is_replaced():
    async def work(http):
        return [await http.get("/") for _ in range(3)]

    assert served(1, work) == ([(200, b"ok")] * 3, 3)
    assert served(3, work) == ([(200, b"ok")] * 3, 1)


def test_a_new_connection_that_is_cut_is_not_tried_again():
    async def work(http):
        with pytest.raises(Failure, match="connection cut"):
            await http.get("/")

    assert served(0, work)[1] == 1
