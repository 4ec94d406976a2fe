"""Mistakes in telling owners apart: kept responses, prompts, flushes."""

from __future__ import annotations

from ..mutation import Mutation

MUTATIONS = (
    Mutation(
        "owners-forget-the-key",
        "_owner_of",
        "msgspec.json.encode((caller.hex(), cache_salt))",
        "msgspec.json.encode(cache_salt)",
        ("test_the_prompt_of_another_key_is_not_known",),
        "nobody reads what another key has kept",
    ),
    Mutation(
        "owners-forget-the-salt",
        "_owner_of",
        "msgspec.json.encode((caller.hex(), cache_salt))",
        "msgspec.json.encode(caller.hex())",
        ("test_nobody_reads_what_another_key_or_salt_has_kept",),
        "nobody reads what another salt has kept",
    ),
    Mutation(
        "owners-oldest-of-all-goes",
        "Shares.excess",
        "return next(iter(self._by_owner[max(self._large, key=self._part)]))",
        "return next(iter(self._entries))",
        ("test_who_floods_a_memory_drives_out_none_but_its_own",),
        "one tenant cannot evict everything",
    ),
    Mutation(
        "owners-count-only-up",
        "Shares.remove",
        "        self._count(owner, -num_bytes)\n",
        "",
        ("test_who_floods_a_memory_drives_out_none_but_its_own",),
        "memory is bounded by what is there",
    ),
    Mutation(
        "store-reading-is-no-use",
        "ResponseStore.history",
        "            items += kept.items()\n"
        "        self._touch(owner, response_id)\n",
        "            items += kept.items()\n",
        ("test_the_store_is_bounded_in_count_and_forgets_what_was_used_least",),
        "what is used least goes first",
    ),
    Mutation(
        "store-goes-on-without-a-turn",
        "ResponseStore._turns",
        "        if missing is not None:\n            raise _no_previous(missing)\n",
        "        del missing\n",
        ("test_a_conversation_whose_beginning_is_gone_cannot_go_on",),
        "a conversation whose beginning is gone cannot go on",
    ),
    Mutation(
        "explain-tells-any-salt",
        "CacheRoutes._explain",
        "if prompt is None or prompt.owner != owner_of(salt):",
        "if prompt is None:",
        ("test_the_prompt_of_another_key_is_not_known",),
        "explanations are told to their owner alone",
    ),
    Mutation(
        "explain-compares-across-salts",
        "Explainer.explain",
        "if previous is not None and previous.namespace != prompt.namespace:",
        "if previous is not None and previous.caller != prompt.caller:",
        ("test_nothing_is_told_of_prompts_with_another_salt",),
        "nothing is told of prompts with another salt",
    ),
    Mutation(
        "explain-calls-a-fresh-prompt-evicted",
        "_was_written",
        "return other.writes and 0 < wait <= prompt.time - other.time",
        "return other.writes",
        ("test_a_prompt_that_was_not_written_or_not_yet_is_no_eviction",),
        "a prompt that was not written yet is no eviction",
    ),
    Mutation(
        "prompts-remember-what-was-flushed",
        "PromptLog.flush_prefix",
        "if prompt.namespace == namespace and prompt.tokens.startswith(front):",
        "if prompt.tokens.startswith(front):",
        ("test_a_flush_forgets_prompts_by_salt_and_by_prefix",),
        "a flush of one salt leaves the others",
    ),
    Mutation(
        "prompts-compare-with-later-ones",
        "PromptLog.most_similar",
        "if other.serial < prompt.serial]",
        "if other is not prompt]",
        ("test_a_prompt_is_not_compared_with_one_that_came_after_it",),
        "a prompt is compared with what came before it",
    ),
    Mutation(
        "flush-of-a-salt-empties-all",
        "CacheRoutes.flush",
        "flush_cache(*salts)",
        "flush_cache()",
        ("test_the_cache_is_shown_and_flushed_by_salt_or_whole",),
        "one tenant's flush leaves the others",
    ),
)
