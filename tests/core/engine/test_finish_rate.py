"""The time at which requests that were turned away had better come back."""

from __future__ import annotations

import pytest

from foretoken.core.engine.inbox import (
    MAX_RETRY_SECONDS,
    MIN_RETRY_SECONDS,
    NUM_TIMES,
    RequestInbox,
    retry_seconds,
)
from foretoken.core.telemetry.metrics import EngineMetrics
from support.fake_model import make_request, make_scheduler


def test_a_queue_is_gone_when_as_many_have_finished_at_the_rate_of_late() -> None:
    assert retry_seconds([10.0, 10.5, 11.0, 11.5], 10) == 5.0
    assert retry_seconds([10.0, 14.0, 18.0], 10) == 40.0


@pytest.mark.parametrize("num_requests", [0, 1, 10**6])
def test_the_time_is_from_a_second_to_a_minute(num_requests: int) -> None:
    seconds = retry_seconds([0.0, 0.5], num_requests)
    assert seconds == (MAX_RETRY_SECONDS if num_requests > 100 else MIN_RETRY_SECONDS)


def test_without_a_rate_it_is_a_second() -> None:
    for times in ([], [3.0], [3.0, 3.0]):
        assert retry_seconds(times, 50) == MIN_RETRY_SECONDS


def finish(inbox: RequestInbox, *times: float) -> None:
    """Requests that end at these times."""
    for at in times:
        request = make_request(f"at {at}", [1, 2])
        inbox.accept(request, at)
        inbox.abort(request.request_id)
        inbox.drain(at)
        inbox.deliver(at)


def test_the_last_that_finished_without_a_pause_are_counted() -> None:
    scheduler = make_scheduler(max_queued=100)
    inbox = RequestInbox(scheduler, EngineMetrics(scheduler))
    finish(inbox, *(10.0 * index for index in range(5)))
    finish(inbox, *(100.0 + 0.5 * index for index in range(NUM_TIMES)))
    for index in range(10):
        inbox.accept(make_request(f"waits {index}", [1, 2]), 200.0)
    assert inbox.retry_after() == 5.0
    inbox.mark_idle()
    assert inbox.retry_after() == MIN_RETRY_SECONDS
