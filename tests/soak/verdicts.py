"""Verdicts of a soak: one line for each invariant, leak and promise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from foretoken.bench.load.figures import distribution

from .book import Book, Latency
from .leaks import Drift, Growth

INVARIANTS: Mapping[str, str] = {
    "I1": "every page is accounted for: under load by the audit, at rest by free + evictable",
    "I2": "the tree's locks and lengths add up (by the audit)",
    "I3": "without clients nothing runs and nothing waits",
    "I4": "every answer has one terminal event",
    "I5": "words are those of the idle server",
    "I6": "and of the server without speculation",
    "I7": "and of the server without the cache",
    "I8": "not a token too many, nothing after a stop",
    "I9": "/health answers within 5 s and the loop's timers fire within 2 s, whatever the load",
}
OTHERS: Mapping[str, str] = {
    "hang": "every request ends",
    "there": "connections are taken while it is up",
    "status": "each request gets the status that it should",
    "5xx": "no error of its own, but 503 while it drains or after a deadline",
    "retry-after": "a 429 tells when to return",
    "deadlines": "who sends too slowly is dropped",
    "restart": "SIGTERM drains and exits 0, the next process binds the same address",
    "engine": "no step fails, no audit of its own, no dump is written",
    "log": "no error in its log",
    "leak": "at rest it holds what it held",
    "drift": "canaries at the same load take as long as before",
}


class Verdict(msgspec.Struct, frozen=True):
    """One line."""

    kind: str
    what: str
    checks: int
    violations: int

    @property
    def word(self) -> str:
        """Word that the report shows for the verdict."""
        if self.violations:
            return "VIOLATED"
        return "holds" if self.checks else "not checked"


def verdicts(book: Book) -> list[Verdict]:
    """In the order of the tables above."""
    return [
        Verdict(kind, what, book.checks[kind], book.wrongs[kind])
        for kind, what in [*INVARIANTS.items(), *OTHERS.items()]
    ]


def judge_trends(
    book: Book, lives: Sequence[Sequence[Growth]], drifts: Sequence[Drift], max_drift: float
) -> None:
    """Leaks of each process, and drift of the canaries."""
    for life, grown in enumerate(lives):
        for each in grown:
            told = f"process {life}: {each.name} grew by {each.grown:.0f} (bound {each.bound:.0f})"
            book.check("leak", not each.is_leak, told)
    for drift in drifts:
        told = f"{drift.wave}, {drift.measure}: {drift.first_ms:.2f} to {drift.last_ms:.2f} ms"
        book.check("drift", drift.ratio <= max_drift, told)


def latency_rows(latencies: Sequence[Latency]) -> list[dict[str, object]]:
    """Canaries by wave."""
    rows = []
    for wave in dict.fromkeys(each.wave for each in latencies):
        own = [each for each in latencies if each.wave == wave]
        ttft = distribution((each.ttft for each in own), 1e3)
        gaps = distribution((gap for each in own for gap in each.gaps), 1e3)
        if ttft is not None and gaps is not None:
            rows.append({
                "wave": wave, "canaries": len(own),
                "TTFT p50 ms": ttft["p50"], "TTFT p99 ms": ttft["p99"],
                "gap p50 ms": gaps["p50"], "gap p99 ms": gaps["p99"],
            })  # fmt: skip
    return rows


def verdict_rows(found: Sequence[Verdict]) -> list[dict[str, object]]:
    """The table of the report."""
    return [
        {"": each.kind, "must hold": each.what, "checks": each.checks,
         "violations": each.violations, "verdict": each.word}
        for each in found
    ]  # fmt: skip
