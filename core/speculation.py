"""The protocol of what decides how much to guess, on the event loop's side.

Before each step the scheduler asks its speculator what every decoding request shall draft, and
afterwards tells it what came of it. A speculator reads requests and never writes them; nothing
that it does can change the output, only how many tokens a step yields and what the step costs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ParamSpec, Protocol

from .request import Request
from .step import NO_DRAFT, Draft, PlanRow, RowOutput, StepOutput, StepPlan

logger = logging.getLogger(__name__)
P = ParamSpec("P")
MAX_FAILURES = 20  # in close succession
FORGIVEN = 0.05  # of a failure, by each plan that succeeds


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """What one request drafts in a step: a draft that is known already, or one by the proposer.

    ``branches`` are other guesses for the same positions. Each is verified on pages of its own, so
    it costs one row more than it has tokens. The first path to be dropped for want of pages is
    the last branch.
    """

    draft: Draft = NO_DRAFT
    max_draft: int = 0  # draft tokens that the proposer of the model thread may guess instead
    branches: Sequence[Draft] = ()

    @property
    def depth(self) -> int:
        """Draft tokens on the request's own pages."""
        return max(len(self.draft.token_ids), self.max_draft)

    @property
    def num_rows(self) -> int:
        """Rows of the forward pass that it adds to a plain decode."""
        return self.depth + sum(1 + len(branch.token_ids) for branch in self.branches)


NOTHING = DraftPlan()


class Speculator(Protocol):
    """Decides what each decoding request drafts."""

    def is_silent(self, requests: Sequence[Request], *, ahead: int = 0) -> bool:
        """Whether none of these would draft, once each has ``ahead`` more tokens of any kind.

        Then neither `plan` nor `observe` is called for the step, and it may be planned before the
        step ahead of it is over.
        """

    def plan(
        self, requests: Sequence[Request], limits: Sequence[int], *, budget: int, num_prefill: int
    ) -> Sequence[DraftPlan]:
        """One plan for each request, in order.

        ``limits`` [num_requests]: tokens that a draft of each may have at most, 0 included.
        ``budget``: rows that all drafts together may add to the step. ``num_prefill``: pending
        prompt tokens that share the step (about; at most what is left of the token budget).
        """

    def observe(self, request: Request, row: PlanRow, output: RowOutput, num_served: int) -> None:
        """A row was committed: the last ``num_served`` of ``request.tokens`` are new.

        Called for rows that yield tokens, also of requests that have just ended.
        """

    def observe_step(self, plan: StepPlan, output: StepOutput, seconds: float) -> None:
        """A step was committed; ``seconds`` since the one before it, or since it was planned."""

    def join(self, request: Request) -> None:
        """A request begins to run, for the first time or after a preemption."""

    def leave(self, request: Request) -> None:
        """A request ended."""

    def has_work(self) -> bool:
        """Whether `work` has something to do. Asked often: it costs next to nothing."""

    def work(self) -> None:
        """Upkeep while the model thread runs the step planned last; a millisecond or so."""

    def flush(self, *namespaces: str | None) -> None:
        """Forget the tokens seen in these namespaces, in all when none is named."""

    def describe(self) -> Mapping[str, object]:
        """What it did since the last call and why, for the log."""


class NoSpeculation:
    """Drafts nothing, whatever a request asks for: there is no source."""

    def is_silent(
        self,
        requests: Sequence[Request],  # noqa: ARG002
        *,
        ahead: int = 0,  # noqa: ARG002
    ) -> bool:
        """Always."""
        return True

    def plan(
        self,
        requests: Sequence[Request],
        limits: Sequence[int],  # noqa: ARG002
        *,
        budget: int,  # noqa: ARG002
        num_prefill: int,  # noqa: ARG002
    ) -> Sequence[DraftPlan]:
        """Nothing for every request."""
        return [NOTHING] * len(requests)

    def observe(self, request: Request, row: PlanRow, output: RowOutput, num_served: int) -> None:
        """Nothing is learnt."""

    def observe_step(self, plan: StepPlan, output: StepOutput, seconds: float) -> None:
        """Nothing is learnt."""

    def join(self, request: Request) -> None:
        """Nothing is kept."""

    def leave(self, request: Request) -> None:
        """Nothing is kept."""

    def has_work(self) -> bool:
        """Never."""
        return False

    def work(self) -> None:
        """Nothing is to be done."""

    def flush(self, *namespaces: str | None) -> None:
        """Nothing is remembered."""

    def describe(self) -> Mapping[str, object]:
        """Nothing is decided."""
        return {}


NO_SPECULATION = NoSpeculation()


class GuardedSpeculator:
    """A speculator that may fail: then the step goes on without drafts, and the log says why.

    One that fails more than now and then is not asked again. A plan that exceeds what was offered
    is a failure, too.
    """

    def __init__(self, speculator: Speculator) -> None:
        self.inner = speculator
        self._failures = 0.0  # faded

    def is_silent(self, requests: Sequence[Request], *, ahead: int = 0) -> bool:
        """Passed on; one that fails is silent."""
        try:
            return self.inner.is_silent(requests, ahead=ahead)
        except Exception:
            self._failed()
            return True

    def plan(
        self, requests: Sequence[Request], limits: Sequence[int], *, budget: int, num_prefill: int
    ) -> Sequence[DraftPlan]:
        """What the speculator plans, or nothing for everybody."""
        try:
            plans = self.inner.plan(requests, limits, budget=budget, num_prefill=num_prefill)
            _check(plans, limits, budget)
        except Exception:
            self._failed()
            return [NOTHING] * len(requests)
        self._failures = max(0.0, self._failures - FORGIVEN)
        return plans

    def observe(self, request: Request, row: PlanRow, output: RowOutput, num_served: int) -> None:
        """Passed on."""
        self._try(self.inner.observe, request, row, output, num_served)

    def observe_step(self, plan: StepPlan, output: StepOutput, seconds: float) -> None:
        """Passed on."""
        self._try(self.inner.observe_step, plan, output, seconds)

    def join(self, request: Request) -> None:
        """Passed on."""
        self._try(self.inner.join, request)

    def leave(self, request: Request) -> None:
        """Passed on."""
        self._try(self.inner.leave, request)

    def has_work(self) -> bool:
        """Passed on; one that fails has none."""
        try:
            return self.inner.has_work()
        except Exception:
            self._failed()
            return False

    def work(self) -> None:
        """Passed on."""
        self._try(self.inner.work)

    def flush(self, *namespaces: str | None) -> None:
        """Passed on; a failure reaches the caller, who wants the tokens gone."""
        self.inner.flush(*namespaces)

    def describe(self) -> Mapping[str, object]:
        """Passed on."""
        return self.inner.describe()

    def broke_step(self) -> None:
        """A step failed that came through without its drafts; steps must not go on like that."""
        self._count("drafts made a step fail")

    def _try(self, tell: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
        try:
            tell(*args, **kwargs)
        except Exception:
            self._failed()

    def _failed(self) -> None:
        """To be called while the failure is handled."""
        logger.exception("the speculator failed; this step goes on without drafts")
        self._count("the speculator fails")

    def _count(self, what: str) -> None:
        self._failures += 1
        if self._failures >= MAX_FAILURES:
            logger.error("%s again and again: drafting is off", what)
            self.inner = NO_SPECULATION


def _check(plans: Sequence[DraftPlan], limits: Sequence[int], budget: int) -> None:
    """Raises ValueError for a plan that the scheduler must not follow."""
    if len(plans) != len(limits):
        raise ValueError(f"{len(plans)} plans for {len(limits)} requests")
    num_rows = 0
    for plan, limit in zip(plans, limits, strict=True):
        if plan is NOTHING:
            continue
        num_rows += plan.num_rows
        longest = max([plan.depth, *(len(branch.token_ids) for branch in plan.branches)])
        if longest > limit or num_rows > budget:
            raise ValueError(f"a draft of {longest} tokens, {num_rows} rows: more than offered")
