"""DraftSpeculator: which tokens each request guesses in a step, and how many.

Free sources look the next tokens up in what was said before, or know what a grammar forces; a
draft model, if there is one, is asked in the model thread. How far to trust each is measured
(calibration.py), what a step costs is measured (costs.py), and the controller spends draft rows
where they return most tokens per second, which may be nowhere. Look-ups come before a step; what
was committed is taken into the indexes while the next step runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import numpy as np

from ..core.request import Request
from ..core.speculation import NOTHING, DraftPlan
from ..core.step import PlanRow, RowOutput, StepOutput, StepPlan
from .calibration import Calibration
from .controller import Candidates, Controller
from .grammar import GrammarSource
from .guesser import Guesser
from .meter import Meter
from .rest import Rest
from .source import CarefulSource, Source
from .track import LM, NO_SURVIVAL, Drafters, Track, padded
from .trie import Survival

LM_PRIORS = (0.75, 0.65)  # greedy, sampled: chance of a token given those before it
FREE_LEN = 32  # longest draft of a free source in "auto"
LM_LEN = 6  # longest draft of the model in "auto"
MAX_BRANCHES = 2


class DraftSpeculator:
    """Plans drafts for all requests of an engine.

    ``depth``: "auto" lets the controller decide, a number fixes it; a request may say otherwise,
    but where ``adapts`` is false "auto" is that number for it too.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        controller: Controller,
        calibration: Calibration,
        *,
        depth: Literal["auto"] | int = "auto",
        has_lm: bool = False,
        adapts: bool = True,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.depth = depth
        self.controller = controller
        self.calibration = calibration
        self._sources = [CarefulSource(source) for source in sources]
        grammar = next((s for s in sources if isinstance(s, GrammarSource)), None)
        self._guesser = Guesser(self._sources, calibration, grammar)
        self._has_lm = has_lm
        self._adapts = adapts
        self.meter = Meter(controller, clock)
        self._who = Drafters()
        self._rest = Rest(
            self._who, self.meter, self._sources, calibration, self._guesser.is_forced
        )
        self._uses_lm = has_lm and depth != "auto"
        self._is_drafting = False  # by the controller's last word
        # Of the one request that the last verdict for plain decoding was about, what the draft
        # model makes of its like; None: it was about several.
        self._alone: int | None = None
        self._room = 0  # rows of a step for decoding and drafts, the most that were offered
        for source in self._sources:
            calibration.register(source.name, source.priors)
        calibration.register(LM, LM_PRIORS)

    # -- plan -----------------------------------------------------------------------------------

    def rests(self) -> int:
        """While nobody may draft, or a verdict against it still holds for all."""
        return self._rest.num_steps()

    def plan(
        self, requests: Sequence[Request], limits: Sequence[int], *, budget: int, num_prefill: int
    ) -> Sequence[DraftPlan]:
        """Fixed depths first, then the controller shares what is left of the budget."""
        self.meter.begin()
        self._room = max(self._room, budget + len(requests))
        depths = [self._depth(request) for request in requests]
        auto = [index for index, depth in enumerate(depths) if depth == "auto"]
        plans = [NOTHING] * len(requests)
        share = budget // max(1, len(requests))
        for index, depth in enumerate(depths):
            if depth != "auto" and depth > 0:
                most = min(limits[index], depth, share)
                plans[index] = self._fixed(self._who.of(requests[index]), most)
                budget -= plans[index].num_rows
        tracks = [self._who.of(requests[index]) for index in auto]
        if not auto or self.meter.rests():
            return plans
        began = self.meter.clock()
        candidates = self._candidates(
            tracks,
            [limits[index] for index in auto],
            budget,
            num_prefill,
            others=[
                len(requests[index].tokens) for index, each in enumerate(depths) if each != "auto"
            ],
            is_mixed=any(plan is not NOTHING for plan in plans),
        )
        chosen = self._plan_auto(tracks, candidates)
        for index, plan in zip(auto, chosen, strict=True):
            plans[index] = plan
        self.meter.decided(self.meter.clock() - began)
        return plans

    def _depth(self, request: Request) -> Literal["auto"] | int:
        is_fixed = isinstance(request.depth, int)
        said = request.depth if is_fixed or (self._adapts and request.depth) else self.depth
        return 0 if said is None else said

    def _fixed(self, track: Track, depth: int) -> DraftPlan:
        """What a free source guesses, else the draft model, to that depth."""
        if depth < 1:
            return NOTHING
        paths = self._guesser.guess(track, depth)
        if paths:
            return DraftPlan(paths[0].draft(depth))
        return DraftPlan(max_draft=depth) if self._has_lm else NOTHING

    def _plan_auto(self, tracks: Sequence[Track], candidates: Candidates) -> list[DraftPlan]:
        """The controller's choice; a verdict for plain decoding holds for a while."""
        allocation = self.controller.allocate(candidates)
        self._is_drafting = allocation.is_draft
        if not self._is_drafting:
            self._uses_lm = False
            self._alone = _like(tracks, candidates)
            self.meter.rest(briefly=allocation.measures)
            return [NOTHING] * len(tracks)
        num_free, lm_depth = allocation.num_free.tolist(), allocation.lm_depth.tolist()
        self._uses_lm = any(lm_depth)
        room = candidates.budget - sum(num_free) - sum(lm_depth)
        plans = []
        for track, free, lm in zip(tracks, num_free, lm_depth, strict=True):
            plans.append(plan := self._choose(track, free, lm, room))
            room -= plan.num_rows - plan.depth
        return plans

    def _reconsider(self) -> None:
        """Look again, in a step that rests, whether the verdict for plain decoding still holds.

        Where it does not the rest ends, and the next step decides. Beside prompts nothing can be
        said of steps without them, so the verdict grows old.
        """
        who = self._who
        tracks = list(who.decoding(who.tracks))
        if len(tracks) < len(who.tracks) or who.own_depth:
            return
        began = self.meter.clock()
        self.meter.flush()
        others = [len(each.tokens) for each in who.silent.values() if each.num_pending == 1]
        candidates = self._candidates(
            tracks,
            [max(0, each.request.max_len - len(each.request.tokens) - 1) for each in tracks],
            max(0, self._room - len(tracks) - len(others)),
            num_prefill=0,
            others=others,
            is_mixed=False,
        )
        for track in tracks:
            track.guesses = ()  # they are of this step, which does not verify them
        allocation = self.controller.allocate(candidates)
        if allocation.is_draft or allocation.measures:
            self.meter.end_rest()
        else:
            self._alone = _like(tracks, candidates)
            self.meter.reconsidered(self.meter.clock() - began)

    def _candidates(
        self,
        tracks: Sequence[Track],
        limits: Sequence[int],
        budget: int,
        num_prefill: int,
        *,
        others: Sequence[int],
        is_mixed: bool,
    ) -> Candidates:
        """``others``: tokens of the requests that decode beside these."""
        for track, limit in zip(tracks, limits, strict=True):
            track.paths = self._guesser.guess(track, min(limit, FREE_LEN)) if limit else []
        lens = [len(track.request.tokens) for track in tracks]
        seen, costs = [*lens, *others], self.controller.costs
        context = (len(seen), max(seen), sum(seen))
        return Candidates(
            free=padded([track.free_survival(len(tracks)) for track in tracks]),
            lm=padded(
                [
                    self._lm_survival(track, limit, is_busy=num_prefill > 0)
                    for track, limit in zip(tracks, limits, strict=True)
                ]
            ),
            backlog=np.array([n - t.lm_len for t, n in zip(tracks, lens, strict=True)]),
            horizon=np.array([t.request.max_len - n for t, n in zip(tracks, lens, strict=True)]),
            num_prefill=num_prefill,
            budget=budget,
            context_s=costs.look_back(*context),
            levels=costs.levels(len(seen), with_prompts=num_prefill > 0),
            draft_context_s=costs.draft_look_back(len(lens), max(lens), sum(lens)),
            decide_s=self.meter.decide_s,
            is_mixed=is_mixed,
            num_others=len(others),
        )

    def _lm_survival(self, track: Track, limit: int, *, is_busy: bool) -> Survival:
        """None while prompts wait and much must be caught up with: the load may be growing."""
        length, request = min(limit, LM_LEN), track.request
        backlog = len(request.tokens) - track.lm_len
        if not self._has_lm or not length or (is_busy and backlog > LM_LEN):
            return NO_SURVIVAL
        return self.calibration.survival(LM, track.lm_kind, request.request_id, length)

    def _choose(self, track: Track, num_free: int, lm_depth: int, room: int) -> DraftPlan:
        """The drafts of one request; ``room``: rows that its branches may add."""
        if lm_depth:
            return DraftPlan(max_draft=lm_depth)
        if not num_free or not track.paths:
            return NOTHING
        trunk, *others = track.paths
        branches = []
        for path in others[:MAX_BRANCHES]:
            length = min(max(num_free, path.fork + 1), len(path.token_ids))
            gain = float(path.survival[:length].sum())
            fits = path.fork < num_free and length < room
            if fits and self.controller.takes(gain, length + 1):
                branches.append(path.draft(length))
                room -= length + 1
        return DraftPlan(trunk.draft(num_free), branches=branches)

    # -- what came of it ------------------------------------------------------------------------

    def observe(self, request: Request, row: PlanRow, output: RowOutput, num_served: int) -> None:
        """Score every guess of the step, verified or not, against what was committed."""
        track = self._who.tracks.get(request.request_id)
        if track is None:
            return
        if track.guesses:
            track.score(self.calibration, request.tokens[-num_served:])
        if row.max_draft:
            hits = min(output.num_accepted, num_served)
            self.meter.drafted(row.stop - track.lm_len, output.draft_len, hits)
            track.score_lm(self.calibration, row, output, num_served)

    def observe_step(self, plan: StepPlan, output: StepOutput, seconds: float) -> None:
        """What the step cost."""
        self.meter.end(plan, output, seconds)

    def passed(self, num_steps: int, seconds: float) -> None:
        """What steps cost that rested without being asked about."""
        self._rest.passed(num_steps, seconds)

    # -- who is there ---------------------------------------------------------------------------

    def join(self, request: Request) -> None:
        """A prefix hit brings the draft model's KV along, if that was in use."""
        depth, request_id, who = self._depth(request), request.request_id, self._who
        if depth == 0:
            who.silent[request_id] = request
            return
        if depth != "auto":
            who.own_depth.add(request_id)
        if request.sampling.constraint is not None:
            who.constrained.add(request_id)
        is_free = request.sampling.constraint is None
        self._rest.join(request, may_peek=depth == "auto" and is_free)
        track = who.of(request)
        track.lm_len = request.num_computed if self._uses_lm else 0
        if len(who.tracks) == 1:
            self.meter.cut_rest(anyway=track.lm_kind != self._alone or not is_free)

    def leave(self, request: Request) -> None:
        """Its tokens are kept later, while a step runs."""
        if self._who.leave(request.request_id):
            self._rest.leave(request)
            self.calibration.forget(request.request_id)

    def has_work(self) -> bool:
        """Always but in a rest, where who came or left waits for a few others."""
        return self._rest.has_work()

    def work(self) -> None:
        """Take in what was said; in a rest, look for a reason to end it."""
        self._rest.work(is_drafting=self._is_drafting)
        if self.meter.is_ending and self._who.tracks:
            self._reconsider()

    def flush(self, *namespaces: str | None) -> None:
        """Forget what was said in these namespaces, in all when none is named."""
        self._rest.keep()
        for source in self._sources:
            source.flush(*namespaces)

    def describe(self) -> Mapping[str, object]:
        """What it does and why, for the log."""
        self.meter.flush()
        return self.controller.describe()


def _like(tracks: Sequence[Track], candidates: Candidates) -> int | None:
    """How the draft model fares with the only request that decodes; None: there are others."""
    is_alone = candidates.num_decodes == 1 and tracks[0].request.sampling.constraint is None
    return tracks[0].lm_kind if is_alone else None
