"""Book of a soak: counts, checks of the invariants, latencies."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

MAX_TOLD = 20  # violations of a kind that are told one by one


class Violation(msgspec.Struct, frozen=True):
    """One thing that must not be."""

    kind: str  # I1 to I9, or one of `verdicts.OTHERS`
    what: str
    wave: str
    at: float  # seconds after the start


class Latency(msgspec.Struct, frozen=True):
    """Latency of one canary, in seconds. ``gaps`` are between the events that brought words."""

    wave: str
    cycle: int
    ttft: float
    gaps: list[float]


@dataclass(slots=True)
class Book:
    """Everything is counted; of what was wrong the first of each kind are kept."""

    wave: str = "start"
    cycle: int = 0
    begin: float = field(default_factory=time.monotonic)
    checks: Counter[str] = field(default_factory=Counter)  # by kind
    wrongs: Counter[str] = field(default_factory=Counter)
    violations: list[Violation] = field(default_factory=list)
    answers: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    latencies: list[Latency] = field(default_factory=list)
    probes: list[float] = field(default_factory=list)  # seconds that /health took
    facts: Counter[str] = field(default_factory=Counter)  # what the load made happen

    def check(self, kind: str, is_right: bool, what: str) -> bool:
        """Count a check; what is wrong is written down."""
        self.checks[kind] += 1
        if not is_right:
            self.wrongs[kind] += 1
            if self.wrongs[kind] <= MAX_TOLD:
                at = round(time.monotonic() - self.begin, 1)
                self.violations.append(Violation(kind, what[:1000], self.wave, at))
        return is_right

    def answer(self, who: str, how: str) -> None:
        """An answer that ``who`` got: a status, or how it ended."""
        self.answers[who][how] += 1

    @property
    def num_answers(self) -> int:
        """All of them."""
        return sum(found.total() for found in self.answers.values())

    @property
    def by_status(self) -> Mapping[str, int]:
        """Answers of all clients together."""
        return dict(sum(self.answers.values(), Counter[str]()).most_common())
