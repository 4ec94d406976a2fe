"""StepRunner: the protocol that computes steps; one may be launched before the last has ended."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from msgspec.structs import replace

from .step import RequestOutput, ScheduledRequest, StepOutput, StepPlan

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
        before this one, of which they are part too. The output of a request without such a
        token means nothing. ``on_kernels_started`` is called once or more, before kernels begin:
        Python's lock is free then, for a while. Raises ValueError for a plan that cannot follow
        ``after``, `StepCancelled` where no request has a token, and what beginning it raises.
        """


class Finished:
    """`Pending` of a step that is over."""

    def __init__(self, output: StepOutput) -> None:
        self._output = output

    def finish(self) -> StepOutput:
        """Return the output."""
        return self._output


def launch_behind(
    launch: Callable[[StepPlan], Pending], plan: StepPlan, before: StepOutput
) -> Pending:
    """Launch a plan made ahead where the step before it is over.

    A request that got no token there yields nothing. Raises `StepCancelled` if none got one: then
    the plan's released ids and new pages would not reach the runner.
    """
    chosen = {out.request_id: out.token_ids for out in before.requests}
    requests = [
        _with_token(scheduled, tokens[-1])
        for scheduled in plan.requests
        if (tokens := chosen[scheduled.request_id])
    ]
    if not requests:
        raise StepCancelled
    pending = launch(replace(plan, requests=requests))
    return pending if len(requests) == len(plan.requests) else _PartOfPlan(pending, plan)


def _with_token(scheduled: ScheduledRequest, token_id: int) -> ScheduledRequest:
    """The request with its last token, in a copy of the tokens: those lent may grow."""
    if not scheduled.is_ahead:
        return scheduled
    tokens = scheduled.tokens[: scheduled.stop - 1]
    tokens.append(token_id)
    return replace(scheduled, tokens=tokens, is_ahead=False)


class _PartOfPlan:
    """`Pending` of a plan of which only some requests are computed."""

    def __init__(self, pending: Pending, plan: StepPlan) -> None:
        self._pending = pending
        self._request_ids = [scheduled.request_id for scheduled in plan.requests]

    def finish(self) -> StepOutput:
        output = self._pending.finish()
        found = {out.request_id: out for out in output.requests}
        requests = [found.get(name) or RequestOutput(request_id=name) for name in self._request_ids]
        return replace(output, requests=requests)
