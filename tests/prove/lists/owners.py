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
        "explain-tells-any-salt",
        "CacheRoutes._explain",
        "if prompt is None or prompt.owner != owner_of(salt):",
        "if prompt is None:",
        ("test_the_prompt_of_another_key_is_not_known",),
        "explanations are told to their owner alone",
    ),
    Mutation(
        "flush-of-a-salt-empties-all",
        "CacheRoutes.flush",
        "flush_cache(*namespaces)",
        "flush_cache()",
        ("test_the_cache_is_shown_and_flushed_by_salt_or_whole",),
        "one tenant's flush leaves the others",
    ),
)
