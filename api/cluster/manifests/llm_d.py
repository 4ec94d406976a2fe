"""Whole servers behind the router of llm-d, whose picker reads their KV events and metrics."""

from __future__ import annotations

from ....core.errors import InvalidRequest
from .deployment import Deployment
from .kubernetes import (
    Object,
    container,
    container_security,
    deployment,
    engine_flags,
    from_field,
    grace_seconds,
    pod,
    pod_security,
    port,
    replica_resources,
    resources,
    service,
    serving,
)
from .yaml_text import yaml_text

EVENTS_PORT, REPLAY_PORT = 5557, 5558
IMAGE = "ghcr.io/llm-d/llm-d-router-endpoint-picker:v0.10.0"
IMAGE_USER = 65532
PICKER_PORT, HEALTH_PORT = 9002, 9003
PICKER = resources("1", "4Gi")
POOLS = "inference.networking.k8s.io"
CONFIG = "picker.yaml"


def llm_d(plan: Deployment) -> list[Object]:
    """Servers and their Service, the pool that a gateway routes to, and the pool's picker.

    Raises `InvalidRequest` for other addresses of KV events than those that the picker reads.
    """
    for param in ("kv_events", "kv_events_replay", "kv_events_topic"):
        if param in plan.engine:
            raise InvalidRequest(f"{param} is what the picker of llm-d reads", param=param)
    labels = {"app.kubernetes.io/name": plan.name}
    picker = f"{plan.name}-picker"
    of_picker = {"app.kubernetes.io/name": picker}
    # The picker reads metrics by the names that this label stands for.
    of_servers = {**labels, "llm-d.ai/engine-type": "vllm"}
    return [
        deployment(plan.name, of_servers, plan.replicas, pod(plan, _server(plan))),
        service(plan.name, labels, {"http": plan.port}),
        _policy(plan, labels),
        _pool(plan, labels, picker),
        *_rights(picker),
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": picker},
            "data": {CONFIG: yaml_text(picker_config(plan))},
        },
        deployment(picker, of_picker, 1, _picker_pod(plan, picker)),
        service(picker, of_picker, {"grpc": PICKER_PORT}),
    ]


def _server(plan: Deployment) -> Object:
    args = ["--metric-names", "vllm", "--kv-events", f"tcp://0.0.0.0:{EVENTS_PORT}"]
    args += ["--kv-events-topic", f"kv@$(POD_IP):{plan.port}@{plan.served_name}"]
    ready = {"httpGet": {"path": "/ready", "port": plan.port}}
    ports = {"http": plan.port, "kv-events": EVENTS_PORT, "kv-replay": REPLAY_PORT}
    return container(
        plan,
        "server",
        **serving([*args, *engine_flags(plan)], plan, ready),
        env=[from_field("POD_IP", "status.podIP")],
        ports=[port(name, number) for name, number in ports.items()],
        resources=replica_resources(plan),
    )


def _policy(plan: Deployment, labels: Object) -> Object:
    """A rule that only pods of the namespace may connect.

    The picker sends no key, so servers have none, and events carry token ids.
    """
    ports = [plan.port, EVENTS_PORT, REPLAY_PORT]
    allowed = {
        "from": [{"podSelector": {}}],
        "ports": [{"port": number, "protocol": "TCP"} for number in ports],
    }
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": plan.name},
        "spec": {
            "podSelector": {"matchLabels": labels},
            "policyTypes": ["Ingress"],
            "ingress": [allowed],
        },
    }


def _pool(plan: Deployment, labels: Object, picker: str) -> Object:
    return {
        "apiVersion": f"{POOLS}/v1",
        "kind": "InferencePool",
        "metadata": {"name": plan.name},
        "spec": {
            "selector": {"matchLabels": labels},
            "targetPorts": [{"number": plan.port}],
            "endpointPickerRef": {
                "name": picker,
                "port": {"number": PICKER_PORT},
                "failureMode": "FailOpen",
            },
        },
    }


def picker_config(plan: Deployment) -> Object:
    """The picker's config: cached prefixes by KV events, then the use of KV memory and queues."""
    events, metrics, prefixes = (
        "endpoint-notification-source",
        "metrics-data-source",
        "precise-prefix-cache-producer",
    )
    page = plan.engine.get("page_size") or (
        32 if plan.engine_options.get("device") == "cuda" else 16
    )
    sockets = {"socketPort": EVENTS_PORT, "replaySocketPort": REPLAY_PORT}
    tokens = {"modelName": plan.served_name, "vllm": {"url": f"http://{plan.name}:{plan.port}"}}
    plugins: list[Object] = [
        {"type": "token-producer", "parameters": tokens},
        {"type": events},
        {"type": metrics},
        {"type": "core-metrics-extractor"},
        {
            "type": prefixes,
            "parameters": {
                "tokenProcessorConfig": {"blockSizeTokens": page},
                "speculativeIndexing": True,
                "kvEventsConfig": {
                    "topicFilter": "kv@",
                    "concurrency": 4,
                    "discoverPods": True,
                    "podDiscoveryConfig": sockets,
                },
            },
        },
        {"type": "prefix-cache-scorer", "parameters": {"prefixMatchInfoProducerName": prefixes}},
        {"type": "kv-cache-utilization-scorer"},
        {"type": "queue-scorer"},
        {"type": "max-score-picker"},
        {"type": "single-profile-handler"},
    ]
    scores = {"prefix-cache-scorer": 3, "kv-cache-utilization-scorer": 2, "queue-scorer": 2}
    weighted = [{"pluginRef": each, "weight": weight} for each, weight in scores.items()]
    return {
        "apiVersion": "llm-d.ai/v1alpha1",
        "kind": "EndpointPickerConfig",
        "plugins": plugins,
        "dataLayer": {
            "sources": [
                _source(metrics, "core-metrics-extractor"),
                _source(events, prefixes),
            ]
        },
        "schedulingProfiles": [
            {"name": "default", "plugins": [*weighted, {"pluginRef": "max-score-picker"}]}
        ],
    }


def _source(name: str, extractor: str) -> Object:
    return {"pluginRef": name, "extractors": [{"pluginRef": extractor}]}


def _rights(name: str) -> list[Object]:
    """The picker's account, which may watch pods and pools of its namespace."""
    own = ["inferenceobjectives", "inferencemodelrewrites"]  # of this group, or of the older one
    older = "inference.networking.x-k8s.io"
    kinds = {"": ["pods"], POOLS: ["inferencepools"], "llm-d.ai": own, older: own}
    rules = [
        {"apiGroups": [group], "resources": names, "verbs": ["get", "watch", "list"]}
        for group, names in kinds.items()
    ]
    rbac, metadata = "rbac.authorization.k8s.io", {"name": name}
    return [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata},
        {"apiVersion": f"{rbac}/v1", "kind": "Role", "metadata": metadata, "rules": rules},
        {
            "apiVersion": f"{rbac}/v1",
            "kind": "RoleBinding",
            "metadata": metadata,
            "subjects": [{"kind": "ServiceAccount", "name": name}],
            "roleRef": {"apiGroup": rbac, "kind": "Role", "name": name},
        },
    ]


def _picker_pod(plan: Deployment, name: str) -> Object:
    health = {"grpc": {"port": HEALTH_PORT, "service": "inference-extension"}, "periodSeconds": 10}
    args = ["--pool-name", plan.name, "--pool-namespace", "$(NAMESPACE)", "--pool-group", POOLS]
    args += ["--config-file", f"/config/{CONFIG}", "--grpc-health-port", str(HEALTH_PORT)]
    return {
        "serviceAccountName": name,
        "enableServiceLinks": False,
        "securityContext": pod_security(IMAGE_USER),
        "terminationGracePeriodSeconds": grace_seconds(plan),
        "containers": [
            {
                "name": "picker",
                "image": IMAGE,
                "args": [*args, "--zap-encoder", "json", "--tracing=false"],
                "env": [
                    from_field("NAMESPACE", "metadata.namespace"),
                    from_field("POD_NAME", "metadata.name"),
                ],
                "ports": [port("grpc", PICKER_PORT), port("health", HEALTH_PORT)],
                "livenessProbe": {**health, "initialDelaySeconds": 5},
                "readinessProbe": health,
                "resources": PICKER,
                "securityContext": container_security(),
                "volumeMounts": [{"name": "config", "mountPath": "/config", "readOnly": True}],
            }
        ],
        "volumes": [{"name": "config", "configMap": {"name": name}}],
    }
