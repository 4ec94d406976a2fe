"""Steps of fakes that continue the tokens of the step before, as those of a device do."""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from foretoken.core.interface.output import RequestOutput, StepOutput
from foretoken.core.interface.plan import ScheduledRequest, StepPlan
from foretoken.core.interface.protocols import Pending


class Finished:
    """`Pending` of a step that is over."""

    def __init__(self, output: StepOutput) -> None:
        self._output = output

    def finish(self) -> StepOutput:
        return self._output


def launch_behind(
    launch: Callable[[StepPlan], Pending], plan: StepPlan, before: StepOutput
) -> Pending:
    """Compute a plan made ahead; a row whose request got no token in ``before`` yields nothing."""
    chosen = {out.request_id: out.token_ids for out in before.requests}
    rows = [
        _with_token(row, tokens[-1]) for row in plan.requests if (tokens := chosen[row.request_id])
    ]
    output = launch(replace(plan, requests=rows)).finish()
    found = {out.request_id: out for out in output.requests}
    names = [row.request_id for row in plan.requests]
    requests = [found.get(name) or RequestOutput(request_id=name) for name in names]
    return Finished(replace(output, requests=requests))


def _with_token(row: ScheduledRequest, token_id: int) -> ScheduledRequest:
    """The row with its last token, in a copy of the tokens: those lent may grow."""
    if not row.is_ahead:
        return row
    tokens = row.tokens[: row.stop - 1]
    tokens.append(token_id)
    return replace(row, tokens=tokens, is_ahead=False)
