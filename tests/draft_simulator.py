"""Decoding in virtual time: machines by their cost tables, texts by how well drafts fit them.

The number of running requests is constant within a phase: one that ends is replaced. So seconds
per token compare fairly between policies. Noise disturbs what a policy observes, not the total.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from foretoken.draft.calibration import Calibration
from foretoken.draft.controller import Candidates, Controller
from foretoken.draft.costs import CostModel, StepProfile

LM_LEN, FREE_LEN, WINDOW = 6, 16, 256
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


@dataclass(frozen=True)
class Machine:
    """True costs in seconds by rows, and how noisy a step's time is."""

    forward: Callable[[int], float]
    draft: Callable[[int], float]
    sampling: float = 0.0  # for each token that comes out or is drafted
    host: float = 0.0
    noise: float = 0.0  # sigma of a lognormal factor
    stalls: float = 0.0  # share of steps that take ten times as long

    def profile(self) -> StepProfile:
        return StepProfile({n: self.forward(n) for n in ROWS}, {n: self.draft(n) for n in ROWS[:7]})


@dataclass(frozen=True)
class Phase:
    """So many tokens are served; ``free``: (share of steps, length, chance of a token)."""

    num_tokens: int
    num_requests: int = 1
    lm: float | None = None
    free: tuple[float, int, float] | None = None


@dataclass
class Seat:
    """One running request."""

    request_id: str
    left: int  # tokens
    backlog: int  # tokens whose KV the draft model lacks
    free_len: int = 0
    free_hits: int = 0
    lm_hits: int = 0


@dataclass
class Totals:
    seconds: float = 0.0
    tokens: int = 0
    steps: int = 0
    kinds: dict[str, int] = field(default_factory=dict)

    @property
    def token_s(self) -> float:
        return self.seconds / self.tokens


class Policy(Protocol):
    def choose(self, seats: Sequence[Seat], has_lm: bool) -> tuple[list[int], list[int]]: ...
    def learn(self, seats: Sequence[Seat], outcome: Outcome) -> None: ...


@dataclass(frozen=True)
class Outcome:
    """What a step brought, in lists by request. Its times were seen multiplied by ``factor``."""

    num_tokens: list[int]
    drafted: list[int]  # by the draft model
    times: dict[str, float]  # seconds
    factor: float
    num_rows: int
    draft_passes: int
    draft_rows: int


@dataclass
class Fixed:
    """The draft model to the same depth, always."""

    depth: int

    def choose(self, seats: Sequence[Seat], has_lm: bool) -> tuple[list[int], list[int]]:
        return [0] * len(seats), [self.depth * has_lm] * len(seats)

    def learn(self, seats: Sequence[Seat], outcome: Outcome) -> None:
        pass


class Adaptive:
    """The controller with its calibration."""

    def __init__(
        self, profile: StepProfile | None, lm_prior: float = 0.7, free_prior: float = 0.8
    ) -> None:
        self.costs = CostModel(profile)
        self.controller = Controller(self.costs)
        self.calibration = Calibration()
        self.calibration.register("lm", (lm_prior,))
        self.calibration.register("free", (free_prior,))
        self.kinds: dict[str, int] = {}

    def choose(self, seats: Sequence[Seat], has_lm: bool) -> tuple[list[int], list[int]]:
        free, lm = np.zeros((len(seats), FREE_LEN)), np.zeros((len(seats), LM_LEN * has_lm))
        for row, seat in enumerate(seats):
            known = min(seat.free_len, FREE_LEN, seat.left - 1)
            survival = self.calibration.survival
            free[row, :known] = survival("free", 0, seat.request_id, known)
            if has_lm:
                length = min(LM_LEN, seat.left - 1)
                lm[row, :length] = survival("lm", 0, seat.request_id, length)
        allocation = self.controller.allocate(
            Candidates(
                free=free,
                lm=lm,
                backlog=np.array([seat.backlog for seat in seats]),
                horizon=np.array([seat.left for seat in seats]),
                budget=1024,
            )
        )
        self.kinds[allocation.reason] = self.kinds.get(allocation.reason, 0) + 1
        return allocation.num_free.tolist(), allocation.lm_depth.tolist()

    def learn(self, seats: Sequence[Seat], outcome: Outcome) -> None:
        lm_hits = 0
        for seat, drafted, out in zip(seats, outcome.drafted, outcome.num_tokens, strict=True):
            if seat.free_len:
                hits = min(seat.free_hits, out)
                self.calibration.score(
                    "free", 0, seat.request_id, hits, hits < min(seat.free_len, out)
                )
            if drafted:
                hits = min(seat.lm_hits, drafted, out)
                lm_hits += hits
                self.calibration.score("lm", 0, seat.request_id, hits, hits < min(drafted, out))
        times = {name: seconds * outcome.factor for name, seconds in outcome.times.items()}
        num_tokens = sum(outcome.num_tokens)
        self.costs.observe(
            num_rows=outcome.num_rows,
            forward_s=times["forward"],
            verify_s=times["verify"],
            num_tokens=num_tokens,
            draft_s=times["draft"],
            draft_passes=outcome.draft_passes,
            draft_rows=outcome.draft_rows,
            num_drafted=sum(outcome.drafted),
            host_s=times["host"],
        )
        self.controller.observe(
            num_tokens,
            sum(times.values()),
            num_lm_drafted=sum(outcome.drafted),
            num_lm_hits=lm_hits,
        )


def run(machine: Machine, phases: Sequence[Phase], policy: Policy, seed: int = 0) -> Totals:
    """Serve all phases."""
    rng = np.random.default_rng(seed)
    totals, seats = Totals(), list[Seat]()
    for phase in phases:
        seats = seats[: phase.num_requests]
        stop = totals.tokens + phase.num_tokens
        while totals.tokens < stop:
            _step(machine, phase, policy, seats, totals, rng)
    return totals


def _step(
    machine: Machine,
    phase: Phase,
    policy: Policy,
    seats: list[Seat],
    totals: Totals,
    rng: np.random.Generator,
) -> None:
    seats[:] = [seat for seat in seats if seat.left > 0]
    while len(seats) < phase.num_requests:
        seats.append(Seat(f"r{totals.steps}.{len(seats)}", int(rng.integers(150, 450)), 48))
    for seat in seats:
        _foresee(seat, phase, rng)
    num_free, depths = policy.choose(seats, phase.lm is not None)
    outcome = _decode(machine, seats, num_free, depths, rng)
    policy.learn(seats, outcome)
    for seat, out in zip(seats, outcome.num_tokens, strict=True):
        seat.left -= out
        seat.free_len, seat.free_hits = max(0, seat.free_len - out), seat.free_hits - out
        if seat.free_hits < 0:
            seat.free_len = seat.free_hits = 0
    totals.seconds += sum(outcome.times.values())
    totals.tokens += sum(outcome.num_tokens)
    totals.steps += 1


def _foresee(seat: Seat, phase: Phase, rng: np.random.Generator) -> None:
    """How many tokens of its drafts would come true."""
    if phase.lm is not None:
        seat.lm_hits = int(rng.geometric(1.0 - phase.lm)) - 1
    share, length, chance = phase.free or (0.0, 0, 0.0)
    if not seat.free_len and rng.random() < share:
        seat.free_len = length
        seat.free_hits = int(rng.geometric(1.0 - chance)) - 1


def _decode(
    machine: Machine,
    seats: Sequence[Seat],
    num_free: Sequence[int],
    depths: Sequence[int],
    rng: np.random.Generator,
) -> Outcome:
    drafted, first_rows = [], 0
    for seat, depth in zip(seats, depths, strict=True):
        first_rows += min(seat.backlog, WINDOW) + 1 if depth else 0
        drafted.append(depth if seat.backlog <= WINDOW else 0)
    asked = max(drafted, default=0)
    passes = [first_rows] * (first_rows > 0)
    passes += [sum(depth > level for depth in drafted) for level in range(1, asked)]
    out = [
        1 + min(seat.left - 1, max(min(free, seat.free_hits), min(depth, seat.lm_hits)))
        for seat, free, depth in zip(seats, num_free, drafted, strict=True)
    ]
    for seat, asked, depth, num in zip(seats, depths, drafted, out, strict=True):
        if not asked:
            seat.backlog += num
        else:
            seat.backlog = int(num > depth) if depth else seat.backlog - WINDOW
    num_rows = len(seats) + sum(num_free) + sum(drafted)
    factor = float(rng.lognormal(0.0, machine.noise)) if machine.noise else 1.0
    factor *= 10.0 if rng.random() < machine.stalls else 1.0
    draft_s = sum(machine.draft(rows) for rows in passes) + machine.sampling * sum(drafted)
    times = {
        "forward": machine.forward(num_rows),
        "verify": machine.sampling * sum(out),
        "draft": draft_s,
        "host": machine.host,
    }
    return Outcome(out, drafted, times, factor, num_rows, len(passes), sum(passes))
