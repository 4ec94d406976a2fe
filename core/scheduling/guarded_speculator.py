"""GuardedSpeculator: drafting may fail, the step may not.

`CircuitBreaker` is the rule by which every drafter is given up that keeps failing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

from typing_extensions import override

from ..interface.draft import NO_DRAFT_PLAN, DraftPlan
from ..interface.protocols import NO_SPECULATION, RowPrice, Speculator
from ..interface.request import Request

logger = logging.getLogger(__name__)
P = ParamSpec("P")
R = TypeVar("R")
MAX_FAILURES = 20  # in close succession, until a drafter is given up
FORGIVEN = 0.05  # of a failure, for each call that succeeds
ALL_DRAFTERS = "all"  # the name of drafting as a whole among the names of drafters


class CircuitBreaker:
    """Decides when a drafter is given up: after `MAX_FAILURES` in close succession.

    One rule for all drafters: each success takes off `FORGIVEN` of a failure, so failures that lie
    far apart never add up. The owner reads ``is_open`` after each failure and drops the drafter.
    A drafter has a breaker for each of its methods where a success of one says nothing of another.
    """

    def __init__(self) -> None:
        self._num_failures = 0.0  # less those that were forgiven

    @property
    def is_open(self) -> bool:
        """Whether the drafter is to be given up."""
        return self._num_failures >= MAX_FAILURES

    def record_failure(self) -> None:
        """Count a failure."""
        self._num_failures += 1

    def record_success(self) -> None:
        """Forgive a part of the failures so far."""
        if self._num_failures:
            self._num_failures = max(0.0, self._num_failures - FORGIVEN)


def _guard(
    method: Callable[Concatenate[Speculator, P], R], *, if_failed: R
) -> Callable[Concatenate[GuardedSpeculator, P], R]:
    """Make a method that calls the speculator's and returns ``if_failed`` where that raises."""
    name = method.__name__

    def call(self: GuardedSpeculator, /, *args: P.args, **kwargs: P.kwargs) -> R:
        try:
            found: R = getattr(self.inner, name)(*args, **kwargs)
        except Exception:
            self._failed()
            return if_failed
        return found

    return wraps(method)(call)


class GuardedSpeculator(Speculator):
    """Wraps a speculator: if a call fails, the step goes on without drafts and the error is logged.

    After repeated failures drafting is turned off. A plan that exceeds its limits or its budget is
    a failure, too. A failed flush is raised, because the caller relies on the flush.
    """

    def __init__(self, speculator: Speculator) -> None:
        self.inner = speculator
        self._breaker = CircuitBreaker()

    drafts_nothing = _guard(Speculator.drafts_nothing, if_failed=True)
    observe = _guard(Speculator.observe, if_failed=None)
    observe_step = _guard(Speculator.observe_step, if_failed=None)
    join = _guard(Speculator.join, if_failed=None)
    leave = _guard(Speculator.leave, if_failed=None)
    has_work = _guard(Speculator.has_work, if_failed=False)
    work = _guard(Speculator.work, if_failed=None)

    def plan(
        self, requests: Sequence[Request], limits: Sequence[int], *, budget: int, num_prefill: int
    ) -> Sequence[DraftPlan]:
        """Call the speculator; no drafts if it fails."""
        try:
            plans = self.inner.plan(requests, limits, budget=budget, num_prefill=num_prefill)
            _check(plans, limits, budget)
        except Exception:
            self._failed()
            return [NO_DRAFT_PLAN] * len(requests)
        self._breaker.record_success()
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
        return {**self.inner.drafters(), ALL_DRAFTERS: self.inner is not NO_SPECULATION}

    @override
    def broke_step(self) -> None:
        self._count("steps fail with drafts and succeed without them")

    def _failed(self) -> None:
        """Log the exception that is being handled, and count it."""
        logger.exception("the speculator failed; this step continues without drafts")
        self._count("the speculator fails")

    def _count(self, what: str) -> None:
        self._breaker.record_failure()
        if self._breaker.is_open:
            logger.error("%s repeatedly: drafting is turned off", what)
            self.inner = NO_SPECULATION


def guarded(speculator: Speculator) -> Speculator:
    """Wrap a speculator in a `GuardedSpeculator`; one that never drafts cannot fail."""
    return speculator if speculator is NO_SPECULATION else GuardedSpeculator(speculator)


def _check(plans: Sequence[DraftPlan], limits: Sequence[int], budget: int) -> None:
    """Raise ValueError for plans that exceed the limits or the budget."""
    if len(plans) != len(limits):
        raise ValueError(f"{len(plans)} plans for {len(limits)} requests")
    num_rows = 0
    for plan, limit in zip(plans, limits, strict=True):
        if plan is NO_DRAFT_PLAN:
            continue
        num_rows += plan.num_rows
        if plan.depth > limit or num_rows > budget:
            raise ValueError(f"a draft of {plan.depth} tokens, {num_rows} rows: more than offered")
