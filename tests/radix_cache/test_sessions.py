"""Pins of sessions: the last turn of each conversation, within the quota, behind other pins."""

from __future__ import annotations

from array import array

import pytest

from foretoken.radix_cache import PrefixCache
from foretoken.radix_cache.pins import MAX_CONVERSATIONS


def seq(num_tokens: int, first: int = 0) -> array[int]:
    return array("q", range(first, first + num_tokens))


def turn(
    cache: PrefixCache, tokens: array[int], session: str = "s", namespace: str | None = None
) -> None:
    """A request of a session comes, computes all of its tokens, and goes."""
    lease = cache.acquire(tokens, namespace=namespace)
    assert cache.extend(lease, len(tokens))
    cache.release(lease, tokens, len(tokens))
    cache.pin_session(tokens, len(tokens), session=session, namespace=namespace)
    cache.check([])


def ask_for(cache: PrefixCache, tokens: array[int], namespace: str | None = None) -> None:
    lease = cache.acquire(tokens, namespace=namespace)
    assert cache.extend(lease, len(tokens))
    cache.release(lease, tokens, len(tokens))
    assert cache.pin(tokens, len(tokens), ttl=1e6, namespace=namespace) > 0
    cache.check([])


def ends(cache: PrefixCache, namespace: str | None = None) -> list[tuple[int, int]]:
    """The last token and the pages of each pin, the oldest first."""
    return [(p.lock.node.key[-1], p.lock.num_pages) for p in cache.pins.of(namespace)]


def test_the_last_turn_stays_for_its_time_past_pressure() -> None:
    cache = PrefixCache(32, 1, session_ttl=60.0)
    turn(cache, seq(6))
    lease = cache.acquire(array("q"))
    assert cache.extend(lease, 26)
    cache.release(lease, array("q"), 0)
    assert cache.match_len(seq(7)) == 6
    assert (cache.num_pinned_pages, cache.pins.num_sessions) == (6, 1)
    cache.tick(60.0)
    assert (cache.num_pinned_pages, cache.pins.num_sessions) == (0, 0)
    assert cache.pins.num_session_yields == 0, "its time was over"


def test_a_new_turn_moves_the_pin() -> None:
    cache = PrefixCache(64, 1)
    turn(cache, seq(4))
    turn(cache, seq(8))
    assert len(cache.pins) == 1
    assert cache.num_pinned_pages == 8
    turn(cache, seq(6) + seq(3, 90))  # the last answer lost its thought
    assert len(cache.pins) == 1
    assert cache.num_pinned_pages == 9
    assert cache.match_len(seq(9)) == 8, "the branch of its own is still cached"


def test_sub_agents_share_what_they_begin_with_and_one_of_another_prompt_has_its_own() -> None:
    cache = PrefixCache(128, 1)
    turn(cache, seq(8))
    for first in (100, 200, 300):
        turn(cache, seq(8) + seq(2, first))
    assert ends(cache) == [(301, 10)]
    turn(cache, seq(10, 500))
    turn(cache, seq(12))
    assert ends(cache) == [(509, 10), (11, 12)]


def test_a_conversation_that_was_compacted_keeps_what_it_begins_with() -> None:
    cache = PrefixCache(128, 1)
    turn(cache, seq(4) + seq(16, 100))
    turn(cache, seq(4) + seq(4, 200))
    lease = cache.acquire(array("q"))
    assert cache.extend(lease, 128 - 24)
    cache.release(lease, array("q"), 0)
    assert cache.match_len(seq(4) + seq(9, 200)) == 8
    assert cache.pins.num_sessions == 1


def test_a_session_pins_a_few_conversations_at_most() -> None:
    cache = PrefixCache(512, 1)
    for number in range(MAX_CONVERSATIONS + 3):
        turn(cache, seq(4, 1000 * number))
    assert len(cache.pins) == MAX_CONVERSATIONS
    assert ends(cache)[0] == (3003, 4)


def test_sessions_of_one_prompt_have_one_pin_until_the_last_has_gone_on() -> None:
    cache = PrefixCache(128, 1)
    for session in ("a", "b"):
        turn(cache, seq(4), session)
    assert (len(cache.pins), cache.pins.num_sessions) == (1, 2)
    turn(cache, seq(4) + seq(4, 100), "a")
    assert sorted(ends(cache)) == [(3, 4), (103, 8)]
    turn(cache, seq(4) + seq(4, 200), "b")
    assert sorted(ends(cache)) == [(103, 8), (203, 8)]


def test_a_pin_that_was_asked_for_stays_when_a_session_leaves_it() -> None:
    cache = PrefixCache(128, 1, session_ttl=60.0)
    turn(cache, seq(4))
    ask_for(cache, seq(4))
    turn(cache, seq(8))
    assert sorted(ends(cache)) == [(3, 4), (7, 8)]
    cache.tick(61.0)
    assert ends(cache) == [(3, 4)]


def test_a_session_makes_no_pin_give_way_that_was_asked_for() -> None:
    cache = PrefixCache(32, 1)  # a quota of 8 pages
    ask_for(cache, seq(6, 100))
    turn(cache, seq(4))
    assert ends(cache) == [(105, 6)]
    assert cache.pins.num_session_yields == 1
    turn(cache, seq(2, 200))
    ask_for(cache, seq(1, 300))
    assert ends(cache) == [(105, 6), (300, 1)], "the session's was younger, and went"


def test_a_request_takes_pages_of_sessions_before_those_that_were_asked_for() -> None:
    cache = PrefixCache(16, 1, pin_quota=1.0)
    ask_for(cache, seq(4, 100))
    turn(cache, seq(4))
    lease = cache.acquire(array("q"))
    assert cache.extend(lease, 10)
    assert ends(cache) == [(103, 4)]
    assert cache.pins.num_session_yields == 1
    cache.check([lease])


@pytest.mark.parametrize("options", [{"pin_quota": 0.0}, {"session_ttl": 0.0}])
def test_sessions_can_be_left_out(options: dict[str, float]) -> None:
    cache = PrefixCache(32, 1, **options)
    turn(cache, seq(4))
    assert (len(cache.pins), cache.pins.num_sessions) == (0, 0)


@pytest.mark.parametrize("is_one_prompt", [True, False])
def test_a_flood_of_sessions_pins_and_remembers_no_more_than_the_quota(is_one_prompt) -> None:
    cache = PrefixCache(64, 1)
    for number in range(500):
        turn(cache, seq(3, 0 if is_one_prompt else 1000 * number), f"s-{number}")
        assert cache.num_pinned_pages <= 16
        assert cache.pins.num_sessions <= 32
    assert cache.pins.num_sessions == (32 if is_one_prompt else 5)


def test_a_flood_of_sessions_of_one_prompt_ends_no_session_of_others() -> None:
    cache = PrefixCache(64, 1)  # 32 pages may be pinned, so there are 32 sessions at most
    for name in ("a", "b"):
        turn(cache, seq(4), "theirs", name)
    for number in range(100):
        turn(cache, seq(1), f"s-{number}", "flood")
    assert cache.pins.num_sessions == 32
    assert [ends(cache, name) for name in ("a", "b")] == [[(3, 4)], [(3, 4)]]
    turn(cache, seq(8), "theirs", "a")
    assert ends(cache, "a") == [(7, 8)], "it is still the session that it was"


def test_of_namespaces_with_as_many_sessions_the_one_without_a_turn_for_longest_has_one_less() -> (
    None
):
    cache = PrefixCache(8, 1)  # 2 pages each, 4 together
    for name in ("a", "b"):
        turn(cache, seq(1), "first", name)
        turn(cache, seq(1), "second", name)
    turn(cache, seq(1), "first", "a")
    turn(cache, seq(1), "first", "c")
    turn(cache, seq(2), "second", "b")
    assert ends(cache, "b") == [(1, 2)], "its first had ended"
    turn(cache, seq(2), "second", "a")
    assert ends(cache, "a") == [(0, 1), (1, 2)]


def test_the_pin_of_a_session_that_ends_for_others_is_counted() -> None:
    cache = PrefixCache(64, 1)  # 32 sessions at most
    turn(cache, seq(4, 100), "first")
    for number in range(31):
        turn(cache, seq(1), f"s-{number}")
    assert (len(cache.pins), cache.pins.num_session_yields) == (2, 0)
    turn(cache, seq(1), "one too many")
    assert ends(cache) == [(0, 1)]
    assert cache.pins.num_session_yields == 1


def test_a_name_in_two_namespaces_is_two_sessions() -> None:
    cache = PrefixCache(128, 1)
    turn(cache, seq(4), namespace="a")
    turn(cache, seq(8), namespace="b")
    assert cache.pins.num_sessions == 2
    cache.flush("a")
    cache.check([])
    assert (cache.pins.num_sessions, ends(cache, "b")) == (1, [(7, 8)])
