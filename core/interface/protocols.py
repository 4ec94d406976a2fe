"""Protocols of the parts that the engine calls: drafting and the model.

`Speculator` decides the draft of each request, on the event loop. `StepRunner` computes steps; it
may launch a step before the previous step has ended.
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

    tokens_per_pass: int  # number of draft tokens that one pass yields along a path
    catches_up: bool  # whether the proposer computes the request's tokens, too, before it drafts
    weighs: bool  # whether it drafts only tokens that are worth their price; it may grow trees


class RowPrice(NamedTuple):
    """Cost of one more row in a step.

    A draft token is worth its row if its probability of acceptance exceeds ``tokens``.
    """

    seconds: float
    tokens: float  # number of tokens that the engine serves in ``seconds``


class Speculator:
    """Controller that plans the draft of each decoding request. This base class never drafts."""

    def drafts_nothing(
        self,
        requests: Sequence[Request],  # noqa: ARG002
        *,
        num_new_tokens: int = 0,  # noqa: ARG002
    ) -> bool:
        """Return whether no request would draft after ``num_new_tokens`` more tokens each.

        If true, `plan` and `observe` are not called for the step, and the step may be planned
        before the preceding step has ended.
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

        ``limits`` [num_requests]: maximum number of tokens along a path of each draft, which may be
        0. ``budget``: number of rows that all drafts together may add to the step. ``num_prefill``:
        estimated number of prompt tokens in the same step.
        """
        return [NO_DRAFT_PLAN] * len(requests)

    def observe(
        self, request: Request, scheduled: ScheduledRequest, output: RequestOutput, num_served: int
    ) -> None:
        """Learn from a committed output: the last ``num_served`` of ``request.tokens`` are new.

        This is called for each output with tokens, even if the request has just ended. The next
        step may be planned already, unless the request's draft came from the proposer.
        """

    def observe_step(self, plan: StepPlan, output: StepOutput, seconds: float) -> None:
        """Learn from a committed step.

        ``seconds``: time since the previous commit, without idle time.
        """

    def join(self, request: Request) -> None:
        """Register a request that was admitted, for the first time or after a preemption."""

    def leave(self, request: Request) -> None:
        """Drop the data of a request that ended."""

    def has_work(self) -> bool:
        """Return whether `work` has something to do. This must be fast: it is called often."""
        return False

    def work(self) -> None:
        """Index tokens and clean up, for about a millisecond, while the model thread computes."""

    def flush(self, *namespaces: str | None) -> None:
        """Drop the indexed tokens of ``namespaces``; without arguments, of all namespaces."""

    def describe(self) -> Mapping[str, object]:
        """Return a description of the decisions since the last call, for the log."""
        return {}

    def row_price(self, num_requests: int) -> RowPrice | None:  # noqa: ARG002
        """Return the cost of one more row in a step of ``num_requests``; None if unknown."""
        return None

    def drafters(self) -> Mapping[str, bool]:
        """Return whether each drafter is still in use, by name; False if it failed too often."""
        return {}

    def broke_step(self) -> None:
        """Record that a step failed with drafts and succeeded without them."""


NO_SPECULATION = Speculator()


# -- the model -------------------------------------------------------------------------------------

OnKernelsStarted = Callable[[], None]


class StepCancelled(Exception):  # noqa: N818 - nothing went wrong with this step itself
    """Error of a step whose output was asked for again after its first `Pending.finish` failed."""


class Pending(Protocol):
    """A step that was launched."""

    def finish(self) -> StepOutput:
        """Wait for the output and return it; may be called again. Raises the step's error."""


def ignore_kernels() -> None:
    """Do nothing: the default for `OnKernelsStarted`."""


class StepRunner(Protocol):
    """Runner of steps, of which one call runs at a time.

    The engine calls it in the model thread. Only a short launch (`StepPlan.is_short`) of a runner
    with `is_async` is called on the event loop.
    """

    @property
    def is_async(self) -> bool:
        """Whether `launch` returns before the step is computed, as on a GPU."""

    def prepare_thread(self) -> None:
        """Prepare the calling thread to launch steps, so that its first launch takes no longer.

        The engine calls it on the event loop, after the warm-up of the model thread.
        """

    def launch(
        self,
        plan: StepPlan,
        after: Pending | None = None,
        on_kernels_started: OnKernelsStarted = ignore_kernels,
    ) -> Pending:
        """Launch one ragged batch and return the pending step.

        Requests with ``is_ahead`` take their last token from ``after``, the preceding step, which
        must include them; if it chose no token for a request, the request's output must be ignored.
        Only a runner with `is_async` gets such requests. ``on_kernels_started`` is called at least
        once, when this thread begins to leave Python's global lock to others for a while: before it
        runs kernels, or after it launched them on a device. Raises ValueError for a plan that
        cannot follow ``after``, and any error of the launch.
        """


class Companions(Protocol):
    """Other processes that every step needs: the ranks of a tensor-parallel model."""

    def watch(self, on_lost: Callable[[BaseException], None]) -> None:
        """Call ``on_lost`` on the running event loop when one of the processes ends."""

    def unwatch(self) -> None:
        """Undo `watch`, on the same event loop."""

    def end(self, *, at_once: bool = False) -> None:
        """End the processes, and wait until they have exited.

        ``at_once``: kill them without waiting for them to exit by themselves.
        """
