"""Inbox of the engine's loop: how callers leave requests and aborts, and learn of their end."""

from __future__ import annotations

import asyncio

import pytest

from foretoken.core.engine.inbox import RequestInbox
from foretoken.core.errors import EngineDead
from foretoken.core.interface.request import FinishReason
from foretoken.core.telemetry.metrics import EngineMetrics
from support.fake_model import make_request, make_scheduler


def make_mail() -> RequestInbox:
    scheduler = make_scheduler()
    return RequestInbox(scheduler, EngineMetrics(scheduler))


@pytest.mark.parametrize("is_known", [False, True], ids=["on its way", "known to the scheduler"])
def test_an_abort_ends_a_request_wherever_it_is(is_known: bool) -> None:
    async def scenario() -> None:
        inbox = make_mail()
        stream = inbox.accept(make_request("a", [1, 2]), 0.0)
        if is_known:
            inbox.drain(1.0)
        inbox.abort("a")
        inbox.drain(2.0)
        inbox.deliver(2.0)
        assert stream.ended
        assert (await anext(stream)).finish_reason is FinishReason.ABORT
        assert not inbox.streams

    asyncio.run(scenario())


def test_whatever_comes_wakes_the_loop() -> None:
    async def scenario() -> None:
        inbox = make_mail()
        for leave in (lambda: inbox.accept(make_request("a", [1]), 0.0), lambda: inbox.abort("a")):
            inbox.wake.clear()
            inbox.mark_idle()
            leave()
            assert inbox.wake.is_set()
            assert not inbox.idle.is_set()

    asyncio.run(scenario())


def test_those_on_their_way_are_counted_by_tenant_until_they_are_there() -> None:
    async def scenario() -> None:
        inbox = make_mail()
        for name, tenant in (("a", "t"), ("b", None), ("c", "t")):
            inbox.accept(make_request(name, [1], tenant=tenant), 0.0)
        assert [inbox.pending_arrivals(tenant) for tenant in ("t", None, "u")] == [
            (3, 2),
            (3, 1),
            (3, 0),
        ]
        inbox.drain(0.0)
        assert inbox.pending_arrivals("t") == (0, 0)
        inbox.accept(make_request("d", [1], tenant="t"), 0.0)
        assert inbox.pending_arrivals("t") == (1, 1)
        inbox.fail_streams(EngineDead("it is over"))
        assert inbox.pending_arrivals("t") == (0, 0)

    asyncio.run(scenario())


def test_at_the_end_everybody_is_told_who_was_not() -> None:
    async def scenario() -> None:
        inbox = make_mail()
        known = inbox.accept(make_request("a", [1]), 0.0)
        inbox.drain(0.0)
        unknown = inbox.accept(make_request("b", [1]), 0.0)
        inbox.fail_streams(EngineDead("it is over"))
        for stream in (known, unknown):
            assert stream.ended
            with pytest.raises(EngineDead, match="it is over"):
                await anext(stream)
        assert inbox.idle.is_set()

    asyncio.run(scenario())
