"""Drafters of a simulation: a fake draft model, and speculators that fail at named points."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from foretoken.core.execution.proposer import Proposer
from foretoken.core.interface.draft import NO_DRAFT, NO_DRAFT_PLAN, Draft, DraftPlan
from foretoken.core.interface.output import RequestOutput, StepOutput
from foretoken.core.interface.plan import ScheduledRequest, StepPlan
from foretoken.core.interface.protocols import NO_SPECULATION, Speculator
from foretoken.core.interface.request import Request
from foretoken.draft.control.controller import Controller
from foretoken.draft.control.cost_model import CostModel, StepProfile
from foretoken.draft.control.estimators import AcceptanceModel
from foretoken.draft.sources.prediction import PredictionSource
from foretoken.draft.sources.prefix import PrefixSource
from foretoken.draft.sources.suffix import SuffixSource
from foretoken.draft.speculator import DraftSpeculator
from support.draft_trees import tree_of
from support.fixed_depth import FixedDepth
from support.proposers import MODEL, BareProposer

from .faults import Fault, Faults
from .model import VOCAB_SIZE, Chains, advance, choose, solo

OUTSIDE = (-1, VOCAB_SIZE, 2**40, -(2**63))
SLOTS = 2**10  # of an index, so few that its entries collide
PROFILE = StepProfile({1: 0.010, 8: 0.011, 64: 0.02}, {1: 0.001, 8: 0.001, 64: 0.002})
SPECULATORS = ("off", "fixed", "forks", "auto", "auto+lm", "radix", "suffix", "ngram")


class FakeProposer(BareProposer):
    """A draft model that is right as often as ``skill`` says, with KV of its own in every page."""

    def __init__(
        self,
        faults: Faults,
        rng: random.Random,
        *,
        page_size: int,
        skill: float,
        violation: Callable[[str], None],
    ) -> None:
        self._faults, self._rng, self._skill = faults, rng, skill
        self._page_size, self._violation = page_size, violation
        self._chains = Chains()
        self._kv: dict[tuple[int, int], object] = {}  # by page and slot

    def propose(self, rows: Sequence[ScheduledRequest]) -> Sequence[Draft]:
        if self._faults.happens("draft raises"):
            raise Fault("the proposer failed")
        drafts = [self._spoilt(self._draft(row)) for row in rows]
        if self._faults.happens("draft of wrong shape"):
            return self._rng.choice([[], drafts[1:], drafts * 2])
        return drafts

    def forget(self, request_ids: Sequence[str], newly_allocated_pages: array[int]) -> None:
        for page_id in newly_allocated_pages:
            for slot in range(self._page_size):
                self._kv.pop((page_id, slot), None)

    def _draft(self, row: ScheduledRequest) -> Draft:
        chain = self._chains.of(row)
        self._catch_up(row, chain)
        state, guessed = chain[-1], array("q")
        for _ in range(
            self._rng.randint(0, row.draft_plan.max_draft + 1)
        ):  # sometimes one too many
            is_right = self._rng.random() < self._skill
            guessed.append(choose(state) if is_right else self._rng.randrange(VOCAB_SIZE))
            state = advance(state, guessed[-1])
        return Draft.of(guessed, "fake") if guessed else NO_DRAFT

    def _catch_up(self, row: ScheduledRequest, chain: Sequence[object]) -> None:
        """Compare the draft KV of a path with the right one; void slots are written."""
        for position, right in enumerate(chain):
            slot = row.page_ids[position // self._page_size], position % self._page_size
            if self._kv.setdefault(slot, right) != right:
                self._violation(f"foreign draft KV on the path of {row.request_id}")

    def _spoilt(self, draft: Draft) -> Draft:
        """Now and then with an id that the model does not have."""
        if not draft.token_ids or not self._faults.happens("draft ids outside"):
            return draft
        ids = array("q", draft.token_ids)
        ids[self._rng.randrange(len(ids))] = self._rng.choice(OUTSIDE)
        return Draft.of(ids, "fake")


class FaultySpeculator(Speculator):
    """Any speculator, failing at its named points; what it plans may be nonsense."""

    def __init__(self, inner: Speculator, faults: Faults, rng: random.Random) -> None:
        self.inner, self._faults, self._rng = inner, faults, rng

    def drafts_nothing(self, requests: Sequence[Request], *, num_new_tokens: int = 0) -> bool:
        self._fail("plan raises")
        return self.inner.drafts_nothing(requests, num_new_tokens=num_new_tokens)

    def plan(
        self, requests: Sequence[Request], limits: Sequence[int], *, budget: int, num_prefill: int
    ) -> Sequence[DraftPlan]:
        self._fail("plan raises")
        plans = list(self.inner.plan(requests, limits, budget=budget, num_prefill=num_prefill))
        if self._faults.happens("plan of wrong shape"):
            return plans[1:] if self._rng.random() < 0.5 else plans * 2
        if self._faults.happens("plan too deep"):
            plans[-1] = DraftPlan(max_draft=limits[-1] + 1 + self._rng.randrange(50))
        return plans

    def observe(
        self, request: Request, row: ScheduledRequest, output: RequestOutput, num_served: int
    ) -> None:
        self._fail("observe raises")
        self.inner.observe(request, row, output, num_served)

    def observe_step(self, plan: StepPlan, output: StepOutput, seconds: float) -> None:
        self._fail("observe raises")
        self.inner.observe_step(plan, output, seconds)

    def join(self, request: Request) -> None:
        self._fail("upkeep raises")
        self.inner.join(request)

    def leave(self, request: Request) -> None:
        self.inner.leave(request)
        self._fail("upkeep raises")

    def has_work(self) -> bool:
        self._fail("upkeep raises")
        return self.inner.has_work()

    def work(self) -> None:
        self._fail("upkeep raises")
        self.inner.work()

    def flush(self, *namespaces: str | None) -> None:
        self.inner.flush(*namespaces)

    def describe(self) -> Mapping[str, object]:
        return self.inner.describe()

    def _fail(self, kind: str) -> None:
        if self._faults.happens(kind):
            raise Fault(kind)


class Forks(FixedDepth):
    """Drafts several ways for each request, right and wrong, as model-free sources do."""

    def __init__(self, depth: int, rng: random.Random) -> None:
        super().__init__(depth)
        self._rng = rng

    def plan(
        self, requests: Sequence[Request], limits: Sequence[int], *, budget: int, num_prefill: int
    ) -> Sequence[DraftPlan]:
        plans = []
        for request, limit in zip(requests, limits, strict=True):
            plans.append(plan := self._fork(request, min(limit, self._depth(request)), budget))
            budget -= plan.num_rows
        return plans

    def _fork(self, request: Request, most: int, budget: int) -> DraftPlan:
        """Draft up to three paths, as many as the budget has rows for."""
        paths = [self._path(request, most) for _ in range(self._rng.randint(1, 3))]
        while paths:
            plan = DraftPlan(tree_of(paths, ["forks"] * len(paths)))
            if plan.num_rows <= budget:
                return plan
            paths.pop()
        return NO_DRAFT_PLAN

    def _path(self, request: Request, most: int) -> list[int]:
        """Right up to some token."""
        salt, right = request.sampling.seed, self._rng.randrange(most + 2)
        said = list(solo(tuple(request.tokens), salt, min(right, most)))
        said += [self._rng.randrange(VOCAB_SIZE) for _ in range(most - len(said))]
        return said


def make_speculator(
    kind: str, *, depth: int, overlaps: bool, clock: Callable[[], float], rng: random.Random
) -> Speculator:
    """One of `SPECULATORS`; ``depth`` is that of those that do not choose it themselves."""
    if kind == "off":
        return NO_SPECULATION
    if kind == "fixed":
        return FixedDepth(depth)
    if kind == "forks":
        return Forks(depth, rng)
    makers = {
        "radix": PrefixSource,
        "suffix": lambda: SuffixSource(num_slots=SLOTS, max_tokens=200),
        "ngram": lambda: SuffixSource(num_slots=SLOTS, own_only=True),
    }
    is_auto = kind.startswith("auto")
    names = ["radix", "suffix"] if is_auto else [kind]
    chosen: Literal["auto"] | int = "auto" if is_auto else depth
    return DraftSpeculator(
        [PredictionSource(), *(makers[name]() for name in names)],
        Controller(CostModel(PROFILE)),
        AcceptanceModel(),
        depth=chosen,
        proposer=MODEL if kind == "auto+lm" else None,
        overlaps=overlaps,
        clock=clock,
    )


def make_proposer(
    kind: str,
    faults: Faults,
    rng: random.Random,
    *,
    page_size: int,
    violation: Callable[[str], None],
) -> Proposer | None:
    """The draft model, where the speculator of that kind asks one."""
    if kind not in ("fixed", "auto+lm"):
        return None
    skill = rng.choice([0.0, 0.5, 0.9, 1.0])
    return FakeProposer(faults, rng, page_size=page_size, skill=skill, violation=violation)
