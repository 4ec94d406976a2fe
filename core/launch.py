"""Launches: steps on their way, each of which may begin before the one ahead of it is over."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from msgspec.structs import replace

from .step import PlanRow, RowOutput, StepOutput, StepPlan

Announce = Callable[[], None]


class Grounded(Exception):  # noqa: N818 - nothing went wrong with this step itself
    """A step was not computed: it was withdrawn, or it had no tokens to go on from."""


class Pending(Protocol):
    """A step that was launched."""

    def finish(self) -> StepOutput:
        """Wait for it, again if it is over. Raises what it raised: then no row is valid."""


def be_silent() -> None:
    """An `Announce` that reaches nobody."""


class StepRunner(Protocol):
    """What the model thread runs."""

    @property
    def launches(self) -> bool:
        """Whether `launch` returns before the step is computed, as on a GPU."""

    def launch(
        self, plan: StepPlan, after: Pending | None = None, announce: Announce = be_silent
    ) -> Pending:
        """Begin one ragged batch.

        Rows that are ``is_ahead`` take their last token from ``after``, the step launched before
        this one, in which the same requests have a row. What comes of a row without such a token
        means nothing. ``announce`` is called once or more, before kernels begin: Python's lock is
        free then, for a while. Raises ValueError for a plan that cannot follow ``after``,
        `Grounded` where no row has a token, and what beginning it raises.
        """


class Finished:
    """`Pending` of a step that is over."""

    def __init__(self, output: StepOutput) -> None:
        self._output = output

    def finish(self) -> StepOutput:
        """What came of it."""
        return self._output


def launch_behind(
    launch: Callable[[StepPlan], Pending], plan: StepPlan, before: StepOutput
) -> Pending:
    """Launch a plan made ahead where the step before it is over.

    A row that got no token there yields nothing. Raises `Grounded` where none got any: the runner
    would not be told what the plan has to tell it.
    """
    chosen = {out.request_id: out.token_ids for out in before.rows}
    rows = [_known(row, tokens[-1]) for row in plan.rows if (tokens := chosen[row.request_id])]
    if not rows:
        raise Grounded
    pending = launch(replace(plan, rows=rows))
    return pending if len(rows) == len(plan.rows) else _Part(pending, plan)


def _known(row: PlanRow, token_id: int) -> PlanRow:
    """The row with its last token, and tokens of its own: those of the request may grow."""
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
