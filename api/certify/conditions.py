"""The conditions of a certificate: engines, and passes of all requests through each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ...core.interface.request import CacheOptions

State = Literal["cold", "cached", "repeated", "preempted", "restarted"]
BATCHES = (1, 8, 64)
SHARES = (1, 2, 7)  # of the requests that go in each of `BATCHES`: single ones take longest
DEPTH = 4  # draft tokens of a drafter alone
POOL_TOKENS = 16_384
SMALL_PAGE = 4  # tokens of a page of the pass with preemptions: requests need many
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
    """An engine by its options, and the passes that it makes.

    A cold pass reads nothing from the cache and leaves its answers there, so a cached one behind it
    finds all of them. What a cold one said is kept for no drafts: in a repeated pass, behind the
    cached one, look-ups know each answer. ``restarts``: a first engine fills a folder, a second one
    reads it.
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
    """Plain decoding: no drafts, and the logits the same in any batch unless asked otherwise."""
    pool = {} if "kv_memory" in options or "kv_tokens" in options else {"kv_tokens": POOL_TOKENS}
    own = {"kv_cache_dtype": kv, "draft": "none", "speculation": "off"}
    return {"exact": "batch", "max_running": max(BATCHES)} | pool | dict(options) | own


def conditions(
    options: Mapping[str, Any], kv: str, *, own_draft: str | None, longest: int, page_size: int
) -> Iterator[Condition]:
    """All conditions of a KV data type; ``longest``: tokens of the longest request.

    ``own_draft``: the draft model that belongs to the target. ``page_size``: of the pass with
    preemptions, whose pool has room for the longest request and little more.
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
