"""When the invariants of requests and pages are checked: when asked, and in idle moments."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from itertools import islice

from ..radix_cache.audit import Steps
from .scheduler import Scheduler

logger = logging.getLogger(__name__)
SECONDS = 60.0  # between two audits in idle moments, at least
SLICE = 1000  # steps of an audit in an idle moment between turns of others: about a millisecond
QUIET = 1.0  # seconds without a request until an audit that one cut short is begun again
Verdict = dict[str, object]


def inspect(scheduler: Scheduler) -> Verdict:
    """The ledger as it stands: ``ok``, and what is where, or the ``violation``. O(pages)."""
    if violation := _go_on(scheduler.checks(), None):
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
    return {"ok": True, "pages": pages, "requests": requests}


def _go_on(steps: Steps, num_steps: int | None) -> str | None:
    """So many steps more, or all. None: there are more; else what is wrong, "" for nothing."""
    try:
        num_done = sum(1 for _ in islice(steps, num_steps))
    except AssertionError as violation:
        return str(violation) or "an invariant does not hold"
    except Exception as error:  # broken so far that the check fails; its text may quote tokens
        return f"the check failed: {type(error).__name__}"
    return None if num_done == num_steps else ""


class Auditor:
    """Audits an engine between its steps: when somebody asks, and at times when it is idle."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.num_failures = 0
        self._scheduler = scheduler
        self._asked: list[asyncio.Future[Verdict]] = []
        self._passed = -SECONDS  # when it last did so by itself
        self._was_cut = False  # the last time that it tried

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

    async def rest(self, now: float, wake: asyncio.Event) -> None:
        """Nobody waits: a good moment, now and then, for a large pool takes a while.

        Others have their turns meanwhile. Whoever sets ``wake`` ends it until the next rest: then
        it waits for a longer one, or short pauses would be full of audits that never end.
        """
        if now - self._passed < SECONDS:
            return
        if self._was_cut:
            with suppress(TimeoutError):
                async with asyncio.timeout(QUIET):
                    await wake.wait()
        self._was_cut = True
        while self._was_cut and not wake.is_set():
            if await self._inspect_slowly(wake):
                self._passed, self._was_cut = now, False

    async def _inspect_slowly(self, wake: asyncio.Event) -> bool:
        """Whether it came to its end before anything changed, by a flush for example."""
        tree, steps = self._scheduler.cache.tree, self._scheduler.checks()
        version = tree.version
        while tree.version == version and not wake.is_set():
            if (violation := _go_on(steps, SLICE)) is not None:
                self._note(violation)
                return True
            await asyncio.sleep(0)
        return False

    def close(self, error: Exception) -> None:
        """Nobody gets a verdict any more."""
        asked, self._asked = self._asked, []
        for each in asked:
            if not each.done():
                each.set_exception(error)

    def _inspect(self) -> Verdict:
        verdict = inspect(self._scheduler)
        self._note(str(verdict.get("violation", "")))
        return verdict

    def _note(self, violation: str) -> None:
        if violation:
            self.num_failures += 1
            logger.warning("the audit failed: %s", violation)
