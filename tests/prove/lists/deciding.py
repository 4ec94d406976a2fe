"""Mistakes in deciding how much to draft: acceptance, costs, allocation, probes, silence."""

from __future__ import annotations

from ..mutation import Mutation

MUTATIONS = (
    Mutation(
        "acceptance-misses-teach-nothing",
        "AcceptanceModel.score",
        "curve.scores.append((num_hits, num_hits + missed))",
        "curve.scores.append((num_hits, num_hits))",
        ("control/test_estimators.py",),
        "chances converge to the truth",
    ),
    Mutation(
        "acceptance-mixes-greedy-and-sampled",
        "AcceptanceModel.survivals",
        "self._curves[each.source][each.sampled][each.kind]",
        "self._curves[each.source][False][each.kind]",
        ("control/test_estimators.py",),
        "greedy and sampled requests are learnt apart",
    ),
    Mutation(
        "costs-more-rows-take-less",
        "CostCurve.observe",
        "self._values = np.maximum.accumulate(np.exp(logs))",
        "self._values = np.exp(logs)",
        ("test_cost_model.py",),
        "a row never has a price below 0",
    ),
    Mutation(
        "costs-prompts-slow-decoding",
        "CostModel.observe",
        "if with_prompts or not num_requests:",
        "if not num_requests:",
        ("test_cost_model.py",),
        "steps with prompts are no measure of decoding",
    ),
    Mutation(
        "allocation-drafts-beyond-the-budget",
        "_best_prefix",
        "most = min(budget, int(np.count_nonzero(for_a_row > 0.0)))",
        "most = int(np.count_nonzero(for_a_row > 0.0))",
        ("test_allocation.py",),
        "drafts stay within the rows that are offered",
    ),
    Mutation(
        "probes-take-any-time",
        "ProbeScheduler.is_due",
        "self._num_idle >= self._interval and cost_s <= self._saved_s",
        "self._num_idle >= self._interval",
        ("test_controller.py",),
        "probes take a hundredth of the time at most",
    ),
    Mutation(
        "silence-holds-for-forced-runs",
        "DraftSpeculator._finds_nothing",
        " and request.sampling.constraint is None",
        "",
        ("sources/test_grammar.py",),
        "a forced run is found however long nothing was drafted",
    ),
    Mutation(
        "silence-of-one-is-taken-for-all",
        "DraftSpeculator.drafts_nothing",
        "not uses_proposer and all(",
        "not uses_proposer and any(",
        ("test_speculator.py",),
        "a step is planned unless all are silent",
    ),
    Mutation(
        "silence-is-broken-by-a-failure",
        "GuardedSpeculator.drafts_nothing",
        "if_failed=True",
        "if_failed=False",
        ("test_draft_pages.py",),
        "a speculator that fails drafts nothing",
    ),
    Mutation(
        "speculator-takes-the-unserved-for-wrong",
        "DraftState.score",
        "missed=hits < min(len(guess.token_ids), len(served)),",
        "missed=hits < len(guess.token_ids),",
        ("test_speculator.py",),
        "what follows the last token served says nothing",
    ),
    Mutation(
        "shadow-loses-what-nobody-told-of",
        "OverlapWork.finish",
        "        if self._is_due:\n            self._is_due = False\n            self._work()\n",
        "        self._is_due = False\n",
        ("test_overlap_work.py",),
        "what is due is done before the step is over",
    ),
)
