"""Scaling: how many replicas there should be, by how full they are. No clock: time is passed in.

A replica is added when the present ones are fuller than `FULL` on average, or cannot admit all
requests; one is removed only when the others would then stay below `CALM`. The room between the two
is why a load that stays the same never adds and removes by turns.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import NamedTuple

from .wire.messages import Load

FULL = 0.7  # mean usage up to which replicas are filled
CALM = 0.6  # mean usage below which the rest must stay when one is removed


class ReplicaLoad(NamedTuple):
    """A replica's load, now or as a mean over the last seconds."""

    usage: float  # share of its room that requests take, 0 to 1
    waiting: float  # requests that it cannot admit yet


class Wanted(NamedTuple):
    """The number of replicas that there should be, and what the next call needs to know."""

    replicas: int
    calm_since: float | None  # since when one replica fewer would have been enough


def replica_load(load: Load, max_running: int) -> ReplicaLoad:
    """Return the load of a replica that runs at most ``max_running`` requests at once.

    Its room is its KV pool and its seats; the fuller of the two is what ends first.
    """
    return ReplicaLoad(max(load.kv_usage, load.running / max_running), load.waiting)


def want(
    loads: Sequence[ReplicaLoad],
    current: int,
    least: int,
    most: int,
    *,
    now: float,
    calm_since: float | None,
    quiet_seconds: float,
) -> Wanted:
    """Return how many replicas there should be, from ``least`` to ``most``.

    ``loads``: of the replicas that serve. ``current``: how many there should be so far, those that
    start included. ``calm_since``: what the last call returned, None at first. At once as many are
    added as the usage asks for, and one more than serve while requests wait; one at a time is
    removed, when nothing else was wanted for ``quiet_seconds``. Raises ValueError unless ``least``
    is at least 1 and not above ``most``.
    """
    if not 1 <= least <= most:
        raise ValueError(f"replicas from {least} to {most}: at least 1, and no fewer at most")
    needed = _num_needed(loads, current)
    if needed > current or not least <= current <= most:
        return Wanted(max(least, min(most, max(needed, current))), None)
    if current == least or not _is_calm(loads, current):
        return Wanted(current, None)
    if calm_since is None:
        return Wanted(current, now)
    if now - calm_since < quiet_seconds:
        return Wanted(current, calm_since)
    return Wanted(current - 1, now)


def _num_needed(loads: Sequence[ReplicaLoad], current: int) -> int:
    needed = ceil(round(sum(each.usage for each in loads) / FULL, 9))  # 2.1 / 0.7 is 3
    if sum(each.waiting for each in loads) >= 1:  # below 1, as a mean, requests wait now and then
        needed = max(needed, min(len(loads), current) + 1)
    return needed


def _is_calm(loads: Sequence[ReplicaLoad], current: int) -> bool:
    """Whether one replica fewer would be enough. Not while one of them does not serve yet."""
    return len(loads) >= current and sum(each.usage for each in loads) < CALM * (current - 1)
