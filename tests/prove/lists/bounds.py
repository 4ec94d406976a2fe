"""Mistakes in what bounds work and memory: audits at rest, bodies, templates, charges."""

from __future__ import annotations

from ..mutation import Mutation

AUDIT = "tests/core/test_audit.py"
RECOVERY = "tests/core/test_recovery.py"
LIMITS = "tests/api/test_limits.py"
TOKENIZER = "tests/api/test_tokenizer.py"

MUTATIONS = (
    Mutation(
        "audit-at-rest-holds-the-loop",
        "core/audit.py",
        "if (violation := _go_on(steps, SLICE)) is not None:",
        "if (violation := _go_on(steps, None)) is not None:",
        (f"{AUDIT}::test_others_have_their_turns_between_the_slices_of_an_audit",),
        "an audit at rest holds nobody up",
    ),
    Mutation(
        "audit-goes-on-over-changes",
        "core/audit.py",
        "while tree.version == version and not wake.is_set():",
        "while not wake.is_set():",
        (f"{AUDIT}::test_an_audit_that_a_flush_comes_between_begins_anew",),
        "what is audited does not change meanwhile",
    ),
    Mutation(
        "audits-fill-every-pause",
        "core/audit.py",
        "        if self._was_cut:\n",
        "        if False:\n",
        (f"{AUDIT}::test_an_audit_that_was_cut_short_is_begun_again_only_when_it_is_quiet",),
        "short pauses are not full of audits that never end",
    ),
    Mutation(
        "engine-forgets-who-came-while-it-audits",
        "core/engine.py",
        "            await self._auditor.rest(self._clock(), self._mail.wake)\n",
        "            await self._auditor.rest(self._clock(), self._mail.wake)\n"
        "            self._mail.wake.clear()\n",
        (AUDIT,),
        "what comes into an idle moment wakes the engine",
    ),
    Mutation(
        "scheduler-charges-twice-where-memory-ran-out",
        "core/scheduler.py",
        "request.num_prepaid += max(0, row.stop - request.num_computed)",
        "request.num_prepaid += 0",
        (f"{RECOVERY}::test_a_tenant_pays_once_for_what_a_step_without_memory_did_not_get_to",),
        "a tenant pays for what is computed",
    ),
    Mutation(
        "body-commas-of-texts-are-values",
        "api/json_depth.py",
        "((block == ord(_COMMA)) & (inside == 0))",
        "(block == ord(_COMMA))",
        (f"{LIMITS}::test_values_are_counted_by_the_commas_outside_texts",),
        "a text of many commas is one value",
    ),
    Mutation(
        "template-keeps-what-is-too-long",
        "api/sandbox.py",
        "        _check(num_chars)\n        return",
        "        return",
        (f"{TOKENIZER}::test_what_a_template_builds_is_bounded_by_what_may_fit",),
        "what a template writes is bounded",
    ),
)
