"""Peek: who is looked at next while deciding rests."""

from __future__ import annotations

from foretoken.core.request import Request
from foretoken.draft.calibration import Calibration
from foretoken.draft.peek import TELLING, Peek


def peek_at(*requests: Request) -> Peek:
    peek = Peek([], Calibration())
    for request in requests:
        peek.join(request)
    return peek


def say(request: Request, count: int) -> None:
    request.tokens.extend([1] * count)
    request.num_computed = len(request.tokens) - 1


def test_who_came_is_looked_at_once_it_has_said_enough(make_request) -> None:
    request = make_request([1, 2, 3])
    peek = peek_at(request)
    say(request, TELLING - 1)
    assert peek.newcomer() is None
    say(request, 1)
    assert peek.newcomer() is request
    assert peek.newcomer() is None


def test_a_long_prompt_keeps_nobody_else_from_being_looked_at(make_request) -> None:
    long, short = make_request([1] * 100), make_request([1])
    peek = peek_at(long, short)
    say(short, TELLING)
    assert peek.newcomer() is short


def test_the_others_have_their_turns(make_request) -> None:
    requests = [make_request([1]) for _ in range(3)]
    peek = peek_at(*requests)
    for request in requests:
        say(request, TELLING)
        assert peek.newcomer() is request
    assert [peek.in_turn() for _ in range(6)] == requests * 2
    requests[1].num_computed = 0  # preempted: it does not decode
    assert [peek.in_turn() for _ in range(4)] == [requests[0], requests[2]] * 2


def test_who_left_is_not_looked_at(make_request) -> None:
    new, known = make_request([1]), make_request([1])
    peek = peek_at(known)
    say(known, TELLING)
    peek.newcomer()
    peek.join(new)
    say(new, TELLING)
    peek.leave(new.request_id)
    peek.leave(known.request_id)
    assert peek.newcomer() is None
    assert peek.in_turn() is None
