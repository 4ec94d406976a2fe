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
        "engine-forgets-who-came-while-it-audits",
        "Engine._wait_for_work",
        "            await self._auditor.audit_while_idle(self._clock(), self._inbox.wake)\n",
        "            await self._auditor.audit_while_idle(self._clock(), self._inbox.wake)\n"
        "            self._inbox.wake.clear()\n",
        ("test_audit.py",),
        "what comes into an idle moment wakes the engine",
    ),
)
