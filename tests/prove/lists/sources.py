"""Mistakes in the sources of drafts, and the speculator over them."""

from __future__ import annotations

from ..mutation import Mutation

MUTATIONS = (
    Mutation(
        "suffix-looks-into-other-namespaces",
        "SuffixIndex._look_up",
        "if found is None or found.scope != history.scope:",
        "if found is None:",
        ("test_every_guess_is_what_followed_in_its_namespace",),
        "cache_salt separates tenants in drafts",
    ),
    Mutation(
        "suffix-keeps-what-is-private",
        "SuffixSource.leave",
        "        if self._is_private(request):\n            self._forget(request)\n",
        "        if self._own_only:\n            self._forget(request)\n",
        ("test_an_ended_private_request_leaves_no_memory_behind",),
        "a private request leaves nothing behind",
    ),
    Mutation(
        "suffix-flush-misses-the-default-namespace",
        "SuffixSource.flush",
        "if history.scope in flushed:",
        "if history.scope in namespaces:",
        ("test_a_flush_forgets_the_answers_of_the_named_namespaces",),
        "a flush of all forgets all",
    ),
    Mutation(
        "ngram-shares-a-namespace",
        "SuffixSource._is_private",
        "return self._own_only or request.cache.is_private",
        "return request.cache.is_private",
        ("test_no_request_sees_another_even_of_the_same_namespace",),
        "no request sees another",
    ),
    Mutation(
        "radix-keeps-all-in-one-namespace",
        "PrefixSource.leave",
        "tree.insert(tokens, namespace=request.namespace)",
        "tree.insert(tokens)",
        ("test_namespaces_are_apart",),
        "cache_salt separates tenants in drafts",
    ),
    Mutation(
        "radix-keeps-what-is-private",
        "PrefixSource.leave",
        "if not request.num_output or request.cache.is_private:",
        "if not request.num_output:",
        ("test_nothing_that_a_private_request_said_is_kept",),
        "a private request leaves nothing behind",
    ),
    Mutation(
        "grammar-uses-the-model-threads-matcher",
        "GrammarSource._follower",
        "_Follower(constraint.fork())",
        "_Follower(constraint)",
        ("test_the_run_that_is_forced_is_proposed_by_a_matcher_of_the_loops_own",),
        "law 5: a constraint belongs to the model thread",
    ),
    Mutation(
        "speculator-takes-all-of-the-budget",
        "DraftSpeculator.plan",
        "own_depths, repeat(share))",
        "own_depths)",
        ("test_speculator.py",),
        "drafts stay within the rows that are offered",
    ),
)
