"""Protocols between the engine and the parts that it drives: drafting and the model.

`Speculator` decides the draft of each request, in the event loop. `StepRunner` computes steps in
the model thread; it may launch a step before the last one has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from .draft import NO_DRAFT_PLAN, DraftPlan
from .output import RequestOutput, StepOutput
from .plan import ScheduledRequest, StepPlan
from .request import Request

# -- drafting --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ProposerTraits:
    """Traits of a proposer that affect the price of its drafts."""

    tokens_per_pass: int  # tokens of a draft that one pass yields
    catches_up: bool  # whether it must compute a request's tokens itself before it drafts
    weighs: bool  # whether it drafts only tokens worth their rows; it may then grow trees


class RowPrice(NamedTuple):
    """Cost of one more row in a step.

    A draft token is worth its row if its probability of acceptance exceeds ``tokens``.
    """

    seconds: float
    tokens: float  # tokens that the engine serves in ``seconds``


class Speculator:
    """Decides the draft of each decoding request; this class never drafts, subclasses do."""

    def drafts_nothing(
        self,
        requests: Sequence[Request],  # noqa: ARG002
        *,
        num_new_tokens: int = 0,  # noqa: ARG002
    ) -> bool:
        """Return whether no request would draft, once each has ``num_new_tokens`` more tokens.

        If so, `plan` and `observe` are not called for the step, and the step may be planned before
        the preceding one has ended.
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

        ``limits`` [num_requests]: the most tokens that a path of each draft may have, maybe 0.
        ``budget``: rows that all drafts together may add to the step. ``num_prefill``: estimate of
        the prompt tokens that share the step, at most the rest of the token budget.
        """
        return [NO_DRAFT_PLAN] * len(requests)

    def observe(
        self, request: Request, scheduled: ScheduledRequest, output: RequestOutput, num_served: int
    ) -> None:
        """Learn from a committed output: the last ``num_served`` of ``request.tokens`` are new.

        Called for outputs with tokens, also for requests that have just ended. The next step may be
        planned already, unless the request's draft came from the proposer.
        """

    def observe_step(self, plan: StepPlan, output: StepOutput, seconds: float) -> None:
        """Learn from a committed step.

        ``seconds``: time since the last commit, without idle time.
        """

    def join(self, request: Request) -> None:
        """Register a request that begins to run, for the first time or after a preemption."""

    def leave(self, request: Request) -> None:
        """Forget a request that ended."""

    def has_work(self) -> bool:
        """Return whether `work` has something to do. Called often, so it must be cheap."""
        return False

    def work(self) -> None:
        """Do upkeep while the model thread computes a step; about a millisecond at a time."""

    def flush(self, *namespaces: str | None) -> None:
        """Forget the tokens seen in these namespaces, by default in all."""

    def describe(self) -> Mapping[str, object]:
        """Describe the decisions since the last call, for the log."""
        return {}

    def row_price(self, num_requests: int) -> RowPrice | None:  # noqa: ARG002
        """Return the cost of a row in a step of ``num_requests`` requests; None if unknown."""
        return None

    def drafters(self) -> Mapping[str, bool]:
        """Return whether each drafter is in use, by its name; False if it failed too often."""
        return {}

    def broke_step(self) -> None:
        """Record that a step failed with drafts and succeeded without them."""


NO_SPECULATION = Speculator()


# -- the model -------------------------------------------------------------------------------------

OnKernelsStarted = Callable[[], None]


class StepCancelled(Exception):  # noqa: N818 - nothing went wrong with this step itself
    """Raised for a withdrawn step, or if the previous step chose no input token for it."""


class Pending(Protocol):
    """Step that was launched."""

    def finish(self) -> StepOutput:
        """Wait for the output and return it; may be repeated. Raises the step's error."""


def ignore_kernels() -> None:
    """Do nothing; the default `OnKernelsStarted`."""


class StepRunner(Protocol):
    """Computes steps in the model thread."""

    @property
    def is_async(self) -> bool:
        """Whether `launch` returns before the step is computed, as on a GPU."""

    def launch(
        self,
        plan: StepPlan,
        after: Pending | None = None,
        on_kernels_started: OnKernelsStarted = ignore_kernels,
    ) -> Pending:
        """Launch one ragged batch and return the pending step.

        Requests that are ``is_ahead`` take their last token from ``after``, the preceding step,
        which must include them; if it chose no token for a request, the request's output must be
        ignored. Only a runner that `is_async` gets such requests. ``on_kernels_started`` is called
        at least once, when this thread leaves Python's global lock to others for a while: before
        kernels begin, or once the device has them. Raises ValueError for a plan that cannot follow
        ``after``, and any error of the launch.
        """


class Companions(Protocol):
    """Other processes without which no step can run: the ranks of a tensor-parallel model."""

    def watch(self, on_lost: Callable[[BaseException], None]) -> None:
        """Call ``on_lost`` on the running event loop when one of the processes ends."""

    def unwatch(self) -> None:
        """Stop watching. Called on the event loop."""

    def end(self, *, at_once: bool = False) -> None:
        """End the processes, ``at_once`` or when they have stopped; blocks until they are gone."""
