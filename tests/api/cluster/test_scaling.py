"""The number of replicas that there should be: enough, none too many, and no coming and going."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest

from foretoken.api.cluster.scaling import CALM, FULL, ReplicaLoad, Wanted, replica_load, want
from foretoken.api.cluster.wire.messages import Load

RECORDED = Path(__file__).with_name("recorded_load.json")
QUIET = 5.0  # seconds


def loads(*usages: float, waiting: float = 0) -> list[ReplicaLoad]:
    """Loads by usage; the requests wait at the last replica."""
    return [ReplicaLoad(usage, 0) for usage in usages[:-1]] + [ReplicaLoad(usages[-1], waiting)]


def wanted(
    found: Sequence[ReplicaLoad],
    current: int | None = None,
    *,
    least: int = 1,
    most: int = 8,
    now: float = 100.0,
    calm_since: float | None = None,
) -> Wanted:
    return want(
        found,
        len(found) if current is None else current,
        least,
        most,
        now=now,
        calm_since=calm_since,
        quiet_seconds=QUIET,
    )


@pytest.mark.parametrize(
    ("usages", "replicas"),
    [((0.7,), 1), ((0.71,), 2), ((0.7, 0.7, 0.7), 3), ((0.9, 0.9), 3), ((1.0, 0.2), 2),
     ((1.0, 1.0, 1.0, 1.0), 6)],
)  # fmt: skip
def test_replicas_are_added_until_they_are_full_on_average(
    usages: tuple[float, ...], replicas: int
) -> None:
    assert wanted(loads(*usages)) == Wanted(replicas, None)


def test_one_more_is_wanted_while_requests_wait() -> None:
    assert wanted(loads(0.1, 0.1, waiting=1)) == Wanted(3, None)
    assert wanted(loads(1.0, 1.0, waiting=9)) == Wanted(3, None)
    assert wanted(loads(1.0, 1.0, 1.0, waiting=9)) == Wanted(5, None)
    assert wanted(loads(0.5, 0.5, waiting=0.9)).replicas == 2


def test_requests_that_wait_while_a_replica_starts_ask_for_no_other_one() -> None:
    assert wanted(loads(1.0, waiting=50), 2) == Wanted(2, None)
    assert wanted(loads(1.0, 1.0, waiting=50), 2).replicas == 3


def test_one_that_leaves_and_still_reports_counts_as_load_alone() -> None:
    assert wanted(loads(0.6, 0.2), 1).replicas == 2
    assert wanted(loads(0.4, 0.2), 1).replicas == 1
    assert wanted(loads(0.4, 0.2, waiting=1), 1).replicas == 2


def test_the_bounds_hold() -> None:
    assert wanted(loads(1.0, 1.0, waiting=5), most=2) == Wanted(2, None)
    assert wanted(loads(0.0, 0.0), least=2, calm_since=0.0) == Wanted(2, None)
    assert wanted(loads(0.5, 0.5, 0.5), least=1, most=2) == Wanted(2, None)
    assert wanted(loads(0.0), least=3) == Wanted(3, None)
    assert wanted([], 2) == Wanted(2, None)
    for least, most in ((0, 2), (3, 2)):
        with pytest.raises(ValueError, match="at least 1"):
            wanted(loads(0.5), least=least, most=most)


def test_one_is_removed_when_the_rest_were_calm_for_the_quiet_period() -> None:
    calm = loads(0.3, 0.29)
    begun = wanted(calm, now=100.0)
    assert begun == Wanted(2, 100.0)
    assert wanted(calm, now=104.9, calm_since=begun.calm_since) == begun
    assert wanted(calm, now=105.0, calm_since=begun.calm_since) == Wanted(1, 105.0)


def test_replicas_go_one_at_a_time() -> None:
    idle, current, calm_since = [ReplicaLoad(0.0, 0)], 4, None
    removed = []
    for now in range(40):
        answer = wanted(idle * current, now=now, calm_since=calm_since)
        removed += [now] * (current - answer.replicas)
        current, calm_since = answer
    assert removed == [5, 10, 15]


@pytest.mark.parametrize(
    "found",
    [loads(0.3, CALM - 0.3), loads(0.1, 0.1, waiting=1), loads(0.1)],
    ids=["the rest would be full", "requests wait", "one of two does not serve"],
)
def test_none_is_removed_while_it_is_needed(found: list[ReplicaLoad]) -> None:
    answer = wanted(found, 2, calm_since=0.0)
    assert answer.replicas >= 2
    assert answer.calm_since is None


def test_seats_are_room_too() -> None:
    """Short requests fill `max_running` long before they fill the pool."""
    load = Load(running=6, waiting=2, kv_usage=0.2)
    assert replica_load(load, 8) == ReplicaLoad(0.75, 2)
    assert replica_load(load, 64) == ReplicaLoad(0.2, 2)


# -- in virtual time ------------------------------------------------------------------------------


def sizes(demand: Iterator[float], current: int, *, seconds: int = 400) -> list[int]:
    """The sizes that follow one another under a demand, in pools, one call a second."""
    found, calm_since = [current], None
    for now in range(seconds):
        each = next(demand) / current
        answer = wanted(
            [ReplicaLoad(min(each, 1.0), int(each > 1))] * current, now=now, calm_since=calm_since
        )
        current, calm_since = answer
        if current != found[-1]:
            found.append(current)
    return found


@pytest.mark.parametrize("current", [1, 3, 8])
def test_a_load_that_stays_the_same_never_adds_and_removes(current: int) -> None:
    for hundredths in range(0, 400, 7):
        demand = hundredths / 100
        found = sizes(iter(lambda demand=demand: demand, None), current)
        assert found in (sorted(found), sorted(found, reverse=True)), demand
        assert demand <= FULL * found[-1] + 1e-9
        assert found[-1] == 1 or demand >= CALM * (found[-1] - 1)


@pytest.mark.parametrize("seed", range(5))
def test_a_load_that_varies_a_little_never_adds_and_removes(seed: int) -> None:
    rng = random.Random(seed)
    middle = rng.uniform(0.2, 4.0)

    def demand() -> Iterator[float]:
        while True:
            yield middle * rng.uniform(0.95, 1.05)

    upwards, downwards = sizes(demand(), 1), sizes(demand(), 8)
    assert upwards == sorted(upwards)
    assert downwards == sorted(downwards, reverse=True)


class Recorded(msgspec.Struct, array_like=True):
    """A request to one engine with the built-in pair and a pool of 4,096 tokens."""

    arrival: float  # seconds
    num_tokens: int  # of prompt and answer
    seconds: float  # from its admission to its end


@dataclass
class Pool:
    """A replica that admits requests in order while there is room."""

    ready_at: float
    is_leaving: bool = False
    running: list[tuple[float, int]] = field(default_factory=list)  # end, tokens
    waiting: list[Recorded] = field(default_factory=list)

    NUM_TOKENS = 4_096
    SEATS = 32

    def advance(self, now: float) -> None:
        self.running = [each for each in self.running if each[0] > now]
        while self.waiting and self._has_room(self.waiting[0]):
            request = self.waiting.pop(0)
            self.running.append((now + request.seconds, request.num_tokens))

    @property
    def _held(self) -> int:
        return sum(num_tokens for _, num_tokens in self.running)

    def _has_room(self, request: Recorded) -> bool:
        return self._held + request.num_tokens <= self.NUM_TOKENS

    @property
    def owed(self) -> int:
        return self._held + sum(each.num_tokens for each in self.waiting)

    @property
    def load(self) -> ReplicaLoad:
        now = Load(
            running=len(self.running),
            waiting=len(self.waiting),
            kv_usage=self._held / self.NUM_TOKENS,
        )
        return replica_load(now, self.SEATS)


@dataclass
class Replayed:
    """A recorded load on as many replicas as are wanted, which take a while to start."""

    most: int
    start_seconds: float = 2.0
    current: int = 1
    calm_since: float | None = None
    pools: list[Pool] = field(default_factory=lambda: [Pool(0.0)])
    changes: list[tuple[float, int]] = field(default_factory=list)

    def run(self, requests: Sequence[Recorded]) -> list[int]:
        """Return the sizes that followed one another."""
        todo = list(requests)
        for tick in range(600):
            now = tick / 10
            serving = [each for each in self.pools if each.ready_at <= now]
            while todo and todo[0].arrival <= now:
                free = [each for each in serving if not each.is_leaving]
                min(free, key=lambda each: each.owed).waiting.append(todo.pop(0))
            for each in serving:
                each.advance(now)
            if tick % 5 == 0:
                self._scale(now, [each.load for each in serving])
        assert not todo
        assert all(each.owed == 0 for each in self.pools)
        return [1, *(replicas for _, replicas in self.changes)]

    def _scale(self, now: float, found: list[ReplicaLoad]) -> None:
        before = self.current
        self.current, self.calm_since = wanted(
            found, before, most=self.most, now=now, calm_since=self.calm_since
        )
        if self.current != before:
            self.changes.append((now, self.current))
        self.pools = [each for each in self.pools if not each.is_leaving or each.owed]
        self.pools += [Pool(now + self.start_seconds) for _ in range(self.current - before)]
        for each in self.pools[len(self.pools) - max(before - self.current, 0) :]:
            each.is_leaving = True


@pytest.mark.parametrize("most", [2, 4])
def test_a_recorded_load_is_followed_up_and_down_once(most: int) -> None:
    """Less than one request a second, from the 12th second to the 28th nine, then few again."""
    requests = msgspec.json.decode(RECORDED.read_bytes(), type=list[Recorded])
    replayed = Replayed(most)
    assert replayed.run(requests) == [1, 2, 1]
    (up, _), (down, _) = replayed.changes
    assert 12 < up < 16
    assert 28 < down < 35
