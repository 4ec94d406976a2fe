"""A replica that lies, floods or sends garbage is dropped in one line; the front serves on."""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from foretoken.api.cluster.front.roster import REFUSAL_SECONDS
from foretoken.api.cluster.front.routing import Route
from foretoken.api.cluster.wire import transport
from foretoken.api.cluster.wire.messages import (
    Answer,
    Beat,
    FromReplica,
    Load,
    PageNews,
    Step,
    encode,
)
from foretoken.api.cluster.wire.transport import Quota
from foretoken.core.errors import InvalidRequest
from foretoken.core.interface.output import TokenLogprob
from foretoken.core.interface.request import FinishReason
from support.scripted_replica import (
    ScriptedReplica,
    front_of,
    greeting,
    read,
    replicas_of,
    request,
    run,
    step,
)

LOAD = Load(running=0, waiting=0, kv_usage=0.0)
MANY_KEYS = b"".join(number.to_bytes(8, "big") for number in range(65))
LIES: dict[str, FromReplica] = {
    "outside the vocabulary": step("r", [100]),
    "request that it does not serve": step("unknown", [10]),
    "the replica sent more tokens than the request may have": step("r", [10] * 9),
    "do not match its tokens": step("r", [10], logprobs=[TokenLogprob(10, -1.0)]),
    "vocabulary of 100": step("r", prompt_logprobs=[TokenLogprob(6, -1.0, ((100, -1.0),))]),
    "the request does not want": step(
        "r", pooled=array("f", [1.0]), finish_reason=FinishReason.STOP
    ),
    "page keys have 8 bytes": Step(load=LOAD, pages=[PageNews(True, b"1234567")]),
    "the replica reports more than 64 KV pages": Step(load=LOAD, pages=[PageNews(True, MANY_KEYS)]),
    "the replica sent a second greeting": greeting(),
    "a call that was not made": Answer(call_id=5, result=1),
}


@pytest.mark.parametrize("reason", LIES)
async def test_a_replica_that_lies_is_dropped_in_one_line(
    reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with front_of(2, route=Route.EVEN) as front, replicas_of(front, 2) as (first, second):
        stream = front.submit(request())
        await first.submitted()
        first.send(LIES[reason])
        assert reason in await first.refusal()
        assert (await second.submitted()).output == b""
        second.finish("r", 10)
        assert (await read(stream)).token_ids == [10]
        assert b'replicas_lost_total{cause="wrong"} 1.0' in front.metrics.render()[0]
        (line,) = warnings(caplog)
        assert reason in line


async def test_all_that_an_engine_may_send_is_taken() -> None:
    async with front_of() as front, replicas_of(front) as (replica,):
        stream = front.submit(request())
        replica.send(Step(load=LOAD, pages=[PageNews(True, MANY_KEYS[: 64 * 8])]))
        replica.finish("r", *[99] * 8)
        assert (await read(stream)).token_ids == [99] * 8
        assert len(front.describe()) == 1


async def test_tokens_without_the_log_probabilities_that_were_asked_for_are_a_lie() -> None:
    async with front_of() as front, replicas_of(front) as (replica,):
        front.submit(request(logprobs=0))
        replica.say("r", 10)
        assert "do not match its tokens" in await replica.refusal()


@pytest.mark.parametrize(
    "garbage", [b"", b"\xc1", b"\x81\xa4type\xa4step", msgspec.msgpack.encode({"type": "step"})]
)
@pytest.mark.parametrize("has_joined", [True, False])
async def test_bytes_that_are_no_message_end_their_sender_alone(
    garbage: bytes, has_joined: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async with front_of(1) as front, replicas_of(front) as (sound,):
        bad = ScriptedReplica(front)
        if has_joined:
            await bad.join()
        bad.send_bytes(garbage)
        assert await bad.refusal()
        bad.die()
        stream = front.submit(request())
        await sound.submitted()
        sound.finish("r", 10)
        assert (await read(stream)).token_ids == [10]
        assert len(warnings(caplog)) == 1


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Lines of the log so far; when a test ends, its replicas close their connections."""
    return [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]


FLOODS: dict[str, FromReplica] = {
    "messages per second": Beat(),
    "MiB per second": Beat(unready="x" * 2**22),
}


@pytest.mark.parametrize(("reason", "message"), FLOODS.items(), ids=["messages", "bytes"])
async def test_a_flood_ends_its_sender(
    reason: str, message: FromReplica, caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        front_of(2, clock=lambda: 1.0) as front,
        replicas_of(front, 2) as (first, second),
    ):
        stream = front.submit(request())
        await first.submitted()
        assert reason in await flood(first, message)
        await second.submitted()
        second.finish("r", 10)
        assert (await read(stream)).token_ids == [10]
        (line,) = warnings(caplog)
        assert "is lost" in line


async def flood(replica: ScriptedReplica, message: FromReplica) -> str:
    """Send as much as the connection takes, until the front says why it parts."""
    data, refusal = encode(message), asyncio.create_task(replica.refusal())
    while not refusal.done():
        replica.socket._link.send((data,))  # not, if the front is behind
        await asyncio.sleep(0)
    return refusal.result()


async def test_a_flood_that_goes_on_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """The front drops what comes after its farewell unread, and closes the connection."""
    monkeypatch.setattr(transport, "PARTING_SECONDS", 0.05)
    async with (
        front_of(2, clock=lambda: 1.0) as front,
        replicas_of(front, 2) as (first, second),
    ):
        await flood(first, FLOODS["messages per second"])
        cut = asyncio.create_task(closed(first))
        while not cut.done():
            first.socket._link.send((encode(Beat()),))
            await asyncio.sleep(0)
        stream = front.submit(request())
        await second.submitted()
        second.finish("r", 10)
        assert (await read(stream)).token_ids == [10]


async def closed(replica: ScriptedReplica) -> None:
    while await replica.socket.receive() is not None:
        pass


def test_a_message_that_is_too_large_is_not_read(caplog: pytest.LogCaptureFixture) -> None:
    async def body() -> None:
        async with front_of(2) as front, replicas_of(front, 2) as (first, second):
            stream = front.submit(request())
            await first.submitted()
            first.send_bytes(bytes(transport.MAX_MESSAGE + 1))
            await closed(first)
            await second.submitted()
            second.finish("r", 10)
            assert (await read(stream)).token_ids == [10]

    run(body())
    assert "the connection was closed" in caplog.messages[0]


def test_a_quota_grows_back_and_ends_at_its_limit() -> None:
    quota = Quota(now=0.0)
    assert quota.spend(transport.MAX_BYTES, 0.0) is None
    assert quota.spend(transport.BYTES_PER_SECOND, 1.0) is None
    assert "MiB" in str(quota.spend(1, 1.0))
    assert quota.spend(transport.MAX_BYTES, 1e6) is None
    assert "MiB" in str(quota.spend(1, 1e6))


def test_a_refusal_that_is_repeated_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    async def body() -> None:
        async with front_of(1, clock=lambda: now[0]) as front:
            for seconds in (0.0, 1.0, REFUSAL_SECONDS):
                now[0] = seconds
                stranger = ScriptedReplica(front)
                stranger.send(Beat())
                assert await stranger.refusal()
                stranger.die()

    now = [0.0]
    run(body())
    assert ["not a greeting" in each for each in caplog.messages] == [True, True]


@pytest.mark.parametrize("result", [b"{}", None, b"no json"], ids=["text", "nothing", "no json"])
async def test_an_answer_of_another_kind_ends_its_sender(result: Any) -> None:
    async with front_of(2) as front, replicas_of(front, 2) as (first, second):
        is_number = result != b"no json"
        asking: Callable[[], Any] = front.flush_cache if is_number else front.cache_info
        task = asyncio.create_task(asking())
        await first.answer(result)
        await second.answer(2 if is_number else {"total_pages": 3})
        answer = await task
        assert (answer if is_number else answer["total_pages"]) == (2 if is_number else 3)
        assert len(front.describe()) == 1


async def test_an_error_that_a_call_answers_is_raised_here() -> None:
    async with front_of() as front, replicas_of(front) as (replica,):
        task = asyncio.create_task(front.flush_prefix(array("q", [1])))
        await replica.answer_error(InvalidRequest("no page", param="prefix"))
        with pytest.raises(InvalidRequest, match="no page"):
            await task
        assert len(front.describe()) == 1
