"""Simulated acceptance: decoding in virtual time, where how well guesses fit the text is given.

Nothing here computes or measures: a machine is a formula, a text is a chance for each token, and
the clock moves by what the machine says. The speculator is the real one, over a source and a draft
model that guess as well as the text allows. It competes with constant depths over the same texts,
the best of which is known in hindsight only.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import count
from typing import Protocol

import numpy as np

from foretoken.api.types.sampling_params import SamplingParams
from foretoken.core.interface.draft import NO_DRAFT_PLAN, Draft, DraftPlan
from foretoken.core.interface.output import RequestOutput, StepOutput
from foretoken.core.interface.plan import ScheduledRequest, StepPlan
from foretoken.core.interface.request import Request
from foretoken.core.interface.sampling import SamplingMetadata
from foretoken.draft.control.controller import Controller
from foretoken.draft.control.cost_model import CostModel, StepProfile
from foretoken.draft.control.estimators import AcceptanceModel
from foretoken.draft.sources.source import Guess, Priors
from foretoken.draft.speculator import DraftSpeculator
from support.drafts import proposed
from support.proposers import MODEL

DEPTHS = (0, 1, 2, 4, 8, 16)  # constant ones to compare with
ANSWER = 250  # tokens
WINDOW = 256  # tokens that the draft model catches up with in one step
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)  # that are measured at start-up
RIGHT, WRONG = 1, 0  # all token ids that there are
_NUMBERS = count()  # of requests

Chance = Callable[[int, int], float]
"""The chance of the token at a place of a text, where so many were drafted before it in a step."""


@dataclass(frozen=True)
class Work:
    """Work of one step, in requests, rows and tokens."""

    num_requests: int
    num_rows: int  # of the target's pass
    draft_passes: Sequence[int]  # rows of each
    num_tokens: int  # that come out


@dataclass(frozen=True)
class Times:
    """Seconds of a step."""

    forward: float
    draft: float
    host: float

    @property
    def total(self) -> float:
        """All of it."""
        return self.forward + self.draft + self.host


@dataclass(frozen=True)
class Machine:
    """Costs of a step, as shares of the pass of a plain step of one request."""

    row: float  # of each further row
    draft_pass: float = 0.2  # of the draft model
    host: float = 0.05
    draft_host: float = 0.02  # more, where anything is drafted
    look_up: float = 0.0  # of asking a source once
    noise: float = 0.05  # sigma of a lognormal factor on every time that is observed
    stalls: float = 0.002  # share of steps that are observed to take ten times as long
    step_s: float = 0.010  # seconds

    def forward(self, num_rows: int) -> float:
        """Seconds of a pass of the target."""
        return self.step_s * (1.0 + self.row * (num_rows - 1))

    def draft(self, num_rows: int) -> float:
        """Seconds of a pass of the draft model."""
        return self.draft_pass * self.forward(num_rows)

    def times(self, work: Work, num_look_ups: int = 0) -> Times:
        """Seconds of a step."""
        has_drafts = work.num_rows > work.num_requests
        shares = self.host + self.draft_host * has_drafts + self.look_up * num_look_ups
        return Times(
            forward=self.forward(work.num_rows),
            draft=sum(map(self.draft, work.draft_passes)),
            host=self.step_s * shares,
        )

    def disturbed(self, times: Times, rng: np.random.Generator) -> Times:
        """Return the times as they are observed, with noise and stalls."""
        factor = float(rng.lognormal(0.0, self.noise)) if self.noise else 1.0
        factor *= 10.0 if rng.random() < self.stalls else 1.0
        return Times(times.forward * factor, times.draft * factor, times.host * factor)

    def profile(self) -> StepProfile:
        """Return the profile that is measured at start-up."""
        return StepProfile({n: self.forward(n) for n in ROWS}, {n: self.draft(n) for n in ROWS})


@dataclass(frozen=True)
class Regime:
    """Chances that guesses fit a text, of a source that knows some of it or of a draft model."""

    known: Chance | None = None
    lm: Chance | None = None
    prompt: int = 8  # tokens
    kind: Callable[[int], int] = lambda at: 0  # of the source's guess at a place: 0 or 1


@cache
def _draws(seed: int) -> list[float]:
    """Draw the number that decides, for each token of a text, whether a guess comes true."""
    return np.random.default_rng(seed).random(20_000).tolist()


class Seat:
    """A place in the batch. One answer follows another; the same guesses come true for all."""

    def __init__(self, regime: Regime, seed: int) -> None:
        self.regime = regime
        self._draws = _draws(seed)
        self.at = 0  # tokens said
        self.request: Request | None = None

    def hits(self, length: int, *, lm: bool) -> int:
        """Number of the next ``length`` tokens that are guessed right before one is not."""
        chance = self.regime.lm if lm else self.regime.known
        if chance is None:
            return 0
        for ahead in range(length):
            place = self.at + ahead
            if self._draws[place] >= chance(place, ahead):
                return ahead
        return length


@dataclass
class Served:
    """One request in a step."""

    seat: Seat
    request: Request
    limit: int  # tokens that it may draft
    plan: DraftPlan = NO_DRAFT_PLAN
    num_hits: int = 0
    num_uncached_draft_tokens: int = 0  # tokens that the draft model lacks behind the step
    num_grown: int = 0  # tokens that the draft model guesses

    @property
    def num_own(self) -> int:
        """Draft model's tokens that count: it guesses nothing until it has caught up."""
        return 0 if self.num_uncached_draft_tokens else self.num_grown

    @property
    def num_own_hits(self) -> int:
        """Number of them that are right."""
        return self.seat.hits(self.num_own, lm=True)

    @property
    def num_known_hits(self) -> int:
        """Number of the tokens looked up that are right."""
        return self.seat.hits(self.plan.draft.height, lm=False)

    @property
    def num_drafted(self) -> int:
        """Tokens that are verified: what was looked up and the model's, those of both once."""
        shared = min(self.num_own_hits, self.num_known_hits)
        return self.num_own + self.plan.draft.height - shared

    def survival(self, length: int) -> float:
        """Return the odds that so many of the draft model's tokens come true, as it knows them."""
        chance = self.seat.regime.lm
        assert chance is not None
        return math.prod(chance(self.seat.at + ahead, ahead) for ahead in range(length))


class Policy(Protocol):
    """Policy: it decides how much is drafted."""

    num_look_ups: int

    def join(self, seat: Seat, request: Request) -> None: ...
    def leave(self, request: Request) -> None: ...
    def plan(self, served: Sequence[Served]) -> None: ...
    def learn(self, served: Sequence[Served], times: Times) -> None: ...


class Constant:
    """The same depth in every step: of what the source knows, or of the draft model."""

    num_look_ups = 0  # given to it, so that it is no worse than any

    def __init__(self, depth: int, *, lm: bool = False) -> None:
        self._depth, self._lm = depth, lm

    def join(self, seat: Seat, request: Request) -> None: ...

    def leave(self, request: Request) -> None: ...

    def plan(self, served: Sequence[Served]) -> None:
        for each in served:
            depth = min(self._depth, each.limit)
            known = Draft(_guess(each.seat, depth))
            each.plan = DraftPlan(max_draft=depth) if self._lm else DraftPlan(known)

    def learn(self, served: Sequence[Served], times: Times) -> None: ...


class Auto:
    """The speculator with its controller; it knows nothing of the regime."""

    def __init__(
        self,
        machine: Machine,
        *,
        has_proposer: bool = False,
        profile: StepProfile | None = None,
        prior: float = 0.7,
    ) -> None:
        self.costs = CostModel(machine.profile() if profile is None else profile)
        self._source = _Knowing(Priors.constant(prior, prior))
        self.speculator = DraftSpeculator(
            [self._source],
            Controller(self.costs),
            AcceptanceModel(),
            proposer=MODEL if has_proposer else None,
            clock=lambda: self._source.num_asked * machine.look_up * machine.step_s,
        )
        self._drafts_nothing = False

    @property
    def num_look_ups(self) -> int:
        return self._source.num_asked

    def join(self, seat: Seat, request: Request) -> None:
        self._source.seats[request.request_id] = seat
        self.speculator.join(request)

    def leave(self, request: Request) -> None:
        self.speculator.leave(request)
        self.speculator.work()

    def plan(self, served: Sequence[Served]) -> None:
        requests = [each.request for each in served]
        limits = [each.limit for each in served]
        self._drafts_nothing = self.speculator.drafts_nothing(requests) or not any(limits)
        if self._drafts_nothing:
            return
        plans = self.speculator.plan(requests, limits, budget=512, num_prefill=0)
        for each, plan in zip(served, plans, strict=True):
            each.plan = plan

    def learn(self, served: Sequence[Served], times: Times) -> None:
        rows = [_row(each) for each in served]
        outputs = [_output(each) for each in served]
        if not self._drafts_nothing:
            for each, row, output in zip(served, rows, outputs, strict=True):
                self.speculator.observe(each.request, row, output, len(output.token_ids))
        self.speculator.observe_step(
            StepPlan(requests=rows, newly_allocated_pages=array("q")),
            StepOutput(
                requests=outputs,
                times={"forward": times.forward, "draft": times.draft},
                num_rows=len(served) + sum(each.num_drafted for each in served),
            ),
            times.total,
        )
        self.speculator.work()


class _Knowing:
    """The source: it guesses on to the end, right as far as the text allows."""

    name = "knowing"

    def __init__(self, priors: Priors) -> None:
        self.priors = priors
        self.seats: dict[str, Seat] = {}
        self.num_asked = 0

    def propose(self, request: Request, most: int) -> Sequence[Guess]:
        self.num_asked += 1
        seat = self.seats[request.request_id]
        if seat.regime.known is None:
            return ()
        return (Guess(_guess(seat, most), self.name, seat.regime.kind(seat.at)),)

    def index(self, request: Request, *, for_others: bool = False) -> int:
        return 0

    def leave(self, request: Request) -> None:
        del self.seats[request.request_id]

    def flush(self, *namespaces: str | None) -> None: ...


def run(
    machine: Machine, regime: Regime, policy: Policy, *, num_requests: int, num_tokens: int
) -> float:
    """Tokens a second over so many tokens, the number of running requests being constant.

    Noise disturbs what the policy observes, not the result.
    """
    rng, seconds, tokens, num_look_ups = np.random.default_rng(99), 0.0, 0, 0
    for served, work in _steps(regime, policy, num_requests, num_tokens):
        times = machine.times(work, policy.num_look_ups - num_look_ups)
        num_look_ups = policy.num_look_ups
        policy.learn(served, machine.disturbed(times, rng))
        seconds += times.total
        tokens += work.num_tokens
    return tokens / seconds


def best_constant(
    machine: Machine,
    regime: Regime,
    *,
    num_requests: int,
    num_tokens: int,
    depths: Sequence[int] = DEPTHS,
    lm: bool = False,
) -> tuple[float, int]:
    """Tokens a second of the best constant depth, and that depth."""
    rates = []
    for depth in depths:
        steps = _constant(regime, depth, lm, num_requests, num_tokens)
        seconds = sum(machine.times(work).total for work in steps)
        rates.append((sum(work.num_tokens for work in steps) / seconds, depth))
    return max(rates)


@cache
def _constant(
    regime: Regime, depth: int, lm: bool, num_requests: int, num_tokens: int
) -> list[Work]:
    """Return the work of a constant depth, which does not depend on the machine."""
    policy = Constant(depth, lm=lm)
    return [work for _, work in _steps(regime, policy, num_requests, num_tokens)]


def _steps(
    regime: Regime, policy: Policy, num_requests: int, num_tokens: int
) -> Iterator[tuple[list[Served], Work]]:
    seats = [Seat(regime, seed) for seed in range(num_requests)]
    proposer_len: dict[str, int] = {}
    left = num_tokens
    while left > 0:
        served = [_next(seat, policy) for seat in seats]
        policy.plan(served)
        work = _decode(served, proposer_len)
        for each in served:
            each.request.tokens.extend([RIGHT] * (each.num_hits + 1))
        yield served, work
        for each in served:
            each.seat.at += each.num_hits + 1
        left -= work.num_tokens


def _next(seat: Seat, policy: Policy) -> Served:
    """The seat's request, a new one where the last has ended."""
    request = seat.request
    if request is not None and request.num_output >= ANSWER:
        policy.leave(request)
        request = None
    if request is None:
        params = SamplingParams(temperature=0.0)
        request = seat.request = Request(
            request_id=str(next(_NUMBERS)),
            tokens=array("q", [RIGHT] * seat.regime.prompt),
            sampling=SamplingMetadata(params=params, seed=0, prompt_len=seat.regime.prompt),
        )
        policy.join(seat, request)
    return Served(seat, request, limit=ANSWER - request.num_output - 1)


def _price(served: Served, others: int) -> float:
    """Tokens that one more node must bring beside so many of ``others``."""
    prices = (0.0, *served.plan.row_prices)
    if len(prices) == 1:
        return 0.0
    at = min(served.num_grown + others + 1, len(prices) - 1)
    return prices[at] - prices[at - 1] + served.plan.key_price


def _num_beside(one: Served, served: Sequence[Served]) -> int:
    return sum(each.num_grown for each in served if each is not one)


def _grow(served: Sequence[Served]) -> None:
    """Chains of the draft model, which weighs its tokens as the prices of the plans ask."""
    live = [each for each in served if each.plan.max_draft]
    for each in served:
        each.num_grown = 0
    while live:
        worthy = []
        for each in live:
            survival, others = each.survival(each.num_grown + 1), _num_beside(each, served)
            if each.num_grown < each.plan.max_draft and survival > _price(each, others):
                each.num_grown += 1
                worthy.append(survival)
        live = [each for each in live if each.num_grown < each.plan.max_draft]
        gains = [
            each.survival(each.num_grown + 1) - _price(each, _num_beside(each, served))
            for each in live
        ]
        live = [each for each, gain in zip(live, gains, strict=True) if gain > 0.0]
        prices = max((each.plan.pass_prices for each in live), key=len, default=())
        price = prices[min(len(live), len(prices)) - 1] if prices else 0.0
        if not worthy or (price and sum(gain for gain in gains if gain > 0.0) <= price):
            return


def _decode(served: Sequence[Served], proposer_len: dict[str, int]) -> Work:
    """Grow the texts by a step of their plans. ``proposer_len``: tokens of each with draft KV."""
    first_rows, depths = 0, []
    _grow(served)
    for each in served:
        by_proposer = each.plan.max_draft > 0
        if by_proposer:
            lacking = len(each.request.tokens) - proposer_len.get(each.request.request_id, 0)
            first_rows += min(WINDOW, lacking)
            each.num_uncached_draft_tokens = max(0, lacking - WINDOW)
            depths.append(each.num_own)
        each.num_hits = max(each.num_own_hits, each.num_known_hits)
        if by_proposer:
            right = min(each.num_own_hits, max(0, each.num_own - 1))  # the last has no KV
            proposer_len[each.request.request_id] = (
                len(each.request.tokens) - each.num_uncached_draft_tokens + right
            )
    deepest = max(depths, default=0)
    passes = [sum(depth > level for depth in depths) for level in range(1, deepest)]
    return Work(
        num_requests=len(served),
        num_rows=len(served) + sum(each.num_drafted for each in served),
        draft_passes=[first_rows, *passes] if first_rows else [],
        num_tokens=len(served) + sum(each.num_hits for each in served),
    )


def _guess(seat: Seat, length: int) -> array[int]:
    hits = seat.hits(length, lm=False)
    return array("q", [RIGHT] * hits + [WRONG] * (length - hits))


def _row(each: Served) -> ScheduledRequest:
    """Make the request's row as it was before the step's tokens came."""
    stop = len(each.request.tokens) - each.num_hits - 1
    return ScheduledRequest(
        request_id=each.request.request_id,
        tokens=each.request.tokens,
        start=stop - 1,
        stop=stop,
        page_ids=array("q"),
        sampling=each.request.sampling,
        draft_plan=each.plan,
    )


def _output(each: Served) -> RequestOutput:
    return RequestOutput(
        request_id=each.request.request_id,
        token_ids=[RIGHT] * (each.num_hits + 1),
        draft=proposed(
            each.num_drafted,
            each.num_hits,
            num_own=each.num_own,
            num_own_hits=each.num_own_hits,
            num_uncached=each.num_uncached_draft_tokens,
        ),
        path=range(each.num_hits),
    )
