"""Tenants: who was served how much, and whether several of them are here.

A tenant is a ``cache_salt`` or an API key; requests without either are one tenant together.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Container

Tenant = str | None
MAX_KNOWN = 4096  # tenants that do not wait, whose debt is remembered
CROWD_SECONDS = 600.0  # that a tenant is taken for present after it last asked for something


class TokenCounters:
    """How many tokens each tenant had computed: its virtual token counter.

    Only differences count. Whoever begins to wait is lifted to ``floor``, the least counter of
    those who wait, so idle time saves up no credit (Sheng et al., "Fairness in Serving Large
    Language Models", 2024). A tenant at or below the floor need not be remembered: it would be
    lifted anyway. Of those above it at most ``MAX_KNOWN`` that do not wait are.
    """

    def __init__(self) -> None:
        self.floor = 0  # never falls
        self._counts: dict[Tenant, int] = {}
        self._sweep_at = 2 * MAX_KNOWN

    def __getitem__(self, tenant: Tenant) -> int:
        return self._counts.get(tenant, self.floor)

    def __len__(self) -> int:
        return len(self._counts)

    def charge(self, tenant: Tenant, num_tokens: int) -> None:
        """Tokens were computed for it, whatever came of them. O(1)."""
        self._counts[tenant] = self._counts.get(tenant, self.floor) + num_tokens

    def lift(self, tenant: Tenant, least: int) -> None:
        """It begins to wait, beside others who have at least ``least``. O(1)."""
        self.floor = max(self.floor, least)
        self._counts[tenant] = max(self[tenant], self.floor)

    def forget(self, waiting: Container[Tenant]) -> None:
        """Drop who need not be known; those who wait stay. O(1) per `lift`, on average."""
        if len(self._counts) < self._sweep_at:
            return
        kept = {each: count for each, count in self._counts.items() if each in waiting}
        owing = (i for i in self._counts.items() if i[1] > self.floor and i[0] not in waiting)
        kept.update(heapq.nlargest(MAX_KNOWN, owing, key=lambda item: item[1]))
        self._counts = kept
        self._sweep_at = 2 * max(MAX_KNOWN, len(kept))

    def copy(self) -> TokenCounters:
        """Another with the same counts."""
        other = TokenCounters()
        other.floor, other._counts = self.floor, dict(self._counts)
        return other


class Crowd:
    """Whether more than one tenant has asked for something of late. O(1) in time and memory."""

    def __init__(self) -> None:
        self._last: Tenant = None
        self._is_empty = True
        self._until = -math.inf

    def meet(self, tenant: Tenant, now: float) -> bool:
        """A tenant asks; whether it shares the server with others."""
        if tenant != self._last and not self._is_empty:
            self._until = now + CROWD_SECONDS
        self._last, self._is_empty = tenant, False
        return now < self._until
