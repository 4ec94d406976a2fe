"""Waits of sessions: what is observed of them, how long pins last, and which pages go first."""

from __future__ import annotations

from array import array

import pytest

from foretoken.radix_cache import PrefixCache
from foretoken.radix_cache.session_waits import (
    LEAST_OBSERVED,
    LEAST_TTL,
    MAX_LABELS,
    MAX_RANKED,
    MAX_SESSIONS,
    OWN_LABELS,
    PER_SESSION,
    Ranking,
    SessionWaits,
    Waits,
)
from foretoken.radix_cache.waiting_pages import MAX_MARKS


def seq(num_tokens: int, first: int = 0) -> array[int]:
    return array("q", range(first, first + num_tokens))


def turn(
    cache: PrefixCache,
    tokens: array[int],
    session: str = "s",
    waits_for: str | None = None,
    namespace: str | None = None,
) -> None:
    """A request of a session comes, computes all of its tokens, and goes."""
    began = cache.pins.now
    lease = cache.acquire(tokens, namespace=namespace)
    assert cache.extend(lease, len(tokens))
    cache.release(lease, tokens, len(tokens))
    cache.pin_session(tokens, len(tokens), session=session, namespace=namespace, began=began)
    if waits_for is not None:
        cache.expect(session, waits_for, namespace=namespace)
    cache.check([])


def turn_in_advance(cache: PrefixCache, tokens: array[int]) -> None:
    """The prompt of the next turn is computed before the request comes."""
    lease = cache.acquire(tokens)
    assert cache.extend(lease, len(tokens))
    cache.release(lease, tokens, len(tokens))
    cache.pin_session(tokens, len(tokens), session="s")
    cache.check([])


def fill(cache: PrefixCache, num_pages: int) -> None:
    """Compute tokens that no other request has, and keep none of them."""
    lease = cache.acquire(array("q"))
    assert cache.extend(lease, num_pages)
    cache.release(lease, array("q"), 0)
    cache.check([])


def teach(cache: PrefixCache, label: str, seconds: float, times: int = LEAST_OBSERVED) -> None:
    """Let a session wait ``times`` times for ``seconds``, and end it."""
    now = cache.pins.now
    for number in range(times + 1):
        cache.tick(now + number * seconds)
        turn(cache, seq(1, 10**6), "teacher", label)
    cache.end_session("teacher")
    cache.check([])


def test_a_wait_is_worth_more_the_sooner_and_the_surer_it_ends() -> None:
    assert Waits([1.0] * 9).worth(0.0) > Waits([10.0] * 9).worth(0.0)
    assert Waits([10.0] * 9).worth(9.0) > Waits([10.0] * 9).worth(0.0)
    assert Waits([10.0] * 9).worth(0.0) > Waits([10.0] * 3 + [1000.0] * 6).worth(0.0)
    assert Waits([10.0] * 9).worth(0.0) > Waits([10.0]).worth(0.0), "one wait proves little"
    overdue = Waits([10.0] * 9)
    assert overdue.worth(11.0) < overdue.worth(0.0)
    assert overdue.worth(100.0) < overdue.worth(11.0)


def test_worth_is_the_best_of_all_times_to_give_up() -> None:
    # Nine of ten hits after a second, or all but the assumed one after a hundred seconds.
    assert Waits([1.0] * 9 + [100.0]).worth(0.0) == pytest.approx(9 / 11)
    assert Waits([1.0] * 9 + [100.0]).worth(50.0) == pytest.approx(1 / 100)


def test_pages_are_kept_for_a_quantile_within_bounds() -> None:
    assert Waits([10.0] * 8).ttl(300.0) == 12.5
    assert Waits([0.1] * 8).ttl(300.0) == LEAST_TTL
    assert Waits([10.0, 290.0]).ttl(300.0) == 300.0
    assert Waits([301.0, 400.0]).ttl(300.0) == 0.0, "that would be in vain"


def test_a_session_s_own_waits_count_more_than_those_of_others() -> None:
    waits = SessionWaits(300.0)
    for session, seconds in [("slow", 100.0)] * 4 + [("quick", 1.0)] * 2:
        waits.turn((None, session), 0.0, 0.0)
        waits.expect((None, session), "tests")
        waits.turn((None, session), seconds, seconds)
    for session in ("slow", "quick", "new"):
        waits.turn((None, session), 200.0, 200.0)
        waits.expect((None, session), "tests")
    quick, new, slow = (waits.worth((None, each), 200.0) for each in ("quick", "new", "slow"))
    assert quick > new > slow


def test_other_labels_and_too_few_waits_predict_nothing() -> None:
    waits, session = SessionWaits(300.0), (None, "s")
    for number in range(LEAST_OBSERVED):
        waits.turn(session, float(number), float(number))
        assert waits.expect(session, "tests") == 300.0
        assert not waits.predicts
    waits.turn(session, 9.0, 9.0)
    assert waits.expect(session, "other") == 300.0
    assert waits.worth(session, 9.0) == 1 / 300
    waits.turn(session, 9.0, 9.0)
    assert waits.expect(session, "tests") == pytest.approx(1.25 * 7)
    assert waits.predicts
    assert waits.expect((None, "unknown"), "tests") is None


def test_a_turn_that_runs_beside_another_is_no_wait() -> None:
    waits, session = SessionWaits(300.0), (None, "s")
    for _ in range(LEAST_OBSERVED + 1):
        waits.turn(session, began=1.0, now=5.0)
        assert waits.expect(session, "tests") == 300.0


def test_a_wait_may_be_told_before_the_turn_s_end() -> None:
    waits, session = SessionWaits(300.0), (None, "s")
    waits.turn(session, 0.0, 0.0)
    waits.expect(session, "tests")
    for now in (10.0, 20.0, 30.0):
        assert waits.expect(session, "tests", is_running=True) is None
        assert waits.turn(session, now, now) == "tests"
        ttl = waits.expect(session, "tests")
    assert ttl == 12.5


def test_a_second_label_of_a_wait_is_not_that_of_the_next() -> None:
    waits, session = SessionWaits(300.0), (None, "s")
    waits.turn(session, 0.0, 0.0)
    waits.expect(session, "read")
    assert waits.expect(session, "build") is None, "another replica served that turn"
    assert waits.turn(session, 5.0, 5.0) is None
    waits.expect(session, "build")
    waits.turn(session, 95.0, 95.0)
    times = {label: list(each) for label, each in waits._sessions[session].own.items()}
    assert times == {"read": [5.0], "build": [90.0]}


def test_waits_of_other_namespaces_predict_nothing() -> None:
    waits = SessionWaits(300.0)
    for number in range(9):
        waits.turn(("a", "s"), float(number), float(number))
        waits.expect(("a", "s"), "tests")
    waits.turn(("b", "s"), 9.0, 9.0)
    assert waits.expect(("b", "s"), "tests") == 300.0
    assert waits.is_predicted(("a", "s"))
    assert not waits.is_predicted(("b", "s"))


def test_a_person_is_predicted_by_the_same_session_alone() -> None:
    waits = SessionWaits(300.0)
    for number in range(9):
        waits.turn((None, "script"), float(number), float(number))
        ttl = waits.expect((None, "script"), "")
    assert ttl == 1.25
    waits.turn((None, "human"), 9.0, 9.0)
    assert waits.expect((None, "human"), "") == 300.0


def test_a_session_keeps_the_times_of_its_latest_labels() -> None:
    waits, session = SessionWaits(300.0), (None, "s")
    for number in range(40):
        waits.turn(session, float(number), float(number))
        waits.expect(session, "" if number % 4 == 0 else f"{number}")
    assert len(waits._sessions[session].own) == OWN_LABELS
    assert list(waits._sessions[session].own[""]) == [1.0] * PER_SESSION


def test_sessions_and_labels_are_bounded() -> None:
    waits = SessionWaits(300.0)
    for number in range(max(MAX_SESSIONS, MAX_LABELS) + 9):
        session = (None, f"{number}")
        for _ in range(2):
            waits.turn(session, 0.0, 0.0)
            waits.expect(session, f"{number}")
    assert len(waits._sessions) == MAX_SESSIONS
    assert len(waits._times) == MAX_LABELS
    for number in range(99):
        waits.turn((None, "one"), 0.0, 0.0)
        waits.expect((None, "one"), f"label {number}")
    assert len(waits._sessions[None, "one"].own) < 20


def test_a_ranking_is_sorted_again_after_a_second() -> None:
    worth, ranking = {"a": 1.0, "b": 2.0}, Ranking[str]()

    def first(now: float) -> str:
        return next(ranking.least_first(lambda: worth, worth, worth.__getitem__, now))

    assert first(0.0) == "a"
    worth["a"] = 3.0
    assert first(0.5) == "a"
    assert first(1.0) == "b"
    del worth["b"]
    assert first(1.0) == "a"


def test_a_sort_takes_a_bounded_number_of_items_and_goes_on_when_they_are_gone() -> None:
    items, ranking, num_asked = set(range(MAX_RANKED + 9)), Ranking[int](), 0

    def worth(item: int) -> float:
        nonlocal num_asked
        num_asked += 1
        return -float(item)

    def first() -> int | None:
        return next(ranking.least_first(lambda: sorted(items), items, worth, 0.0), None)

    for number in range(MAX_RANKED):
        assert first() == MAX_RANKED - 1 - number
        items.remove(MAX_RANKED - 1 - number)
    assert num_asked == MAX_RANKED
    assert first() == MAX_RANKED + 8
    items.clear()
    assert first() is None
    items.add(1)
    assert first() is None, "it is newer than the sort"


def test_without_observations_a_pin_lasts_as_long_as_the_setting_says() -> None:
    cache = PrefixCache(32, 1, session_ttl=60.0)
    turn(cache, seq(4), waits_for="tests")
    cache.tick(59.0)
    assert cache.num_pinned_pages == 4
    cache.tick(60.0)
    assert cache.num_pinned_pages == 0


def test_a_pin_lasts_for_as_long_as_its_tool_took_before() -> None:
    cache = PrefixCache(64, 1, session_ttl=60.0)
    teach(cache, "tests", 8.0)
    start = cache.pins.now
    turn(cache, seq(4), waits_for="tests")
    cache.tick(start + 9.9)
    assert cache.num_pinned_pages == 4
    cache.tick(start + 10.0)
    assert cache.num_pinned_pages == 0
    turn(cache, seq(8, 100), "other")
    fill(cache, 56)
    assert cache.match_len(seq(5)) == 0, "its pages are the first to be evicted"
    assert cache.match_len(seq(9, 100)) == 8


def test_a_wait_that_is_always_too_long_is_not_pinned() -> None:
    cache = PrefixCache(64, 1, session_ttl=60.0)
    teach(cache, "agent", 90.0)
    turn(cache, seq(4))
    assert cache.num_pinned_pages == 4
    cache.expect("s", "agent")
    assert (cache.num_pinned_pages, cache.pins.num_sessions) == (0, 0)
    cache.check([])
    assert cache.match_len(seq(5)) == 4


def test_the_pin_that_is_worth_least_yields_first() -> None:
    cache = PrefixCache(64, 1, pin_quota=0.5)
    teach(cache, "tests", 40.0)
    teach(cache, "read", 1.0)
    turn(cache, seq(8, 100), "quick", "read")
    turn(cache, seq(8, 200), "slow", "tests")
    fill(cache, 64 - 8)
    assert (cache.match_len(seq(9, 100)), cache.match_len(seq(9, 200))) == (8, 0)
    assert cache.pins.num_session_yields == 1


def test_the_quota_is_for_the_pins_that_are_worth_most() -> None:
    cache = PrefixCache(64, 1)  # a quota of 16 pages
    teach(cache, "tests", 40.0)
    teach(cache, "read", 1.0)
    turn(cache, seq(8, 100), "quick", "read")
    turn(cache, seq(8, 200), "slow", "tests")
    turn(cache, seq(8, 300), "new")
    pinned = {pin.lock.node.key[0] for pin in cache.pins.of(None)}
    assert pinned == {100, 300}


def test_pages_beyond_the_quota_are_evicted_by_their_worth() -> None:
    cache = PrefixCache(64, 1, session_ttl=300.0)
    teach(cache, "tests", 40.0)
    teach(cache, "agent", 200.0)
    start = cache.pins.now
    for number, label in enumerate(["tests", "agent", "agent", "tests"]):
        turn(cache, seq(16, 100 * number), f"{number}", label)
    cache.tick(start + 30.0)
    fill(cache, 16)
    kept = [cache.match_len(seq(17, 100 * number)) for number in range(4)]
    assert kept[0] == 16, "least recently used, but expected within seconds"
    assert sum(kept) == 48


def test_a_page_that_was_idle_for_longer_than_a_session_is_worth_goes_before_it() -> None:
    cache = PrefixCache(64, 1, pin_quota=0.25, session_ttl=300.0)
    teach(cache, "tests", 40.0)
    start = cache.pins.now
    lease = cache.acquire(seq(16, 900))
    assert cache.extend(lease, 16)
    cache.release(lease, seq(16, 900), 16)
    cache.tick(start + 500.0)
    turn(cache, seq(16), "a", "tests")
    turn(cache, seq(16, 100), "b", "tests")
    fill(cache, 32)
    assert cache.match_len(seq(17, 900)) == 0
    assert [cache.match_len(seq(17, first)) for first in (0, 100)] == [16, 16]


def test_a_waiting_session_without_a_prediction_is_evicted_by_its_last_use() -> None:
    cache = PrefixCache(64, 1, session_ttl=300.0)  # a quota of 16 pages
    teach(cache, "tests", 8.0)
    lease = cache.acquire(seq(16, 900))
    assert cache.extend(lease, 16)
    cache.release(lease, seq(16, 900), 16)
    cache.tick(cache.pins.now + 60.0)
    for number in range(2):
        turn(cache, seq(16, 100 * number), f"{number}", "another tool")
    assert len(cache.pins.waiting) == 1
    fill(cache, 32)
    assert cache.match_len(seq(17, 900)) == 0
    assert [cache.match_len(seq(17, first)) for first in (0, 100)] == [16, 16]


def test_pages_are_evicted_first_when_the_session_s_own_time_is_over() -> None:
    for is_own in (True, False):
        cache = PrefixCache(64, 1, session_ttl=60.0)
        name = "s" if is_own else "other"
        for _ in range(LEAST_OBSERVED + 1):
            turn(cache, seq(4), name, "tests")
            cache.tick(cache.pins.now + 8.0)
        turn(cache, seq(8, 200))
        lease = cache.acquire(seq(8, 100))
        assert cache.extend(lease, 8)
        cache.release(lease, seq(8, 100), 8)
        turn(cache, seq(8, 200), waits_for="tests")
        cache.tick(cache.pins.now + 10.0)
        assert cache.num_pinned_pages == 0
        fill(cache, 64 - 16)
        assert (cache.match_len(seq(9, 200)) < 8) is is_own


def test_a_prompt_that_is_computed_before_its_turn_ends_no_wait() -> None:
    cache = PrefixCache(64, 1, session_ttl=60.0)
    for _ in range(LEAST_OBSERVED + 1):
        turn(cache, seq(4), waits_for="tests")
        turn_in_advance(cache, seq(8))
        assert cache.num_pinned_pages == 8
        cache.tick(cache.pins.now + 8.0)
    (times,) = cache.pins.waits._times.values()
    assert list(times) == [8.0] * LEAST_OBSERVED
    (pinned,) = cache.pins.of(None)
    assert pinned.ttl == 10.0, "it lasts as long as the wait"


def test_a_session_does_not_shorten_or_remove_the_pin_of_another() -> None:
    cache = PrefixCache(64, 1, session_ttl=60.0)
    teach(cache, "agent", 90.0)
    teach(cache, "read", 1.0)
    for session in ("a", "b"):
        turn(cache, seq(8), session)
    cache.expect("a", "read")
    assert [pinned.ttl for pinned in cache.pins.of(None)] == [60.0]
    turn(cache, seq(8), "a")
    cache.expect("a", "agent")
    cache.check([])
    (pinned,) = cache.pins.of(None)
    assert (pinned.ttl, pinned.sessions) == (60.0, {(None, "b")})


def test_an_ended_session_loses_its_pins_at_once_and_its_pages_first() -> None:
    cache = PrefixCache(64, 1)
    turn(cache, seq(8, 100), "a")
    turn(cache, seq(8, 200), "b", namespace="salt")
    turn(cache, seq(8, 300), "b")
    assert cache.end_session("b")
    cache.check([])
    assert cache.num_pinned_pages == 8
    assert not cache.end_session("b")
    fill(cache, 64 - 16)
    assert cache.match_len(seq(9, 100)) == 8
    assert cache.match_len(seq(9, 300)) == 0
    fill(cache, 64 - 8)
    assert cache.match_len(seq(9, 200), namespace="salt") == 0


@pytest.mark.parametrize("is_cached", [True, False])
def test_a_session_may_be_ended_after_its_pin(is_cached: bool) -> None:
    cache = PrefixCache(64, 1, session_ttl=60.0)
    turn(cache, seq(8), waits_for="tests")
    cache.tick(60.0)
    turn(cache, seq(8, 100), "another")
    fill(cache, 48 if is_cached else 56)
    assert cache.end_session("s") is is_cached
    cache.check([])
    assert cache.tree.first_leaf() is None or cache.tree.first_leaf().is_retired
    turn(cache, seq(8))
    assert not cache.pins.waits._times, "it is another session"


def test_an_ended_session_keeps_what_others_pin_or_read() -> None:
    cache = PrefixCache(64, 1)
    for session in ("a", "b"):
        turn(cache, seq(8), session)
    assert cache.end_session("b")
    assert cache.num_pinned_pages == 8
    turn(cache, seq(8) + seq(4, 100), "a")
    cache.end_session("a")
    lease, other = cache.acquire(seq(9)), cache.acquire(array("q"))
    assert cache.extend(other, 64 - 8)
    assert lease.num_cached_tokens == cache.match_len(seq(9)) == 8
    cache.check([lease, other])


def test_pages_that_are_read_again_are_in_the_usual_order_again() -> None:
    cache = PrefixCache(64, 1)
    turn(cache, seq(8, 100))
    cache.end_session("s")
    lease = cache.acquire(seq(9, 200))
    assert cache.extend(lease, 8)
    cache.release(lease, seq(9, 200), 8)
    cache.release(cache.acquire(seq(9, 100)), seq(9, 100), 8)
    fill(cache, 56)
    assert (cache.match_len(seq(9, 100)), cache.match_len(seq(9, 200))) == (8, 0)


def test_a_flush_forgets_the_pages_of_waiting_sessions() -> None:
    cache = PrefixCache(64, 1)
    for number in range(3):
        turn(cache, seq(8, 100 * number), f"{number}")
    assert len(cache.pins.waiting) == 1
    cache.flush("other")
    assert len(cache.pins.waiting) == 1
    cache.flush()
    assert len(cache.pins.waiting) == 0
    cache.check([])


def test_marks_and_evicted_sessions_are_bounded() -> None:
    cache = PrefixCache(64, 1)
    teach(cache, "tests", 40.0)
    start = cache.pins.now
    for number in range(2 * MAX_MARKS):
        cache.tick(start + number)
        cache.pins.waiting.mark(start + number)
    assert len(cache.pins.waiting._ticks) <= MAX_MARKS
    for number in range(200):
        cache.tick(cache.pins.now + 2.0)
        turn(cache, seq(16, 100 * number), f"{number}", "tests")
    assert len(cache.pins.waiting) <= 4, "a session without pages is forgotten"
