"""Replicas of a plan: an update proves itself by its first new replica, or leaves all as it was.

The cluster is a test's own, in virtual time; `server/test_ray.py` has the real one.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from foretoken.api.build.engine_builder import build
from foretoken.api.cluster.launcher import (
    SETTLE_SECONDS,
    UPDATE_SECONDS,
    LauncherError,
    PlannedReplicas,
    ReplicaPlan,
    Rollout,
)
from foretoken.api.serving.errors import UpdateUnderWay
from foretoken.core.config import EngineConfig
from foretoken.core.errors import ForetokenError, InvalidRequest

SECONDS = 20.0  # of a test
GOOD, BAD = {"kv_tokens": 4096}, {"draft": "/nowhere"}


def plan(replicas: int = 2, **changes: Any) -> ReplicaPlan:
    given = {"least": replicas, "most": replicas, "options": {"threads": 1}, **changes}
    return ReplicaPlan(
        **({"model": None, "front": "", "cpus": 1, "gpus": 0, "quiet_seconds": 1} | given)
    )


@dataclass
class Started:
    """A replica, from the call that started it."""

    version: str
    comes_at: float


@dataclass
class RollingCluster:
    """Starts a new replica, and stops an old one when it has come. A look takes a second."""

    start_seconds: float = 5.0
    num_good: int = 1000  # new replicas with bad options that come all the same, before one fails
    hangs: bool = False  # a bad replica does not fail, and never comes
    rejoins: bool = False  # at each look an old one has joined once more
    now: float = 0.0
    num_joined: int = 0
    is_gone: bool = False
    is_open: bool = False
    serving: list[Started] = field(default_factory=list)
    starting: list[Started] = field(default_factory=list)
    deployed: list[ReplicaPlan] = field(default_factory=list)
    num_updates: int = 0  # deployments for which there must be room for one replica more
    fewest: int = 1000  # replicas that served at once, ever since all had come
    _failure: str | None = None

    def open(self, plan: ReplicaPlan) -> None:
        self.is_open = True

    def close(self) -> None:
        self.is_open = False

    def deploy(self, plan: ReplicaPlan, *, is_update: bool = False) -> None:
        assert self.is_open
        if self.is_gone:
            raise LauncherError("it is gone")
        if not self.deployed:
            self.serving = [Started(plan.version, 0.0) for _ in range(plan.least)]
            self.num_joined = plan.least
        self.deployed.append(plan)
        self.num_updates += is_update
        self._failure = None
        self.starting = [each for each in self.starting if each.version == plan.version]
        self._stop_surplus()

    def _stop_surplus(self) -> None:
        """Stop as many as are too many: those of an earlier plan before others."""
        plan = self.deployed[-1]
        by_age = sorted(self.serving, key=lambda each: each.version != plan.version)
        for each in by_age[plan.least :]:
            self.serving.remove(each)

    @property
    def versions(self) -> Counter[str]:
        return Counter(each.version for each in self.serving)

    def rollout(self) -> Rollout:
        self.now += 1
        self.num_joined += self.rejoins
        if self.is_gone:
            return Rollout(failure="it is gone", is_gone=True)
        if self._failure is None:
            self._go_on()
        plan = self.deployed[-1]
        is_complete = self.versions == {plan.version: plan.least} and not self.starting
        return Rollout(failure=self._failure, is_complete=is_complete)

    def _go_on(self) -> None:
        plan = self.deployed[-1]
        missing = plan.least - self.versions[plan.version]
        if missing and not self.starting:
            self.starting = [Started(plan.version, self.now + self.start_seconds)]
        elif self.starting and self.now >= self.starting[0].comes_at:
            self._come(plan)
        self.fewest = min(self.fewest, len(self.serving))

    def _come(self, plan: ReplicaPlan) -> None:
        is_bad = BAD.items() <= plan.options.items()
        if is_bad and not self.num_good:
            self._failure = None if self.hangs else "draft: /nowhere is not there"
            return
        self.num_good -= is_bad
        self.serving += self.starting
        self.num_joined += 1
        self.starting = []
        self._stop_surplus()


@dataclass
class BuildingCluster(RollingCluster):
    """Builds the engine of each new replica by its options, as the process of one does."""

    def _come(self, plan: ReplicaPlan) -> None:
        try:
            build(plan.model, EngineConfig(**plan.options), wants_keys=True)
        except ForetokenError as error:
            self._failure = str(error)
        else:
            super()._come(plan)


async def started(cluster: RollingCluster, wanted: ReplicaPlan) -> PlannedReplicas:
    replicas = PlannedReplicas(wanted, cluster, clock=lambda: cluster.now, look_seconds=1e-4)
    await replicas.start("tcp://here:1", lambda: cluster.num_joined)
    return replicas


async def ended(replicas: PlannedReplicas) -> dict[str, Any]:
    """The outcome of an update."""
    while replicas.update is None or replicas.update["state"] == "running":  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    return replicas.update


def run(
    test: Callable[[PlannedReplicas], Awaitable[None]], cluster: RollingCluster, wanted: ReplicaPlan
) -> None:
    async def body() -> None:
        async with asyncio.timeout(SECONDS):
            replicas = await started(cluster, wanted)
            try:
                await test(replicas)
            finally:
                await replicas.close()
        assert not cluster.is_open

    asyncio.run(body())


def test_an_update_replaces_all_and_none_is_missing_meanwhile() -> None:
    cluster = RollingCluster()

    async def test(replicas: PlannedReplicas) -> None:
        before = cluster.serving[:]
        await replicas.change(None, GOOD)
        assert replicas.update == {"state": "running", "reason": None}
        assert await ended(replicas) == {"state": "done", "reason": None}
        assert cluster.versions == {replicas.plan.version: 2}
        assert not [each for each in cluster.serving if each in before]
        assert replicas.plan.options == {"threads": 1, **GOOD}
        assert cluster.num_updates == 1

    run(test, cluster, plan())
    assert cluster.fewest == 2


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_options_with_which_no_replica_comes_leave_all_as_it_was(
    replicas: int, caplog: pytest.LogCaptureFixture
) -> None:
    cluster = RollingCluster(num_good=0)

    async def test(planned: PlannedReplicas) -> None:
        before, wanted = cluster.serving[:], planned.plan
        await planned.change(None, BAD)
        undone = {"state": "undone", "reason": "draft: /nowhere is not there"}
        assert await ended(planned) == undone
        assert cluster.serving == before
        assert planned.plan == cluster.deployed[-1] == wanted
        assert await planned.failure() is None
        await planned.change(None, GOOD)  # the next one is an update like any other
        assert (await ended(planned))["state"] == "done"

    run(test, cluster, plan(replicas))
    assert cluster.fewest == replicas
    (line,) = [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]
    assert "draft: /nowhere is not there" in line


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"kv_memory": "1KiB"}, "kv_memory must be at least"),
        (BAD, "draft: /nowhere"),
    ],
)
def test_options_that_fail_only_when_a_replica_is_built_leave_both(
    options: dict[str, Any], reason: str
) -> None:
    cluster = BuildingCluster()

    async def test(replicas: PlannedReplicas) -> None:
        before = cluster.serving[:]
        await replicas.change(None, options)
        outcome = await ended(replicas)
        assert outcome["state"] == "undone"
        assert outcome["reason"].startswith(reason)
        assert cluster.serving == before

    run(test, cluster, plan())
    assert cluster.fewest == 2


def test_a_new_replica_that_does_not_come_in_time_leaves_all_as_it_was() -> None:
    cluster = RollingCluster(num_good=0, hangs=True)

    async def test(replicas: PlannedReplicas) -> None:
        before = cluster.serving[:]
        await replicas.change(None, BAD)
        assert await ended(replicas) == {
            "state": "undone", "reason": f"no new replica came in {UPDATE_SECONDS:g} s",
        }  # fmt: skip
        assert UPDATE_SECONDS <= cluster.now < UPDATE_SECONDS + 5
        assert cluster.serving == before
        assert not cluster.starting

    run(test, cluster, plan())
    assert cluster.fewest == 2


def test_old_replicas_that_join_again_keep_no_update_from_its_end() -> None:
    cluster = RollingCluster(num_good=0, hangs=True, rejoins=True)

    async def test(replicas: PlannedReplicas) -> None:
        await replicas.change(None, BAD)
        assert await ended(replicas) == {
            "state": "undone", "reason": f"not all replicas were there in {UPDATE_SECONDS:g} s",
        }  # fmt: skip
        assert UPDATE_SECONDS <= cluster.now < UPDATE_SECONDS + 5

    run(test, cluster, plan(1))


def test_an_error_that_is_not_known_ends_an_update(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = RollingCluster()

    def fail() -> Rollout:
        monkeypatch.undo()  # of this one call
        raise OSError("no route to the head")

    async def test(replicas: PlannedReplicas) -> None:
        wanted = replicas.plan
        await replicas.change(None, GOOD)
        monkeypatch.setattr(cluster, "rollout", fail)
        assert await ended(replicas) == {"state": "undone", "reason": "no route to the head"}
        assert replicas.plan == wanted

    run(test, cluster, plan())


def test_a_front_ends_its_replicas_whatever_became_of_an_update() -> None:
    cluster = RollingCluster(start_seconds=1e9)

    async def test(replicas: PlannedReplicas) -> None:
        await replicas.change(None, GOOD)
        assert replicas._updating is not None
        replicas._updating.cancel()

    run(test, cluster, plan())


def test_replicas_that_come_slowly_have_the_whole_time_each() -> None:
    cluster = RollingCluster(start_seconds=0.9 * UPDATE_SECONDS)

    async def test(replicas: PlannedReplicas) -> None:
        await replicas.change(None, GOOD)
        assert (await ended(replicas))["state"] == "done"
        assert cluster.now > 2 * UPDATE_SECONDS

    run(test, cluster, plan(3))


@pytest.mark.parametrize("hangs", [False, True])
def test_an_update_that_fails_half_way_is_taken_back(hangs: bool) -> None:
    cluster = RollingCluster(num_good=2, hangs=hangs)

    async def test(replicas: PlannedReplicas) -> None:
        wanted = replicas.plan
        await replicas.change(None, BAD)
        assert (await ended(replicas))["state"] == "undone"
        assert cluster.versions == {wanted.version: 3}

    run(test, cluster, plan(3))
    assert cluster.fewest == 3


@pytest.mark.parametrize("replicas", [1, 4])
def test_bounds_that_change_during_an_update_hold_for_the_new_replicas(replicas: int) -> None:
    cluster = RollingCluster()

    async def test(planned: PlannedReplicas) -> None:
        await planned.change(None, GOOD)
        await planned.change((replicas, replicas), None)
        assert planned.update == {"state": "running", "reason": None}
        assert await ended(planned) == {"state": "done", "reason": None}
        assert cluster.versions == {planned.plan.version: replicas}
        assert planned.plan.options == {"threads": 1, **GOOD}
        assert cluster.num_updates == 2, "there must be room for one replica more in both"

    run(test, cluster, plan())
    assert cluster.fewest == min(replicas, 2)


@pytest.mark.parametrize("num_good", [0, 1], ids=["at-once", "half-way"])
@pytest.mark.parametrize("replicas", [1, 3])
def test_bounds_that_change_during_an_update_outlive_it(replicas: int, num_good: int) -> None:
    cluster = RollingCluster(num_good=num_good)

    async def test(planned: PlannedReplicas) -> None:
        version = planned.plan.version
        await planned.change(None, BAD)
        await planned.change((replicas, replicas), None)
        assert (await ended(planned))["state"] == ("undone" if replicas > num_good else "done")
        assert (planned.plan.least, planned.plan.most) == (replicas, replicas)
        assert cluster.deployed[-1] == planned.plan
        if replicas > num_good:
            assert cluster.versions == {version: replicas}

    run(test, cluster, plan())


def test_an_update_with_bounds_of_its_own_takes_them_back_as_well() -> None:
    cluster = RollingCluster(num_good=0)

    async def test(replicas: PlannedReplicas) -> None:
        wanted = replicas.plan
        await replicas.change((3, 3), BAD)
        assert (await ended(replicas))["state"] == "undone"
        assert replicas.plan == wanted

    run(test, cluster, plan())


def test_an_update_waits_for_the_end_of_another() -> None:
    cluster = RollingCluster()

    async def test(replicas: PlannedReplicas) -> None:
        await replicas.change(None, GOOD)
        with pytest.raises(UpdateUnderWay, match="replicas are being replaced"):
            await replicas.change((3, 3), {"kv_tokens": 64})
        await replicas.change(None, GOOD)  # sent twice, it asks for nothing new
        assert replicas.plan == plan(front="tcp://here:1", options={"threads": 1, **GOOD})
        assert (await ended(replicas))["state"] == "done"
        await replicas.change(None, {"kv_tokens": 64})
        assert (await ended(replicas))["state"] == "done"

    run(test, cluster, plan())


def test_shares_of_a_disk_change_neither_during_an_update_nor_when_it_fails() -> None:
    cluster = RollingCluster(num_good=0)
    disk = {"kv_disk": "/disk:1MiB"}

    async def test(replicas: PlannedReplicas) -> None:
        wanted = replicas.plan
        await replicas.change((3, 3), BAD)
        for bounds in ((4, 4), (2, 3)):  # more than are coming, more than would come back
            with pytest.raises(UpdateUnderWay):
                await replicas.change(bounds, None)
        await replicas.change((1, 2), None)
        assert (await ended(replicas))["state"] == "undone"
        assert replicas.plan.version == wanted.version
        assert (replicas.plan.least, replicas.plan.most) == (1, 2)

    run(test, cluster, plan(options=disk))


def test_bounds_for_which_there_is_no_room_leave_an_update_as_it_was() -> None:
    cluster = RollingCluster()

    async def test(replicas: PlannedReplicas) -> None:
        await replicas.change(None, GOOD)
        during, cluster.deploy = replicas.plan, refuse  # type: ignore[method-assign]
        with pytest.raises(LauncherError, match="no room"):
            await replicas.change((9, 9), None)
        assert replicas.plan == during
        assert (await ended(replicas))["state"] == "done"
        assert cluster.versions == {during.version: 2}

    def refuse(plan: ReplicaPlan, *, is_update: bool = False) -> None:
        raise LauncherError("no room")

    run(test, cluster, plan())


def test_bounds_that_come_while_an_update_is_undone_are_the_last_word() -> None:
    cluster = RollingCluster(num_good=0)
    deploy, begun, goes_on = cluster.deploy, threading.Event(), threading.Event()

    def undo_slowly(plan: ReplicaPlan, *, is_update: bool = False) -> None:
        if not begun.is_set():
            begun.set()
            goes_on.wait(SECONDS)
        deploy(plan, is_update=is_update)

    async def test(replicas: PlannedReplicas) -> None:
        await replicas.change(None, BAD)
        cluster.deploy = undo_slowly  # type: ignore[method-assign]
        await asyncio.to_thread(begun.wait, SECONDS)
        changing = asyncio.create_task(replicas.change((3, 3), None))
        await asyncio.sleep(0)
        goes_on.set()
        await changing
        assert (await ended(replicas))["state"] == "undone"
        assert cluster.deployed[-1] == replicas.plan == plan(3, front="tcp://here:1", most_ever=2)

    run(test, cluster, plan())


def test_a_front_closes_while_an_update_is_undone() -> None:
    cluster = RollingCluster(num_good=0)
    deploy, begun, goes_on = cluster.deploy, threading.Event(), threading.Event()

    def undo_slowly(plan: ReplicaPlan, *, is_update: bool = False) -> None:
        begun.set()
        goes_on.wait(SECONDS)
        deploy(plan, is_update=is_update)

    async def test(replicas: PlannedReplicas) -> None:
        await replicas.change(None, BAD)
        cluster.deploy = undo_slowly  # type: ignore[method-assign]
        await asyncio.to_thread(begun.wait, SECONDS)
        closing = asyncio.create_task(replicas.close())
        await asyncio.sleep(0)
        assert cluster.is_open
        goes_on.set()
        await closing
        assert len(cluster.deployed) == 3

    run(test, cluster, plan())


def test_a_failure_is_told_but_for_that_of_an_update() -> None:
    cluster = RollingCluster(num_good=0, start_seconds=0)

    async def test(replicas: PlannedReplicas) -> None:
        cluster._failure = "too little memory"
        assert await replicas.failure() == "too little memory"
        await replicas.change(None, BAD)
        assert replicas.update == {"state": "running", "reason": None}
        cluster._failure = "draft: /nowhere is not there"
        assert await replicas.failure() is None
        await ended(replicas)
        assert await replicas.failure() is None

    run(test, cluster, plan())


def test_an_update_waits_for_replicas_that_start() -> None:
    """A cluster stops those at once whose version is the earlier one."""
    cluster = RollingCluster()

    async def test(replicas: PlannedReplicas) -> None:
        await replicas.change((3, 3), None)
        await replicas.change(None, GOOD)
        assert cluster.versions == {cluster.deployed[1].version: 3}
        await ended(replicas)
        cluster.start_seconds, since = 1e9, cluster.now
        await replicas.change((4, 4), None)
        await replicas.change(None, {"kv_tokens": 64})  # it may be what helps them to start
        assert SETTLE_SECONDS <= cluster.now - since < SETTLE_SECONDS + 5

    run(test, cluster, plan())
    assert cluster.fewest == 2


def test_a_cluster_that_ends_during_an_update_is_told() -> None:
    cluster = RollingCluster()

    async def test(replicas: PlannedReplicas) -> None:
        wanted = replicas.plan
        await replicas.change(None, GOOD)
        cluster.is_gone = True
        assert await replicas.failure() == "it is gone"
        assert await ended(replicas) == {"state": "undone", "reason": "it is gone; it is gone"}
        assert replicas.plan == wanted

    run(test, cluster, plan())


def test_a_front_that_ends_waits_for_no_update() -> None:
    cluster = RollingCluster(start_seconds=1e9)

    async def test(replicas: PlannedReplicas) -> None:
        await replicas.change(None, GOOD)

    run(test, cluster, plan())
    assert cluster.now < UPDATE_SECONDS


def test_a_front_that_has_closed_changes_nothing() -> None:
    cluster = RollingCluster()

    async def test(replicas: PlannedReplicas) -> None:
        await replicas.close()
        with pytest.raises(LauncherError, match="the front closes"):
            await replicas.change((3, 3), None)
        assert len(cluster.deployed) == 1

    run(test, cluster, plan())


def test_a_front_that_closes_takes_back_an_update_that_waits() -> None:
    cluster = RollingCluster(start_seconds=1e9)

    async def test(replicas: PlannedReplicas) -> None:
        await replicas.change((3, 3), None)
        updating = asyncio.create_task(replicas.change(None, GOOD))
        while not cluster.now:  # noqa: ASYNC110 - it waits for the third replica
            await asyncio.sleep(0)
        await replicas.close()
        with pytest.raises(LauncherError, match="the front closes"):
            await updating
        assert len(cluster.deployed) == 2

    run(test, cluster, plan())


def test_a_front_closes_behind_a_change_that_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = RollingCluster()
    deploy, begun, goes_on = cluster.deploy, threading.Event(), threading.Event()

    def deploy_slowly(plan: ReplicaPlan, *, is_update: bool = False) -> None:
        begun.set()
        goes_on.wait(SECONDS)
        deploy(plan, is_update=is_update)

    async def test(replicas: PlannedReplicas) -> None:
        monkeypatch.setattr(cluster, "deploy", deploy_slowly)
        changing = asyncio.create_task(replicas.change((1, 1), None))
        await asyncio.to_thread(begun.wait, SECONDS)
        closing = asyncio.create_task(replicas.close())
        await asyncio.sleep(0)
        await asyncio.to_thread(int)  # a turn of other threads
        assert cluster.is_open
        goes_on.set()
        await asyncio.gather(changing, closing)
        assert len(cluster.deployed) == 2

    run(test, cluster, plan())


def test_another_number_of_replicas_replaces_none() -> None:
    cluster = RollingCluster()

    async def test(replicas: PlannedReplicas) -> None:
        before = cluster.serving[:]
        await replicas.change((1, 1), None)
        assert replicas.update is None
        assert cluster.serving == before[:1]
        await replicas.change((1, 2), {})  # no option is another one
        assert replicas.update is None
        assert cluster.num_updates == 0

    run(test, cluster, plan())


def test_a_disk_has_a_share_more_than_replicas_and_is_never_divided_into_fewer() -> None:
    cluster = RollingCluster()

    async def test(replicas: PlannedReplicas) -> None:
        for bounds, num_shares, is_update in (
            ((1, 1), 3, False),
            ((1, 2), 3, False),
            ((3, 3), 4, True),
            ((1, 1), 4, False),
        ):
            replicas.update = None
            await replicas.change(bounds, None)
            assert replicas.plan.num_shares == num_shares
            assert (replicas.update is not None) is is_update
            if is_update:
                await ended(replicas)

    run(test, cluster, plan(options={"kv_disk": "/disk:1MiB"}))
    assert plan().num_shares is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_token": 1}, "kv_token is not an option"),
        ({"kv_tokens": 0}, "kv_tokens"),
        ({"max_model_len": 64}, "max_model_len cannot change"),
        ({"page_size": 32}, "page_size cannot change"),
        ({"lora": ["sql=/adapters/sql"]}, "load adapters by /v1/load_lora_adapter"),
    ],
)
def test_options_that_mean_nothing_are_refused_at_once(
    options: dict[str, Any], message: str
) -> None:
    cluster = RollingCluster()

    async def test(replicas: PlannedReplicas) -> None:
        with pytest.raises(InvalidRequest, match=message):
            await replicas.change(None, options)
        assert replicas.update is None
        assert len(cluster.deployed) == 1

    run(test, cluster, plan())


def test_a_plan_that_is_refused_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = RollingCluster()

    async def test(replicas: PlannedReplicas) -> None:
        wanted = replicas.plan
        with monkeypatch.context() as patch:
            patch.setattr(cluster, "is_gone", True)
            with pytest.raises(LauncherError, match="it is gone"):
                await replicas.change(None, GOOD)
        assert (replicas.plan, replicas.update) == (wanted, None)

    run(test, cluster, plan())
