"""Mistakes in what bounds work and memory: audits at rest, bodies, templates, charges."""

from __future__ import annotations

from ..mutation import Mutation

MUTATIONS = (
    Mutation(
        "audit-at-rest-holds-the-loop",
        "Auditor._inspect_slowly",
        "if (violation := _advance(steps, SLICE)) is not None:",
        "if (violation := _advance(steps, None)) is not None:",
        ("test_others_have_their_turns_between_the_slices_of_an_audit",),
        "an audit at rest holds nobody up",
    ),
    Mutation(
        "audit-goes-on-over-changes",
        "Auditor._inspect_slowly",
        "while tree.version == version and not wake.is_set():",
        "while not wake.is_set():",
        ("test_an_audit_that_a_flush_comes_between_begins_anew",),
        "what is audited does not change meanwhile",
    ),
    Mutation(
        "audits-fill-every-pause",
        "Auditor.audit_while_idle",
        "        if self._was_cut:\n",
        "        if False:\n",
        ("test_an_audit_that_was_cut_short_is_begun_again_only_when_it_is_quiet",),
        "short pauses are not full of audits that never end",
    ),
    Mutation(
        "engine-forgets-who-came-while-it-audits",
        "Engine._wait_for_work",
        "            await self._auditor.audit_while_idle(self._clock(), self._inbox.wake)\n",
        "            await self._auditor.audit_while_idle(self._clock(), self._inbox.wake)\n"
        "            self._inbox.wake.clear()\n",
        ("test_audit.py",),
        "what comes into an idle moment wakes the engine",
    ),
    Mutation(
        "scheduler-charges-twice-where-memory-ran-out",
        "Scheduler.credit_unfinished",
        "request.num_charged_not_computed += max(0, scheduled.stop - request.num_computed)",
        "request.num_charged_not_computed += 0",
        ("test_a_tenant_pays_once_for_what_a_step_without_memory_did_not_get_to",),
        "a tenant pays for what is computed",
    ),
    Mutation(
        "body-commas-of-texts-are-values",
        "find_excess",
        "((block == ord(_COMMA)) & (inside == 0))",
        "(block == ord(_COMMA))",
        ("test_values_are_counted_by_the_commas_outside_texts",),
        "a text of many commas is one value",
    ),
    Mutation(
        "template-keeps-what-is-too-long",
        "bounded_text",
        "    budget.check(num_chars)\n    return",
        "    return",
        ("test_what_a_template_builds_is_bounded_by_what_may_fit",),
        "what a template writes is bounded",
    ),
    Mutation(
        "memory-of-the-own-group-alone",
        "_groups",
        "(group, *group.parents)",
        "(group,)",
        (
            "test_any_group_up_to_the_top_may_limit",
            "test_the_group_of_a_container_may_be_mounted_as_the_top_one",
        ),
        "a container's memory is within the limits of all groups above it",
    ),
    Mutation(
        "memory-that-file-cache-holds-is-lost",
        "_left",
        "limit - usage + sum(fields.get(name, 0) for name in names.cache)",
        "limit - usage",
        ("test_version_2_limits_with_cache_that_can_be_dropped",),
        "file cache that is dropped first counts as free",
    ),
    Mutation(
        "pool-of-more-than-there-is",
        "_check_free",
        "if num_bytes > free:",
        "if False:",
        ("test_a_pool_larger_than_free_memory_is_refused_with_both_numbers",),
        "an engine that does not fit is refused at its start",
    ),
)
