"""Flight: a step on its way through the model thread, which may begin before the last one is read.

A plan made ahead knows the last token of none of its rows: the step before it chooses them. A
runner that launches is asked for both steps before the first one's outcome is waited for. Others
compute one step after the other, each in one call of the thread.
"""

from __future__ import annotations

from .launch import Announce, Grounded, Pending, StepRunner
from .model_thread import Job, StepThread
from .step import StepOutput, StepPlan


class Flight:
    """One step. Belongs to the event loop, but for what the thread runs.

    ``after`` is the step before it, where the plan was made ahead. ``splits``: the thread launches
    the step in one call and waits for it in another, so that a launch may come between.
    """

    def __init__(
        self,
        plan: StepPlan,
        runner: StepRunner,
        began: float,
        announce: Announce,
        *,
        after: Flight | None = None,
        splits: bool = False,
    ) -> None:
        self.plan = plan
        self.began = began  # on the engine's clock
        self.is_ahead = after is not None
        self._runner = runner
        self._announce = announce
        self._after = after
        self._splits = splits
        self._tickets = [None]  # one: who takes it decides whether the step is computed
        self._job: Job[StepOutput] | None = None
        self._pending: Pending | None = None
        self._failure: BaseException = Grounded()  # why nothing is pending

    def start(self, thread: StepThread) -> None:
        """Have the thread begin it as soon as it can."""
        if self._splits:
            thread.start(self._launch)
        else:
            self._job = thread.start(self._run)

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

    def _board(self) -> Pending | None:
        """The step before, let go of: else each would keep all before it."""
        after, self._after = self._after, None
        if not self._take_ticket() or (after is not None and after._pending is None):
            raise Grounded
        return None if after is None else after._pending

    def _run(self) -> StepOutput:
        self._launch()
        return self._finish()

    def _launch(self) -> None:
        try:
            self._pending = self._runner.launch(self.plan, self._board(), self._announce)
        except Grounded:  # `_failure` is one already; this one's frames hold the step before
            return
        except BaseException as failure:  # raised where the outcome is waited for
            self._failure = failure

    def _finish(self) -> StepOutput:
        if self._pending is None:
            raise self._failure
        try:
            return self._pending.finish()
        except BaseException:
            self._pending = None  # what follows it is not computed
            raise
