"""Simulation of agents' sessions: prompt tokens that each pin policy saves, by pool size.

The prefix cache is the real one; time is virtual, and there is no model. Recordings of sessions say
how their prompts grow. They hold no times, so the waits between turns are random: they are drawn
from a mix. The mix `measured` is close to what TraceLab (University of Washington, 2026) measured
in 4,265 sessions of Claude Code and Codex: a tool takes 0.3 s (median), 13.6 s (90th
percentile) or 3.6 minutes (99th), and a person answers after 1.4 minutes (median) or 20.6 minutes
(90th). `slow` has mostly tests and sub-agents, and `one` has a single tool.

    python -m foretoken.bench.lab.session_pins --out FILE
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
import sys
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count, pairwise
from pathlib import Path
from random import Random
from typing import NamedTuple

from ...radix_cache import KVLease, Node, PrefixCache
from ...radix_cache.eviction import EvictionIndex, NamespaceQuota
from ...radix_cache.prefix_cache import PIN_QUOTA
from ..common.report import heading, table, write_json
from ..load.recording import Request, is_answer, read_recordings

RECORDINGS = Path(__file__).resolve().parents[1] / "recordings"
PAGE_SIZE = 16  # tokens
CHARS = 4  # characters of a body that count as a token
SPAN = 1_000_000  # number of token ids reserved for each session and each agent
PREFILL, DECODE = 8_000.0, 60.0  # tokens per second of one request
FIRST = 100  # session n has the token ids from (n + FIRST) * SPAN on; agents have lower ones
MAX_RUNNING = 8
START_GAP = 3.0  # seconds between the first requests
STEPS = 9  # number of answers between two messages of a person
SHARES = (1, 2, 4)  # pool sizes: the most tokens of live sessions, divided by these


class Wait(NamedTuple):
    """A kind of wait between two turns, with a log-normal distribution."""

    name: str
    share: float  # share of all waits
    median: float  # seconds
    spread: float  # standard deviation of the logarithm of the seconds


class Mix(NamedTuple):
    """The kinds of waits in a workload."""

    tools: Sequence[Wait]
    person: Wait | None  # the wait after every `STEPS` answers; None: no such waits


MIXES = {
    "measured": Mix(
        (
            Wait("read", 0.45, 0.08, 0.6),
            Wait("search", 0.25, 0.3, 0.8),
            Wait("shell", 0.18, 2.0, 1.0),
            Wait("tests", 0.09, 25.0, 0.6),
            Wait("agent", 0.03, 180.0, 0.5),
        ),
        Wait("", 1.0, 84.0, 2.1),
    ),
    "slow": Mix(
        (
            Wait("read", 0.2, 0.1, 0.6),
            Wait("shell", 0.2, 2.0, 1.0),
            Wait("tests", 0.35, 40.0, 0.4),
            Wait("agent", 0.25, 240.0, 0.4),
        ),
        None,
    ),
    "one": Mix((Wait("tests", 1.0, 40.0, 0.4),), None),
}


class Shape:
    """How the prompts of a recorded session grow, in tokens."""

    def __init__(self, requests: Sequence[Request]) -> None:
        body = requests[0].body
        fixed = [body.get(name) or "" for name in ("tools", "system", "instructions")]
        self.num_shared = _tokens(fixed)  # tokens of the agent's tools and system text
        self.prompts = [_tokens(each.items) for each in requests]
        self.answers = [
            max(
                PAGE_SIZE,
                _tokens([item for item in now.items[len(before.items) :] if is_answer(item)]),
            )
            for before, now in pairwise(requests)
        ]
        self.answers.append(self.answers[-1])


def _tokens(value: object) -> int:
    return len(json.dumps(value)) // CHARS


@dataclass(eq=False)
class Session:
    """A simulated session. ``turn``: index of its present turn."""

    number: int
    kind: int  # index of its shape
    shape: Shape
    waits: Sequence[tuple[str, float]]  # label and seconds of the wait after each turn but the last
    closes: bool  # whether its last request ends the session
    turn: int = 0
    began: float = 0.0  # time when the running turn began to read the cache
    returns: float = 0.0  # time of its next request; while a request runs, the time when it began
    tokens: array[int] = field(default_factory=lambda: array("q"))

    def __post_init__(self) -> None:
        """Make the token ids of the longest prompt and the longest answer."""
        own = max(self.shape.prompts) + max(self.shape.answers)
        first = (self.number + FIRST) * SPAN
        self.tokens.extend(range(self.kind * SPAN, self.kind * SPAN + self.shape.num_shared))
        self.tokens.extend(range(first, first + own))

    @property
    def name(self) -> str:
        """The session's name in the cache."""
        return f"session {self.number}"

    @property
    def prompt(self) -> array[int]:
        """The tokens of the present prompt."""
        return self.tokens[: self.shape.num_shared + self.shape.prompts[self.turn]]

    @property
    def prompt_and_answer(self) -> array[int]:
        """The tokens of the present prompt and its answer."""
        return self.tokens[: len(self.prompt) + self.shape.answers[self.turn]]


class Policy:
    """A policy without pins: the cache evicts the least recently used pages first."""

    session_ttl = 0.0
    pin_quota = PIN_QUOTA

    def make(self, num_pages: int, simulation: Simulation) -> PrefixCache:  # noqa: ARG002
        """Return a prefix cache of ``num_pages`` pages."""
        ttl, quota = self.session_ttl, self.pin_quota
        return PrefixCache(num_pages, PAGE_SIZE, session_ttl=ttl, pin_quota=quota)

    def end_turn(self, cache: PrefixCache, session: Session, label: str | None) -> None:
        """Inform the cache that a turn has ended.

        ``label``: label of the wait that follows; None after the last turn.
        """


class Fixed(Policy):
    """Policy that pins each turn for five minutes."""

    session_ttl = 300.0

    def end_turn(self, cache: PrefixCache, session: Session, label: str | None) -> None:  # noqa: ARG002
        """Pin the turn."""
        _pin(cache, session)


class Fitted(Fixed):
    """Policy that pins each turn for the predicted time of the wait, and ends closed sessions."""

    def end_turn(self, cache: PrefixCache, session: Session, label: str | None) -> None:
        """Pin the turn; then inform the cache of the session's wait, or of its end."""
        _pin(cache, session)
        if label is None and session.closes:
            cache.end_session(session.name)
        else:
            cache.expect(session.name, label or "")


class Whole(Fitted):
    """`Fitted`, where pins may take the whole pool: one order of worth for all waiting sessions."""

    pin_quota = 1.0


def _pin(cache: PrefixCache, session: Session) -> None:
    tokens = session.prompt_and_answer
    cache.pin_session(tokens, len(tokens), session=session.name, began=session.began)


class Oracle(Policy):
    """Policy that evicts the pages whose next use is latest, which only a simulation can know."""

    def make(self, num_pages: int, simulation: Simulation) -> PrefixCache:
        """Return a prefix cache that evicts the pages with the latest next use first."""
        cache = super().make(num_pages, simulation)
        cache.tree._index = _Foreseen(simulation)
        return cache


class _Foreseen(EvictionIndex):
    """Leaves in the order of their next use, the latest first."""

    def __init__(self, simulation: Simulation) -> None:
        super().__init__()
        self._simulation = simulation

    def take(
        self,
        missing: int,
        owned: NamespaceQuota,  # noqa: ARG002
        num_evicted: int,  # noqa: ARG002
    ) -> tuple[Node | None, int, bool]:
        """Remove the leaf whose next use is latest. O(leaves)."""
        if not len(self):
            return None, missing, False
        leaf = max(self, key=lambda each: self._simulation.next_use(each.key[-1] // SPAN))
        self.remove(leaf)
        return leaf, missing, False


POLICIES: dict[str, Callable[[], Policy]] = {
    "oracle": Oracle, "last use": Policy, "fixed pins": Fixed, "fitted pins": Fitted,
    "fitted pins, whole pool": Whole,
}  # fmt: skip


class Simulation:
    """Simulates sessions on a cache: ``num_live`` at a time, ``num_all`` in total."""

    def __init__(
        self, shapes: Sequence[Shape], mix: Mix, policy: Policy, num_pages: int, *,
        num_live: int, num_all: int, seed: int,
    ) -> None:  # fmt: skip
        self.num_saved = self.num_asked = 0  # prompt tokens: read from the cache, and in total
        self.most_needed = 0  # maximum number of tokens of live sessions at a time
        self._shapes, self._mix, self._policy, self._seed = shapes, mix, policy, seed
        self._num_all, self._numbers = num_all, count()
        self._live: dict[int, Session] = {}
        self._queue: deque[Session] = deque()
        self._num_running = 0
        self._now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._serials = count()
        self._cache = policy.make(num_pages, self)
        for index in range(num_live):
            self._begin(index * START_GAP)

    def run(self) -> Simulation:
        """Run all sessions to their ends; return this object."""
        while self._events:
            self._now, _, act = heapq.heappop(self._events)
            self._cache.tick(self._now)
            act()
        self._cache.check([])
        return self

    def next_use(self, owner: int) -> float:
        """Return the time when the pages of an agent or session are read next.

        ``owner``: number of an agent, or `FIRST` plus the number of a session.
        """
        if owner >= len(self._shapes):
            session = self._live.get(owner - FIRST)
            return math.inf if session is None else session.returns
        own = [each.returns for each in self._live.values() if each.kind == owner]
        return min(own, default=math.inf)

    def _at(self, time: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time, next(self._serials), act))

    def _begin(self, time: float) -> None:
        number = next(self._numbers)
        if number >= self._num_all:
            return
        rng, kind = Random(self._seed * 7919 + number), number % len(self._shapes)
        shape = self._shapes[kind]
        waits = [self._draw(rng, turn) for turn in range(1, len(shape.prompts))]
        session = Session(number, kind, shape, waits, closes=rng.random() < 0.5, returns=time)
        self._live[number] = session
        self._at(time, lambda: self._arrive(session))

    def _draw(self, rng: Random, turn: int) -> tuple[str, float]:
        tools, person = self._mix
        wait = rng.choices(tools, [each.share for each in tools])[0]
        if person is not None and turn % STEPS == 0:
            wait = person
        return wait.name, math.exp(rng.gauss(math.log(wait.median), wait.spread))

    def _arrive(self, session: Session) -> None:
        self._queue.append(session)
        self._admit()

    def _admit(self) -> None:
        while self._queue and self._num_running < MAX_RUNNING:
            session = self._queue[0]
            lease = self._cache.acquire(session.prompt)
            if not self._cache.extend(lease, len(session.prompt_and_answer)):
                self._cache.release(lease, session.prompt, lease.num_cached_tokens)
                if not self._num_running:
                    raise SystemExit("the pool is too small for the longest session")
                return
            self._queue.popleft()
            self._run(session, lease)

    def _run(self, session: Session, lease: KVLease) -> None:
        self._num_running += 1
        session.began = session.returns = self._now
        num_left = len(session.prompt) - lease.num_cached_tokens
        self.num_saved += lease.num_cached_tokens
        self.num_asked += len(session.prompt)
        seconds = num_left / PREFILL + session.shape.answers[session.turn] / DECODE
        self._at(self._now + seconds, lambda: self._end(session, lease))

    def _end(self, session: Session, lease: KVLease) -> None:
        self._cache.release(lease, session.prompt_and_answer, len(session.prompt_and_answer))
        self._num_running -= 1
        is_last = session.turn == len(session.waits)
        label, seconds = (None, math.inf) if is_last else session.waits[session.turn]
        session.returns = self._now + seconds
        self._policy.end_turn(self._cache, session, label)
        if is_last:
            del self._live[session.number]
            self._begin(self._now)
        else:
            session.turn += 1
            self._at(session.returns, lambda: self._arrive(session))
        own = sum(each.shape.prompts[each.turn] for each in self._live.values())
        shared = sum(each.num_shared for each in self._shapes)
        self.most_needed = max(self.most_needed, own + shared)
        self._admit()


def results(shapes: Sequence[Shape], args: argparse.Namespace) -> list[dict[str, object]]:
    """Return a row for each mix and pool size, with the figures of each policy."""
    rows = []
    for name, mix in MIXES.items():

        def run(policy: str, num_pages: int, mix: Mix = mix) -> Simulation:
            return Simulation(
                shapes, mix, POLICIES[policy](), num_pages,
                num_live=args.live, num_all=args.sessions, seed=args.seed,
            ).run()  # fmt: skip

        need = run("last use", args.sessions * 4096).most_needed
        for share in SHARES:
            runs = {each: run(each, need // share // PAGE_SIZE) for each in POLICIES}
            best = runs["oracle"].num_saved
            row: dict[str, object] = {"waits": name, "pool": f"1/{share}", "tokens": need // share}
            for policy, simulation in runs.items():
                hit = simulation.num_saved / simulation.num_asked
                row[policy] = f"{hit:.3f}, {simulation.num_saved / best:.3f}"
            rows.append(row)
            print(".", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. Returns 0."""
    parser = argparse.ArgumentParser(
        prog="session_pins", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--live", type=int, default=32, help="number of sessions at a time")
    parser.add_argument("--sessions", type=int, default=128, help="number of sessions in total")
    parser.add_argument("--seed", type=int, default=1, help="seed of the waits")
    parser.add_argument("--out", type=Path, help="file for the figures as JSON")
    args = parser.parse_args(argv)
    shapes = [Shape(each) for each in read_recordings(RECORDINGS).values()]
    rows = results(shapes, args)
    print("hit rate of the prompts' tokens, and saved tokens over those of the oracle\n")
    print(table(rows))
    if args.out is not None:
        write_json(args.out, {**heading(), "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
