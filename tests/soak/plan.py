"""The schedule of a soak: waves of clients, cycle after cycle, each cycle in another order."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from .clients import (
    burst,
    deaf,
    feature,
    hurried,
    leaver,
    long,
    operator,
    slow_reader,
    steady,
    stored,
    stranger,
    wordy,
)
from .hostile import broken_body, broken_http, late_body, oversized, slow_body, slow_header
from .world import Actor

CYCLE_SECONDS = 300.0  # of a long run; short ones have `MIN_CYCLES` shorter ones
MIN_CYCLES = 4
MIN_WAVE_SECONDS = 1.0
ACTORS: Mapping[str, Actor] = {
    actor.__name__: actor
    for actor in (
        broken_body, broken_http, burst, deaf, feature, hurried, late_body, leaver, long, operator,
        oversized, slow_body, slow_header, slow_reader, steady, stored, stranger, wordy,
    )
}  # fmt: skip
TRICKLE = {"slow_header": 3, "slow_body": 3, "late_body": 2}
BROKEN = {"broken_http": 4, "broken_body": 4, "oversized": 2, "stranger": 2}


@dataclass(frozen=True, slots=True)
class Wave:
    """Numbers of clients of each kind for a share of the cycle."""

    name: str
    share: float
    crew: Mapping[str, int]


WAVES: Sequence[Wave] = (
    Wave("quiet", 0.06, {}),
    Wave("steady", 0.2, {"steady": 10}),
    Wave("features", 0.14, {"feature": 8, "stored": 1, "hurried": 2, "steady": 2}),
    Wave("flood", 0.1, {"burst": 3, "operator": 1}),
    Wave("storm", 0.12, {"leaver": 16, "steady": 4}),
    Wave("pressure", 0.1, {"wordy": 14, "long": 4, "steady": 2, "operator": 1}),
    Wave("slow", 0.18, {"slow_reader": 4, "deaf": 4, "steady": 4, **TRICKLE}),
    Wave("hostile", 0.1, {"leaver": 2, "steady": 4, "operator": 1, **BROKEN}),
)
LEVEL_WAVES = ("quiet", "steady")  # whose load is the same each time: drift is judged by them


@dataclass(frozen=True, slots=True)
class Turn:
    """A wave at its time."""

    cycle: int
    wave: Wave
    seconds: float


def num_cycles(seconds: float) -> int:
    """Return the number of cycles of a run of so many seconds."""
    if seconds < MIN_CYCLES * MIN_WAVE_SECONDS * len(WAVES) * 2:
        return 1
    return max(MIN_CYCLES, round(seconds / CYCLE_SECONDS))


def schedule(seconds: float, seed: int, waves: Sequence[Wave] = WAVES) -> Iterator[Turn]:
    """Waves that fill ``seconds``: every cycle has all of them, the first one first."""
    cycles, whole = num_cycles(seconds), sum(wave.share for wave in waves)
    for cycle in range(cycles):
        quiet, *others = waves
        random.Random(f"{seed}/{cycle}").shuffle(others)
        for wave in (quiet, *others):
            yield Turn(cycle, wave, max(MIN_WAVE_SECONDS, wave.share / whole * seconds / cycles))
