"""Mistakes in taking a step's outcome into a request."""

from __future__ import annotations

from ..mutation import Mutation

COMMITS = "tests/core/test_commit.py"
SCHEDULER = "tests/core/test_scheduler.py"

MUTATIONS = (
    Mutation(
        "commit-cursor-one-ahead",
        "core/commit.py",
        "min(row.stop + out.num_accepted, len(request.tokens))",
        "min(row.stop + out.num_accepted + 1, len(request.tokens))",
        (SCHEDULER,),
        "I7: a token without KV counts as computed",
    ),
    Mutation(
        "commit-publishes-unserved-drafts",
        "core/commit.py",
        "request.num_computed = min(row.stop + out.num_accepted, len(request.tokens))",
        "request.num_computed = row.stop + out.num_accepted",
        (SCHEDULER,),
        "I7: accepted tokens behind the cut count as computed",
    ),
    Mutation(
        "commit-goes-on-after-the-end",
        "core/commit.py",
        "        if delta.terminal:\n            return\n\n\ndef _end_at",
        "\n\ndef _end_at",
        (SCHEDULER,),
        "I8: nothing after a stop",
    ),
    Mutation(
        "commit-length-one-more",
        "core/commit.py",
        "elif len(request.tokens) >= request.max_len:",
        "elif len(request.tokens) > request.max_len:",
        (SCHEDULER,),
        "I8: never more than max_tokens",
    ),
    Mutation(
        "commit-counts-drafts-beyond-the-cut",
        "core/commit.py",
        "min(out.num_accepted, len(delta.token_ids))",
        "out.num_accepted",
        (COMMITS,),
        "usage: accepted are those that were served",
    ),
    Mutation(
        "commit-tells-every-stop-token",
        "core/commit.py",
        "delta.stop_reason = token_id if explicit else None",
        "delta.stop_reason = token_id",
        (COMMITS,),
        "a model's own end is no stop_reason",
    ),
    Mutation(
        "commit-tells-prompt-logprobs-twice",
        "core/commit.py",
        "out.prompt_logprobs[max(0, request.num_prompt_logprobs - row.start) :]",
        "out.prompt_logprobs",
        (COMMITS,),
        "a preempted request is told each prompt token once",
    ),
    Mutation(
        "commit-first-token-time-is-the-last",
        "core/commit.py",
        "if usage.completion_tokens == 0:",
        "if usage.completion_tokens >= 0:",
        (COMMITS,),
        "usage: time to the first token",
    ),
    Mutation(
        "commit-drops-logprobs-of-a-run",
        "core/commit.py",
        "delta.logprobs.append(out.logprobs[index])",
        "delta.logprobs.append(out.logprobs[0])",
        (COMMITS,),
        "log-probabilities are cut and told as the tokens are",
    ),
)
