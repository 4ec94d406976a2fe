"""GuardedSpeculator: a step continues without drafts if drafting fails.

`Guarded` wraps an object that may raise errors in the event loop: a speculator, or one of its
sources. `CircuitBreaker` decides when a drafter that keeps failing is turned off.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Concatenate, Generic, ParamSpec, TypeVar

from typing_extensions import override

from ..interface.draft import NO_DRAFT_PLAN, DraftPlan
from ..interface.protocols import NO_SPECULATION, RowPrice, Speculator
from ..interface.request import Request

logger = logging.getLogger(__name__)
P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
MAX_FAILURES = 20  # number of uncancelled failures at which a drafter is turned off
FORGIVEN = 0.05  # each successful call cancels this fraction of one failure
ALL_DRAFTERS = "all"  # key of drafting as a whole, beside the names of single drafters


class CircuitBreaker:
    """Count of a drafter's failures: it is turned off after `MAX_FAILURES` in close succession.

    The rule is the same for all drafters: each success subtracts `FORGIVEN` from the count, so
    failures far apart never add up. The owner reads ``is_open`` after each failure, and stops using
    the drafter if it is true.
    """

    def __init__(self) -> None:
        self._num_failures = 0.0  # number of failures, minus what successes subtracted

    @property
    def is_open(self) -> bool:
        """Whether the drafter must be turned off."""
        return self._num_failures >= MAX_FAILURES

    def record_failure(self) -> None:
        """Count a failure."""
        self._num_failures += 1

    def record_success(self) -> None:
        """Subtract `FORGIVEN` from the count of failures."""
        if self._num_failures:
            self._num_failures = max(0.0, self._num_failures - FORGIVEN)


class Guarded(Generic[T]):
    """Wrapper of a drafter, which catches and counts its errors.

    After repeated failures ``idle`` replaces the drafter. Each method has its own breaker, because
    the success of one method says nothing about another.
    """

    def __init__(self, inner: T, idle: T, title: str) -> None:
        self.inner, self._idle, self._title = inner, idle, title
        self.breakers = defaultdict[str, CircuitBreaker](CircuitBreaker)  # breakers by method

    @property
    def works(self) -> bool:
        """Whether the drafter is still used."""
        return self.inner is not self._idle

    def record_exception(self, call: str) -> None:
        """Log the exception that is being handled, and count a failure of the method ``call``."""
        logger.exception("%s failed to %s; the step continues without it", self._title, call)
        self.count_failure(call)

    def count_failure(self, call: str) -> None:
        """Count a failure of the method ``call``, and turn the drafter off after too many."""
        breaker = self.breakers[call]
        breaker.record_failure()
        if breaker.is_open:
            logger.error("%s failed repeatedly and is no longer used", self._title)
            self.inner = self._idle


def guard(
    method: Callable[Concatenate[T, P], R], *, if_failed: R
) -> Callable[Concatenate[Guarded[T], P], R]:
    """Return a method of `Guarded` that calls ``method`` of `Guarded.inner`.

    The returned method catches exceptions: it logs and counts them, and returns ``if_failed``.
    """
    name = method.__name__

    def call(self: Guarded[T], /, *args: P.args, **kwargs: P.kwargs) -> R:
        try:
            found: R = getattr(self.inner, name)(*args, **kwargs)
        except Exception:
            self.record_exception(name)
            return if_failed
        if self.breakers:  # empty until a method fails
            self.breakers[name].record_success()
        return found

    return wraps(method)(call)


class GuardedSpeculator(Guarded[Speculator], Speculator):
    """Wrapper of a speculator: if a call fails, the step continues without drafts.

    After repeated failures drafting is turned off. A plan that exceeds its limits or its budget
    counts as a failure, too. The exception of a failed flush is raised, because the caller relies
    on the flush.
    """

    def __init__(self, speculator: Speculator) -> None:
        super().__init__(speculator, NO_SPECULATION, "drafting")

    drafts_nothing = guard(Speculator.drafts_nothing, if_failed=True)
    observe = guard(Speculator.observe, if_failed=None)
    observe_step = guard(Speculator.observe_step, if_failed=None)
    join = guard(Speculator.join, if_failed=None)
    leave = guard(Speculator.leave, if_failed=None)
    has_work = guard(Speculator.has_work, if_failed=False)
    work = guard(Speculator.work, if_failed=None)

    def plan(
        self, requests: Sequence[Request], limits: Sequence[int], *, budget: int, num_prefill: int
    ) -> Sequence[DraftPlan]:
        """Return the speculator's plans, or plans without drafts if the speculator fails."""
        try:
            plans = self.inner.plan(requests, limits, budget=budget, num_prefill=num_prefill)
            _check(plans, limits, budget)
        except Exception:
            self.record_exception("plan")
            return [NO_DRAFT_PLAN] * len(requests)
        if self.breakers:
            self.breakers["plan"].record_success()
        return plans

    @override
    def flush(self, *namespaces: str | None) -> None:
        self.inner.flush(*namespaces)

    @override
    def describe(self) -> Mapping[str, object]:
        return self.inner.describe()

    @override
    def row_price(self, num_requests: int) -> RowPrice | None:
        return self.inner.row_price(num_requests)

    def drafters(self) -> Mapping[str, bool]:
        """Return the speculator's drafters, and whether drafting as a whole is still on."""
        return {**self.inner.drafters(), ALL_DRAFTERS: self.works}

    @override
    def broke_step(self) -> None:
        self.count_failure("step")

    @override
    def count_failure(self, call: str) -> None:
        # Failures of all methods count as failures of `plan`: only a successful plan cancels them.
        super().count_failure("plan")


def guarded(speculator: Speculator) -> Speculator:
    """Wrap a speculator in a `GuardedSpeculator`, except `NO_SPECULATION`, which cannot fail."""
    return speculator if speculator is NO_SPECULATION else GuardedSpeculator(speculator)


def _check(plans: Sequence[DraftPlan], limits: Sequence[int], budget: int) -> None:
    """Raise ValueError for plans deeper than their ``limits`` or of more rows than ``budget``."""
    if len(plans) != len(limits):
        raise ValueError(f"the speculator made {len(plans)} plans for {len(limits)} requests")
    num_rows = 0
    for plan, limit in zip(plans, limits, strict=True):
        if plan is NO_DRAFT_PLAN:
            continue
        own_rows = plan.num_rows
        num_rows += own_rows
        depth = plan.depth if plan.draft.parents else own_rows
        if depth > limit or num_rows > budget:
            raise ValueError(
                f"the speculator planned a draft {depth} tokens deep (at most {limit} are "
                f"allowed) and {num_rows} draft rows so far (at most {budget})"
            )
