"""Auditor: checks the invariants of requests and pages, on request and while the engine is idle."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from itertools import islice

from ...radix_cache.audit import Steps
from ..scheduling.scheduler import Scheduler

logger = logging.getLogger(__name__)
AUDIT_INTERVAL = 60.0  # minimum number of seconds between two idle audits
SLICE = 1000  # parts of an idle audit after which other tasks run: about a millisecond
QUIET = 1.0  # seconds without a request after which an interrupted audit begins again
AuditResult = dict[str, object]


def inspect(scheduler: Scheduler) -> AuditResult:
    """Check all invariants now. Return ``ok`` True and counts, or False and the ``violation``.

    O(pages).
    """
    if violation := _advance(scheduler.checks(), None):
        return {"ok": False, "violation": violation}
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
    result = {"ok": True, "pages": pages, "requests": requests}
    if (states := cache.states) is not None:
        result["states"] = {
            "total": states.num_total,
            "free": states.num_free,
            "attached": len(states.attached),
            "private": states.num_private,
        }
    return result


def _advance(steps: Steps, num_steps: int | None) -> str | None:
    """Run the next ``num_steps`` parts of an audit; None: run all parts.

    Returns None if parts may be left. Otherwise returns the violation, or "" if all invariants
    hold.
    """
    try:
        num_done = sum(1 for _ in islice(steps, num_steps))
    except AssertionError as violation:
        return str(violation) or "an invariant does not hold"
    except Exception as error:  # the check itself failed; the error's text may quote tokens
        return f"the audit itself failed: {type(error).__name__}"
    return None if num_done == num_steps else ""


class Auditor:
    """Auditor of an engine between its steps: on request, and at intervals while it is idle."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.num_failures = 0
        self._scheduler = scheduler
        self.open_requests: list[asyncio.Future[AuditResult]] = []  # audits that callers wait for
        self._last_audit = -AUDIT_INTERVAL  # time of the last complete idle audit
        self._was_cut = False  # whether the last idle audit was interrupted

    def request(self) -> asyncio.Future[AuditResult]:
        """Request an audit; return the future of its result, which `answer_requests` resolves."""
        self.open_requests.append(result := asyncio.get_running_loop().create_future())
        return result

    def answer_requests(self) -> None:
        """Audit once and resolve all open requests with the result; no step may be running."""
        requests, self.open_requests = self.open_requests, []
        waiting = [each for each in requests if not each.done()]  # a caller may have been cancelled
        if waiting:
            result = self._inspect()
            for each in waiting:
                each.set_result(result)

    async def audit_while_idle(self, now: float, wake: asyncio.Event) -> None:
        """Audit while the engine has no request, at most once in `AUDIT_INTERVAL`.

        The audit of a large pool takes a while, so other tasks run in between. Setting ``wake``
        interrupts the audit. The next audit then begins only after `QUIET` seconds, so that it is
        less likely to be interrupted, too.
        """
        if now - self._last_audit < AUDIT_INTERVAL:
            return
        if self._was_cut:
            with suppress(TimeoutError):
                async with asyncio.timeout(QUIET):
                    await wake.wait()
        self._was_cut = True
        while self._was_cut and not wake.is_set():
            if await self._inspect_slowly(wake):
                self._last_audit, self._was_cut = now, False

    async def _inspect_slowly(self, wake: asyncio.Event) -> bool:
        """Audit part by part; return whether the audit was completed before the cache changed."""
        tree, steps = self._scheduler.cache.tree, self._scheduler.checks()
        version = tree.version
        while tree.version == version and not wake.is_set():
            if (violation := _advance(steps, SLICE)) is not None:
                self._note(violation)
                return True
            await asyncio.sleep(0)
        return False

    def close(self, error: Exception) -> None:
        """Raise ``error`` in the callers that still wait for an audit."""
        requests, self.open_requests = self.open_requests, []
        for each in requests:
            if not each.done():
                each.set_exception(error)

    def _inspect(self) -> AuditResult:
        result = inspect(self._scheduler)
        self._note(str(result.get("violation", "")))
        return result

    def _note(self, violation: str) -> None:
        if violation:
            self.num_failures += 1
            logger.warning("the audit failed: %s", violation)
