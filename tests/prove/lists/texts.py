"""Mistakes in the text of an answer: stop strings, pieces, usage."""

from __future__ import annotations

from ..mutation import Mutation

TEXT = "tests/api/test_text.py"
SDK = "tests/api/test_sdk.py"

MUTATIONS = (
    Mutation(
        "stops-miss-one-inside-another",
        "api/stops.py",
        "child.stop = child.stop or child.fail.stop",
        "child.stop = child.stop or None",
        (TEXT,),
        "every stop string is found",
    ),
    Mutation(
        "stops-lose-their-place-between-pieces",
        "api/stops.py",
        "        self._state = state\n        return None",
        "        return None",
        (TEXT,),
        "a stop string may be cut into pieces",
    ),
    Mutation(
        "text-shows-a-stop-strings-beginning",
        "api/text.py",
        "held = self._stops.held",
        "held = 0",
        (TEXT,),
        "a possible beginning of a stop string is held back",
    ),
    Mutation(
        "text-keeps-the-stop-string",
        "api/text.py",
        "whole[: len(whole) - (len(text) - consumed) - len(stop)]",
        "whole[: len(whole) - (len(text) - consumed)]",
        (TEXT,),
        "a stop string ends the text before its first character",
    ),
    Mutation(
        "text-stops-below-min-tokens",
        "api/text.py",
        "count=self._num_tokens >= self._min_tokens",
        "count=self._num_tokens >= self._min_tokens - 1",
        (TEXT,),
        "a stop string counts when min_tokens are out",
    ),
    Mutation(
        "text-loses-its-last-character",
        "api/text.py",
        "            whole += self._detokenizer.flush()\n",
        "            self._detokenizer.flush()\n",
        (TEXT,),
        "the pieces add up to the whole text",
    ),
    Mutation(
        "text-spells-the-stop-token",
        "api/answer.py",
        "token_ids = token_ids[:-1]",
        "token_ids = token_ids[:]",
        (f"{SDK}::test_a_stop_token_that_the_caller_named_is_counted_and_has_no_text",),
        "a token that stops the answer has no text",
    ),
    Mutation(
        "answer-loses-logprobs-of-later-deltas",
        "api/answer.py",
        "            self._logprobs += delta.logprobs\n",
        "            self._logprobs = delta.logprobs\n",
        (f"{SDK}::test_logprobs_come_per_token_and_prompt_logprobs_per_prompt_token",),
        "one log-probability for each token",
    ),
    Mutation(
        "answer-aborts-what-has-ended",
        "api/answer.py",
        "        if not self.ended:\n            self._abort(",
        "        if self.ended:\n            self._abort(",
        (f"{SDK}::test_leaving_a_stream_early_aborts_the_request",),
        "who leaves frees what he had",
    ),
    Mutation(
        "merge-leaves-its-sources-open",
        "api/answer.py",
        "        for source in sources:\n            await source.aclose()\n",
        "        pass\n",
        ("tests/api/test_answer.py",),
        "no generator is left to be closed later",
    ),
    Mutation(
        "results-count-the-prompt-n-times",
        "api/results.py",
        "prompt_tokens=first.prompt_tokens,",
        "prompt_tokens=sum(usage.prompt_tokens for usage in usages),",
        (f"{SDK}::test_siblings_have_their_own_seeds_and_ids_and_share_the_count_of_the_prompt",),
        "usage counts the prompt of n answers once",
    ),
    Mutation(
        "results-lose-tokens-of-siblings",
        "api/results.py",
        "total.completion_tokens += usage.completion_tokens",
        "total.completion_tokens = usage.completion_tokens",
        (f"{SDK}::test_siblings_have_their_own_seeds_and_ids_and_share_the_count_of_the_prompt",),
        "usage counts the tokens of all answers",
    ),
    Mutation(
        "results-write-more-than-the-prompt",
        "api/results.py",
        "return min(missing, sum(usage.cache_write_tokens for usage in usages))",
        "return sum(usage.cache_write_tokens for usage in usages)",
        (f"{SDK}::test_siblings_write_no_more_of_their_prompt_than_was_missing",),
        "siblings write the prompt once",
    ),
)
