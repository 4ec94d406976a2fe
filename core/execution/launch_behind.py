"""Launch a plan that was made ahead where the step before it is over already."""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from ..interface.output import RequestOutput, StepOutput
from ..interface.plan import ScheduledRequest, StepPlan
from ..interface.protocols import Pending, StepCancelled


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
