"""Mistakes in giving up drafters and observers that fail, and in drafts of a fixed depth."""

from __future__ import annotations

from ..mutation import Mutation

MUTATIONS = (
    Mutation(
        "source-failure-is-forgiven-by-other-calls",
        "Guarded.count_failure",
        "breaker = self.breakers[call]",
        'breaker = self.breakers["propose"]',
        ("test_a_source_is_dropped_after_failures_in_close_succession_alone",),
        "a call that always fails drops its source, whatever else succeeds",
    ),
    Mutation(
        "runner-lets-an-empty-draft-hide-a-looked-up-one",
        "ModelRunner._draft",
        "if proposed.token_ids:",
        "if proposed is not NO_DRAFT:",
        ("test_where_the_proposer_has_no_draft_what_was_looked_up_is_verified",),
        "a proposer may return nothing",
    ),
    Mutation(
        "lost-proposer-is-planned-for",
        "DraftSpeculator.observe_step",
        "self._proposer, self._lost_proposer, self._uses_proposer = None, True, False",
        "self._lost_proposer, self._uses_proposer = True, False",
        ("test_a_lost_proposer_is_planned_for_no_more",),
        "no step is planned for a proposer that was given up",
    ),
    Mutation(
        "observer-ends-the-engine",
        "Observers._notify",
        "            self._count_failure()\n",
        "            self._count_failure()\n            raise\n",
        ("test_an_observer_that_raises_costs_nothing_but_itself",),
        "no step depends on an observer",
    ),
)
