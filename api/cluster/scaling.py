"""Scaling: the number of replicas for a given usage. Callers pass the time.

A replica is added when the mean usage exceeds `FULL`, or when requests wait. One is removed only if
the mean usage of the others would then stay below `CALM`. Because of the gap between the two
limits, a constant load never adds and removes replicas alternately.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import NamedTuple

from .wire.messages import Load

FULL = 0.7  # mean usage above which a replica is added
CALM = 0.6  # mean usage below which the others must stay when a replica is removed


class ReplicaLoad(NamedTuple):
    """A replica's load, now or as a mean over the last seconds."""

    usage: float  # used share of its capacity, 0 to 1
    waiting: float  # requests that it cannot admit yet


class Wanted(NamedTuple):
    """The wanted number of replicas, and the state for the next call."""

    replicas: int
    calm_since: float | None  # time from which one replica fewer would have been enough


def replica_load(load: Load, max_running: int) -> ReplicaLoad:
    """Return the load of a replica that runs at most ``max_running`` requests at once.

    Its usage is the used share of the KV pool or of ``max_running``, whichever is greater.
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
    """Return the wanted number of replicas, from ``least`` to ``most``.

    ``loads``: loads of the replicas that serve. ``current``: the number wanted so far, including
    replicas that are still starting. ``calm_since``: the value that the last call returned, or None
    at first. All replicas that the usage requires are added at once; if requests wait, at least one
    more than serve now is wanted. Replicas are removed one at a time, each after ``quiet_seconds``
    in which one fewer would have been enough. Raises ValueError unless ``least`` is at least 1 and
    not above ``most``.
    """
    if not 1 <= least <= most:
        raise ValueError(
            f"invalid limits of {least} to {most} replicas: use at least 1, and no maximum below it"
        )
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
    needed = ceil(round(sum(each.usage for each in loads) / FULL, 9))  # rounded: 2.1 / 0.7 > 3
    if sum(each.waiting for each in loads) >= 1:  # fewer wait only briefly
        needed = max(needed, min(len(loads), current) + 1)
    return needed


def _is_calm(loads: Sequence[ReplicaLoad], current: int) -> bool:
    """Whether one replica fewer would be enough; False while a replica does not serve yet."""
    return len(loads) >= current and sum(each.usage for each in loads) < CALM * (current - 1)
