"""The protocols through which the engine meets what it drives: drafting and the model.

`Speculator` decides what each request drafts, on the event loop's side. `StepRunner` computes
steps in the model thread; one may be launched before the last has ended.
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
    """Traits of a proposer that the price of its drafts depends on."""

    tokens_per_pass: int  # of a draft, that one of its passes yields
    catches_up: bool  # whether it must compute tokens of a request itself before it drafts
    weighs: bool  # whether it stops where a token is not worth its row, and may grow trees


class RowPrice(NamedTuple):
    """The cost of one more row in a step.

    A draft token is verified where the chance that it is accepted exceeds ``tokens``.
    """

    seconds: float
    tokens: float  # that the engine would serve in that time


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

    def row_price(self, num_requests: int) -> RowPrice | None:  # noqa: ARG002
        """Return the cost of a row in a step of so many requests; None: unknown."""
        return None

    def drafters(self) -> Mapping[str, bool]:
        """Return whether each drafter, by name, is still in use; False: it was given up."""
        return {}

    def broke_step(self) -> None:
        """Note that a step failed with drafts and succeeded without them."""


NO_SPECULATION = Speculator()


# -- the model -------------------------------------------------------------------------------------

OnKernelsStarted = Callable[[], None]


class StepCancelled(Exception):  # noqa: N818 - nothing went wrong with this step itself
    """A step was not computed: it was withdrawn, or the step before chose no token for it."""


class Pending(Protocol):
    """A step that was launched."""

    def finish(self) -> StepOutput:
        """Wait for the output; may be repeated. Raises what the step raised: no output is valid."""


def ignore_kernels() -> None:
    """An `OnKernelsStarted` that does nothing."""


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
        """Begin one ragged batch.

        Requests that are ``is_ahead`` take their last token from ``after``, the step launched
        before this one, of which they are part too. The output of a request without such a token
        means nothing. Only a runner that `is_async` gets such requests. ``on_kernels_started`` is
        called once or more, before kernels begin, or once the device has them: Python's lock is
        free then, for a while. Raises ValueError for a plan that cannot follow ``after``, and what
        beginning it raises.
        """


class Companions(Protocol):
    """Other processes without which no step can be computed: the ranks of one model."""

    def watch(self, on_lost: Callable[[BaseException], None]) -> None:
        """Call ``on_lost`` on the running event loop when one of them ends."""

    def unwatch(self) -> None:
        """Call it no more. Called on that loop."""

    def end(self, *, at_once: bool = False) -> None:
        """End them, ``at_once`` without waiting for them to stop; blocks until they are gone."""
