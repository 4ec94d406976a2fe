"""Core kinds of Kubernetes: Deployments, Services and the containers in them.

Containers run as a user without rights, on a file system that is read-only but for volumes of
their own.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ....core.config import EngineConfig
from ....core.interface.settings import settings_of
from .deployment import Deployment

Object = dict[str, Any]
USER = 10001  # of the image
START_SECONDS = 600  # for a model to be downloaded and read, and for kernels to be compiled
LEAVE_SECONDS = 5  # for balancers to leave a pod out, before it refuses requests
SPARE_SECONDS = 10  # after the drain, for the process to end
WRITABLE = {  # volume -> folder: temporary files, compiled kernels, downloads and crash dumps
    "tmp": "/tmp",
    "cache": "/var/cache/foretoken",
    "home": "/var/lib/foretoken",
}


def service(name: str, selector: Object, ports: Mapping[str, int], **more: Any) -> Object:  # noqa: ANN401
    """A Service of pods with these labels; ``more``: further fields of its spec."""
    listed = [
        {"name": each, "port": port, "targetPort": port, "protocol": "TCP"}
        for each, port in ports.items()
    ]
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name},
        "spec": {"selector": selector, "ports": listed, **more},
    }


def deployment(name: str, labels: Object, replicas: int, pod: Object, **more: Any) -> Object:  # noqa: ANN401
    """A Deployment of pods that have these labels; ``more``: further fields of its spec."""
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name},
        "spec": {
            "replicas": replicas,
            "selector": {"matchLabels": {"app.kubernetes.io/name": name}},
            **more,
            "template": {"metadata": {"labels": labels}, "spec": pod},
        },
    }


def pod(plan: Deployment, container: Object, **more: Any) -> Object:  # noqa: ANN401 - fields of its spec
    """A pod of one container, with its volumes and the time that its drain needs."""
    volumes: list[Object] = [{"name": name, "emptyDir": {}} for name in WRITABLE]
    if plan.models_claim is not None:
        claim = {"claimName": plan.models_claim, "readOnly": True}
        volumes.append({"name": "models", "persistentVolumeClaim": claim})
    return {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        **more,
        "securityContext": pod_security(USER),
        "terminationGracePeriodSeconds": grace_seconds(plan),
        "containers": [container],
        "volumes": volumes,
    }


def pod_security(user: int) -> Object:
    """A security context for pods that run as this user."""
    ids = {"runAsUser": user, "runAsGroup": user, "fsGroup": user}
    return {"runAsNonRoot": True, **ids, "seccompProfile": {"type": "RuntimeDefault"}}


def container_security() -> Object:
    """A security context without rights."""
    return {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def grace_seconds(plan: Deployment) -> int:
    """Seconds from the notice of a pod's end to its end by force."""
    return int(plan.drain_seconds) + LEAVE_SECONDS + SPARE_SECONDS


def container(plan: Deployment, name: str, **more: Any) -> Object:  # noqa: ANN401 - fields of the container
    """A container of our image, with its volumes."""
    mounts: list[Object] = [{"name": each, "mountPath": path} for each, path in WRITABLE.items()]
    if plan.models_claim is not None:
        mounts.append({"name": "models", "mountPath": "/models", "readOnly": True})
    return {
        "name": name,
        "image": plan.image,
        **more,
        "securityContext": container_security(),
        "volumeMounts": mounts,
    }


def serving(args: Sequence[str], plan: Deployment, ready: Object) -> Object:
    """Fields of a container that runs ``foretoken serve ARGS``; ``ready``: its readiness probe."""
    listening = ["--served-model-name", plan.served_name, "--host", "0.0.0.0"]
    listening += ["--port", str(plan.port), "--drain-seconds", f"{plan.drain_seconds:.12g}"]
    alive = {"httpGet": {"path": "/health", "port": plan.port}}
    return {
        "command": ["foretoken"],
        "args": ["serve", plan.model, *listening, *args],
        "lifecycle": {"preStop": {"sleep": {"seconds": LEAVE_SECONDS}}},
        "startupProbe": {**alive, "periodSeconds": 5, "failureThreshold": START_SECONDS // 5},
        "livenessProbe": {**alive, "periodSeconds": 10, "timeoutSeconds": 5, "failureThreshold": 3},
        "readinessProbe": {**ready, "periodSeconds": 5, "timeoutSeconds": 5, "failureThreshold": 2},
    }


def engine_flags(plan: Deployment, among: Collection[str] = EngineConfig.names()) -> list[str]:
    """Flags of ``foretoken`` for the engine options that are given."""
    known = settings_of(EngineConfig)
    given = {name: value for name, value in plan.engine_options.items() if name in among}
    return [
        text
        for name, value in given.items()
        for each in (value if isinstance(value, list | tuple) else (value,))  # a flag is repeated
        for text in ((known[name].flag,) if each is True else (known[name].flag, str(each)))
    ]


def replica_resources(plan: Deployment) -> Object:
    """CPUs, memory and GPUs of a replica."""
    # Memory in whole MiB: Kubernetes' suffixes have no B.
    found = resources(f"{plan.cpus:.12g}", f"{-(-plan.num_bytes // 2**20)}Mi")
    if plan.gpus:
        found["limits"]["nvidia.com/gpu"] = plan.gpus
    return found


def resources(cpus: str, memory: str) -> Object:
    """CPUs are requested and not limited: a limit stops a step in its middle."""
    return {"requests": {"cpu": cpus, "memory": memory}, "limits": {"memory": memory}}


def port(name: str, number: int) -> Object:
    """A port of a container."""
    return {"name": name, "containerPort": number, "protocol": "TCP"}


def secret(variable: str, plan: Deployment, key: str, *, optional: bool = False) -> Object:
    """A variable of the environment whose value is in the plan's Secret."""
    reference: Object = {"name": plan.name, "key": key}
    if optional:
        reference["optional"] = True
    return {"name": variable, "valueFrom": {"secretKeyRef": reference}}


def from_field(variable: str, path: str) -> Object:
    """A variable of the environment whose value is a field of the pod."""
    return {"name": variable, "valueFrom": {"fieldRef": {"fieldPath": path}}}
