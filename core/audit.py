"""The invariants that tie requests to pages, for tests and for idle moments."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING

from ..radix_cache import PrefixCache
from .request import Request, RequestStatus

if TYPE_CHECKING:
    from .scheduler import Scheduler

logger = logging.getLogger(__name__)
SECONDS = 60.0  # between two audits in idle moments, at least
Verdict = dict[str, object]


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


def inspect(scheduler: Scheduler) -> Verdict:
    """The ledger as it stands: ``ok``, and what is where, or the ``violation``. O(pages)."""
    try:
        scheduler.audit()
    except AssertionError as violation:
        return {"ok": False, "violation": str(violation)}
    except Exception as error:  # broken so far that the check fails; its text may quote tokens
        return {"ok": False, "violation": f"the check failed: {type(error).__name__}"}
    cache = scheduler.cache
    free, tree = cache.num_free_pages, cache.tree.num_pages
    pages = {
        "total": cache.num_total_pages,
        "free": free,
        "tree": tree,
        "private": cache.num_total_pages - free - tree,
        "evictable": cache.num_evictable_pages,
        "pinned": cache.num_pinned_pages,
    }
    requests = {"running": len(scheduler.running), "waiting": len(scheduler.waiting)}
    return {"ok": True, "pages": pages, "requests": requests}


class Auditor:
    """Audits an engine between its steps: when somebody asks, and at times when it is idle."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.num_failures = 0
        self._scheduler = scheduler
        self._asked: list[asyncio.Future[Verdict]] = []
        self._passed = -SECONDS  # when it last did so by itself

    def ask(self) -> asyncio.Future[Verdict]:
        """The verdict that the next `answer` gives."""
        self._asked.append(verdict := asyncio.get_running_loop().create_future())
        return verdict

    def answer(self) -> None:
        """Tell those who asked; to be called between two steps."""
        asked = [each for each in self._asked if not each.done()]  # others have left
        self._asked.clear()
        if asked:
            verdict = self._inspect()  # one for all: however many ask, a round has one audit
            for each in asked:
                each.set_result(verdict)

    def idle(self, now: float) -> None:
        """Nobody waits: a good moment, now and then, for a large pool takes a while."""
        if now - self._passed >= SECONDS:
            self._passed = now
            self._inspect()

    def close(self, error: Exception) -> None:
        """Nobody gets a verdict any more."""
        asked, self._asked = self._asked, []
        for each in asked:
            if not each.done():
                each.set_exception(error)

    def _inspect(self) -> Verdict:
        verdict = inspect(self._scheduler)
        if not verdict["ok"]:
            self.num_failures += 1
            logger.warning("the audit failed: %s", verdict["violation"])
        return verdict
