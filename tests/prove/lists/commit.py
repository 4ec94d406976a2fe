"""Mistakes in taking a step's outcome into a request."""

from __future__ import annotations

from ..mutation import Mutation

MUTATIONS = (
    Mutation(
        "commit-publishes-unserved-drafts",
        "take_output",
        "        num_computed = min(num_computed, len(tokens))\n",
        "",
        ("test_a_stop_token_cuts_the_accepted_run",),
        "I7: accepted tokens behind the cut count as computed",
    ),
    Mutation(
        "commit-goes-on-after-the-end",
        "_append",
        "delta.finish_reason, delta.stop_reason = end\n            return\n",
        "delta.finish_reason, delta.stop_reason = end\n",
        ("test_a_stop_token_cuts_the_accepted_run",),
        "I8: nothing after a stop",
    ),
    Mutation(
        "commit-tells-prompt-logprobs-twice",
        "_new_prompt_logprobs",
        "out.prompt_logprobs[max(0, request.num_prompt_logprobs - scheduled.start) :]",
        "out.prompt_logprobs",
        ("test_prompt_logprobs_are_told_once_though_preemption_computes_them_twice",),
        "a preempted request is told each prompt token once",
    ),
)
