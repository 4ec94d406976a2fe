"""DraftSpeculator: decides which tokens each request drafts in a step, and how many.

Free sources look the next tokens up in earlier tokens, or know what a grammar forces. A draft
model, if there is one, proposes in the model thread. The acceptance rate of each is measured
(control/acceptance.py), the cost of a step is measured (control/cost_model.py), and the controller
drafts every token that is worth its row, which may be none. Look-ups run before a step; committed
tokens are indexed while the next step runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import numpy as np

from ..core.interface.request import Request
from ..core.interface.speculator import NO_DRAFT_PLAN, DraftPlan
from ..core.interface.step import PlanRow, RowOutput, StepOutput, StepPlan
from .control.acceptance import AcceptanceModel
from .control.allocation import StepCandidates
from .control.candidates import CandidateGenerator
from .control.controller import Controller
from .control.cost_model import Mean
from .control.request_state import LM, NO_SURVIVAL, DraftState, padded
from .sources.grammar import GrammarSource
from .sources.indexer import SourceIndexer
from .sources.merge import Path, Survival
from .sources.source import BUCKETS, GuardedSource, Priors, Source

LM_PRIORS = Priors(((0.75,) * len(BUCKETS),), ((0.65,) * len(BUCKETS),))
FREE_LEN = 24  # longest draft of a free source in "auto"
LM_LEN = 6  # longest draft of the model in "auto"
MAX_BRANCHES = 2
DECIDE_SHARE = 0.02  # of a step: if deciding takes longer, look-ups that find nothing back off


class DraftSpeculator:
    """Plans drafts for all requests of an engine.

    ``depth``: "auto" lets the controller decide, a number fixes it. A request may ask for another
    depth; if ``adapts`` is false, its "auto" means ``depth``. ``overlaps``: steps without drafts
    are launched before the step ahead of them is read, so look-ups back off even if they are cheap.
    ``lm_block``: tokens that one pass of the draft model yields. ``lm_catches_up``: whether it must
    compute the tokens of a request itself; a head's KV is written from the target's passes.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        controller: Controller,
        odds: AcceptanceModel,
        *,
        depth: Literal["auto"] | int = "auto",
        has_lm: bool = False,
        lm_block: int = 1,
        lm_catches_up: bool = True,
        adapts: bool = True,
        overlaps: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.depth = depth
        self.controller = controller
        self.odds = odds
        self._sources = [GuardedSource(source) for source in sources]
        grammar = next((s for s in sources if isinstance(s, GrammarSource)), None)
        self._generator = CandidateGenerator(self._sources, odds, grammar)
        self._indexer = SourceIndexer(self._sources)
        self._has_lm, self._adapts, self._overlaps = has_lm, adapts, overlaps
        self._lm_block, self._lm_catches_up = lm_block, lm_catches_up
        self._clock = clock
        self._states: dict[str, DraftState] = {}  # of requests that may draft
        self._decide_s = Mean()  # seconds of a decision
        self._lm = _DraftModelUse()  # in the step under way
        self._uses_lm = has_lm and depth != "auto"
        for source in self._sources:
            odds.register(source.name, source.priors)
        odds.register(LM, LM_PRIORS)

    # -- plan -----------------------------------------------------------------------------------

    def drafts_nothing(self, requests: Sequence[Request], *, num_new_tokens: int = 0) -> bool:
        """Whether no request would be looked up, once each has ``num_new_tokens`` more tokens."""
        return all(self._drafts_nothing(request, num_new_tokens) for request in requests)

    def _drafts_nothing(self, request: Request, num_new_tokens: int) -> bool:
        state = self._states.get(request.request_id)
        return state is None or (
            state.drafts_nothing(num_new_tokens)
            and request.sampling.constraint is None
            and self._depth(request) == "auto"
        )

    def plan(
        self, requests: Sequence[Request], limits: Sequence[int], *, budget: int, num_prefill: int
    ) -> Sequence[DraftPlan]:
        """Fixed depths first, then the controller shares what is left of the budget."""
        self._lm = _DraftModelUse()
        plans = [NO_DRAFT_PLAN] * len(requests)
        share = budget // max(1, len(requests))
        auto = []
        for index, request in enumerate(requests):
            depth = self._depth(request)
            if depth == "auto":
                auto.append(index)
            elif depth > 0:
                most = min(limits[index], depth, share)
                plans[index] = self._fixed(self._state_of(request), most)
                budget -= plans[index].num_rows
        if auto:
            began = self._clock()
            states = [self._state_of(requests[index]) for index in auto]
            candidates = self._candidates(
                states,
                [limits[index] for index in auto],
                budget,
                num_prefill=num_prefill,
                num_others=len(requests) - len(auto),
            )
            for index, plan in zip(auto, self._allocate(states, candidates), strict=True):
                plans[index] = plan
            self._decide_s.observe(self._clock() - began)
        return plans

    def _depth(self, request: Request) -> Literal["auto"] | int:
        is_fixed = isinstance(request.depth, int)
        said = request.depth if is_fixed or (self._adapts and request.depth) else self.depth
        return 0 if said is None else said

    def _state_of(self, request: Request) -> DraftState:
        return self._states.setdefault(request.request_id, DraftState(request))

    def _fixed(self, state: DraftState, depth: int) -> DraftPlan:
        """A free source's draft of at most ``depth`` tokens; without one, the draft model's."""
        if depth < 1:
            return NO_DRAFT_PLAN
        paths = self._generator.generate(state, depth)
        if paths:
            return DraftPlan(paths[0].draft(depth))
        return DraftPlan(max_draft=depth) if self._has_lm else NO_DRAFT_PLAN

    def _candidates(
        self,
        states: Sequence[DraftState],
        limits: Sequence[int],
        budget: int,
        *,
        num_prefill: int,
        num_others: int,
    ) -> StepCandidates:
        for state, limit in zip(states, limits, strict=True):
            is_requested = limit and not self._drafts_nothing(state.request, 0)
            most = min(limit, FREE_LEN)
            state.paths = self._generator.generate(state, most) if is_requested else []
        is_busy = num_prefill > 0
        return StepCandidates(
            free=padded([s.paths[0].survival if s.paths else NO_SURVIVAL for s in states]),
            lm=padded(
                [self._lm_survival(*each, is_busy) for each in zip(states, limits, strict=True)]
            ),
            num_uncached_draft_tokens=np.array([self._num_uncached(state) for state in states]),
            budget=budget,
            num_prefill=num_prefill,
            num_others=num_others,
            lm_block=self._lm_block,
        )

    def _num_uncached(self, state: DraftState) -> int:
        """Tokens that the draft model must compute before it drafts."""
        return len(state.request.tokens) - state.lm_len if self._lm_catches_up else 0

    def _lm_survival(self, state: DraftState, limit: int, is_busy: bool) -> Survival:
        """The draft model's survival; empty while prompts wait and much KV is missing.

        Then the load may be growing, and catching up would delay the prompts.
        """
        length, request = min(limit, LM_LEN), state.request
        has_backlog = is_busy and self._num_uncached(state) > LM_LEN
        if not self._has_lm or not length or has_backlog:
            return NO_SURVIVAL
        return self.odds.survival(LM, 0, request.request_id, length, sampled=state.is_sampled)

    def _allocate(
        self, states: Sequence[DraftState], candidates: StepCandidates
    ) -> Sequence[DraftPlan]:
        """Ask the controller for the drafts; requests whose look-ups find nothing may back off."""
        allocation = self.controller.allocate(candidates)
        room = candidates.budget - allocation.num_rows
        may_back_off = self._overlaps or self._is_deciding_dear(candidates.num_decodes)
        plans = []
        num_free, depths = allocation.num_free.tolist(), allocation.lm_depth.tolist()
        self._uses_lm = any(depths)
        for state, free, depth in zip(states, num_free, depths, strict=True):
            if depth:
                plans.append(DraftPlan(max_draft=depth))
            else:
                plans.append(plan := self._choose(state.paths, free, room))
                room -= plan.num_rows - plan.depth
            if not state.drafts_nothing(0):
                state.drafted(plans[-1].num_rows, may_back_off=may_back_off)
        return plans

    def _is_deciding_dear(self, num_decodes: int) -> bool:
        step_s = self.controller.costs.step_seconds(num_decodes)
        return self._decide_s.value > DECIDE_SHARE * step_s

    def _choose(self, paths: Sequence[Path], num_free: int, room: int) -> DraftPlan:
        """The drafts of one request; ``room``: rows that its branches may add."""
        if not num_free:
            return NO_DRAFT_PLAN
        trunk, *others = paths
        branches = []
        for path in others[:MAX_BRANCHES]:
            length = min(max(num_free, path.fork + 1), len(path.token_ids))
            gain = float(path.survival[:length].sum())
            fits = path.fork < num_free and length < room
            if fits and self.controller.takes(gain, length + 1):
                branches.append(path.draft(length))
                room -= length + 1
        return DraftPlan(trunk.draft(num_free), branches=branches)

    # -- outcomes -------------------------------------------------------------------------------

    def observe(self, request: Request, row: PlanRow, output: RowOutput, num_served: int) -> None:
        """Score every guess of the step, verified or not, against what was committed."""
        state = self._states.get(request.request_id)
        if state is None:
            return
        if state.guesses:
            state.score(self.odds, request.tokens[-num_served:])
        if row.max_draft:
            hits = min(output.num_accepted, num_served)
            uncached = row.stop - state.lm_len if self._lm_catches_up else 0
            num_passes = -(-output.draft_len // self._lm_block)
            self._lm.add(uncached, output.draft_len, hits, num_passes)
            state.score_lm(self.odds, row, output, num_served)

    def observe_step(self, plan: StepPlan, output: StepOutput, seconds: float) -> None:
        """Learn the cost of a step that took ``seconds``."""
        decodes = [
            out
            for row, out in zip(plan.rows, output.rows, strict=True)
            if row.stop - row.start == 1
        ]
        lm, draft_s = self._lm, output.times.get("draft", 0.0)
        self.controller.costs.observe(
            num_rows=output.num_rows,
            num_requests=len(decodes),
            num_tokens=sum(len(out.token_ids) for out in decodes),
            forward_s=output.times.get("forward", 0.0),
            draft_s=draft_s,
            seconds=seconds,
            with_prompts=len(decodes) < len(plan.rows),
        )
        self.controller.costs.observe_draft(lm.num_passes, lm.num_rows, draft_s)
        self.controller.observe(seconds, num_lm_drafted=lm.num_drafted, num_lm_hits=lm.num_hits)
        self._lm = _DraftModelUse()

    # -- requests -------------------------------------------------------------------------------

    def join(self, request: Request) -> None:
        """Register a request; a prefix hit brings the draft model's KV along, if that is in use."""
        if self._depth(request) == 0:
            return
        self._state_of(request).lm_len = request.num_computed if self._uses_lm else 0
        self._indexer.join(request)
        for state in self._states.values():  # the load has changed
            state.paused_until = 0

    def leave(self, request: Request) -> None:
        """Forget a request; the sources keep its tokens later, while a step runs."""
        if self._states.pop(request.request_id, None) is not None:
            self._indexer.leave(request)
            self.odds.forget(request.request_id)

    def has_work(self) -> bool:
        """Whether there may be something to index."""
        return self._indexer.has_work

    def work(self) -> None:
        """Index new tokens."""
        self._indexer.work()

    def flush(self, *namespaces: str | None) -> None:
        """Forget the tokens of these namespaces, of all when none is named."""
        self._indexer.keep()
        for source in self._sources:
            source.flush(*namespaces)

    def describe(self) -> Mapping[str, object]:
        """Describe the decisions since the last call, for the log."""
        return self.controller.describe()


class _DraftModelUse:
    """The draft model's work in one step."""

    def __init__(self) -> None:
        self.num_rows = self.num_passes = self.num_drafted = self.num_hits = 0

    def add(
        self, num_uncached_draft_tokens: int, num_drafted: int, num_hits: int, num_passes: int
    ) -> None:
        """Count a request: tokens caught up with, drafted and accepted, and passes."""
        self.num_rows += num_uncached_draft_tokens + num_passes
        self.num_passes = max(self.num_passes, 1, num_passes)
        self.num_drafted += num_drafted
        self.num_hits += num_hits
