"""Room that a Ray cluster asks for before it replaces replicas, and its errors; no Ray starts."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest

from foretoken.api.cluster.launcher import LauncherError, ReplicaPlan

pytest.importorskip("ray", reason="the extra ray is not installed")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Ray's own, of what it imports
    from foretoken.api.cluster import ray_app


pytestmark = [pytest.mark.filterwarnings("ignore::DeprecationWarning:ray"), pytest.mark.slow]


def plan(least: int, most: int) -> ReplicaPlan:
    return ReplicaPlan(
        model=None, front="tcp://here:1", least=least, most=most, cpus=2, gpus=1, quiet_seconds=1
    )


@pytest.fixture
def deployed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Applications that a Ray of 32 CPUs and 4 GPUs was asked for; three replicas run."""
    asked: list[Any] = []
    deployment = SimpleNamespace(replica_states={"RUNNING": 3, "STOPPING": 1})
    application = SimpleNamespace(deployments={ray_app.DEPLOYMENT: deployment})
    status = SimpleNamespace(applications={ray_app.APP: application})
    monkeypatch.setattr(ray_app.ray, "cluster_resources", lambda: {"CPU": 32.0, "GPU": 4.0})
    monkeypatch.setattr(ray_app.serve, "status", lambda: status)
    monkeypatch.setattr(ray_app.serve, "run_many", lambda targets, **_: asked.append(targets))
    return asked


@pytest.mark.parametrize(
    ("least", "most", "needed"),
    [(1, 4, 4), (1, 2, 3), (4, 4, 5), (4, 6, 5)],
    ids=["as-the-load-has-it", "at-most", "fixed", "at-least"],
)
def test_an_update_needs_room_for_a_replica_more_than_there_will_be(
    deployed: list[Any], monkeypatch: pytest.MonkeyPatch, least: int, most: int, needed: int
) -> None:
    cluster = ray_app.RayCluster(owns_ray=False)
    there = {"CPU": 32.0, "GPU": float(needed)}
    monkeypatch.setattr(ray_app.ray, "cluster_resources", lambda: there)
    cluster.deploy(plan(least, most), is_update=True)
    assert len(deployed) == 1
    there["GPU"] -= 1
    with pytest.raises(LauncherError, match=f"needs {needed} GPUs, and Ray has {needed - 1}"):
        cluster.deploy(plan(least, most), is_update=True)
    assert len(deployed) == 1


def test_errors_of_ray_are_a_launchers(
    deployed: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> dict[str, float]:
        raise RuntimeError("no head\nand a traceback")

    monkeypatch.setattr(ray_app.ray, "cluster_resources", fail)
    with pytest.raises(LauncherError, match=r"^Ray refuses the replicas: no head$"):
        ray_app.RayCluster(owns_ray=False).deploy(plan(1, 1))
    assert not deployed
