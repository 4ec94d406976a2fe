"""Speculator: decides what each request drafts, on the event loop's side.

Before each step the scheduler calls `Speculator.plan` for the decoding requests, and after it
`Speculator.observe` with the outcome. A speculator reads requests and never writes them. It cannot
change the output, only how many tokens a step yields and what the step costs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ParamSpec

from .request import Request
from .step import NO_DRAFT, Draft, RequestOutput, ScheduledRequest, StepOutput, StepPlan

logger = logging.getLogger(__name__)
P = ParamSpec("P")
MAX_FAILURES = 20  # in close succession, until a drafter is given up
FORGIVEN = 0.05  # of a failure, for each call that succeeds
ALL_DRAFTERS = "all"  # the name of drafting as a whole among the names of drafters


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """What one request drafts in a step: known tokens, a number for the proposer, or both.

    With both the proposer merges what it guesses into the known tokens; where it may not branch,
    the better of the two chains is verified. Either may be a tree. If pages are short, the last
    nodes beside the trunk are dropped first.
    """

    draft: Draft = NO_DRAFT
    max_draft: int = 0  # draft tokens that the proposer may draft, the known ones among them
    may_branch: bool = False  # whether what the proposer guesses may be a tree
    row_prices: tuple[float, ...] = ()  # as in `ScheduledRequest`
    pass_price: float = 0.0

    @property
    def depth(self) -> int:
        """Most positions behind the request's tokens that its draft reaches."""
        return max(self.draft.height, self.max_draft)

    @property
    def num_rows(self) -> int:
        """Rows of the forward pass that it adds to a plain decode."""
        return max(len(self.draft.token_ids), self.max_draft)

    @property
    def num_beside_trunk(self) -> int:
        """Most draft tokens whose KV needs a slot of a spare page."""
        known = len(self.draft.token_ids) - self.draft.trunk_len if self.draft.parents else 0
        return max(known, self.max_draft - 1 if self.may_branch else 0)


NO_DRAFT_PLAN = DraftPlan()


@dataclass(frozen=True, slots=True)
class ProposerTraits:
    """How a proposer works, as far as the prices of its drafts depend on it."""

    tokens_per_pass: int  # of a draft, that one of its passes yields
    catches_up: bool  # whether it must compute tokens of a request itself before it drafts
    weighs: bool  # whether it stops where a token is not worth its row, and may grow trees


class Speculator:
    """Decides what each decoding request drafts; this one never drafts, subclasses do."""

    def drafts_nothing(
        self,
        requests: Sequence[Request],  # noqa: ARG002
        *,
        num_new_tokens: int = 0,  # noqa: ARG002
    ) -> bool:
        """Return whether no request would draft, once each has ``num_new_tokens`` more.

        If so, `plan` and `observe` are not called for the step, and it may be planned before the
        step before it has ended.
        """
        return True

    def plan(
        self,
        requests: Sequence[Request],
        limits: Sequence[int],  # noqa: ARG002
        *,
        budget: int,  # noqa: ARG002
        num_prefill: int,  # noqa: ARG002
    ) -> Sequence[DraftPlan]:
        """Return one plan for each request, in order.

        ``limits`` [num_requests]: tokens that a path of each draft may have, 0 included.
        ``budget``: rows that all drafts together may add to the step. ``num_prefill``: pending
        prompt tokens that share the step (about; at most what is left of the token budget).
        """
        return [NO_DRAFT_PLAN] * len(requests)

    def observe(
        self, request: Request, scheduled: ScheduledRequest, output: RequestOutput, num_served: int
    ) -> None:
        """Learn from a committed output: the last ``num_served`` of ``request.tokens`` are new.

        Called for outputs with tokens, also of requests that have just ended.
        """

    def observe_step(self, plan: StepPlan, output: StepOutput, seconds: float) -> None:
        """Learn from a committed step; ``seconds`` since the last commit or its planning."""

    def join(self, request: Request) -> None:
        """Register a request that begins to run, for the first time or after a preemption."""

    def leave(self, request: Request) -> None:
        """Forget a request that ended."""

    def has_work(self) -> bool:
        """Return whether `work` has something to do. Called often: it must be cheap."""
        return False

    def work(self) -> None:
        """Do upkeep while the model thread computes a step; about a millisecond at a time."""

    def flush(self, *namespaces: str | None) -> None:
        """Forget the tokens seen in these namespaces, in all when none is named."""

    def describe(self) -> Mapping[str, object]:
        """Describe the decisions since the last call, for the log."""
        return {}

    def drafters(self) -> Mapping[str, bool]:
        """Return whether each drafter, by name, is still in use; False: it was given up."""
        return {}

    def broke_step(self) -> None:
        """Note that a step failed with drafts and succeeded without them."""


NO_SPECULATION = Speculator()


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
        self._num_failures = max(0.0, self._num_failures - FORGIVEN)


class GuardedSpeculator(Speculator):
    """Wraps a speculator: if a call fails, the step goes on without drafts and the error is logged.

    After repeated failures drafting is turned off. A plan that exceeds its limits or its budget is
    a failure, too.
    """

    def __init__(self, speculator: Speculator) -> None:
        self.inner = speculator
        self._breaker = CircuitBreaker()

    def drafts_nothing(self, requests: Sequence[Request], *, num_new_tokens: int = 0) -> bool:
        """Call the speculator; True if it fails."""
        try:
            return self.inner.drafts_nothing(requests, num_new_tokens=num_new_tokens)
        except Exception:
            self._failed()
            return True

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

    def observe(
        self, request: Request, scheduled: ScheduledRequest, output: RequestOutput, num_served: int
    ) -> None:
        """Call the speculator."""
        self._try(self.inner.observe, request, scheduled, output, num_served)

    def observe_step(self, plan: StepPlan, output: StepOutput, seconds: float) -> None:
        """Call the speculator."""
        self._try(self.inner.observe_step, plan, output, seconds)

    def join(self, request: Request) -> None:
        """Call the speculator."""
        self._try(self.inner.join, request)

    def leave(self, request: Request) -> None:
        """Call the speculator."""
        self._try(self.inner.leave, request)

    def has_work(self) -> bool:
        """Call the speculator; False if it fails."""
        try:
            return self.inner.has_work()
        except Exception:
            self._failed()
            return False

    def work(self) -> None:
        """Call the speculator."""
        self._try(self.inner.work)

    def flush(self, *namespaces: str | None) -> None:
        """Call the speculator; a failure is raised, because the caller relies on the flush."""
        self.inner.flush(*namespaces)

    def describe(self) -> Mapping[str, object]:
        """Call the speculator."""
        return self.inner.describe()

    def drafters(self) -> Mapping[str, bool]:
        """Return the speculator's drafters, and whether drafting as a whole is still on."""
        return {**self.inner.drafters(), ALL_DRAFTERS: self.inner is not NO_SPECULATION}

    def broke_step(self) -> None:
        """Count a step that failed with drafts and succeeded without them."""
        self._count("steps fail with drafts and succeed without them")

    def _try(self, call: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
        try:
            call(*args, **kwargs)
        except Exception:
            self._failed()

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
