"""The arithmetic of a load: from the arrival times of tokens to the figures in the report.

TTFT is the time from the moment a request was *due* to its first token. In an open loop the
schedule sets that moment, even if the client or the server is late, so that a slow server cannot
hide the requests that it kept waiting (coordinated omission). A chunk is a part of the answer that
arrives at once and may hold several tokens. ITL per token is a chunk's gap to the one before it
divided by its tokens, counted once for each token; the chunk gap is the pause that a reader sees.
TPOT is E2E without TTFT, divided by all tokens but the first. Nothing here reads a clock.
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
    times: list[float] = []  # Arrival times of the chunks that hold tokens.
    counts: list[int] = []  # Tokens of each such chunk.
    ended: float = 0.0
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    proposed_tokens: int | None = None
    accepted_tokens: int | None = None
    verify_steps: int | None = None
    finish_reason: str | None = None
    asked_len: int = 0  # Requested length of the answer in tokens.
    # Kind of the error; such a request counts for no latency and not for goodput.
    error: str | None = None
    message: str = ""
    was_cut: bool = False  # Whether the client ended the request on purpose.

    @property
    def num_tokens(self) -> int:
        """Tokens of the answer."""
        return sum(self.counts)

    @property
    def ttft(self) -> float:
        """Seconds from the due time to the first token."""
        return self.times[0] - self.due

    @property
    def e2e(self) -> float:
        """Seconds from the due time to the last token."""
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
    """Group records by round, which is the text after the slash in their names."""
    ordered = sorted(records, key=_round_of)
    return [list(group) for _, group in groupby(ordered, key=_round_of)]


def _round_of(record: Record) -> str:
    return record.name.partition("/")[2]


# -- gaps ---------------------------------------------------------------------------------------


def chunk_gaps(record: Record) -> list[tuple[float, float, int]]:
    """Return begin, end and tokens of every gap between two chunks."""
    return list(zip(record.times, record.times[1:], record.counts[1:], strict=False))


def token_gaps(gaps: Iterable[tuple[float, float, int]]) -> list[float]:
    """Return the ITL of every token: a chunk's tokens share its gap equally."""
    return [(end - begin) / count for begin, end, count in gaps for _ in range(count)]


def gaps_between(
    record: Record, begin: float, end: float, minimum: int = 0
) -> list[tuple[float, float, int]]:
    """Return the gaps whose middle lies in a window, so that each belongs to one window only.

    ``minimum``: number of leading chunks to skip.
    """
    gaps = chunk_gaps(record)[minimum:]
    return [gap for gap in gaps if begin <= (gap[0] + gap[1]) / 2 < end]


def apportion(total: int, weights: Sequence[int]) -> list[int]:
    """Divide ``total`` by weight into whole numbers, each at least 1 while that is possible.

    For servers that report the tokens of an answer, but not of its chunks; the weights are then
    characters. With as many chunks as tokens each gets one, which is exact.
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
    """Return a percentile of sorted values, with linear interpolation; nan without values."""
    if not values:
        return math.nan
    at = share * (len(values) - 1)
    low = math.floor(at)
    high = min(low + 1, len(values) - 1)
    return values[low] + (at - low) * (values[high] - values[low])


def distribution(values: Iterable[float], scale: float = 1.0, *, high_is_good: bool = False) -> (
    dict[str, float] | None
):  # fmt: skip
    """Return mean and percentiles, or None without values.

    With ``high_is_good``, 99% of the values are p99 or higher.
    """
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
    "itl": _own_itl,  # The 99th percentile of the request's own ITL.
    "tpot": lambda record: record.tpot,
    "e2e": lambda record: record.e2e,
}


def parse_slo(text: str) -> dict[str, float]:
    """Parse limits in milliseconds such as ``ttft=500,itl=50``.

    Raises ValueError for other text.
    """
    limits: dict[str, float] = {}
    for part in text.split(","):
        name, found, value = part.strip().partition("=")
        if name not in SLO_MEASURES or not found:
            raise ValueError(
                f"'{part}' is not NAME=MILLISECONDS with a name of {', '.join(SLO_MEASURES)}"
            )
        limits[name] = float(value)
        if not limits[name] > 0:  # This also rejects nan.
            raise ValueError(f"the limit for {name} must be above 0")
    return limits


def meets(record: Record, slo: dict[str, float]) -> bool:
    """Whether a request was served within all limits; a missing value meets its limit."""
    if record.error is not None or not record.times:
        return False
    found = ((SLO_MEASURES[name](record), limit) for name, limit in slo.items())
    return not any(value is not None and 1e3 * value > limit for value, limit in found)


# -- the whole ----------------------------------------------------------------------------------


def summary(records: Sequence[Record], slo: dict[str, float]) -> dict[str, object]:
    """Return all figures of a run. Failed requests count as errors and against goodput."""
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
    """Return token rates per second; the rates per user start at the first token."""
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
    """Return the sum of a figure; None if no server reported it."""
    values = [value for record in records if (value := getattr(record, name)) is not None]
    return sum(values) if values else None


def _share(part: int | None, whole: int | None) -> float | None:
    return None if part is None or not whole else part / whole


def _per(count: int, seconds: float) -> float | None:
    return count / seconds if seconds > 0 else None
