"""When those who were turned away had better come back."""

from __future__ import annotations

import pytest

from foretoken.core.engine.inbox import MAX_RETRY_SECONDS, MIN_RETRY_SECONDS, NUM_TIMES, FinishRate


def measured(*times: float) -> FinishRate:
    rate = FinishRate()
    for time in times:
        rate.note(time)
    return rate


def test_a_queue_is_gone_when_as_many_have_finished_at_the_rate_of_late() -> None:
    assert measured(10.0, 10.5, 11.0, 11.5).seconds_for(10) == 5.0
    assert measured(10.0, 14.0, 18.0).seconds_for(10) == 40.0


@pytest.mark.parametrize("num_requests", [0, 1, 10**6])
def test_the_time_is_from_a_second_to_a_minute(num_requests: int) -> None:
    seconds = measured(0.0, 0.5).seconds_for(num_requests)
    assert seconds == (MAX_RETRY_SECONDS if num_requests > 100 else MIN_RETRY_SECONDS)


def test_without_a_rate_it_is_a_second() -> None:
    for rate in (measured(), measured(3.0), measured(3.0, 3.0)):
        assert rate.seconds_for(50) == MIN_RETRY_SECONDS
    idle = measured(0.0, 0.5)
    idle.clear()
    assert idle.seconds_for(50) == MIN_RETRY_SECONDS


def test_what_finished_long_ago_no_longer_counts() -> None:
    slow = [10.0 * index for index in range(5)]
    fast = [100.0 + 0.5 * index for index in range(NUM_TIMES)]
    assert measured(*slow, *fast).seconds_for(10) == 5.0
