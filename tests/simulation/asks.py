"""Requests of simulated clients, and the answers they must get, known in advance."""

from __future__ import annotations

import random
from array import array
from dataclasses import dataclass

from foretoken.api.types.sampling_params import SamplingParams
from foretoken.core.interface.request import DEFAULT_CACHE, CacheOptions, OnToken, Pin, Request
from foretoken.core.interface.sampling import SamplingMetadata

from .model import VOCAB_SIZE, solo

NUM_SALTS = 3
STOPPED = "the stop string"
HABITS = (
    "salts",
    "priorities",
    "deadlines",
    "stops",
    "fails",
    "cache",
    "depth",
    "echoes",
    "poison",
)


def namespace_of(salt: int) -> str | None:
    """Return the namespace of a salt; 0 is the shared default."""
    return f"tenant-{salt}" if salt else None


class CannotRead(RuntimeError):
    """The request's own ``on_token`` fails."""


@dataclass(frozen=True, kw_only=True)
class Ask:
    """One request. Tokens are counted from the first of the answer, 1."""

    prompt: tuple[int, ...]
    max_tokens: int
    salt: int = 0  # 0: the shared default
    stop_ids: frozenset[int] = frozenset()
    stops_after: int | None = None  # the token with which a stop string is complete
    fails_after: int | None = None  # the token that its ``on_token`` cannot read
    priority: int = 0
    deadline: float | None = None  # seconds
    depth: int | None = None
    cache: CacheOptions = DEFAULT_CACHE
    prediction: tuple[int, ...] | None = None
    echoes: bool = False  # wants the log-probabilities of its prompt
    is_poison: bool = False  # no step that computes it succeeds

    @property
    def namespace(self) -> str | None:
        return namespace_of(self.salt)

    def right(self, capacity: int) -> tuple[tuple[int, ...], str]:
        """The tokens of the solo run within a pool of so many, and how it ends."""
        room = min(self.max_tokens, capacity - len(self.prompt))
        said = solo(self.prompt, self.salt, room)
        for count, token in enumerate(said, 1):
            if token in self.stop_ids:
                return said[:count], "stop"
            if count == self.fails_after:
                return said[:count], "error"
            if count == self.stops_after:
                return said[:count], "stop"
        return said, "length"

    def request(self, request_id: str) -> Request:
        """A fresh one."""
        params = SamplingParams(
            max_tokens=self.max_tokens,
            temperature=0.0,
            prompt_logprobs=0 if self.echoes else None,
        )
        return Request(
            request_id=request_id,
            tokens=array("q", self.prompt),
            sampling=SamplingMetadata(params=params, seed=self.salt, prompt_len=len(self.prompt)),
            stop_ids=self.stop_ids,
            depth=self.depth,
            prediction=None if self.prediction is None else array("q", self.prediction),
            namespace=self.namespace,
            tenant=self.namespace,
            cache=self.cache,
            priority=self.priority,
            deadline=self.deadline,
            on_token=self._on_token(),
        )

    def _on_token(self) -> OnToken | None:
        if self.stops_after is None and self.fails_after is None:
            return None
        count = 0

        def on_token(token_id: int) -> str | None:
            nonlocal count
            count += 1
            if count == self.fails_after:
                raise CannotRead
            return STOPPED if count == self.stops_after else None

        return on_token


class Asks:
    """Draws requests whose prompts share beginnings; each seed has habits of its own."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        longest = rng.choice([6, 12, 30])
        self.stems = [self._draw(rng.randint(1, longest)) for _ in range(rng.randint(1, 4))]
        self._habits = {habit: rng.random() < 0.4 for habit in HABITS}

    def _draw(self, num_tokens: int) -> tuple[int, ...]:
        return tuple(self._rng.randrange(VOCAB_SIZE) for _ in range(num_tokens))

    def _is(self, habit: str, share: float) -> bool:
        return self._habits[habit] and self._rng.random() < share

    def one(self, *, is_plain: bool = False) -> Ask:
        """The next; a plain one has neither deadline nor faults of its own."""
        rng = self._rng
        prompt = rng.choice(self.stems) + self._draw(rng.randint(0, 3))
        if rng.random() < 0.2:  # a conversation goes on from an earlier answer
            prompt += solo(prompt, 0, rng.randint(1, 8)) + self._draw(1)
        salt = rng.randrange(NUM_SALTS) if self._habits["salts"] else 0
        max_tokens = rng.choice([1, 2, 4, 8, 20, 40, 40])
        guess = solo(prompt, salt, max_tokens) if rng.random() < 0.2 else None
        return Ask(
            prompt=prompt,
            salt=salt,
            max_tokens=max_tokens,
            stop_ids=frozenset({rng.randrange(VOCAB_SIZE)})
            if self._is("stops", 0.3)
            else frozenset(),
            stops_after=rng.randint(1, max_tokens) if self._is("stops", 0.3) else None,
            fails_after=(
                rng.randint(1, max_tokens) if not is_plain and self._is("fails", 0.15) else None
            ),
            priority=rng.randint(-1, 2) if self._habits["priorities"] else 0,
            deadline=(
                rng.choice([0.0, 0.05, 0.5, 5.0])
                if not is_plain and self._is("deadlines", 0.3)
                else None
            ),
            depth=rng.choice([0, 1, 5]) if self._is("depth", 0.5) else None,
            cache=self._cache(len(prompt)) if self._habits["cache"] else DEFAULT_CACHE,
            prediction=guess,
            echoes=self._is("echoes", 0.3),
            is_poison=not is_plain and self._is("poison", 0.08),
        )

    def _cache(self, prompt_len: int) -> CacheOptions:
        rng = self._rng
        pins = (Pin(rng.randint(1, prompt_len), rng.choice([0.05, 1.0, 60.0])),)
        return CacheOptions(
            read=rng.random() < 0.8,
            write=rng.random() < 0.8,
            pins=pins if rng.random() < 0.3 else (),
        )
