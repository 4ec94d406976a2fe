"""Mistakes in pins, and what requests leave in the cache."""

from __future__ import annotations

from ..mutation import Mutation

PINS = "tests/radix_cache/test_pins.py"
OPTIONS = "tests/core/test_cache_options.py"
SCHEDULER = "tests/core/test_scheduler.py"

MUTATIONS = (
    Mutation(
        "pins-outgrow-their-quota",
        "radix_cache/pins.py",
        "while self._num_pages[own] > self.quota:",
        "while self._num_pages[own] > 2 * self.quota:",
        (PINS,),
        "a namespace pins no more than its quota",
    ),
    Mutation(
        "pins-outgrow-the-pool",
        "radix_cache/pins.py",
        "while self._tree.counts.num_pinned > self.total_quota:",
        "while self._tree.counts.num_pinned > 2 * self.total_quota:",
        (PINS,),
        "all together pin at most half",
    ),
    Mutation(
        "pins-never-expire",
        "radix_cache/pins.py",
        "while self._due and self._due.peekitem(0)[0][0] <= now:",
        "while self._due and self._due.peekitem(0)[0][0] < 0:",
        (PINS,),
        "a pin decays when its time is over",
    ),
    Mutation(
        "pins-shorten-each-other",
        "radix_cache/pins.py",
        "known.ttl = max(known.ttl, ttl)",
        "known.ttl = ttl",
        (PINS,),
        "pinning again never shortens",
    ),
    Mutation(
        "pins-leak-a-receipt",
        "radix_cache/pins.py",
        "        if known is not None:\n            self._tree.unlock(lock)\n",
        "        if known is not None:\n",
        (PINS,),
        "I2: a lost reference leaks KV for ever",
    ),
    Mutation(
        "pins-do-not-live-on",
        "radix_cache/pins.py",
        "                if passed.pins and (pinned := self._pins.get(passed)) is not None:\n"
        "                    self._renew(pinned)",
        "                if passed.pins and (pinned := self._pins.get(passed)) is not None:\n"
        "                    self._pins.move_to_end(pinned.lock.node)",
        (PINS,),
        "a hit begins the time of a pin anew",
    ),
    Mutation(
        "pins-give-way-in-vain",
        "radix_cache/pins.py",
        "if pin.lock.node.locks == 1))",
        "if pin.lock.node.locks))",
        (PINS,),
        "a pin gives way only where pages become evictable",
    ),
    Mutation(
        "pages-ignore-the-wish-not-to-write",
        "core/pages.py",
        "keep = keep and request.cache.write",
        "keep = keep and request.cache is not None",
        (OPTIONS,),
        "who does not write leaves nothing",
    ),
    Mutation(
        "pages-publish-what-is-not-to-be-written",
        "core/pages.py",
        "if request.lease is not None and request.cache.write:",
        "if request.lease is not None:",
        (OPTIONS,),
        "what is not to be written is not lent while it runs",
    ),
    Mutation(
        "pages-pin-the-answer-too",
        "core/pages.py",
        "min(pin.num_tokens, request.prompt_len)",
        "pin.num_tokens",
        (OPTIONS,),
        "a prompt is pinned, and nothing else",
    ),
    Mutation(
        "pages-note-a-preempted-hit",
        "core/pages.py",
        "is_first = request.num_preemptions == 0",
        "is_first = request.num_preemptions >= 0",
        (OPTIONS, SCHEDULER),
        "cached tokens are those found at first",
    ),
    Mutation(
        "pages-note-writes-twice",
        "core/pages.py",
        "new = upto - max(written.start, request.num_noted)",
        "new = upto - written.start",
        (OPTIONS,),
        "preemption counts no token as written twice",
    ),
)
