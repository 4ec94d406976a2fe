"""Distance of ``auto`` from the best choice on recorded answers, without a clock.

Recorded answers (bench/lab/recorded_steps.py) are given token by token. The real sources guess, the
real controller decides, and a step takes what the recorded machine's prices say: so two runs differ
by decisions alone, and a difference of one percent is one. What the controller observes of the
times is disturbed, as real times are.

``auto`` is compared with each fixed depth, and with an oracle: the same guesses, allocated by the
chances that are measured over the whole text beforehand, by the true prices, at the rate of tokens
that this yields. The oracle's chances are those of a source, its kind of guess and the position;
what a request's own history says is bent as ``auto`` bends it. Regret is the share of the oracle's
tokens a second that ``auto`` lacks.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count

import numpy as np

from foretoken.api.build.drafts import AUTO, DraftSpec, make_sources
from foretoken.api.types.sampling_params import SamplingParams
from foretoken.bench.lab.recorded_steps import Prices, Text
from foretoken.core.interface.draft import NO_DRAFT_PLAN, Draft, DraftPlan
from foretoken.core.interface.output import RequestOutput, StepOutput
from foretoken.core.interface.plan import ScheduledRequest, StepPlan
from foretoken.core.interface.request import Request
from foretoken.core.interface.sampling import SamplingMetadata
from foretoken.core.scheduling.shares import MAX_DRAFT, draft_limits, draft_row_budget
from foretoken.draft.control.controller import Allocation, Controller, StepCandidates, allocate
from foretoken.draft.control.cost_model import CostModel, FloatArray, IntArray, StepProfile
from foretoken.draft.control.estimators import MAX_LENGTH, AcceptanceModel
from foretoken.draft.sources.source import BUCKETS
from foretoken.draft.speculator import DraftSpeculator

DEPTHS = (0, 1, 2, 4, 8, 16)
LAPS = 2  # answers by seats
MAX_BATCH_TOKENS = 256
NOISE = 0.05  # sigma of a lognormal factor on observed times
STALLS = 0.002  # share of them that is ten times as long
VOCAB_SIZE = 49_152
_NUMBERS = count()  # of runs: no two share a namespace


@dataclass
class Outcome:
    """A text given to its end, at the recorded prices."""

    num_tokens: int = 0
    seconds: float = 0.0

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.num_tokens / self.seconds


@dataclass(frozen=True)
class TruePrices:
    """Prices of every number of rows, on the line between those that were recorded."""

    recorded: Prices

    def forward(self, num_rows: int | IntArray, num_keys: float = 0.0) -> FloatArray:
        """Seconds of a pass; ``num_keys``: tokens behind its further rows, summed."""
        known = sorted(self.recorded.forward)
        seconds = [self.recorded.forward[rows] for rows in known]
        return np.asarray(np.interp(num_rows, known, seconds) + self.recorded.key_s * num_keys)

    def host(self, num_requests: int, *, has_drafts: bool) -> float:
        """Seconds of a step beyond its pass."""
        by_load = self.recorded.host_drafts if has_drafts else self.recorded.host_plain
        return float(
            np.interp(num_requests, sorted(by_load), [by_load[n] for n in sorted(by_load)])
        )

    def profile(self) -> StepProfile:
        """Profile that an engine would have measured at its start."""
        forward = {rows: float(self.forward(rows)) for rows in self.recorded.knots}
        return StepProfile(forward, {}, self.recorded.key_s)


class _TrueCosts(CostModel):
    """The prices themselves, where the controller has its estimates of them."""

    def __init__(self, prices: TruePrices) -> None:
        super().__init__(prices.profile())
        self._prices = prices

    def row_seconds(self, num_rows: int, most: int, num_requests: int) -> FloatArray:
        seconds = self._prices.forward(num_rows + np.arange(most + 1))
        added: FloatArray = seconds - seconds[0]
        return added

    def key_seconds(self, num_requests: int) -> float:
        return self._prices.recorded.key_s

    def draft_overhead(self, num_requests: int, *, with_proposer: bool = False) -> float:
        drafts, plain = (self._prices.host(num_requests, has_drafts=has) for has in (True, False))
        return max(0.0, drafts - plain)


class _OracleController(Controller):
    """Chooses by true prices, at a rate that is given."""

    def __init__(self, prices: TruePrices, rate: float) -> None:
        super().__init__(_TrueCosts(prices))
        self._given_rate = rate

    def allocate(self, candidates: StepCandidates) -> Allocation:
        return allocate(candidates, self.costs, self._given_rate)


@dataclass
class _Tally:
    """Hits and trials of one kind of guess of one source, by class of positions."""

    hits: list[int] = field(default_factory=lambda: [0] * len(BUCKETS))
    trials: list[int] = field(default_factory=lambda: [0] * len(BUCKETS))

    def count(self, num_hits: int, missed: bool) -> None:
        for position in range(num_hits + missed):
            bucket = int(np.searchsorted(BUCKETS, position, side="right")) - 1
            self.trials[bucket] += 1
            self.hits[bucket] += position < num_hits


class _Counting(AcceptanceModel):
    """Learns as ever, and keeps count of everything."""

    def __init__(self) -> None:
        super().__init__()
        self.tallies: dict[tuple[str, bool, int], _Tally] = {}

    def score(
        self, source: str, kind: int, request_id: str, num_hits: int, *, missed: bool, sampled: bool
    ) -> None:
        self.tallies.setdefault((source, sampled, kind), _Tally()).count(num_hits, missed)
        super().score(source, kind, request_id, num_hits, missed=missed, sampled=sampled)


class _Knowing(AcceptanceModel):
    """Knows the chances of the whole text; learns of a request's own history alone."""

    def __init__(self, tallies: dict[tuple[str, bool, int], _Tally]) -> None:
        super().__init__()
        self._tallies = tallies

    def know(self) -> None:
        """Set the curves of all sources, which are registered now."""
        for (source, sampled, kind), tally in self._tallies.items():
            curve = self._curves[source][sampled][kind]
            for bucket, trials in enumerate(tally.trials):
                if trials:
                    curve.hits[bucket], curve.trials[bucket] = tally.hits[bucket], trials
            curve.refresh()

    def score(
        self, source: str, kind: int, request_id: str, num_hits: int, *, missed: bool, sampled: bool
    ) -> None:
        """Learn how this request differs, and nothing of others."""
        num_tried = min(num_hits + missed, MAX_LENGTH)
        if num_tried:
            expected = float(self._curves[source][sampled][kind].expected_rejections[num_tried - 1])
            self._adjustment(request_id, source).count(expected, missed)


class Run:
    """Requests that run beside each other and are given recorded answers."""

    def __init__(self, look_ups: DraftSpeculator) -> None:
        self.seats: list[tuple[Request, array[int]]] = []
        self.outcome = Outcome()
        self._speculator = look_ups
        self._rng = np.random.default_rng(5)

    def join(self, request: Request, answer: array[int]) -> None:
        """Add a request."""
        self._speculator.join(request)
        self.seats.append((request, answer))

    def has_ended(self, request: Request) -> bool:
        """Whether a request has its whole answer."""
        return all(len(answer) == each.num_output for each, answer in self.seats if each is request)

    def leave(self, request: Request) -> None:
        """Remove a request."""
        self._speculator.leave(request)
        self.seats = [seat for seat in self.seats if seat[0] is not request]

    def step(self, prices: TruePrices | None = None) -> int:
        """Give each request what its draft and one more token are worth; return how many tokens.

        ``prices``: what the step takes, which the speculator observes, disturbed.
        """
        requests = [request for request, _ in self.seats]
        limits = draft_limits(requests, MAX_DRAFT)
        is_plain = self._speculator.drafts_nothing(requests) or not any(limits)
        plans: Sequence[DraftPlan] = [NO_DRAFT_PLAN] * len(requests)
        if not is_plain:
            budget = draft_row_budget(MAX_BATCH_TOKENS - len(requests), others_wait=False)
            plans = self._speculator.plan(requests, limits, budget=budget, num_prefill=0)
        rows = [_scheduled(each, plan.draft) for each, plan in zip(requests, plans, strict=True)]
        outputs = [
            _verified(request, answer, row.draft_plan.draft)
            for (request, answer), row in zip(self.seats, rows, strict=True)
        ]
        for request, row, out in zip(requests, rows, outputs, strict=True):
            request.tokens.extend(out.token_ids)
            if not is_plain:
                self._speculator.observe(request, row, out, len(out.token_ids))
        num_tokens = sum(len(out.token_ids) for out in outputs)
        if prices is not None:
            self._pay(prices, rows, outputs)
        self.outcome.num_tokens += num_tokens
        return num_tokens

    def _pay(
        self, prices: TruePrices, rows: Sequence[ScheduledRequest], outputs: Sequence[RequestOutput]
    ) -> None:
        drafted = [len(out.draft.token_ids) for out in outputs]
        num_rows = len(rows) + sum(drafted)
        keys = sum(row.start * count for row, count in zip(rows, drafted, strict=True))
        forward = float(prices.forward(num_rows, keys))
        host = prices.host(len(rows), has_drafts=num_rows > len(rows))
        self.outcome.seconds += forward + host
        factor = float(self._rng.lognormal(0.0, NOISE))
        factor *= 10.0 if self._rng.random() < STALLS else 1.0
        self._speculator.observe_step(
            StepPlan(requests=rows, newly_allocated_pages=array("q")),
            StepOutput(requests=outputs, times={"forward": factor * forward}, num_rows=num_rows),
            factor * (forward + host),
        )


def replay(
    text: Text,
    prices: TruePrices,
    num_seats: int,
    look_ups: DraftSpeculator,
    *,
    depth: int | None = None,
) -> Outcome:
    """Give the answers of a text to ``num_seats`` requests at a time, one behind the other.

    ``depth`` fixes the depth of all. Steps count while every seat is taken.
    """
    run, number, pairs = Run(look_ups), next(_NUMBERS), text.requests()
    laps = -(-LAPS * num_seats // len(pairs)) if num_seats > 1 else 1
    waiting = iter([(lap, *pair) for lap in range(laps) for pair in pairs])

    def take_seats() -> None:
        while len(run.seats) < num_seats and (entry := next(waiting, None)) is not None:
            lap, prompt, answer = entry
            namespace = f"{number}.{lap}"
            run.join(new_request(namespace, prompt, answer, text.temperature, depth), answer)

    take_seats()
    while len(run.seats) == num_seats:
        run.step(prices)
        for request, _ in [*run.seats]:
            if run.has_ended(request):
                run.leave(request)
        take_seats()
        look_ups.work()
    return run.outcome


def new_request(
    namespace: str, prompt: array[int], answer: array[int], temperature: float, depth: int | None
) -> Request:
    """A request whose prompt is computed and whose first token is chosen."""
    params = SamplingParams(temperature=temperature, max_tokens=len(answer))
    request = Request(
        request_id=f"regret-{next(_NUMBERS)}",
        tokens=array("q", prompt),
        sampling=SamplingMetadata(params=params, seed=0, prompt_len=len(prompt)),
        stop_ids=frozenset(),
        depth="auto" if depth is None else depth,
        namespace=namespace,
    )
    request.max_len = len(prompt) + len(answer)
    request.tokens.append(answer[0])
    return request


def _scheduled(request: Request, draft: Draft) -> ScheduledRequest:
    stop = len(request.tokens)
    return ScheduledRequest(
        request_id=request.request_id,
        tokens=request.tokens,
        start=stop - 1,
        stop=stop,
        page_ids=array("q"),
        sampling=request.sampling,
        draft_plan=DraftPlan(draft),
    )


def _verified(request: Request, answer: array[int], draft: Draft) -> RequestOutput:
    """The draft's path along the answer, and the answer's next token."""
    at = request.num_output
    parents = draft.parents or range(-1, len(draft.token_ids) - 1)
    path: list[int] = []
    for index, (token, parent) in enumerate(zip(draft.token_ids, parents, strict=True)):
        if (
            parent == (path[-1] if path else -1)
            and at + len(path) < len(answer)
            and token == answer[at + len(path)]
        ):
            path.append(index)
    served = answer[at : at + len(path) + 1]
    return RequestOutput(
        request_id=request.request_id,
        token_ids=served,
        draft=draft,
        path=path,
    )


# -- comparisons -----------------------------------------------------------------------------------


def speculator(controller: Controller, acceptance: AcceptanceModel) -> DraftSpeculator:
    """Look-ups as ``--draft auto`` has them; a decision takes no time."""
    sources = make_sources(DraftSpec(AUTO))
    return DraftSpeculator(sources, controller, acceptance, clock=lambda: 0.0)


def auto(
    text: Text, prices: TruePrices, num_seats: int, profile: StepProfile | None = None
) -> tuple[Outcome, _Counting]:
    """The controller, and what it could have known. ``profile``: by default the measured one."""
    acceptance = _Counting()
    look_ups = speculator(Controller(CostModel(profile or prices.profile())), acceptance)
    return replay(text, prices, num_seats, look_ups), acceptance


def fixed(text: Text, prices: TruePrices, num_seats: int, depth: int) -> Outcome:
    """The same depth in every step; 0: no drafts."""
    look_ups = speculator(Controller(CostModel(prices.profile())), AcceptanceModel())
    return replay(text, prices, num_seats, look_ups, depth=depth)


def oracle(
    text: Text, prices: TruePrices, num_seats: int, known: _Counting, rate: float
) -> Outcome:
    """Replay with the chances of the whole text known. ``rate``: a first estimate, tokens/s."""
    best = Outcome(0, 1.0)
    for _ in range(3):  # the rate that a choice yields is the rate by which to choose
        acceptance = _Knowing(known.tallies)
        look_ups = speculator(_OracleController(prices, rate), acceptance)
        acceptance.know()
        found = replay(text, prices, num_seats, look_ups)
        rate = found.rate
        best = max(best, found, key=lambda each: each.rate)
    return best


def compared(text: Text, prices: TruePrices, num_seats: int) -> dict[str, object]:
    """A line of the table: tokens a second of each, regret, and ``auto`` over the best depth."""
    found, acceptance = auto(text, prices, num_seats)
    by_depth = {depth: fixed(text, prices, num_seats, depth).rate for depth in DEPTHS}
    best = max(by_depth, key=lambda depth: by_depth[depth])
    ideal = oracle(text, prices, num_seats, acceptance, found.rate)
    return {
        "task": text.kind,
        "T": text.temperature,
        "requests": num_seats,
        "off": by_depth[0],
        "best depth": best,
        "at it": by_depth[best],
        "auto": found.rate,
        "oracle": ideal.rate,
        "auto / best": found.rate / by_depth[best],
        "auto / off": found.rate / by_depth[0],
        "regret": 1.0 - found.rate / max(ideal.rate, found.rate),
    }
