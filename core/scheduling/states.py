"""Recurrent states of requests: the page ends whose states are kept, and their use in a step.

This concerns models with recurrent layers; for other models `PrefixCache.states` is None. A request
owns a slot and a log of the state pool from its admission to its end. A later request resumes from
a kept state.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from ...radix_cache import KVLease, PrefixCache, StateRank
from ..interface.draft import DraftPlan
from ..interface.plan import StateUse
from ..interface.request import Request

MAX_STATE_DRAFT = 32  # maximum draft tokens of a request: a log holds one page and these rows
LEAST_SHARED_PAGES = 4  # no state is kept for a shorter common prefix, and no request waits for it


def want_states(
    cache: PrefixCache, request: Request, lease: KVLease, openings: Sequence[array[int]]
) -> None:
    """Choose the page ends whose states are kept while a prompt is computed.

    A state is kept at the last page end before each of three positions: the end of each pin, the
    opening of the answer, and the end of cached pages that have no state, because requests repeat
    this prefix. The opening is the longest of ``openings`` with which the prompt ends: the next
    turn of a conversation may render it differently. If the prompt ends with no opening, the last
    token takes its place. States at multiples of `StateSlots.interval` are kept, too.
    """
    states, state = cache.states, lease.state
    if states is None or state is None or not request.cache.write:
        return
    page_size, first = cache.page_size, lease.num_cached_tokens
    used = [min(pin.num_tokens, request.prompt_len) for pin in request.cache.pins]
    used.append(request.prompt_len - max(1, opening_len(request, openings)))
    if lease.num_found_tokens >= first + LEAST_SHARED_PAGES * page_size:
        used.append(lease.num_found_tokens)
    ends = dict.fromkeys(used, StateRank.USED)
    if states.interval:
        grid = range(states.interval, request.prompt_len + 1, states.interval)
        ends = dict.fromkeys(grid, StateRank.GRID) | ends
    for num_tokens, rank in ends.items():
        position = num_tokens // page_size * page_size
        if position > first:
            state.want(position, rank)


def opening_len(request: Request, openings: Sequence[array[int]]) -> int:
    """Return the length of the first of ``openings`` with which the prompt ends, in tokens.

    Returns 0 if the prompt ends with none of them.
    """
    stop = request.prompt_len
    lens = (
        len(each) for each in openings if request.tokens[max(0, stop - len(each)) : stop] == each
    )
    return next(lens, 0)


def claim_states(cache: PrefixCache, request: Request, running: Iterable[Request]) -> bool:
    """Let running requests keep the states from which a waiting request can resume.

    Returns whether a running request will still compute such a state: then the waiting request
    should wait for it. A state that saves fewer than `LEAST_SHARED_PAGES` pages is not kept.
    """
    num_cached = cache.match_len(request.tokens, namespace=request.namespace)
    least = num_cached + LEAST_SHARED_PAGES * cache.page_size
    if len(request.tokens) <= least:
        return False
    awaits = False
    for other in running:
        state = None if other.lease is None else other.lease.state
        is_prompt = other.num_pending > 1 and other.cache.write
        if state is None or not is_prompt or other.namespace != request.namespace:
            continue
        shared = shared_len(request.tokens[:-1], other.tokens, cache.page_size)
        if shared >= least and shared > other.num_computed:
            state.want(shared)
            awaits = True
    return awaits


def shared_len(one: array[int], other: array[int], page_size: int) -> int:
    """Return the number of tokens in whole pages that two sequences have in common.

    O(length), by comparisons at the speed of memcmp.
    """
    same, bound = 0, min(len(one), len(other)) // page_size
    if one[: bound * page_size] == other[: bound * page_size]:
        return bound * page_size
    while same + 1 < bound:  # the first ``same`` pages are equal, the first ``bound`` are not
        middle = (same + bound) // 2
        is_equal = (
            one[same * page_size : middle * page_size]
            == (other[same * page_size : middle * page_size])
        )
        same, bound = (middle, bound) if is_equal else (same, middle)
    return same * page_size


def use_state(cache: PrefixCache, request: Request, stop: int) -> StateUse | None:
    """Return how a step that computes tokens up to ``stop`` uses the request's recurrent state.

    Returns None if the model has no recurrent states.
    """
    lease = request.lease
    if lease is None or lease.state is None:
        return None
    state = lease.state
    keeps = cache.keep_states(lease, request.num_computed, stop) if state.wanted else ()
    source = -1 if state.source is None else state.source.slot
    return StateUse(state.slot, state.log, source, keeps)


def as_chain(plan: DraftPlan) -> DraftPlan:
    """Return ``plan`` as a chain of at most `MAX_STATE_DRAFT` tokens, which fits into a log."""
    draft = plan.draft.trunk().first_nodes(MAX_STATE_DRAFT)
    max_draft = min(plan.max_draft, MAX_STATE_DRAFT)
    return replace(plan, draft=draft, max_draft=max_draft, may_branch=False)
