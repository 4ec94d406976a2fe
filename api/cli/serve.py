"""``foretoken serve`` and ``foretoken replica``."""

from __future__ import annotations

import argparse
import importlib.util
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ...core.config import EngineConfig
from ...core.errors import InvalidRequest
from ...core.options.settings import settings_of
from ...core.startup import STARTUP
from ..serving.limits import Limits
from ..serving.settings import FrontOptions, Joining, Listen, ObservingOptions, Settings
from .config import REPLICA, SERVE, Given, model_options
from .flags import engine_options

if TYPE_CHECKING:
    from ..cluster.front.front_client import Launcher
    from ..cluster.replica.front_session import FrontLink
    from ..runtime.engine_client import EngineClient

FRONT_ENGINE_OPTIONS = (
    "chat_template", "default_chat_template_kwargs", "special_tokens_in_text", "step_timeout",
    "dump_dir", "lora", "max_loras",
)  # fmt: skip
"""Options of `EngineConfig` for the front itself: chat templates, the event loop, dumps, and the
adapters that it loads into its replicas.
"""


def serve(parsed: argparse.Namespace) -> int:
    """Serve until a signal. Return the exit status."""
    given = Given(parsed, SERVE)
    model, options = model_options(given)
    listen, observed = listen_options(given), given.make(ObservingOptions)
    front = given.make(FrontOptions)
    if not front.is_given:
        from ..sdk.async_llm import AsyncLLM

        llm: EngineClient = AsyncLLM(model, **options)
    else:
        llm = _front_client(parsed, model, front, options)
    from ..server.observation.logs import configure
    from ..server.observation.observability import make_observing
    from ..server.process import run

    configure(listen.log_level, listen.log_format)
    if parsed.verbose:
        logging.getLogger(STARTUP).setLevel(logging.DEBUG)
    given.warn_of_unknown_variables()
    return run(llm, listen, make_observing(observed, listen))


def _front_client(
    parsed: argparse.Namespace, model: str | None, front: FrontOptions, options: dict[str, Any]
) -> EngineClient:
    """Return the engine client of a front.

    Without --ray, engine options that only replicas use are refused as flags, and ignored in
    variables and the file. Raises `InvalidRequest` for such a flag, an invalid address, or if the
    extra ``events`` is not installed.
    """
    for name in () if front.ray else engine_options(parsed):
        if name not in FRONT_ENGINE_OPTIONS:
            flag = settings_of(EngineConfig)[name].flag
            raise InvalidRequest(
                f"{flag} is a flag of the replicas and cannot be combined with --front", param=name
            )
    from ..cluster.front.front_client import FrontClient

    own = {name: value for name, value in options.items() if name in FRONT_ENGINE_OPTIONS}
    try:
        launcher = _ray_replicas(model, front, options) if front.ray else None
        return FrontClient(model, front, launcher, **own)
    except ModuleNotFoundError as error:
        if error.name != "zmq":
            raise
        message = f"--front needs the extra events: pip install 'foretoken[events]' ({error})"
        raise InvalidRequest(message, param="front") from None


def _ray_replicas(model: str | None, front: FrontOptions, options: dict[str, Any]) -> Launcher:
    """Return the launcher that starts replicas with these engine options on Ray.

    Raises `InvalidRequest` if the extra ``ray`` is not installed, for the option ``kv_transfer``,
    and if a Ray cluster is joined without an address of the front that it can reach.
    """
    from ..cluster import ray_environment

    if "kv_transfer" in options:
        message = (
            "kv_transfer: replicas of --ray all have the same role; start them with "
            "foretoken replica"
        )
        raise InvalidRequest(message, param="kv_transfer")
    is_joined = ray_environment.is_joined()
    if is_joined and front.front is None:
        message = "--ray with RAY_ADDRESS needs --front with an address that the cluster can reach"
        raise InvalidRequest(message, param="front")
    if importlib.util.find_spec("ray") is None:
        message = "--ray needs the extra ray: pip install 'foretoken[ray,events]'"
        raise InvalidRequest(message, param="ray")
    ray_environment.prepare()
    from ..cluster.launcher import PlannedReplicas, plan_of
    from ..cluster.ray_app import RayCluster

    # The front loads the adapters.
    own = {name: value for name, value in options.items() if name != "lora"}
    return PlannedReplicas(plan_of(model, front, own), RayCluster(owns_ray=not is_joined))


def replica(parsed: argparse.Namespace) -> int:
    """Compute for a front until a signal. Return the exit status."""
    given = Given(parsed, REPLICA)
    joining, (model, options) = given.make(Joining), model_options(given)
    dial = _connector(joining.front)
    from ..cluster.replica.process import run
    from ..server.observation.logs import configure

    configure(joining.log_level, joining.log_format)
    given.warn_of_unknown_variables()
    config, num_shares = EngineConfig(**options), joining.replicas
    if config.allow_weight_updates:
        message = "--allow-weight-updates is not supported by replicas"
        raise InvalidRequest(message, param="allow_weight_updates")
    return run(model, config, dial, address=joining.front, num_shares=num_shares)


def _connector(front: str) -> Callable[[], FrontLink]:
    """Check a front's address. Return a function that connects to it.

    Raises `InvalidRequest` for an invalid address, or if the extra ``events`` is not installed.
    """
    try:
        from ..cluster.wire.transport import ReplicaSocket, check_address, cluster_key
    except ModuleNotFoundError as error:
        if error.name != "zmq":
            raise
        message = f"a replica needs the extra events: pip install 'foretoken[events]' ({error})"
        raise InvalidRequest(message, param="front") from None
    key = cluster_key()
    check_address(front, key)
    return lambda: ReplicaSocket(front, key)


def listen_options(given: Given) -> Listen:
    """Return the address, the TLS files and the options of the HTTP server."""
    from ..server.guards.foreign_pages import is_loopback

    address = given.make(Listen)
    settings = given.make(
        Settings,
        limits=given.make(Limits),
        loopback_only=address.uds is None and is_loopback(address.host),
    )
    return replace(address, settings=settings)
