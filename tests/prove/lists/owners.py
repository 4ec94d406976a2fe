"""Mistakes in telling owners apart: kept responses, prompts, flushes."""

from __future__ import annotations

from ..mutation import Mutation

HTTP = "tests/api/test_http.py"
EXPLAIN = "tests/api/test_explain.py"
OWNERS = "tests/api/test_owners.py"
STORE = "tests/api/responses/test_store.py"

MUTATIONS = (
    Mutation(
        "owners-forget-the-key",
        "api/owners.py",
        "msgspec.json.encode((CALLER.get().hex(), cache_salt))",
        "msgspec.json.encode(cache_salt)",
        (f"{OWNERS}::test_the_prompt_of_another_key_is_not_known",),
        "nobody reads what another key has kept",
    ),
    Mutation(
        "owners-forget-the-salt",
        "api/owners.py",
        "msgspec.json.encode((CALLER.get().hex(), cache_salt))",
        "msgspec.json.encode(CALLER.get().hex())",
        (f"{STORE}::test_nobody_reads_what_another_key_or_salt_has_kept",),
        "nobody reads what another salt has kept",
    ),
    Mutation(
        "owners-oldest-of-all-goes",
        "api/owners.py",
        "return next(iter(self._by_owner[max(self._large, key=self._part)]))",
        "return next(iter(self._entries))",
        (f"{OWNERS}::test_who_floods_a_memory_drives_out_none_but_its_own",),
        "one tenant cannot evict everything",
    ),
    Mutation(
        "owners-count-only-up",
        "api/owners.py",
        "        self._count(owner, -num_bytes)\n",
        "",
        (OWNERS,),
        "memory is bounded by what is there",
    ),
    Mutation(
        "store-reading-is-no-use",
        "api/responses/store.py",
        "            items += [_decode_items(kept.inputs), _decode_items(kept.outputs)]\n"
        "        self._touch(owner, response_id)\n",
        "            items += [_decode_items(kept.inputs), _decode_items(kept.outputs)]\n",
        (STORE,),
        "what is used least goes first",
    ),
    Mutation(
        "store-goes-on-without-a-turn",
        "api/responses/store.py",
        "        if missing is not None:\n            raise _no_previous(missing)\n",
        "        del missing\n",
        (f"{STORE}::test_a_conversation_whose_beginning_is_gone_cannot_go_on",),
        "a conversation whose beginning is gone cannot go on",
    ),
    Mutation(
        "explain-tells-any-salt",
        "api/cache_routes.py",
        "if prompt is None or prompt.owner != owner_of(salt):",
        "if prompt is None:",
        (OWNERS,),
        "explanations are told to their owner alone",
    ),
    Mutation(
        "explain-compares-across-salts",
        "api/explain.py",
        "if previous is not None and previous.namespace != prompt.namespace:",
        "if previous is not None and previous.caller != prompt.caller:",
        (EXPLAIN,),
        "nothing is told of prompts with another salt",
    ),
    Mutation(
        "explain-calls-a-fresh-prompt-evicted",
        "api/explain.py",
        "return other.writes and 0 < wait <= prompt.time - other.time",
        "return other.writes",
        (EXPLAIN,),
        "a prompt that was not written yet is no eviction",
    ),
    Mutation(
        "prompts-remember-what-was-flushed",
        "api/prompts.py",
        "if prompt.namespace == namespace and prompt.tokens.startswith(front):",
        "if prompt.tokens.startswith(front):",
        (EXPLAIN,),
        "a flush of one salt leaves the others",
    ),
    Mutation(
        "prompts-compare-with-later-ones",
        "api/prompts.py",
        "if other.serial < prompt.serial]",
        "if other is not prompt]",
        (EXPLAIN,),
        "a prompt is compared with what came before it",
    ),
    Mutation(
        "flush-of-a-salt-empties-all",
        "api/cache_routes.py",
        "flush_cache(salt, everything=salt is None)",
        "flush_cache(salt)",
        (f"{HTTP}::test_the_cache_is_shown_and_flushed_by_salt_or_whole",),
        "one tenant's flush leaves the others",
    ),
)
