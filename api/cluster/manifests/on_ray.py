"""Replicas on Ray Serve, which starts and scales them, and dial in to a front."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from .deployment import FRONT_PORT, Deployment
from .kubernetes import (
    Object,
    container,
    deployment,
    engine_flags,
    pod,
    port,
    replica_resources,
    resources,
    secret,
    service,
    serving,
)
from .yaml_text import yaml_text

APP = "foretoken.api.cluster.ray_app"
RAY_VERSION = "2.60.0"
AGENT_PORT = 52365  # of Ray's agent on each node, which answers health checks
HEAD = resources("1", "4Gi")  # it runs no replica
FRONT = resources("1", "2Gi")
LORA = "lora"  # the front has its replicas load adapters
OF_FRONT = (  # engine options that the front needs, too, or alone
    LORA,
    "max_loras",
    "chat_template",
    "default_chat_template_kwargs",
    "special_tokens_in_text",
    "generation_config",
    "override_generation_config",
)


def serve_config(plan: Deployment, **more: Any) -> Object:  # noqa: ANN401 - options of a deployment
    """The config of ``serve deploy``; ``more``: further options of Ray's deployment.

    No request passes through Ray, so it has no HTTP server.
    """
    of_replicas = {
        "name": "Replica",
        **_number(plan),
        "ray_actor_options": {"num_cpus": plan.cpus, "num_gpus": plan.gpus},
        "health_check_period_s": 2.0,
        "graceful_shutdown_timeout_s": plan.drain_seconds,
        **more,
    }
    application = {
        "name": "foretoken",
        "import_path": f"{APP}:app",
        "route_prefix": None,
        "args": _arguments(plan),
        "deployments": [of_replicas],
    }
    return {"proxy_location": "Disabled", "applications": [application]}


def _arguments(plan: Deployment) -> Object:
    options = {name: value for name, value in plan.engine_options.items() if name != LORA}
    shared = {"most": plan.most} if "kv_disk" in options else {}  # among so many a disk is divided
    return {"model": plan.model, "front": plan.front, "options": options, **shared}


def _number(plan: Deployment) -> Object:
    if not plan.scales:
        return {"num_replicas": plan.replicas}
    scaling = {
        "min_replicas": plan.fewest,
        "initial_replicas": plan.replicas,
        "max_replicas": plan.most,
        "metrics_interval_s": 0.5,
        "look_back_period_s": 2.0,
        "upscale_delay_s": 0.0,
        "downscale_delay_s": 0.0,  # the policy itself waits
        "policy": {"policy_function": f"{APP}:Scaling"},
    }
    return {"autoscaling_config": scaling}


def kuberay(plan: Deployment) -> list[Object]:
    """A front with its Services, and a RayService of replicas that dial in to it."""
    name = f"{plan.name}-front"
    labels = {"app.kubernetes.io/name": name}
    return [
        service(plan.name, labels, {"http": plan.port}),
        # The front is ready once replicas have dialled in, so they must reach it before.
        service(name, labels, {"replicas": FRONT_PORT}, publishNotReadyAddresses=True),
        # Two fronts at once would share the replicas, and each has the API's state for itself.
        deployment(name, labels, 1, pod(plan, _front(plan)), strategy={"type": "Recreate"}),
        _ray_service(replace(plan, front=f"tcp://{name}:{FRONT_PORT}")),
    ]


def _front(plan: Deployment) -> Object:
    args = ["--front", f"tcp://0.0.0.0:{FRONT_PORT}", "--replicas", str(plan.replicas)]
    args += ["--route", plan.route, *engine_flags(plan, OF_FRONT)]
    ready = {"exec": {"command": ["python", "-c", _asks_if_ready(plan.port)]}}
    return container(
        plan,
        "front",
        **serving(args, plan, ready),
        env=[
            secret("FORETOKEN_API_KEY", plan, "api-key"),
            secret("FORETOKEN_ADMIN_KEY", plan, "admin-key", optional=True),
            secret("FORETOKEN_CLUSTER_KEY", plan, "cluster-key"),
        ],
        ports=[port("http", plan.port), port("replicas", FRONT_PORT)],
        resources=FRONT,
    )


def _asks_if_ready(number: int) -> str:
    """Python code that fails while the front is not ready. A probe over HTTP would show the key."""
    return (
        "import os, urllib.request as u; "
        f"u.urlopen(u.Request('http://127.0.0.1:{number}/ready', headers="
        "{'Authorization': 'Bearer ' + os.environ['FORETOKEN_API_KEY']}), timeout=4)"
    )


def _ray_service(plan: Deployment) -> Object:
    workers = {
        "groupName": "replicas",
        "replicas": plan.replicas,
        "minReplicas": plan.fewest,
        "maxReplicas": plan.most,
        "rayStartParams": {},
        "template": {"spec": pod(plan, _worker(plan))},
    }
    no_statistics = {"name": "RAY_USAGE_STATS_ENABLED", "value": "0"}
    head = container(plan, "ray-head", env=[no_statistics], resources=HEAD)
    # The autoscaler, a container beside the head's, asks Kubernetes for pods.
    head_pod = pod(plan, head, automountServiceAccountToken=plan.scales)
    cluster = {
        "rayVersion": RAY_VERSION,
        "authOptions": {"mode": "token"},
        "enableInTreeAutoscaling": plan.scales,
        "headGroupSpec": {"rayStartParams": {"num-cpus": "0"}, "template": {"spec": head_pod}},
        "workerGroupSpecs": [workers],
    }
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayService",
        "metadata": {"name": plan.name},
        "spec": {
            "serveConfigV2": yaml_text(serve_config(plan, max_replicas_per_node=1)),
            "excludeHeadPodFromServeSvc": True,
            "rayClusterConfig": cluster,
        },
    }


def _worker(plan: Deployment) -> Object:
    # KubeRay's own check of a worker asks for Ray's HTTP server as well, and there is none.
    health = {"httpGet": {"path": "/api/healthz", "port": AGENT_PORT}}
    return container(
        plan,
        "ray-worker",
        env=[secret("FORETOKEN_CLUSTER_KEY", plan, "cluster-key")],
        readinessProbe={**health, "periodSeconds": 5, "timeoutSeconds": 5},
        resources=replica_resources(plan),
    )
