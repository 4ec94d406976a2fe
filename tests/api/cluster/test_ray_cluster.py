"""Errors of a Ray cluster, and why it starts no replicas; no Ray starts."""

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
    """Applications that Ray was asked for."""
    asked: list[Any] = []
    monkeypatch.setattr(ray_app.serve, "run_many", lambda targets, **_: asked.append(targets))
    return asked


def test_errors_of_ray_are_a_launchers(
    deployed: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> dict[str, float]:
        raise RuntimeError("no head\nand a traceback")

    monkeypatch.setattr(ray_app.ray, "cluster_resources", fail)
    with pytest.raises(LauncherError, match=r"^Ray rejected the replicas: no head$"):
        ray_app.RayCluster(owns_ray=False).deploy(plan(1, 1))
    assert not deployed


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        ("RUNNING", None),
        ("DEPLOYING", None),
        ("DEPLOY_FAILED", "kv_memory must be at least 1MiB"),
        ("UNHEALTHY", "kv_memory must be at least 1MiB"),
        (None, ray_app.NO_RAY_WILL_RESTART),
    ],
)
def test_the_reason_for_which_no_replica_starts_is_the_last_line_of_rays(
    status: str | None, reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = "Traceback:\nforetoken.core.errors.InvalidRequest: kv_memory must be at least 1MiB"
    deployment = SimpleNamespace(message=message)
    applications: dict[str, Any] = {}
    if status is not None:
        applications[ray_app.APP] = SimpleNamespace(
            status=ray_app.ApplicationStatus(status),
            message="",
            deployments={ray_app.DEPLOYMENT: deployment},
        )
    there = SimpleNamespace(applications=applications)
    monkeypatch.setattr(ray_app.serve, "status", lambda: there)
    assert ray_app.RayCluster(owns_ray=False).failure() == reason
