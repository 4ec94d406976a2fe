"""The circuit breaker opens at failures in close succession, not at failures that lie apart."""

from __future__ import annotations

import pytest

from foretoken.core.interface.speculator import CircuitBreaker


def after(breaker: CircuitBreaker, outcomes: str) -> bool:
    """Whether it is open after these outcomes: ``x`` is a failure, ``.`` a success."""
    for outcome in outcomes:
        (breaker.record_failure if outcome == "x" else breaker.record_success)()
    return breaker.is_open


@pytest.mark.parametrize(
    ("outcomes", "is_open"),
    [
        ("", False),
        ("xx", False),
        ("xxx", True),
        ("xx.xx", False),
        ("xx.xxx", True),
        ("...xx", False),
    ],
)
def test_only_failures_in_a_row_open_it(outcomes: str, is_open: bool) -> None:
    assert after(CircuitBreaker(3), outcomes) is is_open


def test_a_success_may_forgive_a_part_of_a_failure() -> None:
    assert after(CircuitBreaker(3, forgiven=0.5), "xx.xx")
    assert not after(CircuitBreaker(3, forgiven=0.5), "xx..xx.")


def test_without_forgiveness_all_failures_count() -> None:
    assert after(CircuitBreaker(3, forgiven=0.0), "x....x....x")


def test_a_success_can_close_it_again() -> None:
    assert not after(CircuitBreaker(2), "xx.")
