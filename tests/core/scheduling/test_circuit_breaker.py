"""The circuit breaker opens at failures in close succession, not at failures that lie apart."""

from __future__ import annotations

import pytest

from foretoken.core.scheduling.guarded_speculator import CircuitBreaker


def after(breaker: CircuitBreaker, outcomes: str) -> bool:
    """Whether it is open after these outcomes: ``x`` is a failure, ``.`` a success."""
    for outcome in outcomes:
        (breaker.record_failure if outcome == "x" else breaker.record_success)()
    return breaker.is_open


@pytest.mark.parametrize(
    ("outcomes", "is_open"),
    [
        ("", False),
        ("x" * 19, False),
        ("x" * 20, True),
        ("x" * 19 + "." * 20 + "x", False),
        ("x" * 19 + "." * 20 + "xxx", True),
        ("." * 1000 + "x" * 19, False),
    ],
)
def test_failures_in_close_succession_open_it(outcomes: str, is_open: bool) -> None:
    assert after(CircuitBreaker(), outcomes) is is_open


def test_failures_that_lie_far_apart_never_do() -> None:
    """One bad request a week must not cost a drafter after some weeks."""
    assert not after(CircuitBreaker(), ("x" + "." * 20) * 500)


def test_a_success_can_close_it_again() -> None:
    assert not after(CircuitBreaker(), "x" * 20 + ".")
