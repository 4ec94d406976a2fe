"""Replicas on Ray Serve, which starts, watches, scales and updates them.

No request passes through Ray: a replica dials in to the front as any other does. The only file that
imports Ray.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy
from ray.serve.schema import ApplicationStatus

from ...core.config import EngineConfig
from ...core.errors import ForetokenError, InvalidRequest
from ..runtime.preprocess import make_config
from ..serving.settings import FrontOptions
from .ray_environment import RAY_ADDRESS
from .scaling import ReplicaLoad, replica_load, want
from .wire.transport import CLUSTER_KEY, cluster_key

if TYPE_CHECKING:
    from ray.serve.config import AutoscalingContext

    from .replica.engine_host import EngineHost

logger = logging.getLogger(__name__)
APP, DEPLOYMENT = "foretoken", "Replica"
HEALTH_SECONDS = 2.0  # between checks of a replica
STOP_SECONDS = 30.0  # for a replica to hand over its streams and to write out its tiers
STATS_SECONDS = 0.5  # between reports of loads
QUIET_SECONDS = 30.0  # of a low load before a replica is taken away
REACH_SECONDS = 5.0  # for a connection to Ray's head
OBJECT_STORE = 2**27  # bytes; nothing of ours goes through it
NO_RAY_WILL_RESTART = "Ray is gone: replicas and front go on, and nothing will be restarted"


class RayError(ForetokenError):
    """Ray cannot start, or has not what the replicas need."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaPlan:
    """Replicas that are wanted: how many, of what model, with what resources each."""

    model: str | None
    front: str  # address that they dial
    least: int
    most: int
    cpus: float
    gpus: float
    quiet_seconds: float  # of a low load before a replica is taken away
    options: Mapping[str, Any] = field(default_factory=dict)  # engine options
    most_ever: int = 0

    @property
    def is_fixed(self) -> bool:
        """Whether their number does not follow the load."""
        return self.least == self.most

    @property
    def num_shares(self) -> int | None:
        """Number of replicas that share a disk; None without one. It never becomes less."""
        return None if self.options.get("kv_disk") is None else max(self.most, self.most_ever)

    @property
    def version(self) -> str:
        """Equal for plans whose replicas are alike: Ray replaces those of another version."""
        alike = (self.model, self.front, sorted(self.options.items()), self.num_shares)
        return blake2b(repr(alike).encode(), digest_size=8).hexdigest()


def plan_of(model: str | None, front: FrontOptions, options: Mapping[str, Any]) -> ReplicaPlan:
    """The plan that the flags of a front ask for; its address is known when it listens.

    The CPUs of this machine are shared out unless they are named, and are the replicas' threads.
    """
    least, most = front.bounds
    threads = options.get("threads")
    cpus = front.replica_cpus
    if cpus is None:
        cpus = threads or max(1, len(os.sched_getaffinity(0)) // most)
    on_cuda = options.get("device") == "cuda"
    return ReplicaPlan(
        model=model,
        front="",
        least=least,
        most=most,
        cpus=cpus,
        gpus=(1.0 if on_cuda else 0.0) if front.replica_gpus is None else front.replica_gpus,
        quiet_seconds=(
            QUIET_SECONDS if front.scale_down_seconds is None else front.scale_down_seconds
        ),
        options={"threads": max(1, int(cpus)), **options},
    )


class Replica:
    """A replica's process, as Ray Serve knows it: an engine that has dialled in to the front."""

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
            wait_seconds=STOP_SECONDS,  # another replica may be about to end
        )
        await self._host.start()
        self._max_running = self._host.engine.limits.max_running
        self._serving = asyncio.create_task(self._host.run())

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """The load by which Ray scales."""
        load = replica_load(self._host.load, self._max_running)
        return {"usage": load.usage, "waiting": load.waiting}

    async def check_health(self) -> None:
        """Raise if the engine has ended, so that Ray starts another replica."""
        if self._serving.done():
            self._serving.result()  # a front has dropped it
        if self._serving.done() or not self._host.engine.alive:
            raise RayError("the engine has ended")

    async def __del__(self) -> None:
        """Hand over the streams and end; Ray Serve awaits it when it stops a replica."""
        await self._host.close(drain_seconds=STOP_SECONDS / 2)


class Scaling:
    """Ray's policy: how many replicas there should be, by their own loads."""

    def __init__(self, quiet_seconds: float = QUIET_SECONDS) -> None:
        self._quiet_seconds = quiet_seconds

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        """Return how many, and what the next call needs to know."""
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
    """The application of a Serve config: ``model``, ``front`` and engine ``options``.

    ``most``: number of replicas that share a disk, if options ask for one.
    """
    options, most = args.get("options") or {}, args.get("most")
    deployment = serve.deployment(name=DEPLOYMENT)(Replica)
    return deployment.bind(args["model"], args["front"], options, most)


def application(plan: ReplicaPlan) -> serve.Application:
    """The Ray Serve application of a plan."""
    options: dict[str, Any] = {
        "name": DEPLOYMENT,
        "ray_actor_options": {"num_cpus": plan.cpus, "num_gpus": plan.gpus},
        "health_check_period_s": HEALTH_SECONDS,
        "graceful_shutdown_timeout_s": STOP_SECONDS,
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
    # Without a version of ours every change, even of their number, would replace all replicas.
    deployment = deployment.options(version=plan.version, _internal=True)
    return deployment.bind(plan.model, plan.front, dict(plan.options), plan.num_shares)


class RayReplicas:
    """Keeps as many replicas as a plan says. Belongs to one event loop.

    ``owns_ray``: a Ray is started, which ends with `close`; else that of ``RAY_ADDRESS`` is joined,
    which loses our application alone.
    """

    def __init__(self, plan: ReplicaPlan, *, owns_ray: bool) -> None:
        self.plan, self._owns_ray = plan, owns_ray
        self._changing = asyncio.Lock()
        self._folder: Path | None = None
        self._head = ""  # HOST:PORT of Ray's head
        self._has_serve = False

    async def start(self, address: str) -> None:
        """Start Ray, or join it, and ask for replicas that dial ``address``. Raises `RayError`."""
        await asyncio.to_thread(self._join)
        try:
            self.plan = replace(self.plan, front=address)
            await self.change(None, None)
        except BaseException:
            await self.close()
            raise

    async def change(
        self, bounds: tuple[int, int] | None, options: Mapping[str, Any] | None
    ) -> None:
        """Change the fewest and most; with options replace all, one after the other.

        Returns when Ray has taken note of it. Raises `InvalidRequest` for an option that is none,
        or that the front holds to, and `RayError`.
        """
        async with self._changing:
            plan = self.plan
            if bounds is not None:
                ever = max(plan.most, plan.most_ever)
                plan = replace(plan, least=bounds[0], most=bounds[1], most_ever=ever)
            if options is not None:
                plan = replace(plan, options={**plan.options, **options})
                _check_same_model(make_config(self.plan.options), make_config(plan.options))
            await asyncio.to_thread(_require_resources, plan)
            await asyncio.to_thread(_deploy, plan)
            self.plan = plan

    async def failure(self) -> str | None:
        """Why replicas cannot be started, or that Ray is gone; None if all is well."""
        return await asyncio.to_thread(self._failure)

    async def close(self) -> None:
        """Stop the replicas, and the Ray that we started."""
        await asyncio.to_thread(self._leave)

    def _join(self) -> None:
        try:
            ray.init(**self._ray_options())
            self._head = ray.get_runtime_context().gcs_address
            _require_resources(self.plan)
            logging.getLogger("ray.serve").setLevel(logging.WARNING)
            serve.start(http_options={"location": "NoServer"})
            self._has_serve = True
        except RayError:
            self._leave()
            raise
        except Exception as error:
            self._leave()
            raise RayError(f"Ray cannot start: {_first_line(error)}") from error

    def _ray_options(self) -> dict[str, Any]:
        """Arguments of `ray.init`; makes the folder of a Ray that we start."""
        options: dict[str, Any] = {"logging_level": "ERROR", "log_to_driver": False}
        if self._owns_ray:
            self._folder = Path(tempfile.mkdtemp(prefix="foretoken-ray-"))
            options |= {
                "include_dashboard": False,
                "object_store_memory": OBJECT_STORE,
                "_node_ip_address": "127.0.0.1",
                "_temp_dir": str(self._folder),
            }
            return options
        if not _is_reachable(address := os.environ[RAY_ADDRESS]):
            raise RayError(f"no Ray answers at RAY_ADDRESS {address}")
        if (key := cluster_key()) is not None:
            options["runtime_env"] = {"env_vars": {CLUSTER_KEY: key}}
        return options

    def _failure(self) -> str | None:
        return _failure() if _is_reachable(self._head) else NO_RAY_WILL_RESTART

    def _leave(self) -> None:
        """Delete the application, if Ray's head is there to do it, and end the Ray that we own."""
        if self._has_serve and _is_reachable(self._head):
            try:
                serve.delete(APP, _blocking=True)
            except Exception as error:
                logger.warning("Ray did not end its application: %s", _first_line(error))
        self._has_serve = False
        ray.shutdown()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


def _is_reachable(address: str) -> bool:
    """Whether something listens at HOST:PORT; True for another kind of address."""
    host, _, port = address.rpartition(":")
    if not port.isdecimal():
        return True
    try:
        socket.create_connection((host.strip("[]"), int(port)), REACH_SECONDS).close()
    except OSError:
        return False
    return True


def _check_same_model(now: EngineConfig, wanted: EngineConfig) -> None:
    """Refuse replicas that the front would not take. Raises `InvalidRequest`."""
    for name in ("max_model_len", "page_size"):
        if getattr(now, name) != getattr(wanted, name):
            message = f"{name} cannot change while this front serves: start another one"
            raise InvalidRequest(message, param=f"options.{name}")


def _require_resources(plan: ReplicaPlan) -> None:
    """Refuse a plan that would wait for ever. Raises `RayError`."""
    there = ray.cluster_resources()
    for name, each in (("CPU", plan.cpus), ("GPU", plan.gpus)):
        needed, found = plan.least * each, there.get(name, 0.0)
        if needed > found:
            raise RayError(
                f"{plan.least} replicas need {needed:g} {name}s, and Ray has {found:g}: fewer "
                f"--replicas, or a smaller --replica-{name.lower()}s"
            )


def _deploy(plan: ReplicaPlan) -> None:
    try:
        target = serve.RunTarget(application(plan), name=APP, route_prefix=None)
        serve.run_many([target], wait_for_applications_running=False)
    except Exception as error:
        raise RayError(f"Ray refuses the replicas: {_first_line(error)}") from error


def _failure() -> str | None:
    try:
        status = serve.status().applications.get(APP)
    except Exception:
        return NO_RAY_WILL_RESTART
    if status is None:
        return NO_RAY_WILL_RESTART
    if status.status in (ApplicationStatus.DEPLOY_FAILED, ApplicationStatus.UNHEALTHY):
        deployment = status.deployments.get(DEPLOYMENT)
        message = (deployment.message if deployment else status.message) or status.status.value
        return str(message)
    return None


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
