"""Clients that mean well, and those that leave, read slowly, or come all at once.

Each is one coroutine that does its thing once; a wave runs it again and again.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Mapping
from typing import Any

import msgspec

from .answers import PATHS, Stream, read_whole
from .requests import TENANTS, Known, long_prompt
from .wire import OK, Link, Pace, Reply, request_bytes
from .world import LIMIT, UNAVAILABLE, World

BURST = 40
SLOW_SECONDS, DEAF_SECONDS = 30.0, 45.0  # beyond what a server should wait for a deaf client
NIBBLE = 16  # bytes
DEAF_CHOICES = 6  # some MiB: a kernel may well take one for a client that reads nothing
LEAVER_SECONDS = 0.5  # at most, until it comes again: a storm, but not more than can be accepted


async def steady(world: World, rng: random.Random) -> None:
    """A plain request of some tenant."""
    await world.ask_known("steady", rng.choice(world.plain), rng)


async def feature(world: World, rng: random.Random) -> None:
    """A form, a call, several choices, another dialect."""
    await world.ask_known("feature", rng.choice(world.featured), rng)


async def wordy(world: World, rng: random.Random) -> None:
    """A long answer: the pages that it needs are not all there when it begins."""
    await world.ask_known("wordy", rng.choice(world.wordy), rng)


async def burst(world: World, rng: random.Random) -> None:
    """More requests at once than may wait: some are answered, the others told when to return."""
    seeds = [random.Random(rng.random()) for _ in range(BURST)]
    asked = (world.ask_known("burst", own.choice(world.plain), own) for own in seeds)
    await asyncio.gather(*asked)


async def long(world: World, rng: random.Random) -> None:
    """A long prompt of its own; what was cached has to go."""
    body, began = long_prompt(world.texts, rng), world.phase
    reply = await world.send(world.request("POST", PATHS["completions"], body))
    if world.judge("long", reply, began) and reply.ended == "whole":
        told = read_whole("completions", reply.body)
        right = told.fault() is None and told.completion_tokens <= body["max_tokens"]
        world.book.check("I8", right, f"long: {told.completion_tokens} tokens, {told.fault()}")


async def hurried(world: World, rng: random.Random) -> None:
    """A deadline that may pass while it waits or while it runs."""
    known = rng.choice(world.wordy)
    extra = {"deadline_ms": rng.choice([0, 1, 5, 20, 80, 300]), "speculation": "auto"}
    began, stream = world.phase, Stream(known.dialect)
    body = {**known.varied(rng, stream=True), **extra}
    reply = await world.send(world.request("POST", known.path, body), on_body=stream.feed)
    if world.judge("hurried", reply, began, UNAVAILABLE):
        world.judge_end("hurried", known, reply, stream.told)
        world.judge_beginning("hurried", known, stream.told)
        world.judge_length("hurried", known, stream.told)


async def stored(world: World, _rng: random.Random) -> None:
    """An answer that is kept, read again, deleted, and then no longer there."""
    body = {"input": world.texts.prompt(43), "store": True, "max_output_tokens": 12}
    began = world.phase
    reply = await world.send(world.request("POST", PATHS["responses"], body))
    if not world.judge("stored", reply, began) or reply.ended != "whole":
        return
    path = f"{PATHS['responses']}/{msgspec.json.decode(reply.body)['id']}"
    for method in ("GET", "DELETE", "GET"):
        began = world.phase
        world.judge("stored", await world.send(world.request(method, path)), began, 404)


# -- those that leave ---------------------------------------------------------------------------


async def leaver(world: World, rng: random.Random) -> None:
    """Leaves in the middle of its request, before the first byte, or midway."""
    known, began = rng.choice(world.plain), world.phase
    request = world.request("POST", known.path, known.varied(rng, stream=rng.random() < 0.8))
    how = rng.choice(["in the request", "before the first byte", "soon", "midway"])
    try:
        link = await Link.open(world.address)
    except OSError as error:
        world.judge("leaver", Reply("refused", why=str(error)), began)
        return
    try:
        with contextlib.suppress(OSError):
            await link.send(request[: len(request) // 2] if how == "in the request" else request)
            if how in ("soon", "midway"):
                await _listen(world, rng, link, known, 0.02 if how == "soon" else 0.2)
        world.book.answer("leaver", how)
    finally:
        link.close()
    await asyncio.sleep(rng.random() * LEAVER_SECONDS)


async def _listen(world: World, rng: random.Random, link: Link, known: Known, most: float) -> None:
    stream = Stream(known.dialect)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(rng.random() * most):
            await link.reply(stream.feed)
    if stream.told.num_terminals == 0 and not stream.told.error:
        world.judge_beginning("leaver", known, stream.told)


# -- those that read slowly ---------------------------------------------------------------------


async def slow_reader(world: World, rng: random.Random) -> None:
    """Reads a few bytes a second for a while; the answer is whole all the same."""
    known, began = rng.choice(world.wordy), world.phase
    pace = Pace(NIBBLE, 0.25, asyncio.get_running_loop().time() + min(SLOW_SECONDS, world.left))
    body, stream = known.varied(rng, stream=True), Stream(known.dialect)
    reply = await _patient(world, known, body, stream, 0.0, pace)
    if world.judge("slow reader", reply, began):
        world.judge_end("slow reader", known, reply, stream.told)
        if reply.ended == "whole" and stream.told.error is None:
            world.judge_words("slow reader", known, stream.told)


async def deaf(world: World, rng: random.Random) -> None:
    """Asks for more than the kernel's buffers hold and reads nothing: it may be dropped."""
    known, began = rng.choice(world.wordy), world.phase
    is_chat, stream = known.dialect == "chat", Stream(known.dialect)
    much = {"logprobs": True, "top_logprobs": 20} if is_chat else {"logprobs": 20}
    body = {**known.varied(rng, stream=True), **much, "n": DEAF_CHOICES}
    reply = await _patient(world, known, body, stream, min(DEAF_SECONDS, world.left), None)
    if reply.ended == "cut" and reply.status == OK:
        world.book.answer("deaf", "dropped")
    elif world.judge("deaf", reply, began):
        world.judge_end("deaf", known, reply, stream.told)


async def _patient(
    world: World,
    known: Known,
    body: Mapping[str, Any],
    stream: Stream,
    wait: float,
    pace: Pace | None,
) -> Reply:
    """Ask on a connection with small buffers, wait, then read at that pace."""
    try:
        link = await Link.open(world.address, small=True)
    except OSError as error:
        return Reply("refused", why=str(error))
    try:
        async with asyncio.timeout(LIMIT):
            await link.send(world.request("POST", known.path, body))
            await asyncio.sleep(wait)
            return await link.reply(stream.feed, pace)
    except OSError as error:
        return Reply("cut", why=str(error))
    except TimeoutError:
        return Reply("hang", why=f"no end within {LIMIT:g} s")
    finally:
        link.close()


# -- those that look after it -------------------------------------------------------------------


async def operator(world: World, rng: random.Random) -> None:
    """Counts tokens, asks after the cache, branches, and empties the cache now and then."""
    text = world.texts.prompt(rng.randrange(30))
    turns = [{"role": "user", "content": text}]
    requests: list[tuple[str, str, object]] = [
        ("GET", "/cache", None),
        ("GET", "/v1/models", None),
        ("GET", "/version", None),
        ("POST", "/tokenize", {"prompt": text}),
        ("POST", "/v1/messages/count_tokens", {"messages": turns}),
        ("POST", "/v1/responses/input_tokens", {"input": text}),
        ("POST", "/cache/flush", {"cache_salt": rng.choice(TENANTS)}),
        ("POST", "/cache/flush", {"prefix": text, "cache_salt": rng.choice(TENANTS)}),
    ]
    if rng.random() < 0.1:
        requests.append(("POST", "/cache/flush", None))
    method, path, body = rng.choice(requests)
    began = world.phase
    world.judge("operator", await world.send(world.request(method, path, body)), began)
    await asyncio.sleep(rng.random() * 0.1)


async def stranger(world: World, rng: random.Random) -> None:
    """Has no key, or a wrong one."""
    key = rng.choice([None, "wrong", world.key[:-1]])
    path, began = rng.choice(["/v1/models", "/metrics", "/cache", "/debug/audit"]), world.phase
    reply = await world.send(request_bytes("GET", path, key=key))
    if reply.ended == "whole" and world.phase == "up" == began:
        world.book.answer("stranger", str(reply.status))
        world.book.check("status", reply.status == 401, f"{path} without a key: {reply.status}")
    await asyncio.sleep(0.02)
