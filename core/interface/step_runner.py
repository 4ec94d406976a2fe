"""StepRunner: the protocol that computes steps; one may be launched before the last has ended."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from msgspec.structs import replace

from .step import PlanRow, RowOutput, StepOutput, StepPlan

OnKernelsStarted = Callable[[], None]


class StepCancelled(Exception):  # noqa: N818 - nothing went wrong with this step itself
    """A step was not computed: it was withdrawn, or none of its rows got a token before."""


class Pending(Protocol):
    """A step that was launched."""

    def finish(self) -> StepOutput:
        """Wait for the output; may be repeated. Raises what the step raised: no row is valid."""


def ignore_kernels() -> None:
    """An `OnKernelsStarted` that does nothing."""


class StepRunner(Protocol):
    """Computes steps in the model thread."""

    @property
    def launches(self) -> bool:
        """Whether `launch` returns before the step is computed, as on a GPU."""

    def launch(
        self,
        plan: StepPlan,
        after: Pending | None = None,
        on_kernels_started: OnKernelsStarted = ignore_kernels,
    ) -> Pending:
        """Begin one ragged batch.

        Rows that are ``is_ahead`` take their last token from ``after``, the step launched before
        this one, in which the same requests have a row. The output of a row without such a
        token means nothing. ``on_kernels_started`` is called once or more, before kernels begin:
        Python's lock is free then, for a while. Raises ValueError for a plan that cannot follow
        ``after``, `StepCancelled` where no row has a token, and what beginning it raises.
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

    A row that got no token there yields nothing. Raises `StepCancelled` if no row got one: then the
    plan's released ids and new pages would not reach the runner.
    """
    chosen = {out.request_id: out.token_ids for out in before.rows}
    rows = [_known(row, tokens[-1]) for row in plan.rows if (tokens := chosen[row.request_id])]
    if not rows:
        raise StepCancelled
    pending = launch(replace(plan, rows=rows))
    return pending if len(rows) == len(plan.rows) else _Part(pending, plan)


def _known(row: PlanRow, token_id: int) -> PlanRow:
    """The row with its last token, in a copy of the tokens: those of the request may grow."""
    if not row.is_ahead:
        return row
    tokens = row.tokens[: row.stop - 1]
    tokens.append(token_id)
    return replace(row, tokens=tokens, is_ahead=False)


class _Part:
    """`Pending` of a plan of which only some rows are computed."""

    def __init__(self, pending: Pending, plan: StepPlan) -> None:
        self._pending = pending
        self._request_ids = [row.request_id for row in plan.rows]

    def finish(self) -> StepOutput:
        output = self._pending.finish()
        found = {out.request_id: out for out in output.rows}
        rows = [found.get(name) or RowOutput(request_id=name) for name in self._request_ids]
        return replace(output, rows=rows)
