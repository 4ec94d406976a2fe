"""``foretoken deploy``: print manifests for replicas or servers on several machines."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

from ...core.config import EngineConfig
from ...core.errors import InvalidRequest
from ...core.interface.settings import settings_of
from ..cluster.manifests.deployment import Deployment
from .flags import Parser, engine_options

ON_KUBERNETES = frozenset({"name", "image", "port", "memory", "models_claim"})
SCALED = frozenset({"min_replicas", "max_replicas"})
UNUSED = {  # target -> settings that mean nothing there
    "ray": ON_KUBERNETES | {"route"},
    "kuberay": frozenset({"front"}),
    "llm-d": SCALED | {"front", "route"},
}
HEADS = {
    "ray": """\
Replicas on Ray Serve, as `foretoken deploy ray` prints them. The config passes Ray's own schema
and was never deployed: try it where nothing depends on it.

Each machine of the Ray cluster needs foretoken with the extras ray and events, and the model. The
front, which serves HTTP, listens at the address of "front":
  foretoken serve {model} --front {front} --replicas {replicas}
  serve deploy FILE
If they are on several machines, set FORETOKEN_CLUSTER_KEY to the same secret for the front and for
every `ray start`. Ray's processes listen on every interface: set RAY_AUTH_MODE=token for them.
""",
    "kuberay": """\
A front, and replicas that KubeRay runs, as `foretoken deploy kuberay` prints them. Kubernetes' own
kinds pass its schemas (1.37), and RayService has the fields that KubeRay 1.7 requires. Never
applied to a cluster: try it where nothing depends on it.

It needs KubeRay's operator, an image with Ray in it, and a Secret with keys of your choice:
  docker build --build-arg EXTRAS=server,otel,events,ray -t {image} .
  kubectl create secret generic {name} --from-literal=api-key=A --from-literal=cluster-key=B
Clients send the api-key to port {port} of the Service {name}. The Secret may have an admin-key as
well.
""",
    "llm-d": """\
Whole servers behind the router of llm-d, as `foretoken deploy llm-d` prints them. Kubernetes' own
kinds pass its schemas (1.37), InferencePool has the fields that v1 requires, and the picker's
config follows llm-d's router 0.10. Never applied to a cluster: try it where nothing depends on it.

It needs the kinds of Gateway API and of its inference extension, an image with the extra events,
and a Gateway with an HTTPRoute whose backend is the InferencePool {name}:
  docker build -t {image} .
The picker sends no API key, so the servers have none: the gateway must check callers. The
NetworkPolicy admits pods of this namespace alone: add the gateway's, if that is another one.
""",
}


def add_flags(parser: Parser) -> None:
    """Add the target and the flags of ``foretoken deploy``."""
    parser.add_argument(
        "target",
        choices=tuple(HEADS),
        help="manifests to print: a Serve config (ray), a RayService and a front (kuberay), or "
        "servers, an InferencePool and its picker (llm-d)",
    )
    parser.add_settings(Deployment, EngineConfig)


def deploy(parsed: argparse.Namespace) -> int:
    """Print the manifests of a target. Raises `InvalidRequest` naming a bad flag."""
    plan = planned(parsed)
    from ..cluster.manifests.llm_d import llm_d
    from ..cluster.manifests.on_ray import kuberay, serve_config
    from ..cluster.manifests.yaml_text import yaml_text

    builders: dict[str, Callable[[Deployment], Sequence[dict[str, Any]]]] = {
        "ray": lambda plan: [serve_config(plan)],
        "kuberay": kuberay,
        "llm-d": llm_d,
    }
    documents = builders[parsed.target](plan)
    values = {each.field: getattr(plan, each.field) for each in settings_of(Deployment).values()}
    head = HEADS[parsed.target].format(**values)
    print("".join(f"# {line}".rstrip() + "\n" for line in head.splitlines()))
    print(yaml_text(*documents), end="")
    return 0


def planned(parsed: argparse.Namespace) -> Deployment:
    """The deployment that flags describe. Raises `InvalidRequest`."""
    given = {name: getattr(parsed, name) for name in settings_of(Deployment)}
    given = {name: value for name, value in given.items() if value is not None}
    for name in given:
        if name in UNUSED[parsed.target]:
            raise InvalidRequest(f"{name} means nothing for {parsed.target}", param=name)
    engine = engine_options(parsed)
    if parsed.target == "ray" and "lora" in engine:
        message = "lora: start the front with --lora, its replicas load the adapters"
        raise InvalidRequest(message, param="lora")
    return Deployment(**given, engine=engine)
