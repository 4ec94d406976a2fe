"""Meter: what deciding and drafting cost, step by step, and when deciding may rest."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from ..core.step import StepOutput, StepPlan
from .controller import Controller

REST_SHARE = 0.002  # of the time that deciding may take where it decides against drafts
MAX_REST, MAX_REST_S = 128, 0.5  # steps, seconds: such a verdict holds no longer than both
BRIEF_REST = 2  # steps that tell what plain decoding costs
CUT_EVERY = 4  # rests, of which one may end early for who came
RUN = 4  # steps that rest between two that ask whether there is a reason not to
# Of the time that looks for a reason to end a rest may take, by their own clock: two threads' time
# to wake one, and what they push out of the caches, cost the steps more than that.
PEEK_SHARE = 0.0005
FIRST_PEEK = 6  # steps of a rest after drafts
MAX_PATIENCE = 16  # times longer between them, where such reasons came to nothing
MEAN_RATE = 0.1  # of a new value in a running mean
STALL = 3.0  # times what deciding took: what a step took beyond that is the machine's fault
OBSERVE_SHARE = 0.001  # of the time that learning from steps without drafts may take
OBSERVE_EVERY, OBSERVE_LEAST = 8, 64  # of so many of these, at most and at least one is learnt from


@dataclass(slots=True)
class _Step:
    """What is known of the step under way that somebody may draft in."""

    is_allocated: bool = False  # by the controller
    decide_s: float = 0.0  # what that took
    lm_rows: int = 0
    lm_passes: int = 0
    lm_drafted: int = 0
    lm_hits: int = 0


_NOTHING = _Step()  # of a step that nobody could draft in; never written


class Meter:
    """Tells the controller and its cost tables what came of each step.

    A step that rests may be planned while the one before it, which rests too, is under way.
    """

    def __init__(self, controller: Controller, clock: Callable[[], float]) -> None:
        self.controller = controller
        self.clock = clock
        self.decide_s = 0.0  # host seconds of a step that is decided on; running mean
        self._verdict_s = 0.0  # of what a verdict for plain decoding costs, cold caches included
        self._step_s = 0.0  # seconds of a step without prompts and drafts; running mean
        self._step = _Step()
        self._rest = 0  # steps for which plain decoding need not be questioned
        self._holds = False  # in the step that was planned last
        self._num_rested = 0  # steps of which the controller does not know yet
        self._rest_s = 0.0  # seconds of them, at most
        self._num_wanted = 0  # steps of a brief rest, all of which are learnt from
        self._num_uncut = 0  # rests begun since one was cut short for who came
        self._peek_s = 0.0  # seconds of a peek; running mean
        self._peek_in = 0  # steps
        self._peek_patience = 1
        self._has_peeked = False  # and so ended the last rest
        self._num_unseen = 0  # steps since one without drafts was learnt from
        self._observe_s = 0.0  # seconds that this takes; running mean
        self._late_s = 0.0  # host seconds of this round that are the last step's

    # -- before a step --------------------------------------------------------------------------

    @property
    def is_resting(self) -> bool:
        """Whether a verdict for plain decoding still holds."""
        return self._rest > 0

    @property
    def is_ending(self) -> bool:
        """Whether this step rests, and the verdict is about to grow old.

        A brief rest does not: it is to tell something, and then comes what made it wanted.
        """
        return self._holds and self._rest <= RUN and not self._num_wanted

    def rests(self) -> bool:
        """Whether a verdict holds for the step that is being planned."""
        self._holds = self._rest > 0
        if self._holds:
            self._count(1)
        else:
            self.flush()
        return self._holds

    def run(self) -> int:
        """Steps behind this one that may rest without anybody asking."""
        return 0 if self._num_wanted else min(self._rest, RUN)

    def _count(self, num_steps: int) -> None:
        """So many steps rest."""
        self._rest = max(0, self._rest - num_steps)
        self._num_rested += num_steps
        self._peek_in = max(self._peek_in - num_steps, -RUN)

    def begin(self) -> None:
        """A step is planned that somebody may draft in; the last such one is over, or failed."""
        self._step = _Step()

    def flush(self) -> None:
        """Tell the controller of the steps that rested; that may wait until it is asked again."""
        if self._num_rested:
            self.controller.rested(self._num_rested)
            self._num_rested = 0

    def rest(self, *, briefly: bool = False) -> None:
        """Plain decoding was found best: look again when deciding has become cheap.

        ``briefly``: only to see what it costs.
        """
        self._num_uncut += 1
        if self._has_peeked:
            self._peek_patience = min(MAX_PATIENCE, 2 * self._peek_patience)
            self._has_peeked = False
        if briefly:
            self._rest = self._num_wanted = BRIEF_REST
            self._rest_s = math.inf
        elif self._step_s > 0.0:
            longest = max(MAX_REST, MAX_REST_S / self._step_s)
            self._rest = round(
                min(longest, max(self.decide_s, self._verdict_s) / (REST_SHARE * self._step_s))
            )
            self._rest_s = 2.0 * self._rest * self._step_s  # if steps grow it ends sooner

    def end_rest(self) -> None:
        """Something is new: look again in the next step.

        A brief rest goes on: cut short, it would be wanted again in the next step, and the next.
        """
        if not self._num_wanted:
            self._rest, self._holds = 0, False

    def cut_rest(self, *, anyway: bool = False) -> None:
        """Who came is to be weighed soon.

        Only one rest in a few ends for that, or ``anyway``: where requests join others all the
        time, deciding takes little more than its share.
        """
        if anyway or self._num_uncut >= CUT_EVERY:
            self._num_uncut = 0
            if not self._num_wanted:
                self._rest = min(self._rest, 1)

    @property
    def may_peek(self) -> bool:
        """Whether to look, in this step of a rest, for a reason to end it; perhaps repeatedly."""
        return self._peek_in < 0

    def peeked(self, seconds: float, *, found: bool) -> None:
        """That took so long; a rest in which something was ``found`` is over."""
        self._peek_s += (MEAN_RATE if self._peek_s else 1.0) * (seconds - self._peek_s)
        interval = self._peek_s / (PEEK_SHARE * self._step_s) if self._step_s > 0.0 else 0.0
        self._peek_in += max(1, min(MAX_REST, round(self._peek_patience * interval)))
        if found:
            self._has_peeked = True
            self.end_rest()

    def decided(self, seconds: float) -> None:
        """The controller allocated this step; that took so long."""
        self._step.is_allocated, self._step.decide_s = True, seconds

    def reconsidered(self, seconds: float) -> None:
        """Plain decoding was found best again, in a step that rests; that took so long."""
        self._verdict_s += MEAN_RATE * (seconds - self._verdict_s)
        self.rest()

    # -- after it -------------------------------------------------------------------------------

    def drafted(self, backlog: int, num_drafted: int, num_hits: int) -> None:
        """The draft model caught up with ``backlog`` tokens of a request and guessed some."""
        step = self._step
        step.lm_rows += backlog + num_drafted
        step.lm_passes = max(step.lm_passes, 1, num_drafted)
        step.lm_drafted += num_drafted
        step.lm_hits += num_hits

    def passed(self, num_steps: int, seconds: float) -> None:
        """So many steps are over that rested without being asked about, and took so long in all."""
        self._count(num_steps)
        self._num_unseen += num_steps
        self._pass_time(seconds)

    def end(self, plan: StepPlan, output: StepOutput, seconds: float) -> None:
        """The step is over. Of steps that nothing was decided for, one in some is learnt from."""
        if output.num_rows <= len(plan.rows) or not self._step_s:
            self._step_s += MEAN_RATE * (seconds - self._step_s)
        late_s, self._late_s = self._late_s, 0.0
        step = _NOTHING if plan.is_plain else self._step
        drafts = not plan.is_plain and output.num_rows > plan.num_tokens
        if drafts:
            self._peek_patience, self._has_peeked = 1, False
            self._peek_in = min(self._peek_in, FIRST_PEEK)  # what is repeated next shows soon
        if not step.is_allocated:
            self._pass_time(seconds)
            if not drafts and self._may_skip():
                return
        began = self.clock()
        # Plain decoding is what follows a verdict for it: that step paid for the decision, and its
        # pass ran on cold caches.
        if drafts or step.lm_passes or not (step.is_allocated and self._rest):
            self._observe_costs(step, plan, output, seconds - late_s)
        if step.is_allocated:
            self._observe_outcome(step, plan, output, seconds)
        self._late_s = self.clock() - began
        if step.is_allocated:
            self.decide_s += MEAN_RATE * (step.decide_s + self._late_s - self.decide_s)
            if self._rest and output.num_rows <= len(plan.rows):  # prompts are no part of it
                self._verdict_s += MEAN_RATE * (self._verdict_cost(step, seconds) - self._verdict_s)
        else:
            self._observe_s += MEAN_RATE * (self._late_s - self._observe_s)

    def _verdict_cost(self, step: _Step, seconds: float) -> float:
        """Seconds of a step that paid for a verdict for plain decoding, beyond what it takes."""
        known = step.decide_s + self._late_s
        return min(STALL * known, max(known, seconds - self._step_s))

    def _pass_time(self, seconds: float) -> None:
        """A rest ends sooner where steps take longer than they did."""
        self._rest_s -= seconds
        if self._rest_s <= 0.0:
            self._rest = 0

    def _may_skip(self) -> bool:
        """Whether a step without drafts need not be learnt from: one in a few is enough."""
        if self._num_wanted:
            self._num_wanted -= 1
            return False
        self._num_unseen += 1
        if self._num_unseen < OBSERVE_EVERY:
            return True
        affordable_s = OBSERVE_SHARE * self._step_s * self._num_unseen
        if self._num_unseen < OBSERVE_LEAST and affordable_s < self._observe_s:
            return True
        self._num_unseen = 0
        return False

    def _observe_outcome(
        self, step: _Step, plan: StepPlan, output: StepOutput, seconds: float
    ) -> None:
        num_tokens = sum(
            len(out.token_ids)
            for row, out in zip(plan.rows, output.rows, strict=True)
            if row.stop - row.start == 1
        )
        self.controller.observe(
            num_tokens, seconds, num_lm_drafted=step.lm_drafted, num_lm_hits=step.lm_hits
        )

    def _observe_costs(
        self, step: _Step, plan: StepPlan, output: StepOutput, seconds: float
    ) -> None:
        times, costs = output.times, self.controller.costs
        stops = [row.stop for row in plan.rows]
        context = (len(stops), max(stops), sum(stops))
        costs.observe(
            num_rows=output.num_rows,
            forward_s=times.get("forward", 0.0),
            verify_s=times.get("verify", 0.0),
            num_tokens=sum(len(row.token_ids) for row in output.rows),
            draft_s=times.get("draft", 0.0),
            draft_passes=step.lm_passes,
            draft_rows=step.lm_rows,
            num_drafted=step.lm_drafted,
            host_s=seconds - sum(times.values()) - step.decide_s,
            context_s=costs.look_back(*context),
            draft_context_s=costs.draft_look_back(*context),
            num_requests=len(stops),
            num_drafts=max(0, output.num_rows - plan.num_tokens),  # rows may have failed
            with_prompts=any(row.stop - row.start > 1 for row in plan.rows),
        )
