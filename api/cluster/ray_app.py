"""Replicas on Ray Serve, which starts, monitors and scales them.

No request passes through Ray: a replica connects to the front like any other. Only this file
imports Ray.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import shutil
import socket
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy
from ray.serve.schema import ApplicationStatus

from ...core.config import EngineConfig
from .launcher import QUIET_SECONDS, LauncherError, ReplicaPlan, num_cpus
from .ray_environment import RAY_ADDRESS
from .scaling import ReplicaLoad, replica_load, want
from .wire.transport import CLUSTER_KEY, cluster_key

if TYPE_CHECKING:
    from ray.serve.config import AutoscalingContext

    from .replica.engine_host import EngineHost

logger = logging.getLogger(__name__)
APP, DEPLOYMENT = "foretoken", "Replica"
HEALTH_SECONDS = 2.0  # interval between checks of a replica
STOP_SECONDS = 30.0  # time for a replica to hand over its streams and write its tiers
STATS_SECONDS = 0.5  # interval between reports of loads
REACH_SECONDS = 5.0  # timeout of a connection to Ray's head
OBJECT_STORE = 2**27  # bytes; foretoken does not use it
NO_RAY_WILL_RESTART = (
    "Ray cannot be reached: replicas and front continue, but lost replicas are not replaced"
)


class RayError(LauncherError):
    """Raised if Ray cannot start, or has too few resources for the replicas."""


class Replica:
    """Ray Serve's deployment: a replica's process, with an engine that serves the front."""

    async def __init__(  # type: ignore[misc] # Ray Serve awaits it
        self, model: str | None, front: str, options: Mapping[str, Any], num_shares: int | None
    ) -> None:
        from .replica.process import make_host
        from .wire.transport import ReplicaSocket

        config = EngineConfig(**options)
        dial = partial(ReplicaSocket, front, cluster_key())
        self._max_running = 1
        self._host: EngineHost = await asyncio.to_thread(
            make_host,
            model,
            config,
            dial,
            address=front,
            num_shares=num_shares,
            wait_seconds=STOP_SECONDS,  # a stopping replica may still hold a share
        )
        await self._host.start()
        self._max_running = self._host.engine.limits.max_running
        self._serving = asyncio.create_task(self._host.run())
        await self._join()

    async def _join(self) -> None:
        """Wait until the front accepts the replica. Raises `RefusedError`."""
        joined = asyncio.create_task(self._host.joined.wait())
        await asyncio.wait((joined, self._serving), return_when=asyncio.FIRST_COMPLETED)
        joined.cancel()
        if self._serving.done():
            self._serving.result()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the load for Ray's autoscaling."""
        load = replica_load(self._host.load, self._max_running)
        return {"usage": load.usage, "waiting": load.waiting}

    async def check_health(self) -> None:
        """Raise if the engine has ended, so that Ray starts another replica."""
        if self._serving.done():
            self._serving.result()  # raises if a front has refused the replica
        if self._serving.done() or not self._host.engine.alive:
            raise RayError("the engine has ended")

    async def __del__(self) -> None:
        """Hand over the streams and stop; Ray Serve awaits this when it stops a replica."""
        await self._host.close(drain_seconds=STOP_SECONDS / 2)


class Scaling:
    """The autoscaling policy for Ray, which chooses the number of replicas by their loads."""

    def __init__(self, quiet_seconds: float = QUIET_SECONDS) -> None:
        self._quiet_seconds = quiet_seconds

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        """Return the number of replicas and the policy's state for the next call."""
        metrics = context.aggregated_metrics or {}
        usages, waiting = metrics.get("usage") or {}, metrics.get("waiting") or {}
        wanted = want(
            [ReplicaLoad(usage, waiting.get(name, 0.0)) for name, usage in usages.items()],
            context.target_num_replicas,
            context.capacity_adjusted_min_replicas,
            context.capacity_adjusted_max_replicas,
            now=time.monotonic(),
            calm_since=(context.policy_state or {}).get("calm_since"),
            quiet_seconds=self._quiet_seconds,
        )
        return wanted.replicas, {"calm_since": wanted.calm_since}


def app(args: Mapping[str, Any]) -> serve.Application:
    """Return the application for the arguments of a Serve config.

    ``args``: ``model``, ``front``, engine ``options``, and ``most``, the number of replicas that
    share a disk if the options have one.
    """
    options, most = args.get("options") or {}, args.get("most")
    deployment = serve.deployment(name=DEPLOYMENT)(Replica)
    return deployment.bind(args["model"], args["front"], options, most)


def application(plan: ReplicaPlan) -> serve.Application:
    """Return the Ray Serve application of a plan."""
    options: dict[str, Any] = {
        "name": DEPLOYMENT,
        "ray_actor_options": {"num_cpus": plan.cpus, "num_gpus": plan.gpus},
        "health_check_period_s": HEALTH_SECONDS,
        "graceful_shutdown_timeout_s": STOP_SECONDS,
        "max_constructor_retry_count": 1,  # a start fails when its first replica fails
    }
    if plan.is_fixed:
        options["num_replicas"] = plan.least
    else:
        options["autoscaling_config"] = AutoscalingConfig(
            min_replicas=plan.least,
            max_replicas=plan.most,
            metrics_interval_s=STATS_SECONDS,
            look_back_period_s=4 * STATS_SECONDS,
            upscale_delay_s=0,
            downscale_delay_s=0,
            policy=AutoscalingPolicy(
                policy_function=f"{__name__}:{Scaling.__name__}",
                policy_kwargs={"quiet_seconds": plan.quiet_seconds},
            ),
        )
    deployment = serve.deployment(**options)(Replica)
    # Without an explicit version every change, even of the number, would replace all replicas.
    deployment = deployment.options(version=plan.version, _internal=True)
    return deployment.bind(plan.model, plan.front, dict(plan.options), plan.num_shares)


class RayCluster:
    """The `Cluster` of a front on Ray Serve.

    ``owns_ray``: `open` starts Ray, and `close` stops it. Otherwise `open` joins the running Ray at
    ``RAY_ADDRESS``, and `close` only deletes the application.
    """

    def __init__(self, *, owns_ray: bool) -> None:
        self._owns_ray = owns_ray
        self._folder: Path | None = None
        self._head = ""  # HOST:PORT of Ray's head
        self._has_serve = False

    def open(self, plan: ReplicaPlan) -> None:
        """Start or join Ray. Raises `RayError`, also if it has too few resources for the plan."""
        try:
            ray.init(**self._ray_options(plan))
            self._head = ray.get_runtime_context().gcs_address
            self._require_room(plan)
            logging.getLogger("ray.serve").setLevel(logging.WARNING)
            serve.start(http_options={"location": "NoServer"})
            self._has_serve = True
        except RayError:
            self.close()
            raise
        except Exception as error:
            self.close()
            raise RayError(f"Ray cannot start: {_first_line(error)}") from error

    def _ray_options(self, plan: ReplicaPlan) -> dict[str, Any]:
        """Return the arguments of `ray.init`; if Ray is to be started, make its folder."""
        options: dict[str, Any] = {"logging_level": "ERROR", "log_to_driver": False}
        if self._owns_ray:
            self._folder = Path(tempfile.mkdtemp(prefix="foretoken-ray-"))
            options |= {
                "include_dashboard": False,
                # Ray only counts CPUs. A replica may start before the one that it replaces ends.
                "num_cpus": num_cpus() + ceil(plan.cpus),
                "object_store_memory": OBJECT_STORE,
                "_node_ip_address": "127.0.0.1",
                "_temp_dir": str(self._folder),
            }
            return options
        if not _is_reachable(address := os.environ[RAY_ADDRESS]):
            raise RayError(f"no Ray cluster answers at RAY_ADDRESS {address}")
        if (key := cluster_key()) is not None:
            options["runtime_env"] = {"env_vars": {CLUSTER_KEY: key}}
        return options

    def _require_room(self, plan: ReplicaPlan) -> None:
        """Raise `RayError` if the plan needs more resources than Ray has, and would never start."""
        there = ray.cluster_resources()
        if self._owns_ray:
            there["CPU"] = num_cpus()
        for name, each in (("CPU", plan.cpus), ("GPU", plan.gpus)):
            needed, found = plan.least * each, there.get(name, 0.0)
            if needed > found:
                raise RayError(
                    f"{plan.least} replicas need {needed:g} {name}s, and Ray has {found:g}: fewer "
                    f"--replicas, or a smaller --replica-{name.lower()}s"
                )

    def deploy(self, plan: ReplicaPlan) -> None:
        """Deploy the application of a plan; returns when Ray has accepted it. Raises `RayError`."""
        if not _is_reachable(self._head):
            raise RayError(NO_RAY_WILL_RESTART)
        try:
            self._require_room(plan)
            target = serve.RunTarget(application(plan), name=APP, route_prefix=None)
            serve.run_many([target], wait_for_applications_running=False)
        except RayError:
            raise
        except Exception as error:
            raise RayError(f"Ray rejected the replicas: {_first_line(error)}") from error

    def failure(self) -> str | None:
        """Return why Ray cannot start replicas (Ray itself may have ended), or None."""
        status = None
        if _is_reachable(self._head):
            with suppress(Exception):
                status = serve.status().applications.get(APP)
        if status is None:
            return NO_RAY_WILL_RESTART
        if status.status not in (ApplicationStatus.DEPLOY_FAILED, ApplicationStatus.UNHEALTHY):
            return None
        deployment = status.deployments.get(DEPLOYMENT)
        message = (deployment.message if deployment else "") or status.message
        return _last_line(message) or status.status.value

    def close(self) -> None:
        """Delete the application if Ray's head is reachable; stop Ray if `open` started it."""
        if self._has_serve and _is_reachable(self._head):
            try:
                serve.delete(APP, _blocking=True)
            except Exception as error:
                logger.warning("could not stop the Ray application: %s", _first_line(error))
        self._has_serve = False
        ray.shutdown()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


def _is_reachable(address: str) -> bool:
    """Whether a process listens at HOST:PORT; True for other kinds of address."""
    host, _, port = address.rpartition(":")
    if not port.isdecimal():
        return True
    try:
        socket.create_connection((host.strip("[]"), int(port)), REACH_SECONDS).close()
    except OSError:
        return False
    return True


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


def _last_line(message: str) -> str:
    """Return the error at the end of a traceback, without the name of its class."""
    line = message.strip().rpartition("\n")[2]
    return re.sub(r"^[\w.]+: ", "", line)
