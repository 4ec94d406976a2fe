"""Functions of which every small mistake must be noticed, with the tests that must notice it.

The core's decisions: who owns a page, what a step computes, which tokens come out, who is told.
"""

from __future__ import annotations

from .code import Code
from .mutation import Mutation
from .operators import Target, generated

_TREE = (
    "radix_cache/test_tree.py", "radix_cache/test_quota.py", "radix_cache/test_eviction.py",
    "radix_cache/test_pins.py", "radix_cache/test_prefix_cache.py",
)  # fmt: skip
_CACHE = ("radix_cache/test_prefix_cache.py", "radix_cache/test_eviction.py")
_QUOTA = ("radix_cache/test_quota.py", "radix_cache/test_eviction.py")
_SCHEDULER = ("core/scheduling/test_scheduler.py", "core/scheduling/test_chunk_budget.py")
_ADMISSION = ("core/scheduling/test_request_queue.py", "core/scheduling/test_scheduler.py")
_COMMIT = ("core/scheduling/test_scheduler.py", "core/scheduling/test_cache_options.py")
_SHORT = ("core/scheduling/test_scheduler.py", "simulation/test_long_prompts.py")
_QUEUE = ("core/scheduling/test_request_queue.py", "core/scheduling/test_fairness.py")
_LEASES = ("core/scheduling/test_cache_options.py", "core/scheduling/test_scheduler.py")
_OUTPUT = ("core/scheduling/test_output_processor.py", "core/scheduling/test_scheduler.py")
_OVERLAP = ("core/scheduling/test_async_scheduling.py", "core/engine/test_in_flight_launches.py")
_VERIFY = ("core/sampling/test_verifier.py", "core/sampling/test_acceptance.py")
_MAIL = ("core/engine/test_inbox.py", "core/interface/test_token_stream.py")
_STOPS = ("api/text/test_text.py",)

_PLACES: dict[tuple[str, ...], tuple[str, ...]] = {
    _TREE: (
        "RadixTree.match", "RadixTree.lock", "RadixTree.unlock", "RadixTree.insert_below",
        "RadixTree.evict", "RadixTree._append", "RadixTree._split", "RadixTree._drop",
        "RadixTree._drop_upwards", "RadixTree._count", "Node.common_pages", "Node.cut_front",
    ),
    _CACHE: (
        "PrefixCache.acquire", "PrefixCache.extend", "PrefixCache.shrink", "PrefixCache.publish",
        "PrefixCache.release", "_borrowable",
    ),
    _QUOTA: ("NamespaceQuota.add", "EvictionIndex.take"),
    ("radix_cache/test_pins.py",): (
        "PinnedPrefixes.keep", "PinnedPrefixes.expire", "PinnedPrefixes._shrink",
    ),
    _SCHEDULER: (
        "Scheduler._release", "Scheduler._finish", "check_fits", "RequestTable.discard",
    ),
    _ADMISSION: ("RequestTable._check_room", "RequestTable.candidates"),
    _COMMIT: ("Scheduler._commit_request",),
    _SHORT: (
        "Scheduler._plan_chunks", "Scheduler._fill_in_turn", "Scheduler._admit_early",
        "Scheduler._preempt", "RequestTable.short_ones", "would_fit",
    ),
    _QUEUE: (
        "WaitingQueue.begin_round", "WaitingQueue._enter", "WaitingQueue._leave",
        "WaitingQueue._least", "VirtualTokenCounter.forget",
    ),
    _LEASES: ("cache_limit", "awaits_prefix"),
    ("core/scheduling/test_draft_pages.py",): ("allocate_draft_pages",),
    _OUTPUT: ("take_output", "end_at"),
    _OVERLAP: (
        "plan_next", "_continuing", "Scheduler.discard_plan",
        "PrefixCache.return_newly_allocated_pages",
    ),
    _VERIFY: ("verified", "_Walk.take", "_waves"),
    ("core/sampling/test_drafted_row.py",): (
        "DraftedRow.at", "DraftedRow.tail", "DraftedRow.child", "DraftedRow.follow",
    ),
    ("core/sampling/test_logits_processors.py", "core/interface/test_constraint.py"): (
        "_edit", "_penalise", "_history", "DraftedRow.banned_by_words", "EncodedSampling.ask",
    ),
    ("core/sampling/test_logprobs.py",): ("token_logprobs",),
    _MAIL: (
        "RequestInbox.abort", "RequestInbox.drain", "RequestInbox.deliver",
        "RequestInbox.fail_streams", "TokenStream.push", "TokenStream.__anext__", "Delta.merge",
    ),
    ("core/engine/test_step_bisection.py",): ("StepBisection.failed", "_splits"),
    ("core/engine/test_finish_rate.py",): ("retry_seconds",),
    _STOPS: (
        "StopTable._link",
        "StopTable.step",
        "StopStrings.feed",
        "AnswerText.add_token",
        "AnswerText.take",
    ),
    ("api/server/test_owners.py",): ("Shares.remove", "Shares.excess"),
    ("api/cluster/test_routing.py",): (
        "Router.leave", "Router.retire", "Router.stored", "Router.choose", "Router.begin",
        "Router.progress", "Router.end", "_Replica.mark_sent", "_Replica.forget_sent",
        "_Offer.has", "_find_pages", "_of_session",
    ),
    ("api/cluster/test_scaling.py",): ("want", "_num_needed", "_is_calm"),
}  # fmt: skip
TARGETS = tuple(Target(place, tests) for tests, places in _PLACES.items() for place in places)

_TICKS = "ticks of a clock are compared with each other, never counted"
EQUIVALENT: dict[str, str] = {
    "RadixTree.lock: off by one 1": _TICKS,
    "RadixTree.unlock: off by one 1": _TICKS,
    "RadixTree.insert_below: off by one 1": _TICKS,
    "RadixTree._split: off by one 1 #2": _TICKS,
    "RadixTree._drop: off by one 1 #3": _TICKS,
    "PrefixCache.publish: bound start >= stop": "no page is given, to a node that is held anyway",
    "Scheduler._fill_in_turn: bound early[0].order < head.order": "no two requests have one place",
    "Node.common_pages: off by one 0": "a child is found by its first page, which is common",
    "Node.common_pages: off by one 1": "the search halves elsewhere, and ends at the same page",
    "_find_pages: drop return": "keys that no replica has are made for nothing",
    "want: bound needed > current": "a number that is needed is never calm",
    "_num_needed: off by one 9": "a quotient of few digits is rounded to the same",
}
"""Generated mutations, by name, that change nothing that a caller could notice, and why."""


def generated_mutations(code: Code) -> list[Mutation]:
    """Mutations of all targets, less equivalent ones. Raises `DoesNotApply` if a target is gone."""
    return [
        mutation
        for target in TARGETS
        for mutation in generated(target, code.source(target.place))
        if mutation.name not in EQUIVALENT
    ]
