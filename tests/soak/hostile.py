"""Clients that break the rules: broken HTTP, broken bodies, requests that trickle in."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Sequence

from .answers import PATHS
from .requests import Texts
from .wire import Link, Reply
from .world import LIMIT, World

CHAT, TEXT = PATHS["chat"], PATHS["completions"]
HEADER_SECONDS, BODY_SECONDS = 10.0, 30.0  # what a server waits for a header and a body
SLACK = 5.0
BYTE_SECONDS = 0.4
TOLD_APART = (501, 505)  # a transfer coding or a version of HTTP that nobody knows
PAUSE_SECONDS = 0.02
BIG_BODY = 5 * 2**20

BROKEN_HTTP: Sequence[bytes] = (
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(64)) + b"\r\n\r\n",
    b"GET\r\n\r\n",
    b"GET / HTTP/9.9\r\nhost: a\r\n\r\n",
    b"GET /health HTTP/1.1\r\n\r\n",
    b"GET /health HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n",
    b"GET /health HTTP/1.1\r\nhost: a\r\nx y: 1\r\n\r\n",
    b"GET /health HTTP/1.1\r\nhost: a\r\nx: a\x00b\r\n\r\n",
    b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\nhost: a\r\n\r\n",
    b"GET /health HTTP/1.1\r\nhost: a\r\n" + b"x: 1\r\n" * 200 + b"\r\n",
    b"GET /health HTTP/1.1\r\nhost: a\r\nx: " + b"a" * 70_000 + b"\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: -1\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 99999999999999\r\n\r\n{}",
    b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 2\r\ncontent-length: 3\r\n\r\n{}",
    b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 5\r\n"
    b"transfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n{}\r\n",
    b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ntransfer-encoding: gzip\r\n\r\n{}",
    b"\r\n\r\n\r\n",
    b"\x00" * 1000,
)
BROKEN_JSON: Sequence[bytes] = (
    b"",
    b"{",
    b"null",
    b"[]",
    b'"x"',
    b'{"prompt": "a",}',
    b'{"prompt": "\xff\xfe"}',
    b'{"prompt": "\\ud800"}',
    b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    b'{"prompt": "a", "max_tokens": ' + b"9" * 5000 + b"}",
    b'{"prompt": "a", "temperature": NaN}',
    b'{"prompt": "a", "temperature": 1e999}',
    b'{"prompt": "a", "max_tokens": 0}',
    b'{"prompt": "a", "n": 1000000}',
    b'{"prompt": "a", "n": -1}',
    b'{"prompt": "a", "top_p": 0}',
    b'{"prompt": "a", "logit_bias": {"-1": 5}}',
    b'{"prompt": "a", "logit_bias": {"99999999": 5}}',
    b'{"prompt": [-1, 5]}',
    b'{"prompt": [99999999]}',
    b'{"prompt": [1.5]}',
    b'{"prompt": "a", "stop": [""]}',
    b'{"prompt": "a", "regex": "(((("}',
    b'{"prompt": "a", "json_schema": {"type": "nothing"}}',
    b'{"prompt": "a", "stop_token_ids": [-5]}',
    b'{"prompt": "a", "deadline_ms": -1}',
    b'{"prompt": "a", "priority": 1e30}',
)


async def broken_http(world: World, rng: random.Random) -> None:
    """Bytes that are no request, or one that must not be served."""
    data, began = rng.choice(BROKEN_HTTP), world.phase
    if rng.random() < 0.5:  # past the gate
        data = data.replace(b"host: a\r\n", b"host: a\r\nx-api-key: %b\r\n" % world.key.encode())
    reply = await _raw(world, data)
    _judge_refusal(world, "broken http", reply, began, f"{data[:60]!r}")
    await asyncio.sleep(PAUSE_SECONDS)


async def broken_body(world: World, rng: random.Random) -> None:
    """A body that must be refused by a 4xx."""
    data, began = rng.choice(BROKEN_JSON), world.phase
    path = TEXT if rng.random() < 0.7 else rng.choice(list(PATHS.values()))
    reply = await world.send(world.request("POST", path, data), link=world.kept_link())
    _judge_refusal(world, "broken body", reply, began, f"{path} {data[:60]!r}")
    await asyncio.sleep(PAUSE_SECONDS)


async def oversized(world: World, rng: random.Random) -> None:
    """Too many bytes, or a prompt that can never fit."""
    began, which = world.phase, rng.choice(["body", "prompt", "ids", "path", "method"])
    match which:
        case "body":
            data, expected = b'{"prompt": "' + b"a" * BIG_BODY + b'"}', 413
        case "prompt":
            data, expected = b'{"prompt": "' + _words(world.texts, 200_000) + b'"}', 400
        case "ids":
            data, expected = b'{"prompt": [' + b"5," * 50_000 + b"5]}", 400
        case _:
            data, expected = b"{}", 404 if which == "path" else 405
    method = "PUT" if which == "method" else "POST"
    path = "/v1/nothing" if which == "path" else TEXT
    reply = await world.send(world.request(method, path, data))
    if reply.ended == "whole" and began == world.phase == "up":
        world.book.answer("oversized", str(reply.status))
        told = f"{which}: {reply.status} {reply.body[:200]!r}"
        world.book.check("status", reply.status == expected, told)
    else:
        _judge_refusal(world, "oversized", reply, began, which)
    await asyncio.sleep(0.2)


def _words(texts: Texts, length: int) -> bytes:
    """Text as JSON has it; quotes would need more care than they are worth."""
    text = texts.cut("too long", length // 4) * 4
    return text.replace("\\", "/").replace('"', "'").replace("\n", " ").encode("ascii", "replace")


async def _raw(world: World, data: bytes) -> Reply:
    """Send bytes, read what comes within the header's time."""
    try:
        link = await Link.open(world.address)
    except OSError as error:
        return Reply("refused", why=str(error))
    try:
        async with asyncio.timeout(LIMIT):
            with contextlib.suppress(OSError):
                await link.send(data)
            return await link.reply()
    except TimeoutError:
        return Reply("hang", why=f"no end within {LIMIT:g} s")
    finally:
        link.close()


def _judge_refusal(world: World, who: str, reply: Reply, began: str, what: str) -> None:
    """Refused by a 4xx or by closing; never served, never an error of the server's own."""
    book, status = world.book, reply.status
    book.answer(who, str(status or reply.ended))
    told = f"{who}, {what}: {reply.ended} {status} {reply.body[:200]!r}"
    book.check("hang", reply.ended != "hang", told)
    if began == world.phase == "up" and status:
        book.check("5xx", status < 500 or status in TOLD_APART, told)
        book.check("status", status >= 400, told)


# -- requests that trickle in -------------------------------------------------------------------


async def slow_header(world: World, rng: random.Random) -> None:
    """A header, byte by byte: the connection is closed when its time is over."""
    head = world.request("GET", "/v1/models") + b"x: " + b"a" * rng.randrange(200, 400)
    await _trickle(world, "slow header", b"", head, HEADER_SECONDS)


async def slow_body(world: World, rng: random.Random) -> None:
    """A body, byte by byte: 408 when its time is over."""
    request = world.request("POST", CHAT, {"messages": [], "x": "a" * rng.randrange(300, 600)})
    head, _, body = request.partition(b"\r\n\r\n")
    await _trickle(world, "slow body", head + b"\r\n\r\n", body, BODY_SECONDS)


async def late_body(world: World, rng: random.Random) -> None:
    """A body in some pieces, but in time: it is served like any other."""
    known, began = rng.choice(world.canaries), world.phase
    request = world.request("POST", known.path, known.varied(rng, stream=False))
    try:
        link = await Link.open(world.address)
    except OSError as error:
        world.judge("late body", Reply("refused", why=str(error)), began)
        return
    try:
        async with asyncio.timeout(LIMIT):
            with contextlib.suppress(OSError):
                await link.send(request, piece=len(request) // 8, pause=0.1)
            reply = await link.reply()
    except TimeoutError:
        reply = Reply("hang")
    finally:
        link.close()
    world.judge("late body", reply, began)


async def _trickle(world: World, who: str, head: bytes, rest: bytes, seconds: float) -> None:
    """One byte after the other, until it is answered, closed, or the wave is over."""
    most = min(world.left, seconds + SLACK)
    try:
        link = await Link.open(world.address)
    except OSError as error:
        world.judge(who, Reply("refused", why=str(error)), world.phase)
        return
    answer = asyncio.create_task(link.reply())
    sending = asyncio.create_task(_send_slowly(link, head, rest))
    try:
        await asyncio.wait([answer], timeout=most)
        closed = answer.done()
        world.book.answer(who, f"closed {answer.result().status or ''}" if closed else "left")
        if most > seconds + SLACK / 2:
            world.book.check("deadlines", closed, f"{who}: open after {most:.0f} s")
    finally:
        link.close()
        sending.cancel()
        answer.cancel()
        await asyncio.gather(sending, answer, return_exceptions=True)


async def _send_slowly(link: Link, head: bytes, rest: bytes) -> None:
    with contextlib.suppress(OSError):
        await link.send(head)
        await link.send(rest, piece=1, pause=BYTE_SECONDS)
