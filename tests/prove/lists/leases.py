"""Mistakes in who owns which page: acquire, extend, publish, release."""

from __future__ import annotations

from ..mutation import Mutation

MUTATIONS = (
    Mutation(
        "cache-drafts-evict",
        "PrefixCache.extend",
        "if needed > (self.num_available_pages if evict else self.num_free_pages):",
        "if needed > self.num_available_pages:",
        ("test_extend_for_drafts_never_evicts",),
        "drafts never push out what is committed",
    ),
    Mutation(
        "cache-shrink-takes-shared-pages",
        "PrefixCache.shrink",
        "keep = max(lease.num_shared_pages, -(-upto // self.page_size))",
        "keep = -(-upto // self.page_size)",
        ("test_shrink_gives_back_private_pages_and_never_what_the_tree_lent",),
        "law 2: lent pages are the tree's",
    ),
    Mutation(
        "cache-publishes-a-page-begun",
        "PrefixCache.publish",
        "start, stop = lease.num_shared_pages, num_computed // self.page_size",
        "start, stop = lease.num_shared_pages, -(-num_computed // self.page_size)",
        ("test_publish_shares_whole_pages_with_requests_that_still_run",),
        "I7: only whole computed pages reach the tree",
    ),
    Mutation(
        "cache-publish-believes-any-count",
        "PrefixCache.publish",
        "if not 0 <= num_computed <= min(len(tokens), len(lease.page_ids) * self.page_size):",
        "if num_computed < 0:",
        ("test_publish_of_more_than_was_computed_is_refused",),
        "I7: nothing is published that was not computed",
    ),
    Mutation(
        "cache-release-publishes-what-failed",
        "PrefixCache.release",
        "num_computed) if keep else range(0)",
        "num_computed) if tokens else range(0)",
        ("test_release_of_a_failed_request_publishes_nothing",),
        "what a failed request computed reaches nobody",
    ),
    Mutation(
        "cache-release-empties-a-lent-table",
        "PrefixCache.release",
        'lease.page_ids = array("q")  # a new array',
        "del lease.page_ids[:]  # a new array",
        ("test_release_leaves_the_page_table_lent_to_a_running_step_alone",),
        "a running step may still read the page table",
    ),
    Mutation(
        "cache-would-fit-counts-a-match-twice",
        "PrefixCache.would_fit",
        "needed = num_pages - len(match.page_ids) + match.num_idle_pages",
        "needed = num_pages - len(match.page_ids)",
        ("test_would_fit_counts_a_match_as_borrowed_and_not_as_evictable",),
        "a match is borrowed and no longer evictable",
    ),
)
