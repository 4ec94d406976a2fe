"""The arithmetic of a load: from the times at which tokens came to the figures that are shown.

Words: TTFT is from the moment a request was *due* to its first token; in an open loop it is due
when the schedule says, however late the client or the server is, so that a slow server cannot
hide the requests that it kept waiting (coordinated omission). A chunk is what arrives together
and may hold several tokens. ITL per token is a chunk's gap to the one before it divided by its
tokens, counted once for each token; the chunk gap is what a reader sees. TPOT is E2E without TTFT
over all tokens but the first. Nothing here reads a clock.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby

import msgspec

PERCENTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


class Record(msgspec.Struct, omit_defaults=True):
    """One request as the client saw it; seconds on the client's clock. None: not reported."""

    name: str
    due: float
    sent: float = 0.0
    times: list[float] = []  # arrival of each chunk that holds tokens
    counts: list[int] = []  # tokens of each of them
    ended: float = 0.0
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    proposed_tokens: int | None = None
    accepted_tokens: int | None = None
    verify_steps: int | None = None
    finish_reason: str | None = None
    asked_len: int = 0  # tokens that the answer should have
    error: str | None = None  # its kind; such a request is in no latency and in no goodput
    message: str = ""
    was_cut: bool = False  # ended by the client on purpose

    @property
    def num_tokens(self) -> int:
        """Tokens of the answer."""
        return sum(self.counts)

    @property
    def ttft(self) -> float:
        """Seconds from due to the first token."""
        return self.times[0] - self.due

    @property
    def e2e(self) -> float:
        """Seconds from due to the last token."""
        return self.times[-1] - self.due

    @property
    def decode_time(self) -> float:
        """Seconds from the first token to the last."""
        return self.times[-1] - self.times[0]

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first; None for an answer of one chunk."""
        return self.decode_time / (self.num_tokens - 1) if len(self.times) > 1 else None


def by_round(records: Iterable[Record]) -> list[list[Record]]:
    """Records of each round: those whose names have the same text behind the slash."""
    ordered = sorted(records, key=_round_of)
    return [list(group) for _, group in groupby(ordered, key=_round_of)]


def _round_of(record: Record) -> str:
    return record.name.partition("/")[2]


# -- gaps ---------------------------------------------------------------------------------------


def chunk_gaps(record: Record) -> list[tuple[float, float, int]]:
    """Begin, end and tokens of every gap between two chunks."""
    return list(zip(record.times, record.times[1:], record.counts[1:], strict=False))


def token_gaps(gaps: Iterable[tuple[float, float, int]]) -> list[float]:
    """ITL of every token: the tokens of a chunk share its gap."""
    return [(end - begin) / count for begin, end, count in gaps for _ in range(count)]


def gaps_between(
    record: Record, begin: float, end: float, minimum: int = 0
) -> list[tuple[float, float, int]]:
    """The gaps whose middle lies in a window, each in one window only.

    ``minimum``: leading chunks that do not count yet.
    """
    gaps = chunk_gaps(record)[minimum:]
    return [gap for gap in gaps if begin <= (gap[0] + gap[1]) / 2 < end]


def apportion(total: int, weights: Sequence[int]) -> list[int]:
    """Share ``total`` out by weight, in whole numbers, at least one each as long as they last.

    For servers that tell the tokens of an answer, but not of its chunks: there the weights are
    characters. As many chunks as tokens gives one each, which is exact.
    """
    least = 1 if total >= len(weights) else 0
    whole, seen, reached, shares = sum(weights), 0, 0, []
    for num_left, weight in zip(range(len(weights) - 1, -1, -1), weights, strict=True):
        seen += weight
        upto = round(total * seen / whole) if whole else 0
        upto = min(max(upto, reached + least), total - least * num_left)
        upto = upto if num_left else total
        shares.append(upto - reached)
        reached = upto
    return shares


# -- distributions ------------------------------------------------------------------------------


def percentile(values: Sequence[float], share: float) -> float:
    """Percentile of sorted values, linear between two neighbours; nan without values."""
    if not values:
        return math.nan
    at = share * (len(values) - 1)
    low = math.floor(at)
    high = min(low + 1, len(values) - 1)
    return values[low] + (at - low) * (values[high] - values[low])


def distribution(values: Iterable[float], scale: float = 1.0, *, high_is_good: bool = False) -> (
    dict[str, float] | None
):  # fmt: skip
    """Mean and percentiles, None of no values. Where high is good, p99 is what 99% reach."""
    ordered = sorted(values, reverse=high_is_good)
    if not ordered:
        return None
    found = {name: scale * percentile(ordered, share) for name, share in PERCENTILES.items()}
    return {"mean": scale * math.fsum(ordered) / len(ordered), **found}


# -- goodput ------------------------------------------------------------------------------------


def _own_itl(record: Record) -> float:
    return percentile(sorted(token_gaps(chunk_gaps(record))), 0.99)


SLO_MEASURES: dict[str, Callable[[Record], float | None]] = {
    "ttft": lambda record: record.ttft,
    "itl": _own_itl,  # the 99th percentile of the request's own
    "tpot": lambda record: record.tpot,
    "e2e": lambda record: record.e2e,
}


def parse_slo(text: str) -> dict[str, float]:
    """``ttft=500,itl=50``: limits in milliseconds. Raises ValueError that says what is wrong."""
    limits: dict[str, float] = {}
    for part in text.split(","):
        name, found, value = part.strip().partition("=")
        if name not in SLO_MEASURES or not found:
            raise ValueError(f"'{part}' is not one of {', '.join(SLO_MEASURES)} = milliseconds")
        limits[name] = float(value)
        if not limits[name] > 0:  # also nan
            raise ValueError(f"the limit of {name} must be above 0")
    return limits


def meets(record: Record, slo: dict[str, float]) -> bool:
    """Whether a request was served within all limits; what does not exist cannot exceed."""
    if record.error is not None or not record.times:
        return False
    found = ((SLO_MEASURES[name](record), limit) for name, limit in slo.items())
    return not any(value is not None and 1e3 * value > limit for value, limit in found)


# -- the whole ----------------------------------------------------------------------------------


def summary(records: Sequence[Record], slo: dict[str, float]) -> dict[str, object]:
    """All figures of a run. Failed requests count as errors and against goodput."""
    served = [record for record in records if record.error is None and record.times]
    begin = min((record.due for record in records), default=0.0)
    seconds = max((record.ended for record in records), default=0.0) - begin
    return {
        "requests": len(records),
        "served": len(served),
        "cut_by_client": sum(record.was_cut for record in records),
        "errors": dict(Counter(record.error for record in records if record.error is not None)),
        "seconds": seconds,
        **_latencies(served),
        **_rates(served, seconds),
        **_totals(served),
        "goodput": _goodput(records, slo, seconds),
    }


def _latencies(served: Sequence[Record]) -> dict[str, object]:
    gaps = [gap for record in served for gap in chunk_gaps(record)]
    whole = [record for record in served if not record.was_cut]
    return {
        "ttft_ms": distribution((record.ttft for record in served), 1e3),
        "itl_ms": distribution(token_gaps(gaps), 1e3),
        "chunk_gap_ms": distribution((end - begin for begin, end, _ in gaps), 1e3),
        "tpot_ms": distribution((r.tpot for r in served if r.tpot is not None), 1e3),
        "e2e_ms": distribution((record.e2e for record in whole), 1e3),
        "sent_late_ms": distribution((record.sent - record.due for record in served), 1e3),
    }


def _rates(served: Sequence[Record], seconds: float) -> dict[str, object]:
    """Tokens a second; those of a user from the first token on."""
    users = (1 / record.tpot for record in served if record.tpot)
    prompts = [record.prompt_tokens for record in served if record.prompt_tokens is not None]
    tokens = sum(record.num_tokens for record in served)
    return {
        "tokens_per_s_user": distribution(users, high_is_good=True),
        "output_tokens_per_s": _per(tokens, seconds),
        "prompt_tokens_per_s": _per(sum(prompts), seconds) if prompts else None,
        "requests_per_s": _per(len(served), seconds),
    }


def _totals(served: Sequence[Record]) -> dict[str, object]:
    proposed, accepted = _sum(served, "proposed_tokens"), _sum(served, "accepted_tokens")
    prompt, cached = _sum(served, "prompt_tokens"), _sum(served, "cached_tokens")
    output, steps = sum(r.num_tokens for r in served), _sum(served, "verify_steps")
    stepped = sum(r.num_tokens for r in served if r.verify_steps is not None)
    short = [r for r in served if r.num_tokens < r.asked_len and not r.was_cut]
    return {
        "output_tokens": output,
        "prompt_tokens": prompt,
        "cached_tokens": cached,
        "prefix_hit_rate": _share(cached, prompt),
        "proposed_tokens": proposed,
        "accepted_tokens": accepted,
        "acceptance_rate": _share(accepted, proposed),
        "tokens_per_step": _share(stepped, steps),
        "tokens_per_chunk": _share(output, sum(len(record.times) for record in served)),
        "shorter_than_asked": len(short),
    }


def _goodput(
    records: Sequence[Record], slo: dict[str, float], seconds: float
) -> dict[str, object] | None:
    if not slo:
        return None
    good = sum(meets(record, slo) for record in records)
    rate = _per(good, seconds)
    return {"slo_ms": slo, "share": _share(good, len(records)), "requests_per_s": rate}


def _sum(records: Sequence[Record], name: str) -> int | None:
    """Sum of a figure; None where no server reported it."""
    values = [value for record in records if (value := getattr(record, name)) is not None]
    return sum(values) if values else None


def _share(part: int | None, whole: int | None) -> float | None:
    return None if part is None or not whole else part / whole


def _per(count: int, seconds: float) -> float | None:
    return count / seconds if seconds > 0 else None
