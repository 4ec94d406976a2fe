"""DraftSpeculator: which tokens each request guesses in a step, and how many.

Free sources look the next tokens up in what was said before; a draft model, if there is one, is
asked in the model thread. How far to trust each is measured (calibration.py), what a step costs
is measured (costs.py), and the controller spends draft rows where they return most tokens per
second, which may be nowhere. Look-ups come before a step; what was committed is taken into the
indexes while the next step runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from ..core.request import Request
from ..core.speculation import NOTHING, DraftPlan
from ..core.step import PlanRow, RowOutput, StepOutput
from .calibration import Calibration
from .controller import Candidates, Controller
from .source import INDEX_CHUNK, Guess, Source
from .trie import Path, Survival, common_len, merge

LM = "lm"
LM_PRIORS = (0.75, 0.65)  # greedy, sampled: chance of a token given those before it
FREE_LEN = 32  # longest draft of a free source in "auto"
LM_LEN = 6  # longest draft of the model in "auto"
MAX_BRANCHES = 2
REST = 8  # steps for which a verdict against the draft model holds while nothing changes
NO_SURVIVAL: Survival = np.zeros(0)


@dataclass(slots=True)
class _Track:
    """What is known of one request."""

    request: Request
    guesses: Sequence[Guess] = ()  # for the step under way
    backlog: int = 0  # tokens whose KV the draft model lacks, about
    paths: list[Path] = field(default_factory=list)


@dataclass(slots=True)
class _Step:
    """What is known of the step under way."""

    is_allocated: bool = False  # by the controller
    context_s: float = 0.0  # expected of the target's pass for looking back, whatever is drafted
    draft_context_s: float = 0.0  # the same of each pass of the draft model
    num_tokens: int = 0  # of requests that decode
    lm_rows: int = 0
    lm_passes: int = 0
    lm_drafted: int = 0
    lm_hits: int = 0


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
    ) -> None:
        self.depth = depth
        self.controller = controller
        self.calibration = calibration
        self._sources = tuple(sources)
        self._has_lm = has_lm
        self._adapts = adapts
        self._step = _Step()
        self._rest = 0  # steps for which plain decoding need not be questioned
        self._rest_size = 0  # requests of the last step
        self._tracks: dict[str, _Track] = {}
        self._left: list[Request] = []  # ended; their tokens are still to be kept
        for source in self._sources:
            calibration.register(source.name, source.priors)
        calibration.register(LM, LM_PRIORS)

    # -- plan -----------------------------------------------------------------------------------

    def plan(
        self, requests: Sequence[Request], limits: Sequence[int], *, budget: int, num_prefill: int
    ) -> Sequence[DraftPlan]:
        """Fixed depths first, then the controller shares what is left of the budget."""
        plans = [NOTHING] * len(requests)
        tracks = [self._track(request) for request in requests]
        auto = []
        share = budget // max(1, len(requests))
        for index, (track, limit) in enumerate(zip(tracks, limits, strict=True)):
            track.guesses = ()
            depth = self._depth(track.request)
            if depth == "auto":
                auto.append(index)
            elif depth > 0 and limit > 0:
                plans[index] = self._fixed(track, min(limit, depth, share))
        if auto:
            budget -= sum(plan.num_rows for plan in plans)
            chosen = self._auto(
                [tracks[i] for i in auto], [limits[i] for i in auto], budget, num_prefill
            )
            for index, plan in zip(auto, chosen, strict=True):
                plans[index] = plan
        return plans

    def _depth(self, request: Request) -> Literal["auto"] | int:
        is_fixed = isinstance(request.depth, int)
        said = request.depth if is_fixed or (self._adapts and request.depth) else self.depth
        return 0 if said is None else said

    def _fixed(self, track: _Track, depth: int) -> DraftPlan:
        """What a free source guesses, else the draft model, to that depth."""
        if depth < 1:
            return NOTHING
        paths = self._guess(track, depth)
        if paths:
            return DraftPlan(paths[0].draft(depth))
        return DraftPlan(max_draft=depth) if self._has_lm else NOTHING

    def _guess(self, track: _Track, most: int) -> list[Path]:
        """Everything that the free sources say, merged; empty when they say nothing."""
        request = track.request
        guesses = [
            guess
            for source in self._sources
            if (guess := source.propose(request, most)) is not None and guess.token_ids
        ]
        track.guesses = guesses
        if not guesses:
            return []
        survivals = [
            self.calibration.survival(g.source, g.kind, request.request_id, len(g.token_ids))
            for g in guesses
        ]
        return merge(guesses, survivals)

    def _auto(
        self, tracks: Sequence[_Track], limits: Sequence[int], budget: int, num_prefill: int
    ) -> list[DraftPlan]:
        """The controller's choice."""
        nothing_known = True
        for track, limit in zip(tracks, limits, strict=True):
            track.paths = self._guess(track, min(limit, FREE_LEN)) if limit else []
            nothing_known = nothing_known and not track.paths
        self._step.is_allocated = True
        if nothing_known and self._rests(len(tracks)):
            self.controller.rest(len(tracks))
            return [NOTHING] * len(tracks)
        allocation = self.controller.allocate(self._candidates(tracks, limits, budget, num_prefill))
        if not allocation.is_draft:
            self._rest = REST if nothing_known else 0
            return [NOTHING] * len(tracks)
        num_free, lm_depth = allocation.num_free.tolist(), allocation.lm_depth.tolist()
        return [
            self._choose(track, free, lm)
            for track, free, lm in zip(tracks, num_free, lm_depth, strict=True)
        ]

    def _rests(self, num_requests: int) -> bool:
        """Whether the same requests found the draft model not worth its time a moment ago."""
        self._rest = self._rest - 1 if num_requests == self._rest_size else 0
        self._rest_size = num_requests
        return self._rest > 0 or not self._has_lm

    def _candidates(
        self, tracks: Sequence[_Track], limits: Sequence[int], budget: int, num_prefill: int
    ) -> Candidates:
        lens = [len(track.request.tokens) for track in tracks]
        context, profile = (len(lens), max(lens), sum(lens)), self.controller.costs.profile
        self._step.context_s = profile.look_back.seconds(*context)
        self._step.draft_context_s = profile.draft_look_back.seconds(*context)
        return Candidates(
            free=_padded([t.paths[0].survival if t.paths else NO_SURVIVAL for t in tracks]),
            lm=_padded([self._lm_survival(*each) for each in zip(tracks, limits, strict=True)]),
            backlog=np.array([track.backlog for track in tracks]),
            horizon=np.array([t.request.max_len - n for t, n in zip(tracks, lens, strict=True)]),
            num_prefill=num_prefill,
            budget=budget,
            context_s=self._step.context_s,
            draft_context_s=self._step.draft_context_s,
        )

    def _lm_survival(self, track: _Track, limit: int) -> Survival:
        length = min(limit, LM_LEN)
        if not self._has_lm or not length:
            return NO_SURVIVAL
        request = track.request
        return self.calibration.survival(LM, _lm_kind(request), request.request_id, length)

    def _choose(self, track: _Track, num_free: int, lm_depth: int) -> DraftPlan:
        if lm_depth:
            return DraftPlan(max_draft=lm_depth)
        if not num_free:
            return NOTHING
        trunk, *others = track.paths
        branches = []
        for path in others[:MAX_BRANCHES]:
            length = max(num_free, path.fork + 1)
            gain = float(path.survival[:length].sum())
            if path.fork < num_free and self.controller.is_worth(gain, length + 1):
                branches.append(path.draft(length))
        return DraftPlan(trunk.draft(num_free), branches=branches)

    # -- what came of it ------------------------------------------------------------------------

    def observe(self, request: Request, row: PlanRow, output: RowOutput, num_served: int) -> None:
        """Score every guess of the step, verified or not, against what was committed."""
        track = self._track(request)
        served = request.tokens[-num_served:]
        for guess in track.guesses:
            hits = common_len(guess.token_ids, served)
            missed = hits < min(len(guess.token_ids), num_served)
            self.calibration.score(guess.source, guess.kind, request.request_id, hits, missed)
        track.guesses = ()
        if row.stop - row.start == 1:
            self._step.num_tokens += num_served
        if row.max_draft:
            self._observe_lm(track, output, num_served)
        else:
            track.backlog += num_served

    def _observe_lm(self, track: _Track, output: RowOutput, num_served: int) -> None:
        step, hits = self._step, min(output.num_accepted, num_served)
        step.lm_rows += track.backlog + output.draft_len
        step.lm_passes = max(step.lm_passes, 1, output.draft_len)
        step.lm_drafted += output.draft_len
        step.lm_hits += hits
        track.backlog = output.backlog
        if output.draft_len:
            request, missed = track.request, hits < min(output.draft_len, num_served)
            self.calibration.score(LM, _lm_kind(request), request.request_id, hits, missed)

    def observe_step(self, output: StepOutput, seconds: float) -> None:
        """What the step cost."""
        step, self._step = self._step, _Step()
        times = output.times
        self.controller.costs.observe(
            num_rows=output.num_rows,
            forward_s=times.get("forward", 0.0),
            verify_s=times.get("verify", 0.0),
            num_tokens=sum(len(row.token_ids) for row in output.rows),
            draft_s=times.get("draft", 0.0),
            draft_passes=step.lm_passes,
            draft_rows=step.lm_rows,
            num_drafted=step.lm_drafted,
            host_s=seconds - sum(times.values()),
            context_s=step.context_s,
            draft_context_s=step.draft_context_s,
        )
        if step.is_allocated:
            self.controller.observe(
                step.num_tokens,
                seconds,
                num_lm_drafted=step.lm_drafted,
                num_lm_hits=step.lm_hits,
            )

    # -- who is there ---------------------------------------------------------------------------

    def _track(self, request: Request) -> _Track:
        track = self._tracks.get(request.request_id)
        if track is None:
            track = self._tracks[request.request_id] = _Track(request)
        return track

    def join(self, request: Request) -> None:
        """A prefix hit brings the draft model's KV along, as a rule."""
        self._track(request).backlog = len(request.tokens) - request.num_computed

    def leave(self, request: Request) -> None:
        """Its tokens are kept later, while a step runs."""
        self._tracks.pop(request.request_id, None)
        self.calibration.forget(request.request_id)
        self._left.append(request)

    def work(self) -> None:
        """Take in what was said: of requests that ended, then of those that run."""
        self._keep()
        room = INDEX_CHUNK
        for track in self._tracks.values():
            for source in self._sources:
                room -= source.index(track.request)
            if room <= 0:
                return

    def _keep(self) -> None:
        left, self._left = self._left, []
        for request in left:
            for source in self._sources:
                source.leave(request)

    def flush(self, *namespaces: str | None) -> None:
        """Forget what was said in these namespaces, in all when none is named."""
        self._keep()
        for source in self._sources:
            source.flush(*namespaces)

    def describe(self) -> Mapping[str, object]:
        """What it does and why, for the log."""
        return self.controller.describe()


def _padded(rows: Sequence[Survival]) -> Survival:
    """One row each, filled up with 0."""
    table = np.zeros((len(rows), max(map(len, rows))))
    for index, row in enumerate(rows):
        if len(row):
            table[index, : len(row)] = row
    return table


def _lm_kind(request: Request) -> int:
    return 0 if request.sampling.params.temperature == 0 else 1
