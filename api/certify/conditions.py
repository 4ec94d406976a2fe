"""The conditions of a certificate: engine options, and the passes to run with each of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ...core.interface.request import CacheOptions

State = Literal["cold", "cached", "repeated", "preempted", "restarted"]
BATCHES = (1, 8, 64)
SHARES = (1, 2, 7)  # requests of each size in `BATCHES`, as a ratio: single requests take longest
DEPTH = 4  # draft tokens for a single drafter
POOL_TOKENS = 16_384
SMALL_PAGE = 4  # tokens per page in the pass with preemptions, so that requests need many pages
DRAFTED: tuple[State, ...] = ("cold", "cached", "repeated")
LOOK_UPS = ("radix", "suffix", "ngram")
NO_CACHE = CacheOptions(read=False, write=False)
CACHE: Mapping[State, CacheOptions] = {
    "cold": CacheOptions(read=False),
    "cached": CacheOptions(),
    "repeated": CacheOptions(),
    "preempted": CacheOptions(),
    "restarted": CacheOptions(),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """The options of an engine, and the passes to run on it.

    A cold pass writes to the prefix cache but does not read it, so the cached pass that follows
    finds all prompts there. Drafters learn nothing from a cold pass. A repeated pass follows the
    cached pass: drafters that look up earlier text now know each answer. With ``restarts``, one
    engine fills a folder on disk, and a second engine reads it.
    """

    drafter: str
    kv: str
    options: Mapping[str, Any]
    passes: tuple[State, ...]
    restarts: bool = False

    def name(self, state: State) -> str:
        """Return the name of a pass, for reports and ``--only``."""
        return f"{self.kv}/{self.drafter.rstrip('/').rpartition('/')[2]}/{state}"


def reference_options(options: Mapping[str, Any], kv: str) -> dict[str, Any]:
    """Return the engine options for plain decoding without drafts.

    Unless ``options`` says otherwise, answers do not depend on the batch (``exact`` is "batch").
    """
    pool = {} if "kv_memory" in options or "kv_tokens" in options else {"kv_tokens": POOL_TOKENS}
    own = {"kv_cache_dtype": kv, "draft": "none", "speculation": "off"}
    return {"exact": "batch", "max_running": max(BATCHES)} | pool | dict(options) | own


def conditions(
    options: Mapping[str, Any], kv: str, *, own_draft: str | None, longest: int, page_size: int
) -> Iterator[Condition]:
    """Yield all conditions for a data type of the KV cache.

    ``own_draft``: the draft model that belongs to the target, or None. ``longest``: number of
    tokens of the longest request, including its answer. ``page_size``: tokens per page in the pass
    with preemptions, whose KV pool has one page more than the longest request needs.
    """
    plain = reference_options(options, kv)
    given, asked = options.get("draft"), options.get("speculation", DEPTH)
    depth = DEPTH if asked in ("auto", "off") else asked
    drafters = [*LOOK_UPS, "self", "mtp"]
    drafters += [each for each in (own_draft, given) if each not in (None, "auto", "none")]
    yield Condition(drafter="off", kv=kv, options=plain, passes=("cold", "cached"))
    for drafter in dict.fromkeys(drafters):
        drafted = plain | {"draft": drafter, "speculation": depth}
        yield Condition(drafter=drafter, kv=kv, options=drafted, passes=DRAFTED)
    auto = plain | {"draft": "auto", "speculation": "auto"}
    yield Condition(drafter="auto", kv=kv, options=auto, passes=DRAFTED)
    small = {name: each for name, each in plain.items() if name != "kv_memory"}
    room = page_size * (-(-longest // page_size) + 1)
    small |= {"kv_tokens": room, "page_size": page_size}
    small |= {"draft": "radix,suffix", "speculation": depth}
    yield Condition(drafter="look-ups", kv=kv, options=small, passes=("preempted",))
    kept = plain | {"draft": "radix,suffix", "speculation": depth}
    yield Condition(drafter="look-ups", kv=kv, options=kept, passes=("restarted",), restarts=True)
