"""Replicas of a plan. The cluster is a test's own; `server/test_ray.py` has the real one."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from foretoken.api.cluster.launcher import LauncherError, PlannedReplicas, ReplicaPlan, plan_of
from foretoken.api.serving.settings import FrontOptions
from foretoken.core.errors import InvalidRequest

SECONDS = 20.0  # of a test
ADDRESS = "tcp://here:1"


def plan(replicas: int = 2, **options: Any) -> ReplicaPlan:
    front = FrontOptions(ray=True, replicas=replicas, replica_cpus=1)
    return plan_of(None, front, {"threads": 1, **options})


@dataclass
class NotedCluster:
    """Notes the plans that it is to deploy."""

    deployed: list[ReplicaPlan] = field(default_factory=list)
    is_open: bool = False
    refusal: LauncherError | None = None
    reason: str | None = None

    def open(self, plan: ReplicaPlan) -> None:
        self.is_open = True

    def deploy(self, plan: ReplicaPlan) -> None:
        assert self.is_open
        if self.refusal is not None:
            raise self.refusal
        self.deployed.append(plan)

    def failure(self) -> str | None:
        return self.reason

    def close(self) -> None:
        self.is_open = False


def run(
    test: Callable[[PlannedReplicas], Awaitable[None]], cluster: NotedCluster, wanted: ReplicaPlan
) -> None:
    async def body() -> None:
        async with asyncio.timeout(SECONDS):
            replicas = PlannedReplicas(wanted, cluster)
            await replicas.start(ADDRESS)
            try:
                await test(replicas)
            finally:
                await replicas.close()
        assert not cluster.is_open

    asyncio.run(body())


def test_another_number_of_replicas_is_the_same_plan_and_replaces_none() -> None:
    cluster = NotedCluster()

    async def test(replicas: PlannedReplicas) -> None:
        first = replicas.plan
        await replicas.change(1, 1)
        await replicas.change(1, 4)
        assert cluster.deployed == [
            first, replace(first, least=1, most=1), replace(first, least=1, most=4)
        ]  # fmt: skip
        assert replicas.plan == cluster.deployed[-1]
        assert {each.version for each in cluster.deployed} == {first.version}
        assert first.front == ADDRESS

    run(test, cluster, plan())


def test_replicas_of_other_options_are_of_another_version() -> None:
    versions = {
        each.version
        for each in (plan(), plan(kv_tokens=64), replace(plan(), front="tcp://there:1"))
    }
    assert len(versions) == 3


def test_there_are_no_more_replicas_than_a_disk_has_shares_for() -> None:
    cluster = NotedCluster()

    async def test(replicas: PlannedReplicas) -> None:
        assert replicas.plan.num_shares == 3  # one for a replica whose predecessor has not left
        await replicas.change(1, 1)
        await replicas.change(1, 2)
        for bounds in ((3, 3), (1, 3)):
            with pytest.raises(InvalidRequest, match=r"at most 2, .* not 3"):
                await replicas.change(*bounds)
        assert [each.num_shares for each in cluster.deployed] == [3] * 3

    run(test, cluster, plan(kv_disk="/disk:1MiB"))
    assert plan().num_shares is None


def test_a_number_that_is_refused_changes_nothing() -> None:
    cluster = NotedCluster()

    async def test(replicas: PlannedReplicas) -> None:
        wanted, cluster.refusal = replicas.plan, LauncherError("no room")
        with pytest.raises(LauncherError, match="no room"):
            await replicas.change(9, 9)
        assert replicas.plan == wanted

    run(test, cluster, plan())


def test_a_cluster_that_deploys_nothing_is_closed() -> None:
    cluster = NotedCluster(refusal=LauncherError("no room"))

    async def body() -> None:
        with pytest.raises(LauncherError, match="no room"):
            await PlannedReplicas(plan(), cluster).start(ADDRESS)

    asyncio.run(body())
    assert not cluster.is_open


def test_a_failure_is_told() -> None:
    cluster = NotedCluster(reason="too little memory")

    async def test(replicas: PlannedReplicas) -> None:
        assert await replicas.failure() == "too little memory"

    run(test, cluster, plan())


def test_a_front_that_has_closed_changes_nothing() -> None:
    cluster = NotedCluster()

    async def test(replicas: PlannedReplicas) -> None:
        await replicas.close()
        with pytest.raises(LauncherError, match="the front is closing"):
            await replicas.change(3, 3)
        assert len(cluster.deployed) == 1

    run(test, cluster, plan())


def test_a_front_closes_behind_a_change_that_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = NotedCluster()
    deploy, begun, goes_on = cluster.deploy, threading.Event(), threading.Event()

    def deploy_slowly(plan: ReplicaPlan) -> None:
        begun.set()
        goes_on.wait(SECONDS)
        deploy(plan)

    async def test(replicas: PlannedReplicas) -> None:
        monkeypatch.setattr(cluster, "deploy", deploy_slowly)
        changing = asyncio.create_task(replicas.change(1, 1))
        await asyncio.to_thread(begun.wait, SECONDS)
        closing = asyncio.create_task(replicas.close())
        await asyncio.sleep(0)
        await asyncio.to_thread(int)  # a turn of other threads
        assert cluster.is_open
        goes_on.set()
        await asyncio.gather(changing, closing)
        assert len(cluster.deployed) == 2

    run(test, cluster, plan())
