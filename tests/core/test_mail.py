"""What callers leave for the engine's loop, and what they are told."""

from __future__ import annotations

import asyncio

import pytest

from fake_model import make_request, make_scheduler
from foretoken.core.errors import EngineDead
from foretoken.core.mail import Mail
from foretoken.core.metrics import EngineMetrics
from foretoken.core.request import FinishReason


def make_mail() -> Mail:
    scheduler = make_scheduler()
    return Mail(scheduler, EngineMetrics(scheduler))


@pytest.mark.parametrize("is_known", [False, True], ids=["on its way", "known to the scheduler"])
def test_an_abort_ends_a_request_wherever_it_is(is_known: bool) -> None:
    async def scenario() -> None:
        mail = make_mail()
        stream = mail.take(make_request("a", [1, 2]), 0.0)
        if is_known:
            mail.read(1.0)
        mail.abort("a")
        mail.read(2.0)
        mail.deliver(2.0)
        assert stream.ended
        assert (await anext(stream)).finish_reason is FinishReason.ABORT
        assert not mail.streams

    asyncio.run(scenario())


def test_whatever_comes_wakes_the_loop() -> None:
    async def scenario() -> None:
        mail = make_mail()
        for leave in (lambda: mail.take(make_request("a", [1]), 0.0), lambda: mail.abort("a")):
            mail.wake.clear()
            mail.rest()
            leave()
            assert mail.wake.is_set()
            assert not mail.idle.is_set()

    asyncio.run(scenario())


def test_those_on_their_way_are_counted_by_tenant_until_they_are_there() -> None:
    async def scenario() -> None:
        mail = make_mail()
        for name, tenant in (("a", "t"), ("b", None), ("c", "t")):
            mail.take(make_request(name, [1], tenant=tenant), 0.0)
        assert [mail.ahead_of(tenant) for tenant in ("t", None, "u")] == [(3, 2), (3, 1), (3, 0)]
        mail.read(0.0)
        assert mail.ahead_of("t") == (0, 0)
        mail.take(make_request("d", [1], tenant="t"), 0.0)
        assert mail.ahead_of("t") == (1, 1)
        mail.end(EngineDead("it is over"))
        assert mail.ahead_of("t") == (0, 0)

    asyncio.run(scenario())


def test_at_the_end_everybody_is_told_who_was_not() -> None:
    async def scenario() -> None:
        mail = make_mail()
        known = mail.take(make_request("a", [1]), 0.0)
        mail.read(0.0)
        unknown = mail.take(make_request("b", [1]), 0.0)
        mail.end(EngineDead("it is over"))
        for stream in (known, unknown):
            assert stream.ended
            with pytest.raises(EngineDead, match="it is over"):
                await anext(stream)
        assert mail.idle.is_set()

    asyncio.run(scenario())
