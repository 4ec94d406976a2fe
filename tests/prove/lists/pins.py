"""Mistakes in pins, and what requests leave in the cache."""

from __future__ import annotations

from ..mutation import Mutation

MUTATIONS = (
    Mutation(
        "pins-outgrow-their-quota",
        "PinnedPrefixes._shrink",
        "while self._num_pages[own] > self.quota:",
        "while self._num_pages[own] > 2 * self.quota:",
        ("test_a_namespace_beyond_its_quota_loses_its_own_oldest_pin",),
        "a namespace pins no more than its quota",
    ),
    Mutation(
        "pins-outgrow-the-pool",
        "PinnedPrefixes._shrink",
        "while self._tree.num_pinned_pages > self.total_quota:",
        "while self._tree.num_pinned_pages > 2 * self.total_quota:",
        ("test_all_together_pin_at_most_half_and_the_biggest_namespace_gives_way",),
        "all together pin at most half",
    ),
    Mutation(
        "pins-never-expire",
        "PinnedPrefixes.expire",
        "while self._due and self._due.peekitem(0)[0][0] <= now:",
        "while self._due and self._due.peekitem(0)[0][0] < 0:",
        ("test_a_pin_decays_to_ordinary_cache_when_its_time_is_over",),
        "a pin decays when its time is over",
    ),
    Mutation(
        "pins-shorten-each-other",
        "PinnedPrefixes.keep",
        "known.ttl = max(known.ttl, ttl)",
        "known.ttl = ttl",
        ("test_pinning_again_prolongs_and_never_shortens",),
        "pinning again never shortens",
    ),
    Mutation(
        "pins-leak-a-receipt",
        "PinnedPrefixes.keep",
        "        if known is not None:\n            self._tree.unlock(lock)\n",
        "        if known is not None:\n",
        ("test_random_tenants_lose_no_page_and_never_lock_the_pool",),
        "I2: a lost reference leaks KV for ever",
    ),
    Mutation(
        "pins-do-not-live-on",
        "PinnedPrefixes.touch",
        "                if passed.pins and (pinned := self._pins.get(passed)) is not None:\n"
        "                    self._renew(pinned)",
        "                if passed.pins and (pinned := self._pins.get(passed)) is not None:\n"
        "                    self._pins.move_to_end(pinned.lock.node)",
        ("test_a_hit_begins_the_time_of_a_pin_anew",),
        "a hit begins the time of a pin anew",
    ),
    Mutation(
        "pins-give-way-in-vain",
        "PinnedPrefixes.evict_pin",
        "if pin.lock.node.ref_count == 1))",
        "if pin.lock.node.ref_count))",
        ("test_pins_of_pages_that_a_request_reads_do_not_give_way_in_vain",),
        "a pin gives way only where pages become evictable",
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
    Mutation(
        "pages-note-a-preempted-hit",
        "acquire_kv",
        "is_first = request.num_preemptions == 0",
        "is_first = request.num_preemptions >= 0",
        ("test_preemption_counts_no_token_as_written_twice",),
        "cached tokens are those found at first",
    ),
    Mutation(
        "pages-note-writes-twice",
        "_note",
        "new = upto - max(written.start, request.num_tokens_accounted)",
        "new = upto - written.start",
        ("test_preemption_counts_no_token_as_written_twice",),
        "preemption counts no token as written twice",
    ),
)
