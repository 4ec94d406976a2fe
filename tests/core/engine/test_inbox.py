"""Inbox of the engine's loop: how callers leave requests and aborts, and learn of their end."""

from __future__ import annotations

import pytest

from foretoken.core.engine.inbox import RequestInbox
from foretoken.core.errors import DeadlineExceeded, EngineDead
from foretoken.core.interface.request import FinishReason
from foretoken.core.telemetry.metrics import EngineMetrics
from support.fake_model import make_request, make_scheduler


def make_mail() -> RequestInbox:
    scheduler = make_scheduler()
    return RequestInbox(scheduler, EngineMetrics(scheduler))


@pytest.mark.parametrize("is_known", [False, True], ids=["on its way", "known to the scheduler"])
async def test_an_abort_ends_a_request_wherever_it_is(is_known: bool) -> None:
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
    counted = inbox._metrics.registry.get_sample_value
    assert counted("foretoken:request_aborts_total", {"cause": "caller"}) == 1


async def test_an_abort_that_comes_with_the_end_does_not_end_the_next_request_of_that_id() -> None:
    inbox = make_mail()
    for name in "ab":
        inbox.accept(make_request(name, [1, 2]), 0.0)
    inbox.abort("a")
    inbox.drain(1.0)
    for name in "ab":
        inbox.abort(name)
    inbox.deliver(1.0)
    again = inbox.accept(make_request("a", [1, 2]), 2.0)
    inbox.drain(2.0)
    inbox.deliver(2.0)
    assert list(inbox.streams.values()) == [again]


async def test_who_waited_in_vain_is_told_when_to_come_again() -> None:
    inbox = make_mail()
    for each in range(9):
        inbox.accept(make_request(str(each), [1]), 0.0)
    late = inbox.accept(make_request("late", [1], deadline=20.0), 0.0)
    for now in (0, 4, 8):  # one of them ends every four seconds
        inbox.abort(str(now))
        inbox.drain(now)
        inbox.deliver(now)
    inbox.drain(30.0)
    inbox.deliver(30.0)
    assert late.ended
    with pytest.raises(DeadlineExceeded) as caught:
        await anext(late)
    assert caught.value.retry_after == 4.0 * 6, "six are waiting"


async def test_whatever_comes_wakes_the_loop() -> None:
    inbox = make_mail()
    for leave in (lambda: inbox.accept(make_request("a", [1]), 0.0), lambda: inbox.abort("a")):
        inbox.wake.clear()
        inbox.mark_idle()
        leave()
        assert inbox.wake.is_set()
        assert not inbox.idle.is_set()


async def test_those_on_their_way_are_counted_by_tenant_until_they_are_there() -> None:
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


async def test_at_the_end_everybody_is_told_who_was_not() -> None:
    inbox = make_mail()
    known = inbox.accept(make_request("a", [1]), 0.0)
    inbox.drain(0.0)
    unknown = inbox.accept(make_request("b", [1]), 0.0)
    inbox.fail_streams(EngineDead("it is over"))
    assert not inbox.streams
    for stream in (known, unknown):
        assert stream.ended
        with pytest.raises(EngineDead, match="it is over"):
            await anext(stream)
    assert inbox.idle.is_set()
