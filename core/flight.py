"""Flight: a step on its way through the model thread, which may begin before the last one is read.

A plan made ahead knows the last token of none of its rows: the step before it chooses them. On the
CPU the thread runs one step after the other and hands the tokens on. A GPU is asked for both, and
hands them on itself; only then is the first one's outcome waited for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from msgspec.structs import replace

from .launch import Launched, Launcher
from .model_thread import Job, StepThread
from .step import AheadTokens, PlanRow, RowOutput, StepOutput, StepPlan


class StepRunner(Protocol):
    """What the model thread runs. One that launches is a `Launcher`, too."""

    def step(self, plan: StepPlan) -> StepOutput:
        """Compute one ragged batch; blocking."""


class Grounded(Exception):  # noqa: N818 - nothing went wrong with this step itself
    """A step was not computed: it was withdrawn, or it had no tokens to go on from."""


class Flight:
    """One step. Belongs to the event loop, but for what the thread runs.

    ``after`` is the step before it, where the plan was made ahead. ``launches``: the thread asks a
    device for it with `Launcher.launch`, and waits for it in a call of its own.
    """

    def __init__(
        self,
        plan: StepPlan,
        runner: StepRunner,
        began: float,
        *,
        after: Flight | None = None,
        launches: bool = False,
    ) -> None:
        self.plan = plan
        self.began = began  # on the engine's clock
        self.is_ahead = after is not None
        self._runner = runner
        self._after = after
        self._launches = launches
        self._tickets = [None]  # one: who takes it decides whether the step is computed
        self._job: Job[StepOutput] | None = None
        self._launched: Launched | None = None
        self._failure: BaseException = Grounded()  # why nothing was launched
        self._output: StepOutput | None = None

    def start(self, thread: StepThread) -> None:
        """Have the thread begin it as soon as it can."""
        if self._launches:
            thread.start(self._launch)
        else:
            self._job = thread.start(self._compute)

    def outcome(self, thread: StepThread) -> Job[StepOutput]:
        """The call that ends with it; what is to be launched behind it was started before."""
        if self._job is None:
            self._job = thread.start(self._finish)
        return self._job

    def withdraw(self) -> bool:
        """Whether it will not be computed: the thread has not come to it yet. Then it raises."""
        return self._take_ticket()

    # -- in the model thread --------------------------------------------------------------------

    def _take_ticket(self) -> bool:
        try:
            self._tickets.pop()  # one of two threads succeeds
        except IndexError:
            return False
        return True

    def _board(self) -> Flight | None:
        """The step before, let go of: else each would keep all before it."""
        after, self._after = self._after, None
        if not self._take_ticket():
            raise Grounded
        return after

    def _compute(self) -> StepOutput:
        after = self._board()
        if after is None:
            output = self._runner.step(self.plan)
        elif after._output is None:
            raise Grounded
        else:
            output = self._continue(after._output)
        self._output = output
        return output

    def _continue(self, before: StepOutput) -> StepOutput:
        """Compute behind ``before``; a row that got no token there yields nothing."""
        chosen = {out.request_id: out.token_ids for out in before.rows}
        rows = [row for row in self.plan.rows if _tell(row, chosen[row.request_id])]
        if len(rows) == len(self.plan.rows):
            return self._runner.step(self.plan)
        if not rows:  # the runner would not be told what the plan has to tell it
            raise Grounded
        output = self._runner.step(replace(self.plan, rows=rows))
        found = {out.request_id: out for out in output.rows}
        nothing = (RowOutput(request_id=row.request_id) for row in self.plan.rows)
        return replace(output, rows=[found.get(out.request_id, out) for out in nothing])

    def _launch(self) -> None:
        try:
            after = self._board()
            if after is not None and after._launched is None:
                raise Grounded
            assert isinstance(self._runner, Launcher)
            before = None if after is None else after._launched
            self._launched = self._runner.launch(self.plan, before)
        except Grounded:  # `_failure` is one already; this one's frames hold the step before
            return
        except BaseException as failure:  # raised where the outcome is waited for
            self._failure = failure

    def _finish(self) -> StepOutput:
        if self._launched is None:
            raise self._failure
        return self._launched.finish()


def _tell(row: PlanRow, token_ids: Sequence[int]) -> bool:
    """Put in the token that a row goes on from; whether there is one."""
    if token_ids and isinstance(row.tokens, AheadTokens):
        row.tokens.last = token_ids[-1]
    return bool(token_ids)
