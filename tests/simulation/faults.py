"""Faults at named points. A seed has some kinds of them; most seeds have few, some have none."""

from __future__ import annotations

import random

from foretoken.core.interface.plan import StepPlan

from .model import HashDecoder
from .thread import HANGS

KINDS = {  # how often, where a seed has them
    "forward raises": 0.06,
    "forward raises late": 0.06,
    "out of memory": 0.1,
    "not finite": 0.1,
    "draft raises": 0.2,
    "draft of wrong shape": 0.2,
    "draft ids outside": 0.2,
    "plan raises": 0.2,
    "plan of wrong shape": 0.1,
    "plan too deep": 0.1,
    "observe raises": 0.1,
    "upkeep raises": 0.1,
    "slow step": 0.02,
    "forward fails for good": 0.03,
    "model hangs": 0.05,
    "tier raises": 0.03,
    "tier lies": 0.2,
    "tier damages": 0.2,
    "tier is slow": 0.2,
    "tier hangs": 0.03,
    "layer raises": 0.03,
}
OF_TIERS = tuple(kind for kind in KINDS if kind.startswith("tier "))
OF_STATES = ("layer raises",)
DEADLY = ("forward fails for good", "model hangs")


class Fault(RuntimeError):
    """Injected."""


class OutOfMemory(MemoryError):
    """Injected."""


class Faults:
    """Decides where what fails. ``happened`` counts by kind."""

    def __init__(self, rng: random.Random, kinds: frozenset[str]) -> None:
        self.kinds = kinds
        self.happened: dict[str, int] = dict.fromkeys(sorted(kinds), 0)
        self.blamed: set[str] = set()  # requests of steps that failed
        self.poison: set[str] = set()  # requests with which no step succeeds
        self.broken: set[str] = set()  # requests that came out as not a number
        self.is_dead = False  # no step succeeds any more
        self._rng = rng
        self._under_way: set[str] = set()  # requests of the step

    @classmethod
    def draw(cls, rng: random.Random) -> Faults:
        """A third of the seeds have none; few have a deadly one."""
        often = [kind for kind in KINDS if kind not in (*DEADLY, *OF_TIERS, *OF_STATES)]
        kinds = {kind for kind in often if rng.random() < 0.15}
        kinds |= {kind for kind in DEADLY if rng.random() < 0.04}
        return cls(rng, frozenset() if rng.random() < 0.33 else frozenset(kinds))

    def happens(self, kind: str) -> bool:
        """By lot; counted."""
        if kind not in self.kinds or self._rng.random() >= KINDS[kind]:
            return False
        self.happened[kind] += 1
        return True

    # -- of the model's step --------------------------------------------------------------------

    def seconds(self) -> float:
        """Draw the time that a step takes."""
        if self.happens("model hangs"):
            return self._rng.choice([HANGS, 1000.0])
        if self.happens("slow step"):
            return 30.0
        return self._rng.expovariate(100.0)

    def add_those_of_tiers(self, rng: random.Random) -> None:
        """Add faults of tiers: half of the worlds with tiers have some."""
        if rng.random() < 0.5:
            self.kinds |= {kind for kind in OF_TIERS if rng.random() < 0.4}
            self.happened |= {kind: 0 for kind in sorted(self.kinds) if kind in OF_TIERS}

    def add_those_of_states(self, rng: random.Random) -> None:
        """Add faults of recurrent states: half of the worlds with states have them."""
        if rng.random() < 0.5:
            self.kinds |= set(OF_STATES)
            self.happened |= dict.fromkeys(OF_STATES, 0)

    def io_seconds(self) -> float:
        """Draw the time that a call of the tiers takes."""
        if self.happens("tier hangs"):
            return 200.0
        return 2.0 if self.happens("tier is slow") else self._rng.expovariate(500.0)

    def before(self, plan: StepPlan, decoder: HashDecoder) -> None:
        """Raises where the forward pass is to fail; marks rows that come out broken."""
        self._under_way = ids = {row.request_id for row in plan.requests}
        self.is_dead = self.is_dead or self.happens("forward fails for good")
        if self.is_dead or self.happens("forward raises"):
            self.blamed |= ids
            raise Fault("the forward pass failed")
        if failing_requests := ids & self.poison:
            self.happened["poison"] = self.happened.get("poison", 0) + 1
            self.blamed |= failing_requests if len(failing_requests) == 1 else ids
            raise Fault("the forward pass failed for one of its requests")
        if any(row.stop - row.start > 1 for row in plan.requests) and self.happens("out of memory"):
            self.blamed |= ids
            raise OutOfMemory
        decoder.broken = {self._rng.choice(sorted(ids))} if self.happens("not finite") else set()
        self.broken |= decoder.broken

    def between_layers(self, layer: int) -> None:
        """Raises where some layers have moved a state on and others have not."""
        if self.happens("layer raises"):
            self.blamed |= self._under_way
            raise Fault(f"the forward pass failed in layer {layer}")

    def after(self, plan: StepPlan) -> None:
        """Raises when the KV is written already."""
        if self.happens("forward raises late"):
            self.blamed |= {row.request_id for row in plan.requests}
            raise Fault("the forward pass failed at its end")
