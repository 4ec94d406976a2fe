"""Mistakes in taking a step's outcome into a request."""

from __future__ import annotations

from ..mutation import Mutation

MUTATIONS = (
    Mutation(
        "commit-cursor-one-ahead",
        "take_output",
        "min(scheduled.stop + len(out.path), len(request.tokens))",
        "min(scheduled.stop + len(out.path) + 1, len(request.tokens))",
        ("test_an_answer_is_the_models_own",),
        "I7: a token without KV counts as computed",
    ),
    Mutation(
        "commit-publishes-unserved-drafts",
        "take_output",
        "request.num_computed = min(scheduled.stop + len(out.path), len(request.tokens))",
        "request.num_computed = scheduled.stop + len(out.path)",
        ("test_a_stop_token_cuts_the_accepted_run",),
        "I7: accepted tokens behind the cut count as computed",
    ),
    Mutation(
        "commit-goes-on-after-the-end",
        "_append",
        "        if delta.terminal:\n            return\n",
        "",
        ("test_a_stop_token_cuts_the_accepted_run",),
        "I8: nothing after a stop",
    ),
    Mutation(
        "commit-length-one-more",
        "_end_at",
        "elif len(request.tokens) >= request.max_len:",
        "elif len(request.tokens) > request.max_len:",
        ("test_an_answer_is_the_models_own",),
        "I8: never more than max_tokens",
    ),
    Mutation(
        "commit-counts-drafts-beyond-the-cut",
        "_count",
        "out.path[: len(delta.token_ids)]",
        "out.path",
        ("test_accepted_tokens_behind_the_cut_were_proposed_and_not_served",),
        "usage: accepted are those that were served",
    ),
    Mutation(
        "commit-tells-every-stop-token",
        "_end_at",
        "delta.stop_reason = token_id if explicit else None",
        "delta.stop_reason = token_id",
        ("test_only_a_stop_token_that_the_caller_named_is_a_reason",),
        "a model's own end is no stop_reason",
    ),
    Mutation(
        "commit-tells-prompt-logprobs-twice",
        "_new_prompt_logprobs",
        "out.prompt_logprobs[max(0, request.num_prompt_logprobs - scheduled.start) :]",
        "out.prompt_logprobs",
        ("test_prompt_logprobs_are_told_once_though_preemption_computes_them_twice",),
        "a preempted request is told each prompt token once",
    ),
    Mutation(
        "commit-first-token-time-is-the-last",
        "_count",
        "if usage.completion_tokens == 0:",
        "if usage.completion_tokens >= 0:",
        ("test_the_time_to_the_first_token_is_not_that_to_a_later_one",),
        "usage: time to the first token",
    ),
    Mutation(
        "commit-drops-logprobs-of-a-run",
        "_append",
        "delta.logprobs.append(out.logprobs[index])",
        "delta.logprobs.append(out.logprobs[0])",
        ("test_log_probabilities_are_cut_as_the_tokens_are",),
        "log-probabilities are cut and told as the tokens are",
    ),
)
