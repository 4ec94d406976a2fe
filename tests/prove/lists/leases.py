"""Mistakes in who owns which page: acquire, extend, publish, release."""

from __future__ import annotations

from ..mutation import Mutation

CACHE = "tests/radix_cache/test_prefix_cache.py"
ACTORS = "tests/radix_cache/test_cache_actors.py"
OPTIONS = "tests/core/test_cache_options.py"
SCHEDULER = "tests/core/test_scheduler.py"

MUTATIONS = (
    Mutation(
        "cache-borrows-the-last-token",
        "radix_cache/prefix_cache.py",
        "longest = max(num_tokens - 1, 0)",
        "longest = num_tokens",
        (CACHE,),
        "the last token's logits must be computed",
    ),
    Mutation(
        "cache-extend-loses-a-page",
        "radix_cache/prefix_cache.py",
        "        del self._free[-needed:]\n",
        "        del self._free[-needed - 1 :]\n",
        (CACHE,),
        "I1: every page is accounted for",
    ),
    Mutation(
        "cache-drafts-evict",
        "radix_cache/prefix_cache.py",
        "if needed > (self.num_available_pages if evict else self.num_free_pages):",
        "if needed > self.num_available_pages:",
        (CACHE,),
        "drafts never push out what is committed",
    ),
    Mutation(
        "cache-extend-is-not-fresh",
        "radix_cache/prefix_cache.py",
        "        self._fresh += taken\n",
        "",
        (CACHE,),
        "law 3: other pools learn that a page changed hands",
    ),
    Mutation(
        "cache-shrink-takes-shared-pages",
        "radix_cache/prefix_cache.py",
        "keep = max(lease.num_shared_pages, -(-upto // self.page_size))",
        "keep = -(-upto // self.page_size)",
        (CACHE,),
        "law 2: lent pages are the tree's",
    ),
    Mutation(
        "cache-publishes-a-page-begun",
        "radix_cache/prefix_cache.py",
        "start, stop = lease.num_shared_pages, num_computed // self.page_size",
        "start, stop = lease.num_shared_pages, -(-num_computed // self.page_size)",
        (CACHE, ACTORS),
        "I7: only whole computed pages reach the tree",
    ),
    Mutation(
        "cache-publish-loses-its-copies",
        "radix_cache/prefix_cache.py",
        "        self._free += own[: len(adopted)]\n",
        "",
        (CACHE,),
        "I1: copies of what the tree had become free",
    ),
    Mutation(
        "cache-publish-keeps-its-own-copies",
        "radix_cache/prefix_cache.py",
        "        lease.page_ids[start : start + len(adopted)] = adopted\n",
        "",
        (CACHE,),
        "law 2: the lease reads the tree's copy",
    ),
    Mutation(
        "cache-publish-believes-any-count",
        "radix_cache/prefix_cache.py",
        "if not 0 <= num_computed <= min(len(tokens), len(lease.page_ids) * self.page_size):",
        "if num_computed < 0:",
        (CACHE,),
        "I7: nothing is published that was not computed",
    ),
    Mutation(
        "cache-release-publishes-what-failed",
        "radix_cache/prefix_cache.py",
        "if keep else range(0)\n        self._free",
        "if tokens else range(0)\n        self._free",
        (CACHE,),
        "what a failed request computed reaches nobody",
    ),
    Mutation(
        "cache-release-keeps-the-rest",
        "radix_cache/prefix_cache.py",
        "        self._free += lease.page_ids[lease.num_shared_pages :]\n",
        "",
        (CACHE,),
        "I1: private pages become free",
    ),
    Mutation(
        "cache-release-skips-the-unlock",
        "radix_cache/prefix_cache.py",
        "        self.tree.unlock(lease.lock)\n",
        "",
        (CACHE,),
        "I2: a lost reference leaks KV for ever",
    ),
    Mutation(
        "cache-release-empties-a-lent-table",
        "radix_cache/prefix_cache.py",
        'lease.page_ids = array("q")  # anew',
        "del lease.page_ids[:]  # anew",
        (CACHE,),
        "a running step may still read the page table",
    ),
    Mutation(
        "cache-would-fit-counts-a-match-twice",
        "radix_cache/prefix_cache.py",
        "needed = num_pages - len(match.page_ids) + match.num_idle_pages",
        "needed = num_pages - len(match.page_ids)",
        (CACHE,),
        "a match is borrowed and no longer evictable",
    ),
    Mutation(
        "cache-counts-a-preempted-request-again",
        "radix_cache/prefix_cache.py",
        "        if is_first:\n            self.num_queries",
        "        if lock:\n            self.num_queries",
        (CACHE, SCHEDULER, OPTIONS),
        "the hit rate counts each request once",
    ),
)
