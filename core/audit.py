"""The invariants that tie requests to pages, for tests and for idle moments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet

from ..radix_cache import PrefixCache
from .request import Request, RequestStatus


def check_ledger(
    cache: PrefixCache,
    running: Mapping[str, Request],
    waiting: Sequence[Request],
    ids: AbstractSet[str],
) -> None:
    """Asserts that every page has one owner and every request of ``ids`` one state. O(pages)."""
    leases = [r.lease for r in running.values() if r.lease is not None]
    cache.check(leases)
    assert len(leases) == len(running), "every running request owns a lease"
    for request in waiting:
        assert request.lease is None, "a waiting request owns nothing"
        assert request.status is RequestStatus.WAITING
    assert {*running, *(r.request_id for r in waiting)} == ids, "a request is in exactly one state"
    for request in running.values():
        assert request.num_pending >= 1, "there is always a token to compute"
