"""Mistakes in pins, and what requests leave in the cache."""

from __future__ import annotations

from ..mutation import Mutation

MUTATIONS = (
    Mutation(
        "pins-shorten-each-other",
        "PinnedPrefixes._pinned",
        "known.ttl = max(known.ttl, ttl)",
        "known.ttl = ttl",
        ("test_pinning_again_prolongs_and_never_shortens",),
        "pinning again never shortens",
    ),
    Mutation(
        "pins-of-sessions-push-others-out",
        "PinnedPrefixes._first_to_go",
        "if not newest.is_asked else",
        "if newest is None else",
        ("test_a_session_makes_no_pin_give_way_that_was_asked_for",),
        "a session displaces no pin that was asked for",
    ),
    Mutation(
        "pins-of-sessions-are-without-number",
        "PinnedPrefixes._add_to_session",
        "while len(self._sessions) > self.total_quota:",
        "while False:",
        ("test_a_flood_of_sessions_pins_and_remembers_no_more_than_the_quota",),
        "a flood of sessions is bounded",
    ),
    Mutation(
        "pins-of-sessions-end-for-the-flood-of-another",
        "PinnedPrefixes._end_a_session",
        "most = max(self._session_ages.of.values(), key=len)",
        "most = self._session_ages.all",
        ("test_a_flood_of_sessions_of_one_prompt_ends_no_session_of_others",),
        "a flood of sessions ends no session of another namespace",
    ),
    Mutation(
        "pins-of-sessions-stay-behind",
        "_continues",
        "return 2 * shared >= before.lock.num_pages",
        "return shared == before.lock.num_pages",
        ("test_a_new_turn_moves_the_pin",),
        "a new turn moves the pin, also where a thought is gone",
    ),
    Mutation(
        "pins-of-ended-sessions-keep-their-pages",
        "PinnedPrefixes.end_session",
        "self._let_go(pinned)",
        "self._drop(pinned)",
        ("test_an_ended_session_loses_its_pins_at_once_and_its_pages_first",),
        "the pages of an ended session are evicted first",
    ),
    Mutation(
        "pins-yield-by-age-alone",
        "PinnedPrefixes._by_worth",
        "if not self.waits.predicts:",
        "if self.waits is not None:",
        ("test_the_pin_that_is_worth_least_yields_first",),
        "the pin that is worth least yields first",
    ),
    Mutation(
        "waits-of-other-tools-count",
        "SessionWaits.turn",
        "self._observe(session[0], waiting.own, waiting.label, began - waiting.since)",
        'self._observe(session[0], waiting.own, "other", began - waiting.since)',
        ("test_a_pin_lasts_for_as_long_as_its_tool_took_before",),
        "a wait is of the tool that was called",
    ),
    Mutation(
        "pages-ignore-the-wish-not-to-write",
        "release_kv",
        "keep = keep and request.cache.write",
        "keep = keep and request.cache is not None",
        ("test_who_does_not_write_leaves_nothing_and_may_still_read",),
        "who does not write leaves nothing",
    ),
    Mutation(
        "pages-publish-what-is-not-to-be-written",
        "publish",
        "if request.lease is not None and request.cache.write:",
        "if request.lease is not None:",
        ("test_who_does_not_write_leaves_nothing_and_may_still_read",),
        "what is not to be written is not lent while it runs",
    ),
    Mutation(
        "pages-pin-the-answer-too",
        "pin_prompt",
        "min(pin.num_tokens, request.prompt_len)",
        "pin.num_tokens",
        ("test_an_answer_that_was_cached_before_is_not_pinned_with_its_prompt",),
        "a prompt is pinned, and nothing else",
    ),
)
